"""Programs: sequences of calls on one cache, as data that can be drawn, run, shrunk and pasted.

    from tests.hf.programs import Program, run
    run(Program("llama", {"heavy": 5, "recent": 4}, [("read", {"columns": 20}), ("file", {})]))

What happened to a cache on the way must not show in what it holds. `run` therefore compares each
row with a cache that reads this row alone, without padding, in the same passes. A budget for all
must also give the logits of transformers without h2o.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import pickle
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig

from h2o import (
    H2OCache,
    H2OConfig,
    Request,
    backends,
    generate_all,
    patched,
    simulated,
    without_spans,
)
from h2o.compat import with_cache
from h2o.hf.layers.layer import H2OLayer
from tests.hf import tiny
from tests.hf.hidden import logits_without
from tests.hf.payload import FOUR_BITS, check_payload, payload
from tests.hf.program_checks import (
    check_budgets,
    check_evictions,
    check_report,
    check_stored,
    check_trace,
    near,
    near_in_most,
    same,
    stored_bytes,
)
from tests.hf.program_models import FAMILIES, model_of

Span = tuple[int, int]
"""Tokens that a row loses, between two of its passes"""
Call = tuple[str, dict[str, Any]]
"""The name of a method of `Run`, and its arguments"""
Held = dict[int, list[list[int]]]
"""Positions of the keys in each head of a layer, by the layer's number"""
ROOM = 300
"""`heavy` of a budget for everything"""


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, the settings of a cache, and calls."""

    family: str
    settings: dict[str, Any]
    """Fields of an `H2OConfig`"""
    calls: Sequence[Call]
    rows: int = 2
    pinned: Any = None
    trace: bool = False
    compileable: bool = False
    in_patched: bool = False
    autocast: bool = False
    by_torch: bool = False
    exact: bool = False
    """Whether caches store payload (tests/hf/payload.py) instead of keys and values"""
    used: bool = False
    """Whether the cache has read another text before, and was reset"""
    factor: float = 1.0
    """Factor of payload, see `tests.hf.payload.payload`"""
    seed: int = 0


@dataclasses.dataclass
class Row:
    """What one row of a cache has seen."""

    first: int
    """Its number in the first batch, for its pins"""
    passes: list[list[int] | Span]
    """The tokens of each forward pass, without padding, and the spans that were removed"""
    image: dict[str, Tensor] = dataclasses.field(default_factory=dict)
    """Model inputs for its image, if the prompt has one"""

    @property
    def text(self) -> list[int]:
        """The tokens that were not removed."""
        whole, _ = self.history
        return [whole[i] for i in self.left]

    @property
    def left(self) -> list[int]:
        """The positions, among all tokens, of those that were not removed."""
        whole, hidden = self.history
        gone = {i for _, start, stop in hidden for i in range(start, stop)}
        return [i for i in range(len(whole)) if i not in gone]

    @property
    def read_at(self) -> list[tuple[int, bool]]:
        """For each token that was not removed its position when it was read, and whether tokens had
        been removed by then."""
        found: list[tuple[int, bool]] = []
        has_removed = False
        for each in self.passes:
            if isinstance(each, list):
                found += [(len(found) + i, has_removed) for i in range(len(each))]
            else:
                del found[slice(*each)]
                has_removed = True
        return found

    @property
    def history(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """All tokens, and (first, start, stop) of spans that those from `first` on do not see."""
        whole: list[int] = []
        left: list[int] = []  # what the removed spans count in
        hidden = []
        for each in self.passes:
            if isinstance(each, list):
                left += range(len(whole), len(whole) + len(each))
                whole += each
                continue
            hidden += [(len(whole), i, i + 1) for i in left[slice(*each)]]
            del left[slice(*each)]
        return whole, hidden


class Run:
    """One run of a program. Each call is a method."""

    def __init__(self, program: Program, path: Path) -> None:
        self.program, self.path = program, path
        self.random = random.Random(program.seed)
        self.model = model_of(program.family)
        self.config = H2OConfig(**program.settings)
        self.few_bits = FOUR_BITS.get(self.config.kv_dtype, ())
        self.rows = [Row(row, []) for row in range(program.rows)]
        self.masks: list[Tensor] = []
        """The mask [B, Q] of each pass"""
        self.ids: list[Tensor] = []
        self.begins_dynamic = program.calls[0][0] == "dynamic"
        self.prompt_lengths: list[int] | None = None
        self.patch: Any = None
        self.cache: Any = None

    # ---- Reading -------------------------------------------------------------------------------

    def new_cache(self, row: Row | None = None) -> H2OCache:
        """A new cache for all rows, or for a single one."""
        return H2OCache(self.model, self.config, **self.options(row), **self.more())

    def more(self) -> dict[str, Any]:
        return {"compileable": self.program.compileable}

    def options(self, row: Row | None) -> dict[str, Any]:
        pinned, lengths = self.program.pinned, self.prompt_lengths
        if row is not None and isinstance(pinned, list) and isinstance(pinned[0], list):
            pinned = pinned[row.first]
        if row is not None and lengths is not None:
            lengths = lengths[row.first]
        return {"pinned": pinned, "trace": self.program.trace, "prompt_length": lengths}

    def tokens(self, columns: int, left: Sequence[int] = (), right: Sequence[int] = ()):
        """New tokens (ids, mask) [B, columns], with padding on both sides of each row."""
        B = len(self.rows)
        ids = torch.tensor([[self.random.randint(2, 90) for _ in range(columns)] for _ in range(B)])
        mask = torch.ones_like(ids)
        for row, (before, after) in enumerate(zip(_each(left, B), _each(right, B), strict=True)):
            mask[row, :before] = 0
            mask[row, columns - after :] = 0
        ids, mask = ids.to(self.model.device), mask.to(self.model.device)
        if FAMILIES[self.program.family].image and not self.ids:
            name = self.program.family.partition(",")[0]
            inputs = tiny.with_image(name, {"input_ids": ids, "attention_mask": mask})
            ids = inputs.pop("input_ids")
            del inputs["attention_mask"]
            for number, row in enumerate(self.rows):
                row.image = {key: x.chunk(B)[number] for key, x in inputs.items()}
        return ids, mask

    def images(self, ids: Tensor, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Model inputs for the images of some rows, if they are among these new tokens."""
        if not bool((ids == tiny.IMAGE).any()):
            return {}
        return {key: torch.cat([row.image[key] for row in rows]) for key in rows[0].image}

    def forward(self, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Logits of a pass after all others."""
        whole = torch.cat([*self.masks, mask], 1)
        positions = (whole.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        if bool(whole.all()) and not self.program.exact:
            whole = None
        given = {"attention_mask": whole, "position_ids": positions}
        given |= self.images(ids, self.rows)
        return self.model(ids, **given, **with_cache(cache)).logits

    def count(self, ids: Tensor, mask: Tensor) -> None:
        """Record that the cache has seen a pass."""
        self.ids.append(ids)
        self.masks.append(mask)
        for row, tokens, real in zip(self.rows, ids, mask.bool(), strict=True):
            row.passes.append(tokens[real].tolist())

    def read(self, columns: int, left: Sequence[int] = (), right: Sequence[int] = ()) -> None:
        if self.cache is None:
            self.cache = self.new_cache()
            if self.program.used:
                self.forward(*self.tokens(columns), self.cache)
                self.cache.reset()
        ids, mask = self.tokens(columns, left, right)
        self.forward(ids, mask, self.cache)
        self.count(ids, mask)

    def chunks(self, columns: int, size: int, left: Sequence[int] = ()) -> None:
        """The prompt in several passes."""
        self.prompt_lengths = [columns - pads for pads in _each(left, len(self.rows))]
        self.cache = self.new_cache()
        self._in_chunks(self.cache, columns, size, left)

    def _in_chunks(self, cache: Any, columns: int, size: int, left: Sequence[int]) -> None:
        for ids, mask in zip(*(x.split(size, 1) for x in self.tokens(columns, left)), strict=True):
            self.forward(ids, mask, cache)
            self.count(ids, mask)

    def dynamic(self, columns: int, size: int, left: Sequence[int] = ()) -> None:
        """A prompt that a DynamicCache has read, perhaps in chunks."""
        full = DynamicCache(config=self.model.config)
        self._in_chunks(full, columns, size, left)
        self.cache = self.converted(full, torch.cat(self.masks, 1))
        for row in self.rows:
            row.passes = [row.text]

    def converted(self, full: Any, mask: Tensor | None, row: Row | None = None) -> H2OCache:
        return H2OCache.from_dynamic_cache(
            full, self.model, self.config, attention_mask=mask, **self.options(row), **self.more()
        )

    # ---- Generating ----------------------------------------------------------------------------

    def answer(self, columns: int = 2, tokens: int = 3, left: Sequence[int] = (),
               size: int | None = None, beams: int = 1, drafts: int = 0) -> None:  # fmt: skip
        """generate() with new ids after all those that the cache has seen. Without a cache,
        `patched` makes one. `drafts`: number of tokens that each pass guesses, with a new cache
        of one row."""
        if drafts:
            self.cache = self.new_cache()
        if beams > 1 and self.cache is not None:
            self.repeat(beams)
        if self.cache is None:  # generate() knows the whole prompt's length
            self.prompt_lengths = [columns - pads for pads in _each(left, len(self.rows))]
        ids, mask = self.tokens(columns, left)
        if beams > 1 and self.cache is not None:  # rows that are beams have the same new tokens
            ids, mask = (x[::beams].repeat_interleave(beams, 0) for x in (ids, mask))
        inputs = {"input_ids": torch.cat([*self.ids, ids], 1)}
        inputs["attention_mask"] = torch.cat([*self.masks, mask], 1)
        if beams > 1 and self.cache is not None:
            inputs = {name: x[::beams] for name, x in inputs.items()}
        given: dict[str, Any] = {"num_beams": beams} if beams > 1 else {}
        given |= self.images(ids, self.rows)
        if FAMILIES[self.program.family].image:  # or it generates placeholders
            given["suppress_tokens"] = [tiny.IMAGE]
        if size is not None:
            given["prefill_chunk_size"] = size
        if drafts:
            given["prompt_lookup_num_tokens"] = drafts
        if self.cache is not None:
            given |= with_cache(self.cache)
        with self._watched():
            tiny.greedy(self.model, inputs, tokens, **given)
        for layer in self.cache.layers if drafts else []:
            layer.record_past = False
        if self.cache is None:
            self.cache = self.patch.cache

    @contextlib.contextmanager
    def _watched(self) -> Iterator[None]:
        """Record the passes that generate() runs, and the beams that it reorders."""

        def see(_module: Any, _args: Any, given: dict[str, Any]) -> None:
            ids = given["input_ids"]
            mask = given.get("attention_mask")
            if not isinstance(mask, Tensor) or mask.ndim != 2:  # no padding
                mask = torch.ones_like(ids)
            if len(ids) > len(self.rows):  # the first pass of a beam search
                self._move([i // (len(ids) // len(self.rows)) for i in range(len(ids))])
            self.count(ids, mask[:, -ids.shape[1] :])

        def reorder(cache: H2OCache, rows: Tensor) -> None:
            before(cache, rows)
            self._move(rows.tolist())

        def crop(cache: H2OCache, tokens: int) -> None:
            before_crop(cache, tokens)
            self._take_back(-tokens)

        before, H2OCache.reorder_cache = H2OCache.reorder_cache, reorder
        before_crop, H2OCache.crop = H2OCache.crop, crop
        hook = self.model.register_forward_pre_hook(see, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            H2OCache.reorder_cache, H2OCache.crop = before, before_crop

    def _take_back(self, back: int) -> None:
        """Record that the last columns of the last pass were taken back."""
        columns = self.ids[-1].shape[1] - back
        self.ids[-1], self.masks[-1] = self.ids[-1][:, :columns], self.masks[-1][:, :columns]
        for row in self.rows:
            del row.passes[-1][columns:]

    def beams(self, columns: int = 2, tokens: int = 4, left: Sequence[int] = ()) -> None:
        self.answer(columns, tokens, left, beams=2)

    def all(self, lengths: Sequence[int], prefix: bool, size: int | None = None,
            forgets: bool = False) -> None:  # fmt: skip
        """generate_all answers as generate() does, after this cache as prefix or without.
        `forgets`: whether every other request forgets a span of the prefix."""
        text = self.rows[0].text if prefix else []
        prompts = [text + [self.random.randint(2, 90) for _ in range(length)] for length in lengths]
        each = [
            self._span(self.rows[0], 1 + i, 2) if forgets and i % 2 else []
            for i in range(len(prompts))
        ]
        requests = [
            Request(prompt, evict=spans) for prompt, spans in zip(prompts, each, strict=True)
        ]
        how = {} if size is None else {"prefill_chunk_size": size}
        how = {"generation_config": GenerationConfig(**how)}
        pinned = None if prefix else self.program.pinned
        results = generate_all(
            self.model, requests, self.cache.config if prefix else self.config, rows=2,
            max_new_tokens=4, pinned=pinned, prefix=self.cache if prefix else None, **how,
            **self.more(),
        )  # fmt: skip
        for prompt, spans, result in zip(prompts, each, list(results), strict=True):
            if result.error is not None:
                raise result.error
            ids = result.ids
            cache = (
                self.cache.fork() if prefix else H2OCache(self.model, self.config, pinned=pinned)
            )
            cache.evict(spans)
            left = without_spans(torch.tensor(prompt, device=self.model.device), spans)
            inputs = {"input_ids": left}
            if self.program.exact:
                inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            want = tiny.greedy(self.model, inputs, 4, **with_cache(cache), **how)[0].tolist()
            if not self.program.autocast:
                assert ids == want, f"generate_all gave {ids}, not {want}"
                check_report(result.report, cache)

    def simulate(self, columns: int, prompt: int, left: Sequence[int] = (),
                 holes: Sequence[int] = (), ratio_of: str = "prompt",
                 evict: Sequence[tuple[int, int, int]] = ()) -> None:  # fmt: skip
        """A simulation of whole texts answers as a cache that reads each row token by token. If
        budgets are fractions of the text, which no cache knows, it answers as one of each row.
        `evict`: (tokens read, first, number) of spans that leave, see `_removals`."""
        ids, mask = self.tokens(columns, left)
        mask[-1, list(holes)] = 0
        self.count(ids, mask)
        ratio_of = "seen" if ratio_of == "prompt" and self.config.grows else ratio_of
        spans = self._removals(evict)
        got, seen = self._simulated(ids, mask, prompt, ratio_of, spans)
        for number, row in enumerate(self.rows):
            if ratio_of == "text":
                alone = ids[number][mask[number].bool()][None]
                whole = torch.ones_like(alone)
                (want,), (expected,) = self._simulated(alone, whole, prompt, ratio_of, spans, row)
            else:
                want, expected = self._token_by_token(row, prompt, spans)
            what = f"simulated logits of row {number}"
            if self.program.autocast or self.config.kv_dtype is not None:
                near_in_most(got[number], want, what)
            else:
                about = 1e-3 if self.program.family not in tiny.WITH_STATES else 1e-2
                near(got[number], want, what, about)
            if expected:  # the row is longer than its prompt
                assert seen[number] == expected, f"the last token of row {number} sees other keys"

    def _removals(self, wanted: Sequence[tuple[int, int, int]]) -> dict[int, list[Span]]:
        """Spans by the number of tokens read. Each is the first one from the wanted token on that
        is not pinned, part of an image or within a sliding window in any row; none may be left."""
        windows = 10 if "sliding" in FAMILIES[self.program.family].layers else 0
        pins = self.options(None)["pinned"] or []
        fixed = {i for start, stop in pins for i in range(start, stop)}
        for row in self.rows:
            fixed |= {i for i, x in enumerate(row.text) if x >= tiny.IMAGE_STARTS}
        found: dict[int, list[Span]] = {}
        for n, first, tokens in wanted:
            spans = [(i, i + tokens) for i in range(first, n - windows - tokens)]
            free = (x for x in spans if not fixed & {*range(*x)})
            if span := next(free, None):
                found[n] = [span]
                fixed |= {*range(*span)}
        return found

    def _simulated(
        self, ids: Tensor, mask: Tensor, prompt: int, ratio_of: str,
        evict: dict[int, list[Span]], row: Row | None = None
    ) -> tuple[list[Tensor], list[Held]]:  # fmt: skip
        """Logits of each row's tokens, and the earlier keys that its last token sees."""
        pinned = self.options(row)["pinned"]
        with simulated(
            self.model, self.config, prompt_length=prompt, ratio_of=ratio_of, pinned=pinned,
            trace=True, evict=evict or None,
        ) as simulation:  # fmt: skip
            positions = (mask.cumsum(1) - 1).clamp(min=0)
            given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
            images = self.images(ids, self.rows if row is None else [row])
            logits = self.model(ids, **given, **images).logits
        is_held = {
            layer: (simulation.evicted_at(layer) == ids.shape[1])[..., :-1]
            for layer in simulation.layers()
        }
        return [x[real].float() for x, real in zip(logits, mask.bool(), strict=True)], [
            {layer: [at[held].tolist() for held in x[number]] for layer, x in is_held.items()}
            for number, at in enumerate(positions[:, :-1])
        ]

    def _token_by_token(
        self, row: Row, prompt: int, evict: dict[int, list[Span]]
    ) -> tuple[Tensor, Held]:
        """Logits of a row's tokens, and the earlier keys that its last token sees, in a cache that
        reads the prompt first. A row that has no more tokens has no keys."""
        text = row.text
        passes = [text[:prompt], *([token] for token in text[prompt:])]
        cache, logits, held, left = self.new_cache(row), [], {}, [*range(len(text))]
        for n, tokens in zip((0, *range(prompt, len(text))), passes, strict=False):
            for start, stop in evict.get(n, []):
                gone = left.index(start), left.index(start) + stop - start
                cache.evict([gone])
                del left[slice(*gone)]
            held = {
                layer.layer_idx: [
                    [left[i] for i in x[x >= 0].tolist()] for x in layer.kept().positions[0]
                ]
                for layer in cache.layers
                if isinstance(layer, H2OLayer) and layer.slots is not None
            }
            logits.append(self._pass_alone(cache, tokens, int(cache.get_seq_length()), row))
        return torch.cat(logits).float(), held

    # ---- Between passes ------------------------------------------------------------------------

    def copy(self, way: str) -> None:
        ways = {
            "fork": H2OCache.fork,
            "copy": copy.copy,
            "deepcopy": copy.deepcopy,
            "pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
        }
        before, self.cache = self.cache, ways[way](self.cache)
        self.forward(*self.tokens(3), before)  # the other one goes on

    def file(self) -> None:
        self.cache.save(self.path, self.model)
        self.cache = H2OCache.load(self.path, self.model)

    def select(self, rows: Sequence[int]) -> None:
        """Select rows; `rows` are taken modulo the batch."""
        chosen = [row % len(self.rows) for row in rows]
        self.cache.reorder_cache(torch.tensor(chosen, device=self.model.device))
        self._move(chosen)

    def repeat(self, times: int = 2) -> None:
        self.cache = self.cache.fork(rows=times)
        self._move([row for row in range(len(self.rows)) for _ in range(times)])

    def _move(self, rows: Sequence[int]) -> None:
        self.rows = [copy.deepcopy(self.rows[row]) for row in rows]
        self.ids, self.masks = [x[rows] for x in self.ids], [x[rows] for x in self.masks]

    def evict(self, start: int, tokens: int, apart: int = 0) -> None:
        """Remove a span from each row, `apart` tokens later than from the row before. It begins
        where nothing is pinned, part of an image or within a sliding window; such a row may lose
        nothing."""
        ids, mask = torch.cat(self.ids, 1), torch.cat(self.masks, 1)
        spans = [self._span(row, start + apart * i, tokens) for i, row in enumerate(self.rows)]
        if self.begins_dynamic and [] in spans:
            return  # the positions of padded rows are unknown, so all must lose as many tokens
        stored = [stored_bytes(self.cache, row) for row in range(len(self.rows))]
        self.cache.evict(spans, ids=ids, attention_mask=mask)
        for number, (row, found) in enumerate(zip(self.rows, spans, strict=True)):
            row.passes += found
            check_stored(self.cache, number, stored[number], found)
        rows = [torch.tensor([row.text], device=ids.device) for row in self.rows]
        left = tiny.batch(rows)
        more = int(self.cache.get_seq_length()) - left["input_ids"].shape[1]
        pad = torch.nn.functional.pad
        self.ids, self.masks = (
            [pad(left["input_ids"], (more, 0))],
            [pad(left["attention_mask"], (more, 0))],
        )

    def _span(self, row: Row, first: int, tokens: int) -> list[Span]:
        """A span of a row's text that can be removed, from token `first` on; none if there is
        none."""
        windows = 10 if "sliding" in FAMILIES[self.program.family].layers else 0
        pins = self.options(row)["pinned"] or []
        fixed = {i for i, x in enumerate(row.left) if any(a <= x < b for a, b in pins)}
        fixed |= {i for i, x in enumerate(row.text) if x >= tiny.IMAGE_STARTS}
        begins = (
            i
            for i in range(first, len(row.text) - windows - tokens)
            if not fixed & {*range(i, i + tokens)}
        )
        return [(i, i + tokens) for i in itertools.islice(begins, 1)]

    def crop(self, columns: int, back: int) -> None:
        """Read some columns and take the last of them back."""
        self.cache.activate_past_recording()
        self.read(columns)
        self.cache.crop(-back)
        self._take_back(back)
        for layer in self.cache.layers:
            layer.record_past = False

    def look(self) -> None:
        str(self.cache.report())
        repr(self.cache)
        list(self.cache)

    def reject(self, rows: int) -> None:
        """Try what a cache rejects: training, and perhaps a batch of another size."""
        saved, (ids, mask) = self.cache.fork(), self.tokens(2)
        whole = torch.cat([*self.masks, mask], 1)
        if rows:
            ids, whole = (torch.cat([x, x[:1]]) for x in (ids, whole))
        self.model.train()
        try:
            self.model(ids, attention_mask=whole, **with_cache(self.cache))
        except (ValueError, RuntimeError):
            pass
        else:
            raise AssertionError("a pass in training mode was not rejected")
        finally:
            self.model.eval()
        if self.cache.report().broken:
            self.cache = saved

    def fail(self, share: float, columns: int) -> None:
        """Let a pass fail in the part of the model at this share of its parts. Then the cache has
        seen nothing of it, or all of it, or knows that it was interrupted."""
        saved, new = self.cache.fork(), self.tokens(columns)
        parts = [x for name, x in self.model.named_modules() if not name.endswith(IN_PLACE)]
        hook = parts[int(share * len(parts))].register_forward_hook(lambda *_: 1 / 0)
        try:
            self.forward(*new, self.cache)
        except ZeroDivisionError:
            pass
        finally:
            hook.remove()
        if self.cache.report().broken:
            self.cache = saved
        elif self.cache.get_seq_length() > saved.get_seq_length():
            self.count(*new)

    # ---- What is right -------------------------------------------------------------------------

    def compare(self) -> None:
        """Compare the cache with caches that read each row alone."""
        texts = [row.text for row in self.rows]
        if self.program.exact:
            read_at = [row.read_at for row in self.rows]
            check_payload(self.cache, texts, read_at, self.few_bits, self.program.factor)
        if self.program.autocast:  # a row alone is rounded otherwise
            return
        if self.program.trace:
            check_trace(self.cache, torch.cat(self.masks, 1).bool())
        ids, mask = self.tokens(3)
        alone = [self._alone(row) for row in self.rows]
        is_constant = not (self.config.shares_by_echo or self.config.grows)
        if self.prompt_lengths is not None and is_constant:
            for number, row in enumerate(self.rows):
                check_budgets(self.cache, self._in_one_pass(row), number)
        for number, cache in enumerate(alone):
            for layer, other in zip(self.cache.layers, cache.layers, strict=True):
                if isinstance(layer, H2OLayer) and other.slots is not None:
                    same(layer, other, number)
            if self.program.trace:
                check_evictions(self.cache, cache, torch.cat(self.masks, 1).bool(), number)
        got = self.forward(ids, mask, self.cache)
        for number, (row, cache) in enumerate(zip(self.rows, alone, strict=True)):
            want = self._pass_alone(cache, ids[number].tolist(), len(row.text), row)
            near(got[number], want, f"logits of row {number}")
            if self.has_room:
                plain = self._plain(row, ids[number].tolist())
                near(got[number], plain[-3:], f"logits of row {number}, without h2o")

    @property
    def has_room(self) -> bool:
        settings = self.program.settings
        # Ranks close the gap that a removed span leaves.
        closes = settings.get("positions") == "cache_relative" and any(
            isinstance(each, tuple) for row in self.rows for each in row.passes
        )
        return settings.get("heavy") == ROOM and not (
            settings.get("kv_dtype") or self.program.exact or closes
        )

    def _alone(self, row: Row) -> H2OCache:
        passes = [tokens for tokens in row.passes if tokens]
        seen = 0
        if self.begins_dynamic:
            full = DynamicCache(config=self.model.config)
            self._pass_alone(full, passes[0], 0, row)
            cache, seen, passes = self.converted(full, None, row), len(passes[0]), passes[1:]
        else:
            cache = self.new_cache(row)
        for each in passes:
            if isinstance(each, tuple):
                cache.evict([each])
                seen -= each[1] - each[0]
                continue
            self._pass_alone(cache, each, seen, row)
            seen += len(each)
        return cache

    def _pass_alone(self, cache: Any, tokens: list[int], seen: int, row: Row) -> Tensor:
        ids = torch.tensor([tokens], device=self.model.device)
        given = {"position_ids": torch.arange(seen, seen + len(tokens), device=ids.device)[None]}
        if self.program.exact:
            given["attention_mask"] = ids.new_ones(1, seen + len(tokens))
        given |= self.images(ids, [row])
        return self.model(ids, **given, **with_cache(cache)).logits[0]

    def _in_one_pass(self, row: Row) -> H2OCache:
        """A cache that has read the row's prompt in one pass, without knowing its length before."""
        assert self.prompt_lengths is not None
        pinned = self.options(row)["pinned"]
        cache = H2OCache(self.model, self.config, pinned=pinned)
        self._pass_alone(cache, row.history[0][: self.prompt_lengths[row.first]], 0, row)
        return cache

    def _plain(self, row: Row, new: list[int]) -> Tensor:
        whole, hidden = row.history
        ids = torch.tensor([whole + new], device=self.model.device)
        if not hidden:
            plain = model_of(self.program.family, "eager")
            return plain(ids, use_cache=False, **self.images(ids, [row])).logits[0]
        return logits_without(
            model_of(self.program.family, "eager"), ids, hidden, **self.images(ids, [row])
        )


IN_PLACE = "in_proj"
"""A pass that fails between this part of a last layer and its states, which the next kernel changes
in place, is not noticed."""


def run(program: Program) -> None:
    """Run a program. Raises what is wrong."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        stack.enter_context(torch.no_grad())
        this = Run(program, Path(folder, "cache"))
        if program.exact:
            stack.enter_context(payload(this.model, this.few_bits, program.factor))
            if this.config.positions == "cache_relative":
                stack.enter_context(_at_zero(this.model))
        if program.autocast:
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        with contextlib.ExitStack() as during:
            if program.by_torch:
                during.enter_context(backends.by_torch())
            if program.in_patched:
                given = {"pinned": program.pinned, "trace": program.trace}
                this.patch = during.enter_context(patched(this.model, this.config, **given))
            for name, arguments in program.calls:
                getattr(this, name)(**arguments)
        if this.cache is not None:
            this.compare()


@contextlib.contextmanager
def _at_zero(model: Any) -> Iterator[None]:
    """Set all positions to 0, as h2o.patched does, so that keys are not rotated and back."""

    def zero(_module: Any, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        ids = given["input_ids"] if "input_ids" in given else args[0]
        return args, {**given, "position_ids": torch.zeros_like(ids)}

    hook = model.register_forward_pre_hook(zero, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _each(pads: Sequence[int], rows: int) -> list[int]:
    """A number for each row: those given, then 0."""
    return [*pads, *[0] * rows][:rows]
