"""The task h2o_needles: whether facts from a long text can still be retrieved after eviction.

A sentence (`h2o.evaluation.facts`) is hidden in a passage. The passage is prefilled into an
`H2OCache` (not a simulation), which evicts down to its budget before the question is known. The
question follows, and the answer counts if greedy decoding produces it token by token. Keys that get
little attention during prefill must survive, which is the hard case for any eviction (compare
Kamradt, "Needle in a haystack", 2023). With decoys a text has several facts of each of two kinds;
the facts of a kind differ only in their subjects. All questions use the same cache, so a cache that
keeps only one fact of a kind does not pass.
"""

from __future__ import annotations

import collections
import copy
import itertools
import random
import re
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from h2o.arguments.plain_values import is_integer
from h2o.errors import UserError
from h2o.evaluation import protocols
from h2o.evaluation.facts import KINDS, SUBJECTS, Fact
from h2o.evaluation.text_tasks import Samples, TextTask, format_error

LENGTHS = (256, 512, 1024)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Positions of the sentence in the text. At 0 it is the second sentence, at 1 the last."""


Asked = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Token ids [1, n] of the question and the answer for each fact"""


class Needles(TextTask):
    """The task. The answer to each text is which of its facts are found."""

    @staticmethod
    def make_rows(
        text: str,
        tokenizer: Any,
        lengths: int | str | Sequence[int] = LENGTHS,
        each: float = 4,
        facts: str | Sequence[str] = "number",
        decoys: int = 0,
        **_: Any,
    ) -> list[dict[str, Any]]:
        """Hide facts in consecutive pieces of the text, starting over at its end.

        Every call makes the same rows. Each question follows the text alone, without the others.

        Args:
            lengths: lengths of the pieces in tokens, without the hidden sentences, as a list or
                separated by commas.
            each: number of pieces for every length, depth and kind.
            facts: kinds of facts from `h2o.evaluation.facts.KINDS`, separated by commas, or "all".
            decoys: unless 0, each piece has `decoys + 1` facts of the kind and as many of the next
                kind, at random depths, and all of them are asked about.

        Raises: UserError for options out of range, and for a text with fewer tokens than a length,
        or without sentences.
        """
        if each < 1 or each % 1:
            raise UserError(f"--limit {each:g}: must be a number of texts, at least 1")
        chosen, kinds = parse_lengths(lengths), parse_kinds(facts)
        check_decoys(decoys, kinds)
        ids = tokenizer(text, verbose=False)["input_ids"]
        if len(ids) < max(chosen):
            raise UserError(
                f"the text has {len(ids)} tokens, but a length is {max(chosen)}: lower --lengths"
            )
        draw = random.Random(0)
        rows, start = [], 0
        places = itertools.product(chosen, DEPTHS, range(len(kinds)), range(int(each)))
        for length, depth, first, _ in places:
            if start + length > len(ids):
                start = 0
            piece = tokenizer.decode(ids[start : start + length])
            start += length
            of_kinds = [kinds[(first + i) % len(kinds)] for i in range(2 if decoys else 1)]
            hidden = draw_alike(of_kinds, decoys + 1, draw)
            depths = [depth]
            if decoys:
                depths = [i / (len(hidden) - 1) for i in range(len(hidden))]
                draw.shuffle(depths)
            rows.append(
                {
                    "text": hide(piece, hidden, depths),
                    "length": length,
                    "depths": depths,
                    "kinds": [kind for kind in of_kinds for _ in range(decoys + 1)],
                    "asked": {"facts": [[x.question, x.answer] for x in hidden]},
                }
            )
        return rows

    @staticmethod
    def columns(samples: Samples, full: Samples | None) -> dict[str, str]:
        """Shares of facts found: of all facts, of those that the full cache finds, and by length,
        depth and kind. Facts that the model cannot find at all say nothing about a cache."""
        found = [x for sample in samples for x in sample["found"]]
        whole = [x for sample in full or () for x in sample["found"]]
        cells = {"found": format_share(found)}
        if any(whole):
            known = [x for x, is_known in zip(found, whole, strict=True) if is_known]
            cells[f"of full's {sum(whole)}"] = format_share(known)
        lengths, depths, kinds = (collections.defaultdict(list) for _ in range(3))
        for sample in samples:
            doc = sample["doc"]
            for x, depth, kind in zip(sample["found"], doc["depths"], doc["kinds"], strict=True):
                lengths[f"{doc['length']} tokens"].append(x)
                depths[depth].append(x)
                kinds[kind].append(x)
        parts = lengths | {f"depth {depth:.2g}": depths[depth] for depth in sorted(depths)}
        if len(kinds) > 1:
            parts |= kinds
        return cells | {title: f"{statistics.fmean(part):.2f}" for title, part in parts.items()}


def format_share(found: Sequence[bool]) -> str:
    """Format the share of facts that were found, with its standard error."""
    return f"{statistics.fmean(found):.2f}{format_error(found, 2)}"


def parse_lengths(lengths: int | str | Sequence[int]) -> list[int]:
    """Parse lengths of texts in tokens. Raises: UserError unless all are at least 1."""
    parts = [lengths] if isinstance(lengths, int) else lengths
    try:
        numbers = [int(x) for x in (parts.split(",") if isinstance(parts, str) else parts)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"--lengths {lengths}: must be numbers of tokens, such as 256,512")
    return numbers


