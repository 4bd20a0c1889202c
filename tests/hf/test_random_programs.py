"""Random programs: what happened to a cache on the way must not show in what it holds.

A program is a random sequence of operations on one cache: forward passes, passes that are rejected
or fail midway, forks, files, moved rows, crops, answers and readers. The `history` lists the passes
that count. After each program the cache must hold what a new cache holds after these passes alone.
"""

from __future__ import annotations

import copy
import pickle
import random

import pytest
import torch

from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from h2o.hf.cache_state import recurrent_states
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.model_traits.layer_kinds import has_states, kind_of
from tests.hf.test_rollback import remove
from tests.hf.tiny import FAMILIES, LATENT, WITH_STATES, greedy, shared

NAMES = ("llama", "gpt_neox", "qwen2-mixed", "gemma3", "deepseek_v3", "gemma3n_text", "lfm2",
         "qwen3_next", "zamba2", "nemotron_h")  # fmt: skip
CONFIGS = (
    H2OConfig(heavy=5, recent=4),
    H2OConfig(heavy=0.3, recent=0.1, min_tokens=8),
    H2OConfig(heavy=4, recent=3, sinks=2, score_by="mean", decay=0.9, value_weighted=True),
    H2OConfig(heavy=6, recent=3, score_by="mean-echo"),
    H2OConfig(budget=12, min_tokens=0),
)
PINS = (None, [(1, 2)], [(0, 1), (18, 19)])
IN_PLACE = "in_proj"
"""A pass that fails between this part of a last layer and its states, which the next kernel changes
in place, is not noticed."""


class Program:
    """One cache, and the passes that it should have seen, as (ids, mask) [B, Q]."""

    def __init__(self, name, seed, path):
        self.random, self.path, self.ours = random.Random(f"{name} {seed}"), path, shared(name)
        config, pinned = CONFIGS[seed % len(CONFIGS)], PINS[seed % len(PINS)]
        self.new = lambda: H2OCache(self.ours, config, pinned=pinned, trace=True)
        self.cache, self.history, self.rows = self.new(), [], self.random.choice([1, 2, 3])
        self.can_crop = name not in WITH_STATES
        self.run(*self.tokens(self.random.randint(9, 24)))

    def tokens(self, n):
        """New tokens (ids, mask) [B, n]. A prompt is padded on the left."""
        ids = torch.tensor(
            [[self.random.randint(2, 90) for _ in range(n)] for _ in range(self.rows)]
        )
        mask = torch.ones_like(ids)
        for row in range(1, 1 if self.history else self.rows):
            mask[row, : self.random.randint(0, n - 3)] = 0
        return ids.to(self.ours.device), mask.to(self.ours.device)

    def run(self, ids, mask):
        read(self.ours, self.cache, self.history, ids, mask)
        self.history.append((ids, mask))

    def step(self):
        self.run(*self.tokens(1))

    def chunk(self):
        self.run(*self.tokens(self.random.randint(2, 6)))

    def answer(self):
        new, one = self.tokens(2)
        passes = [*self.history, (new, one)]
        ids, mask = (torch.cat(x, 1) for x in zip(*passes, strict=True))
        text = {"input_ids": ids, "attention_mask": mask}
        answer = greedy(self.ours, text, 3, **with_cache(self.cache))
        self.history = [*passes, *((answer[:, i : i + 1], one[:, :1]) for i in range(2))]

    def copy(self):
        ways = copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))
        before, self.cache = self.cache, self.random.choice(ways)(self.cache)
        read(self.ours, before, self.history, *self.tokens(3))  # the other one goes on

    def file(self):
        self.cache.save(self.path, self.ours)
        self.cache = H2OCache.load(self.path, self.ours)

    def move_rows(self):
        rows = [self.random.randrange(self.rows) for _ in range(self.random.randint(1, 3))]
        self.cache.batch_select_indices(rows)
        self.rows, self.history = len(rows), [(x[rows], mask[rows]) for x, mask in self.history]

    def double_rows(self):
        if self.rows < 3:
            self.cache, self.rows = self.cache.fork(rows=2), 2 * self.rows
            self.history = [tuple(x.repeat_interleave(2, 0) for x in y) for y in self.history]

    def crop(self):
        if self.can_crop:
            self.cache.activate_past_recording()
            self.chunk()
            ids, mask = self.history.pop()
            back = self.random.randint(1, ids.shape[1] - 1)
            remove(self.cache, back)
            self.history.append((ids[:, :-back], mask[:, :-back]))

    def look(self):
        str(self.cache.report())
        repr(self.cache)
        list(self.cache)

    def reject(self):
        """Try what a cache rejects. Layers before the first of h2o may have seen it."""
        saved, (ids, mask) = self.cache.fork(), self.tokens(2)
        mask[0, -1] = 0
        mask = torch.cat([*[x for _, x in self.history], mask], 1)
        if self.random.random() < 0.5:
            ids, mask = (torch.cat([x, x[:1]]) for x in (ids, mask))  # a batch of another size
        self.ours.train()
        try:
            with pytest.raises((ValueError, RuntimeError)):
                self.ours(ids, attention_mask=mask, **with_cache(self.cache))
        finally:
            self.ours.eval()
        if self.cache.report().broken:
            self.cache = saved

    def fail(self):
        """Let a pass fail somewhere in the model. Then the cache has seen nothing of it, or all of
        it, or knows that it was interrupted."""
        saved, new = self.cache.fork(), self.tokens(self.random.randint(1, 5))
        parts = [x for name, x in self.ours.named_modules() if not name.endswith(IN_PLACE)]
        at = max(self.random.choices(range(len(parts)), k=2))  # rather in a late layer
        hook = parts[at].register_forward_hook(lambda *_: 1 / 0)
        try:
            read(self.ours, self.cache, self.history, *new)
        except ZeroDivisionError:
            pass
        finally:
            hook.remove()
        if self.cache.report().broken:
            self.cache = saved
        elif self.cache.get_seq_length() > saved.get_seq_length():
            self.history.append(new)

    OPERATIONS = (step, step, chunk, answer, copy, file, move_rows, double_rows, crop, look, reject,
                  fail, fail)  # fmt: skip


