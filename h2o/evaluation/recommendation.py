"""What eviction costs one model on one text, budget by budget, and which budget to use.

Four measurements, each compared with the full cache on the same pieces of the text:

- agreement: after a piece is read, the text that follows is fed token by token. How far is the
  prediction of each token from the full cache's (Kullback-Leibler divergence), how often is the
  most likely token the same, and how much is lost of the text's own likelihood?
- facts: sentences are hidden in a piece (`h2o.evaluation.hidden_facts`) and asked about. How many
  of the facts that the full cache finds are found?
- rule: does the model still follow the first message of a chat (`h2o.evaluation.kept_rule`)?
- speed: time of the prefill and of a token, and bytes (`h2o.evaluation.speed`).

Each result is stored as soon as it is measured, so a run that was cut off continues.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o import compat
from h2o.errors import UserError
from h2o.evaluation import protocols, speed
from h2o.evaluation.facts import KINDS
from h2o.evaluation.hidden_facts import draw_alike, encode, find_facts, hide
from h2o.evaluation.kept_rule import TURNS, is_followed, make_chat
from h2o.evaluation.setting import Setting, parse
from h2o.hf.attention.attention import switch
from h2o.hf.cache.cache import H2OCache
from h2o.hf.model_traits.wrappers import input_device
from h2o.hf.rotary.length_dependent_rope import LengthDependentRope
from h2o.result_file import ResultFile, fingerprint

STEPS = 64
"""Number of tokens after a piece that are predicted"""
SAME = 4
"""Number of facts of a kind in a piece, which differ in their subjects only"""
MARGIN = 512
"""Number of tokens left for hidden facts, a question and its answer, beside a piece"""
ROUNDS = 3
"""Number of times that each cache is timed"""
WARM = 64
"""Tokens of an untimed prompt that comes first, so that libraries are loaded"""
MOST_LOST = 0.02
"""Nats per token that a recommended budget may lose"""
FEWEST_FOUND = 0.97
"""Share of the full cache's facts that a recommended budget must find"""
FEWEST_FACTS = 8
"""Number of facts that the full cache must find, or facts say nothing about a budget"""

FULL, FULL_IN_BITS = parse("full"), parse("budget:1.0")
"""Every key in the model's dtype, and every key in the few bits in which `budget=` stores keys"""


class Agreement(NamedTuple):
    """Agreement with the full cache over the tokens after one piece."""

    divergence: float
    """Mean Kullback-Leibler divergence from the full cache's prediction, in nats"""
    same: float
    """Share of tokens for which the most likely token is the same"""
    lost: float
    """Mean increase of the loss, in nats per token"""


@dataclasses.dataclass(frozen=True)
class Cost:
    """What one setting costs, over all pieces measured so far."""

    setting: str
    budget: int | float | None
    """`budget=` of a setting that is nothing else; None for other settings"""
    divergence: float
    same: float
    lost: float
    lost_error: float
    """Standard error of `lost` over pieces, 0 for a single one"""
    found: int
    """Number of facts found among those that the full cache finds"""
    known: int
    """Number of facts that the full cache finds"""
    followed: int | None
    """Number of chats in which the rule is followed, among those in which it is with the full
    cache; None for random eviction"""
    chats: int
    """Number of chats in which the rule is followed with the full cache"""
    bytes_ratio: float | None = None
    """Bytes relative to the full cache's; None for random eviction, which no cache has"""
    prefill_seconds: float | None = None
    token_seconds: float | None = None
    token_speedup: float | None = None

    @property
    def share_found(self) -> float:
        return self.found / self.known if self.known else 1.0

    @property
    def holds(self) -> bool:
        """Whether the setting loses no more than a recommended budget may."""
        tells = self.known >= FEWEST_FACTS
        return self.lost <= MOST_LOST and (not tells or self.share_found >= FEWEST_FOUND)


