"""score_by="mean-echo": most of a prompt's attention is redistributed in proportion to echo."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import h2o
from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from h2o.policy import Policy
from h2o.slots import new_slots
from tests import inputs
from tests.cases import checkered, pairs
from tests.hf import drive, tiny
from tests.hf.test_compress import positions
from tests.hf.test_echo import echo_of
from tests.hf.test_families import KEPT_ALIKE
from tests.hf.test_simulation import PROMPT, TEXT, check_rows_alone, fitted, prove, text
from tests.hf.tiny import ROTARY, TWINS, batch, model, prompts, shared, slow_if
from tests.reference import echo as reference_echo
from tests.reference import operations as reference
from tests.reference.echo import given_out_anew

SMALL = {"heavy": 6, "recent": 4, "sinks": 2, "score_by": "mean-echo"}
ROOMY = {"heavy": 500, "recent": 0}


def read(ours, documents, **parameters):
    """A cache after the prefill of documents as a batch that is padded on the left."""
    padded = batch(documents)
    mask = padded["attention_mask"]
    cache = H2OCache(ours.config, **parameters)
    ours(
        **padded, position_ids=(mask.cumsum(1) - 1).clamp(min=0), **with_cache(cache),
    )  # fmt: skip
    return cache


def wanted(ours, document, layer, sinks, decay=1.0):
    """Scores of a document's keys, [G, n], computed from the scores by attention and the echo."""
    alone = read(ours, [document], **ROOMY, score_by="mean", decay=decay)
    received, echo = alone.kept(layer).scores[0], echo_of(ours, document)[layer][0]
    return given_out_anew(received, echo, Policy(sinks=sinks, decay=decay))


@pytest.mark.parametrize(
    ("name", "sinks", "decay"),
    pairs(["llama", "gpt_neox", "qwen3", "falcon_h1"], [0, 3], [1.0, 0.9]),
)
def test_scores_of_a_prompt(name, sinks, decay):
    """The scores of a prompt must be those of the definition, and must not depend on the rest of
    the batch."""
    ours, documents = shared(name), prompts(50, 23, 1)
    cache = read(ours, documents, **ROOMY, sinks=sinks, score_by="mean-echo", decay=decay)
    for layer, report in enumerate(cache.report().layers):
        if report.kind != "h2o":
            continue
        got = cache.kept(layer).scores
        for row, document in enumerate(documents):
            want = wanted(ours, document, layer, sinks, decay)
            torch.testing.assert_close(
                got[row, :, : document.shape[1]], want.float(), rtol=1e-3, atol=1e-5
            )


def test_the_attention_stays_what_it_was():
    ours, (document,) = shared("llama"), prompts(60)
    heads = ours.config.num_attention_heads // ours.config.num_key_value_heads
    cache = read(ours, [document], **SMALL)
    for layer in cache.report().layers:
        total = layer.mass_evicted + layer.mass_kept
        assert total == pytest.approx(60 * heads * len(layer.kept_by_head[0]), rel=1e-4)


def test_other_keys_are_kept():
    """Echo must have an effect: other keys are kept than by the mean."""
    ours, (document,) = shared("llama"), prompts(60)
    mean, echo = (
        positions(read(ours, [document], **SMALL | {"score_by": name}))
        for name in ("mean", "mean-echo")
    )
    assert mean != echo


# ---- One layer is the definition ---------------------------------------------------------------

CALLS = [20, 1, 1, 1, 7, 1, 1, 3, *[1] * 20]


def turn(x, distance):
    """Rotate 8 elements by `distance` positions, as Llama does."""
    angles = distance * 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    a, b = x[..., :4].double(), x[..., 4:].double()
    cos, sin = angles.double().cos(), angles.double().sin()
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def judged(cache, seed, mask=None, heads=None, **kwargs):
    """Feed a drifting text to a cache of one layer and to the reference, and assert that both keep
    the same keys. Returns how often a step evicted another key than the one that left the recent
    window."""
    N = sum(CALLS)
    drifting = inputs.drifting(seed, 1 if mask is None else len(mask), 4, 2, N, 8)
    config = cache.layers[0].config
    budgets = heads or [(config.heavy, config.recent)] * 2
    tensors = [torch.from_numpy(x.copy()) for x in drifting]
    slots = new_slots(
        tensors[1], [N + 1] * 2 if heads else N + 1,
        kv_dtype=config.kv_dtype, value_weighted=config.value_weighted, offsets=True,
    )  # fmt: skip
    slots.budget.copy_(torch.tensor(budgets if heads else budgets[0]))
    stop, changes = 0, 0
    for columns in CALLS:
        start, stop = stop, stop + columns
        new = [x[:, :, start:stop] for x in tensors]
        before = reference.kept(slots)[0]
        how = {"mask": None if mask is None else torch.from_numpy(mask[:, start:stop])}
        how |= {"softcap": kwargs.get("softcap") or 0.0, "sink_logits": kwargs.get("s_aux")}
        got = drive.forward(cache, drifting.cut(start, stop), mask, **kwargs)
        if start == 0:
            want, _ = reference_echo.forward(*new, slots, turn, config.policy, **how)
        elif columns == 1:
            want = reference.step(*new, slots, policy=config.policy, **how)
        else:
            want, scores = reference.attend(*new, slots, policy=config.policy, **how)
            reference.evict(*new[1:], scores, slots, mask=how["mask"], policy=config.policy)
        close = {"rtol": 1e-4, "atol": 1e-4 if config.kv_dtype is None else 1e-2}
        torch.testing.assert_close(got, want, **close)
        for ours, theirs in zip(cache.kept(0), reference.kept(slots), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-3, atol=1e-5)
        if columns == 1:
            gone = set(before.flatten().tolist()) - set(reference.kept(slots)[0].flatten().tolist())
            changes += bool(gone - {stop - 1 - budgets[0][1]})
    return changes


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"value_weighted": True},
        {"recent": 0},
        {"decay": 0.9},
        {"kv_dtype": "int8"},
        {"heavy": 60},
        {"sinks": 0, "heavy": 1, "recent": 1},
    ],
    ids=str,
)
def test_a_layer_is_the_definition(more):
    config = SMALL | more
    changes = judged(drive.new_cache(**config), 1)
    assert changes >= 3 or config["heavy"] in (1, 60)