def parse_kinds(facts: str | Sequence[str]) -> list[str]:
    """Parse the kinds of facts. Raises: UserError for an unknown kind."""
    names = facts.split(",") if isinstance(facts, str) else facts
    chosen = list(KINDS) if facts == "all" else [name.strip() for name in names]
    if unknown := [name for name in chosen if name not in KINDS]:
        raise UserError(f"--facts {unknown[0]}: unknown; choose from all, {', '.join(KINDS)}")
    return chosen


def check_decoys(decoys: int, kinds: Sequence[str]) -> None:
    """Raise UserError unless the kinds have enough different questions for so many decoys."""
    if not is_integer(decoys) or decoys < 0:
        raise UserError(f"--decoys {decoys}: must be an integer of at least 0")
    is_twice = any(a == b for a, b in itertools.pairwise([*kinds, kinds[0]]))
    most = SUBJECTS // (2 if is_twice else 1) - 1
    if decoys > most:
        more = f". Up to {SUBJECTS - 1} fit with --facts number,place" if is_twice else ""
        raise UserError(
            f"--decoys {decoys}: must be at most {most} with --facts {','.join(kinds)}, since a "
            f"kind of fact has {SUBJECTS} different questions{more}"
        )


def results(doc: dict[str, Any], answers: Sequence[list[bool]]) -> dict[str, Any]:
    """The metric of a text: which of its facts were found."""
    return {"found": answers[0]}


def share(texts: Sequence[Sequence[bool]]) -> float:
    """The share of facts that were found, over all texts."""
    return statistics.fmean(itertools.chain(*texts))


def draw_alike(kinds: Sequence[str], each: int, draw: random.Random) -> list[Fact]:
    """Draw `each` facts of every kind, no two with the same question."""
    facts: dict[str, Fact] = {}
    for count, kind in enumerate(kinds, 1):
        while len(facts) < count * each:
            fact = KINDS[kind](draw)
            facts.setdefault(fact.question, fact)
    return list(facts.values())


def hide(piece: str, facts: Sequence[Fact], depths: Sequence[float]) -> str:
    """Put the sentence of each fact between the sentences of the piece."""
    ends = [match.end() for match in re.finditer(r"[.!?;]\s+|\n+", piece)]
    if not ends:
        raise UserError("a piece of the text has no end of a sentence: nowhere to hide a fact")
    places = zip(depths, facts, strict=True)
    for depth, fact in sorted(places, key=lambda place: -place[0]):  # earlier positions stay valid
        at = ends[round(depth * (len(ends) - 1))]
        piece = f"{piece[:at]}{fact.sentence} {piece[at:]}"
    return piece


def answer(lm: Any, document: str, facts: Sequence[tuple[str, str]]) -> list[bool]:
    """Whether an `h2o.evaluation.lm.H2OLM` finds each fact, a pair of question and answer.

    Raises: ValueError for a document that is too long for the model, and for a simulation.
    """
    if lm.protocol == "simulate":
        raise ValueError("needles need a real cache: use --protocol drop")
    ids, asked = encode(lm.tokenizer, document, facts)
    tokens = ids.shape[1] + max(question.shape[1] + x.shape[1] for question, x in asked)
    if tokens > lm.max_length:
        raise ValueError(
            f"a text of {ids.shape[1]} tokens and its question exceed the model's "
            f"{lm.max_length} positions: lower --lengths"
        )
    lm.count_text(ids.shape[1])
    if lm.is_counting:
        return []
    return find_facts(lm, ids, asked)


def encode(
    tokenizer: Any, document: str, asked: Sequence[tuple[str, str]]
) -> tuple[torch.Tensor, Asked]:
    """Token ids [1, n] of a document, and of questions and answers."""

    def ids_of(text: str, **how: Any) -> torch.Tensor:
        ids: torch.Tensor = tokenizer(text, return_tensors="pt", **how)["input_ids"]
        return ids

    pairs = [tuple(ids_of(x, add_special_tokens=False) for x in pair) for pair in asked]
    return ids_of(document), pairs


def find_facts(lm: Any, document: torch.Tensor, asked: Asked) -> list[bool]:
    """Whether greedy decoding would produce each answer.

    The answer's own tokens are fed. As long as each is the greedy choice, this is the same as
    decoding. Each question is asked with a cache that holds the document only.
    """
    if lm.simulates:
        context, n = document[0].tolist(), document.shape[1]
        pairs = [(context + x[0].tolist(), y[0].tolist()) for x, y in asked]
        with lm.begin_forward():
            each = [lm.simulate([pair], [n])[0] for pair in pairs]
        return [x.argmax(-1).tolist() == y for x, (_, y) in zip(each, pairs, strict=True)]
    with lm.begin_forward():
        read = protocols.read_documents(
            lm.model, lm.setting, document, torch.ones_like(document), lm.tokenizer
        )
    found = []
    for number, (question, answer) in enumerate(asked, 1):
        cache = read if number == len(asked) else copy.deepcopy(read)
        prompt = torch.cat([document, question], 1)
        prompts = prompt, torch.ones_like(prompt)
        with lm.begin_forward():
            (logits,) = protocols.by_cache(lm.model, prompts, answer.tolist(), cache)
        found.append(torch.equal(logits.argmax(-1).cpu(), answer[0]))
    return found