def read(ours, cache, history, ids, mask):
    """Run a pass by hand, after the passes of `history`."""
    whole = torch.cat([*[before for _, before in history], mask], 1)
    positions = (whole.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    mask = None if bool(whole.all()) else whole
    ours(ids, attention_mask=mask, position_ids=positions, **with_cache(cache))


def contents(cache):
    """What each layer holds, in the order of positions."""
    for layer in cache.layers:
        held = {}
        if isinstance(layer, H2OLayer):
            held = {"kept": layer.kept()[0], "scores": layer.kept()[1], "rows": layer.kept_rows()}
            held["evicted_at"] = cache.evicted_at(layer.layer_idx)
        elif kind_of(layer) == "sliding":
            window = 1 - layer.sliding_window  # a layer that records its last pass holds more
            held = {"keys": layer.keys[:, :, window:], "values": layer.values[:, :, window:]}
        if has_states(layer):
            states = recurrent_states.tensors_of(layer), recurrent_states.numbers_of(layer)
            held["states"] = recurrent_states._without_past(*states)
        yield held


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", [x for x in NAMES if x in FAMILIES | LATENT])
def test_a_cache_holds_what_its_passes_alone_would_leave(name, seed, tmp_path):
    program, done = Program(name, seed, tmp_path / "cache"), []
    for _ in range(14):
        done.append(program.random.choice(program.OPERATIONS).__name__)
        getattr(program, done[-1])()
    alone = program.new()
    for index, (ids, mask) in enumerate(program.history):
        read(program.ours, alone, program.history[:index], ids, mask)
    ids, mask = (torch.cat(x, 1) for x in zip(*program.history, strict=True))
    assert not program.cache.guard.state.text.differing_rows(ids, mask), done
    assert not any(x.ends_in_padding for x in program.cache.guard.state.rows), done
    for got, expected in zip(contents(program.cache), contents(alone), strict=True):
        torch.testing.assert_close(
            got, expected, rtol=1e-3, atol=1e-3, msg=lambda text: f"after {done}: {text}"
        )