@pytest.mark.parametrize("make", [inputs.left, inputs.right, lambda n, Q: inputs.holes(3, n, Q)])
def test_pads_do_not_count(make):
    """Padding must not count. The rows have 20, 3 and no tokens in the first pass, and no padding
    later."""
    mask = make([20, 3, 0], CALLS[0])
    mask = np.concatenate([mask, np.ones((3, sum(CALLS[1:])), bool)], axis=1)
    assert judged(drive.new_cache(**SMALL), 2, mask) >= 3


def test_softcap_and_learned_sinks():
    sinks = torch.from_numpy(inputs.sink_logits(1, 4))
    judged(drive.new_cache(**SMALL), 4, s_aux=sinks)
    judged(drive.new_cache(**SMALL), 5, softcap=2.0)


def test_heads_with_budgets_of_their_own():
    cache = drive.new_cache(**SMALL | {"heavy": [[3, 9]], "recent": [[2, 5]]})
    judged(cache, 6, heads=[(3, 2), (9, 5)])


# ---- Simulation is the cache -------------------------------------------------------------------

POLICIES = {
    "plain": SMALL,
    "no window": SMALL | {"heavy": 9, "recent": 0, "sinks": 0, "value_weighted": True},
    "head_shares": SMALL | {"heavy": 9, "head_shares": [[0.4, 2.5, 1.0, 0.9]] * 2},
    "decay": SMALL | {"decay": 0.95},
    "int8": SMALL | {"kv_dtype": "int8", "value_weighted": True},
    "large": SMALL | {"heavy": 30, "recent": 20},
}


@pytest.mark.parametrize(("chosen", "prompt_length"), checkered(POLICIES, [1, PROMPT, 40, TEXT]))
def test_simulation_equals_the_cache(chosen, prompt_length):
    ours = tiny.model("llama", "sdpa")
    settings = fitted(POLICIES[chosen], ours)
    swaps = prove(ours, text(1), prompt_length, 2e-2 if chosen == "int8" else 2e-4, **settings)
    assert swaps >= 3 or chosen == "large" or prompt_length == TEXT


@pytest.mark.parametrize(
    "family", [slow_if(name in TWINS or name in KEPT_ALIKE, name) for name in ROTARY]
)
def test_every_model_type(family):
    (ids,) = prompts(36)
    prove(model(family), ids, 20, 5e-3, **SMALL)


@pytest.mark.parametrize("side", ["left", "right"])
def test_simulated_rows_of_a_batch_are_alone(side):
    ours = tiny.model("llama", "sdpa")
    rows, lengths = [text(seed, n) for seed, n in enumerate([50, 23, 64])], [20, 9, 30]
    check_rows_alone(ours, rows, lengths, side, **SMALL)


def test_a_first_token_is_no_prompt():
    """A simulation that evicts from the first token on has no prompt, so it must give the same bits
    as the mean."""
    ours, ids = tiny.model("llama", "sdpa"), text(1)
    logits = []
    for name in ("mean", "mean-echo"):
        with h2o.simulated(ours, **SMALL | {"score_by": name}):
            logits.append(ours(ids, use_cache=False).logits)
    assert torch.equal(*logits)


# ---- Everything else -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["opt", "deepseek_v3"])
def test_models_that_echo_does_not_serve(name):
    ours, (document,) = shared(name), prompts(60)
    kept = [
        positions(read(ours, [document], **SMALL | {"score_by": x})) for x in ("mean", "mean-echo")
    ]
    assert kept[0] == kept[1]


@pytest.mark.parametrize("more", [{"positions": "cache_relative"}, {"compileable": True}], ids=str)
def test_other_kinds_of_layers(more):
    ours, (document,) = shared("llama"), prompts(60)
    mean, plain, other = (
        positions(read(ours, [document], **SMALL | {"score_by": name} | change))
        for name, change in (("mean", more), ("mean-echo", {}), ("mean-echo", more))
    )
    assert other == (plain if "compileable" in more else mean)


def test_a_dynamic_cache_goes_on():
    """The keys of a DynamicCache have no queries for echo, and must be ranked by the mean."""
    ours, (document,) = model("llama"), prompts(60)
    kept = []
    for name in ("mean", "mean-echo"):
        full = DynamicCache(config=ours.config)
        ours(document[:, :50], **with_cache(full))
        settings = SMALL | {"score_by": name}
        cache = H2OCache.from_dynamic_cache(full, ours.config, **settings)
        ours(document[:, 50:], **with_cache(cache))
        kept.append(positions(cache))
    assert kept[0] == kept[1]


def test_a_second_reading_goes_by_the_mean():
    ours, (document,) = shared("llama"), prompts(60)
    kept = [
        positions(
            h2o.compress_document(
                ours, document, H2OConfig(**SMALL | more), readings=2, repeat=[5, 9]
            )
        )
        for more in ({"score_by": "mean"}, {}, {"head_shares": "echo"})
    ]
    assert kept[0] == kept[1] == kept[2]
