"""Programs of callers who forget, shorten or shift what they pass: a cache answers right or raises.

A program is a padded prompt, perhaps a padded turn, perhaps a copy, file or crop, and then tokens
whose mask and positions may be wrong. What the model answers, if it answers, must be what plain
transformers answers for each row alone, with the positions that were given.
"""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch

from h2o import H2OCache
from h2o.compat import with_cache
from tests.hf.test_rollback import remove
from tests.hf.tiny import FAMILIES, LATENT, WITH_STATES, shared

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore:nothing is evicted"),
]

NAMES = [
    name
    for name in ("llama", "opt", "gpt2", "gemma2", "gemma3", "qwen2-mixed", "mistral-window",
                 "gpt_oss", "deepseek_v3", "gemma3n_text", "lfm2", "qwen3_next", "falcon_h1")
    if name in FAMILIES | LATENT
]  # fmt: skip
PROGRAMS = 14

SIDES = ("none", "left", "right")
BETWEEN = ("nothing", "fork", "deepcopy", "file", "crop")
MASKS = ("whole", "none", "new columns", "short", "ones")
POSITIONS = ("right", "none", "columns", "later", "earlier")


class Program:
    """A cache of two rows and the passes that it has seen, as (ids, mask, positions) each, where
    positions are None if the model chose them."""

    def __init__(self, name, choices, path):
        self.name, self.ours, self.path = name, shared(name), path
        prompt, gives, turn, between = choices
        self.cache, self.passes = H2OCache(self.ours, heavy=60, recent=60), []
        if between == "crop":
            self.cache.activate_past_recording()
        self.run(12, prompt, 4, gives)
        if turn:
            self.run(6, turn, 2, True)
        getattr(self, between)()

    def tokens(self, n):
        return torch.randint(2, 90, (2, n), generator=torch.Generator().manual_seed(n))

    def run(self, n, side, pads, with_positions):
        mask = torch.ones(2, n, dtype=torch.long)
        if side != "none":
            mask[1, slice(0, pads) if side == "left" else slice(n - pads, n)] = 0
        whole = torch.cat([*(x[1] for x in self.passes), mask], 1)
        positions = (whole.cumsum(1) - 1).clamp(min=0)[:, -n:] if with_positions else None
        given = {} if positions is None else {"position_ids": positions}
        self.passes.append((self.tokens(n), mask, positions))
        ids = self.passes[-1][0]
        self.ours(ids, attention_mask=whole, **given, **with_cache(self.cache))

    def nothing(self):
        pass

    def fork(self):
        self.cache = self.cache.fork()

    def deepcopy(self):
        self.cache = copy.deepcopy(self.cache)

    def file(self):
        self.cache.save(self.path, self.ours)
        self.cache = H2OCache.load(self.path, self.ours)

    def crop(self):
        remove(self.cache, 2)
        self.passes[-1] = tuple(x if x is None else x[:, :-2] for x in self.passes[-1])

    def history(self, row, counts_columns):
        """Ids and positions of a row, if the model counts columns or tokens by itself. Also whether
        its last token has the number of its column as position."""
        ids, masks = (torch.cat([x[i][row] for x in self.passes]) for i in (0, 1))
        counted = torch.arange(len(masks)) if counts_columns else masks.cumsum(0) - 1
        parts = counted.split([x[0].shape[1] for x in self.passes])
        positions = [
            own if x[2] is None else x[2][row] for x, own in zip(self.passes, parts, strict=True)
        ]
        positions = torch.cat(positions)[masks.bool()]
        return ids[masks.bool()], positions, bool(positions[-1] == masks.nonzero().max())

    def follow(self, new, mask, positions):
        """Logits of new tokens from the cache, and all those that are right, for each row."""
        ids, seen = self.tokens(new), torch.cat([x[1] for x in self.passes], 1)
        columns = seen.shape[1]
        end = torch.tensor([[int(self.history(row, True)[1].max()) + 1] for row in range(2)])
        order = torch.arange(new)
        positions = {
            "right": end + order,
            "none": None,
            "columns": (columns + order)[None].expand(2, -1),
            "later": end + order + 5,
            "earlier": end + order - 1,
        }[positions]
        whole = torch.cat([seen, torch.ones_like(ids)], 1)
        mask = {
            "whole": whole,
            "none": None,
            "new columns": torch.ones_like(ids),
            "short": whole[:, 1:],
            "ones": torch.ones_like(whole),
        }[mask]
        given = {"attention_mask": mask, "position_ids": positions}
        given = {name: x for name, x in given.items() if x is not None}
        got = self.ours(ids, **given, **with_cache(self.cache)).logits
        for row, counts_columns in itertools.product(range(2), (True, False)):
            before, at, is_column = self.history(row, counts_columns)
            after = [positions[row]] if positions is not None else [int(at.max()) + 1 + order]
            if positions is None and is_column:  # transformers goes on to number columns
                after.append(columns + order)
            for then in after:
                text, places = torch.cat([before, ids[row]])[None], torch.cat([at, then])[None]
                expected = self.ours(
                    text,
                    attention_mask=torch.ones_like(text),
                    position_ids=places,
                    use_cache=False,
                ).logits[0, -new:]
                yield row, got[row], expected


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_is_right_or_refused(name, tmp_path):
    chosen, answered = random.Random(name), 0
    can_crop = name not in WITH_STATES
    between = BETWEEN if can_crop else BETWEEN[:-1]
    programs = list(itertools.product(SIDES, (True, False), (None, *SIDES), between))
    calls = list(itertools.product((1, 3), MASKS, POSITIONS))
    for choices in chosen.sample(programs, min(PROGRAMS, len(programs))):
        try:
            program = Program(name, choices, tmp_path / "cache")
        except ValueError:
            continue  # padding amid a row, or positions that overlap those of the prompt
        cache = program.cache
        for call in chosen.sample(calls, 10):
            program.cache = cache.fork()
            try:
                results = list(program.follow(*call))
            except ValueError:
                continue
            answered += 1
            for row in range(2):
                right = [
                    torch.allclose(got, expected, rtol=0, atol=1e-3 * float(expected.abs().max()))
                    for at, got, expected in results
                    if at == row
                ]
                assert any(right), f"prompt, positions, turn, then: {choices}; {call}; row {row}"
    assert answered > PROGRAMS // 2