class Reader:
    """A model that reads texts with one setting; `find_facts` takes it."""

    def __init__(self, model: Any, tokenizer: Any, setting: Setting) -> None:
        self.model, self.tokenizer, self.setting = model, tokenizer, setting
        self.simulates = setting.is_random
        self.angles = LengthDependentRope(model)

    @contextlib.contextmanager
    def begin_forward(self) -> Iterator[None]:
        """Within the block the model has the attention that the setting needs, and rotary angles
        that do not depend on earlier texts."""
        wanted = "sdpa" if self.simulates else "h2o"
        if compat.attention_name(self.model.config) != wanted:
            switch(self.model, wanted)
        self.angles.forget()
        yield

    def simulate(self, pairs: Sequence[Any], documents: Sequence[int]) -> list[Tensor]:
        """Logits [tokens, vocabulary] of each continuation. Eviction begins after the document."""
        return protocols.simulate(
            self.model, pairs, h2o_config=self.setting.config, prompt_length=documents,
            ratio_of=self.setting.ratio_of,
        )  # fmt: skip

    def predict(self, piece: list[int], after: list[int]) -> Tensor:
        """Logits [tokens, vocabulary] of the tokens `after` a piece."""
        with self.begin_forward():
            if self.simulates:
                return self.simulate([(piece, after)], [len(piece)])[0]
            config = self.setting.config.for_model(self.model)
            cache = H2OCache(self.model.config, config, prompt_length=len(piece))
            return protocols.by_cache(self.model, protocols.pad_rows([piece]), [after], cache)[0]


