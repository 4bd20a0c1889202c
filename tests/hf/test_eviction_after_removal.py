"""Which keys a cache holds when `H2OCache.evict` and its policy both remove some.

The rule is replayed in Python from the attention of a model with one layer, whose keys no eviction
changes.
"""

from __future__ import annotations

import random

import pytest
import torch

from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from tests.hf.tiny import llama


def replayed(weights, passes, groups, heavy, recent, sinks):
    """The keys of each head after each of the `passes`: numbers of tokens, or spans that leave.

    Args:
        weights: [H, N, N], attention of the whole text.
    """
    left, seen, each = [], 0, []  # `left`: the tokens that no call has removed
    held, scores = [[] for _ in range(groups)], [{} for _ in range(groups)]
    of_group = weights.shape[0] // groups
    for step in passes:
        if isinstance(step, list):
            gone = {left[i] for start, stop in step for i in range(start, stop)}
            left = [x for x in left if x not in gone]
            held = [[x for x in keys if x not in gone] for keys in held]
        else:
            new = range(seen, seen := seen + step)
            left += new
            order = {x: i for i, x in enumerate(left)}
            for g, keys in enumerate(held):
                for query in new:
                    visible = [*keys, *range(new[0], query + 1)]
                    rows = weights[g * of_group : (g + 1) * of_group, query, visible]
                    shares = (rows / rows.sum(1, keepdim=True)).sum(0).tolist()
                    for key, share in zip(visible, shares, strict=True):
                        scores[g][key] = scores[g].get(key, 0) + share
                keys += new
                fixed = [x for x in keys if not sinks <= order[x] < len(left) - recent]
                rest = sorted({*keys} - {*fixed}, key=lambda x, of=scores[g]: -of[x])
                held[g] = fixed + rest[: sinks + heavy + recent - len(fixed)]
        each.append([sorted(keys) for keys in held])
    return each


def held_by_a_cache(model, ids, passes, config):
    cache, left, seen, each = H2OCache(model, config), [], 0, []
    for step in passes:
        if isinstance(step, list):
            cache.evict(step)
            gone = {left[i] for start, stop in step for i in range(start, stop)}
            left = [x for x in left if x not in gone]
        else:
            with torch.no_grad():
                model(ids[:, seen : seen + step], **with_cache(cache))
            left += range(seen, seen := seen + step)
        kept = cache.layers[0].kept().positions[0]
        each.append([sorted(left[i] for i in x[x >= 0].tolist()) for x in kept])
    return each


def drawn(chosen, tokens):
    """Passes over a text, with spans between them, anywhere in what is left."""
    passes = [chosen.randint(4, 20)]
    left = total = passes[0]
    while total < tokens:
        step = min(chosen.choice([1, 1, 1, 2, 5]), tokens - total)
        total, left = total + step, left + step
        passes.append(step)
        if chosen.random() < 0.4:
            edges = sorted(chosen.sample(range(left + 1), chosen.choice([2, 4])))
            spans = [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True)]
            if 0 < (n := sum(b - a for a, b in spans)) < min(left, 12):
                passes.append(spans)
                left -= n
    return passes


@pytest.mark.parametrize("seed", range(4))
def test_the_rule_of_the_shorter_text(seed):
    """Sinks and recent keys are those of the text that is left. Freed room is used by any key, and
    scores stay what they were."""
    ours = llama(1)
    plain = llama(1)
    ours.set_attn_implementation("h2o")
    plain.set_attn_implementation("eager")
    plain.load_state_dict(ours.state_dict())
    groups = ours.config.num_key_value_heads
    removals = 0
    for number in range(5):
        chosen = random.Random(10 * seed + number)
        ids = torch.tensor([[chosen.randint(2, 90) for _ in range(chosen.randint(30, 60))]])
        passes = drawn(chosen, ids.shape[1])
        budget = chosen.randint(0, 8), chosen.randint(1, 6), chosen.choice([0, 2])
        config = H2OConfig(**dict(zip(("heavy", "recent", "sinks"), budget, strict=True)))
        with torch.no_grad():
            whole = plain(ids, output_attentions=True, use_cache=False).attentions[0][0]
        wanted = replayed(whole.double(), passes, groups, *budget)
        assert held_by_a_cache(ours, ids, passes, config) == wanted, (passes, budget)
        removals += sum(isinstance(step, list) for step in passes)
    assert removals > 10