class Study:
    """The measurements of one model on one text.

    Args:
        settings: the settings to compare with the full cache.
        length: tokens of each piece.
        texts: number of pieces, evenly spaced over the text. They overlap in a short text.
        file: where results are stored and found again.
        facts: what the results depend on besides the setting (`h2o.result_file.provenance`).

    Raises: UserError for a text or a model that is too short for the pieces.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        text: str,
        settings: Sequence[Setting],
        *,
        length: int,
        texts: int,
        file: ResultFile,
        facts: dict[str, Any],
    ) -> None:
        self.model, self.tokenizer, self.length = model, tokenizer, length
        self.settings = list(dict.fromkeys([FULL, FULL_IN_BITS, *settings]))
        self.file = file
        self.ids: list[int] = tokenizer(text, verbose=False)["input_ids"]
        self.facts = facts | {"text": fingerprint({"ids": self.ids}), "length": length}
        spare = len(self.ids) - length - STEPS
        if spare < 0:
            raise UserError(
                f"the text has {len(self.ids)} tokens, too few for a piece of {length} and the "
                f"{STEPS} tokens after it: pass a smaller --length, or a longer text"
            )
        limit = getattr(model.config, "max_position_embeddings", None)
        if limit and length + MARGIN > limit:
            raise UserError(
                f"a piece of {length} tokens with hidden facts and a question exceeds the model's "
                f"{limit} positions: pass --length {max(1, limit - MARGIN)} or less"
            )
        self.starts = [spare * i // max(1, texts - 1) for i in range(texts)]
        self._logits: dict[int, Tensor] = {}  # the full cache's, for the last piece

    def run(self, seconds: float, log: Callable[[str], None]) -> None:
        """Measure until everything is measured or the time is over, but at least the speed and the
        first piece. `log` is called with a line before each measurement."""
        end = time.monotonic() + seconds
        if any(self._result("speed", FULL, number) is None for number in range(ROUNDS)):
            log("speed: warming up")
            self._time(FULL, 0, WARM)
        for number in range(ROUNDS):
            self._need("speed", FULL, number, self._time, log)
        for number, setting in itertools.product(range(len(self.starts)), self.settings):
            if number and time.monotonic() > end:
                return
            for what in self._measured(setting):
                measure = {"facts": self._ask, "rule": self._chat, "agreement": self._compare}[what]
                self._need(what, setting, number, measure, log)

    @staticmethod
    def _measured(setting: Setting) -> list[str]:
        """What is measured of a setting, on each piece."""
        is_cache = not setting.is_random  # a simulation has no turns
        return ["facts", *["rule"] * is_cache, *["agreement"] * (setting is not FULL)]

    @property
    def pieces(self) -> list[int]:
        """The numbers of the pieces in which all settings were measured."""
        return [
            number
            for number in range(len(self.starts))
            if all(
                self._result(what, setting, number) is not None
                for setting in self.settings
                for what in self._measured(setting)
            )
        ]

    def costs(self) -> list[Cost]:
        """The cost of each setting, over `pieces`."""
        pieces = self.pieces
        return [self._cost(setting, pieces) for setting in self.settings]

    def _cost(self, setting: Setting, pieces: list[int]) -> Cost:
        full, each = (
            [x for number in pieces for x in self._result("facts", one, number)]
            for one in (FULL, setting)
        )
        agreements = [Agreement(0.0, 1.0, 0.0)]
        if setting is not FULL:
            agreements = [Agreement(*self._result("agreement", setting, x)) for x in pieces]
        means = Agreement(*map(statistics.fmean, zip(*agreements, strict=True)))
        lost = [x.lost for x in agreements]
        return Cost(
            setting.name,
            setting.config.budget,
            *means,
            lost_error=statistics.stdev(lost) / len(lost) ** 0.5 if len(lost) > 1 else 0.0,
            found=sum(a and b for a, b in zip(each, full, strict=True)),
            known=sum(full),
            followed=None if setting.is_random else self._follows(setting, pieces),
            chats=self._follows(FULL, pieces),
            **self._times(setting),
        )

    def _follows(self, setting: Setting, pieces: list[int]) -> int:
        """Number of chats in which both this setting and the full cache follow the rule."""
        here, full = ([self._result("rule", x, i) for i in pieces] for x in (setting, FULL))
        return sum(a and b for a, b in zip(here, full, strict=True))

    # ---- Measurements ------------------------------------------------------------------------

    def _compare(self, setting: Setting, number: int) -> Agreement:
        """Agreement with the full cache after one piece."""
        start = self.starts[number]
        piece = self.ids[start : start + self.length]
        after = self.ids[start + self.length : start + self.length + STEPS]
        if number not in self._logits:
            whole = Reader(self.model, self.tokenizer, FULL).predict(piece, after)
            self._logits = {number: whole.float().log_softmax(-1)}
        full = self._logits[number]
        here = Reader(self.model, self.tokenizer, setting).predict(piece, after)
        here = here.float().log_softmax(-1)
        target = torch.tensor(after, dtype=torch.long, device=here.device)[:, None]
        return Agreement(
            (full.exp() * (full - here)).sum(-1).mean().item(),
            (full.argmax(-1) == here.argmax(-1)).double().mean().item(),
            (full - here).gather(1, target).mean().item(),
        )

    def _ask(self, setting: Setting, number: int) -> list[bool]:
        """Whether each of the facts is found that are hidden in one piece."""
        start, draw = self.starts[number], random.Random(number)
        piece = self.tokenizer.decode(self.ids[start : start + self.length])
        kinds = [list(KINDS)[(2 * number + i) % len(KINDS)] for i in range(2)]
        hidden = draw_alike(kinds, SAME, draw)
        depths = [i / (len(hidden) - 1) for i in range(len(hidden))]
        draw.shuffle(depths)
        asked = [(x.question, x.answer) for x in hidden]
        text = encode(self.tokenizer, hide(piece, hidden, depths), asked)
        return find_facts(Reader(self.model, self.tokenizer, setting), *text)

    def _chat(self, setting: Setting, number: int) -> bool:
        """Whether the rule of a chat about one piece is followed; False without a chat template."""
        start, each = self.starts[number], self.length // TURNS
        parts = [
            self.tokenizer.decode(self.ids[start + turn * each : start + (turn + 1) * each])
            for turn in range(TURNS)
        ]
        chat = make_chat(self.tokenizer, parts, random.Random(number))
        reader = Reader(self.model, self.tokenizer, setting)
        return chat is not None and is_followed(reader, chat)

    def _time(self, _: Setting, number: int, length: int | None = None) -> dict[str, speed.Sample]:
        """Time each cache once, in another order in each round."""
        caches = [x for x in self.settings if not x.is_random]
        first = number % len(caches)
        piece = self.ids[: length or self.length]
        ids = torch.tensor([piece], dtype=torch.long, device=input_device(self.model))
        return {
            setting.name: speed.run(setting, self.model, ids, STEPS // 4)
            for setting in [*caches[first:], *caches[:first]]
        }

    def _times(self, setting: Setting) -> dict[str, float]:
        """The fields of a `Cost` about speed; empty for a setting that is no cache."""
        if setting.is_random:
            return {}
        rounds = [self._result("speed", FULL, number) for number in range(ROUNDS)]
        full, each = ([speed.Sample(*found[x.name]) for found in rounds] for x in (FULL, setting))
        figures = speed.summarize(each, full)
        names = ("bytes_ratio", "prefill_seconds", "token_seconds", "token_speedup")
        return {name: figures[name] for name in names}

    # ---- Results in the file -----------------------------------------------------------------

    def _facts(self, what: str, setting: Setting, number: int) -> dict[str, Any]:
        facts = self.facts | {"measured": what, "number": number, "pieces": len(self.starts)}
        if what == "speed":
            machine = speed.describe_machine(input_device(self.model))
            return facts | {"settings": [x.describe() for x in self.settings], "machine": machine}
        return facts | setting.describe()

    def _result(self, what: str, setting: Setting, number: int) -> Any:
        """A stored result, or None."""
        found = self.file.find(self._facts(what, setting, number))
        return None if found is None else found[what]

    def _need(
        self,
        what: str,
        setting: Setting,
        number: int,
        measure: Callable[[Setting, int], Any],
        log: Callable[[str], None],
    ) -> None:
        """Measure what is not stored yet, and store it."""
        if self._result(what, setting, number) is not None:
            return
        is_time = what == "speed"
        place = (
            f"round {number + 1} of {ROUNDS}" if is_time else f"{setting.name}, text {number + 1}"
        )
        log(f"{what}: {place}{'' if is_time else f' of {len(self.starts)}'}")
        self.file.put(self._facts(what, setting, number), {what: measure(setting, number)})


def verdict(costs: Sequence[Cost]) -> str:
    """One or two sentences that say which budget to use, or not to evict. The budget is the
    smallest from which on all larger ones hold."""
    bits = next(x for x in costs if x.setting == FULL_IN_BITS.name)
    budgets = [x for x in costs if x.budget is not None and x is not bits]
    budgets.sort(key=lambda cost: cost.bytes_ratio or 0.0, reverse=True)
    holding = list(itertools.takewhile(lambda cost: cost.holds, budgets))
    if not holding:
        tried = f": budget={budgets[0].budget} {_losses(budgets[0])}" if budgets else ""
        return (
            f"Do not evict keys of this model on texts like this one{tried}. To save memory "
            f"without eviction write budget=1.0: {_gains(bits)}, and {_losses(bits)}."
        )
    chosen, smaller = holding[-1], budgets[len(holding) :]
    text = f"Use budget={chosen.budget}: it {_gains(chosen)}, and {_losses(chosen)}."
    if chosen.followed is not None and chosen.followed < chosen.chats:
        text += (
            f" A rule in the first message of a chat is followed in {chosen.followed} of "
            f"{chosen.chats} chats, so pin such messages (pinned=)."
        )
    return text + (f" budget={smaller[0].budget} {_losses(smaller[0])}." if smaller else "")


def _gains(cost: Cost) -> str:
    return (
        f"takes {cost.bytes_ratio:.0%} of the bytes, at {cost.token_speedup:.2f} times the full "
        "cache's tokens/s"
    )


def _losses(cost: Cost) -> str:
    lost = f"loses {max(0.0, cost.lost):.3f} nats per token"
    if cost.known < FEWEST_FACTS:
        return f"{lost} (the model itself finds only {cost.known} facts, too few to tell)"
    return f"{lost} and finds {cost.found} of {cost.known} facts"
