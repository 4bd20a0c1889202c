"""Models whose attention has learned sinks, such as gpt-oss, and their sliding windows."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import h2o
from h2o import H2OCache, H2OConfig, UnsupportedError, attention_blocks, supports
from h2o.analysis import collect, removal
from h2o.calibration import head_costs, refine
from h2o.compat import with_cache
from h2o.evaluation.published_masks import MASKS
from h2o.hf.attention import attention
from tests.hf.drive import Attention, feed, forward, new_cache, tensors
from tests.hf.modes import policy
from tests.hf.test_simulation import prove, text
from tests.hf.tiny import DEVICE, Family, batch, greedy, needs_compiler, prompts, slow_if
from tests.inputs import Text, drifting, rotate

MIXED = ["sliding_attention", "full_attention"] * 2
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS |= {"moe_intermediate_size": 32}
FAMILIES = {
    "gpt_oss": EXPERTS,
    "flint": EXPERTS,
    "granite_swa": {},
    "granitemoe_swa": EXPERTS,
    "mimo_v2_flash": EXPERTS | {"v_head_dim": 8},  # only its sliding windows have sinks
}
SMALL = {"heavy": 6, "recent": 6}
LENGTHS = (5, 17, 23, 30)


def made(name: str, attn: str = "h2o", kinds: list[str] = MIXED):
    """A tiny model in which the sink of each head gets much of the attention."""
    layers = tuple("h2o" if kind == "full_attention" else "sliding" for kind in kinds)
    config = {**FAMILIES[name], "layer_types": kinds, "sliding_window": 10}
    try:
        config = Family(name, config, layers=layers).build_config()
    except ValueError as error:
        pytest.skip(str(error))  # this version of transformers lacks the model
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(config).eval()
    for module in model.modules():
        sinks = getattr(module, "sinks", None)
        if isinstance(sinks, torch.nn.Parameter):
            torch.nn.init.normal_(sinks, 1.0, 1.5)
    model.set_attn_implementation(attn)
    return model.to(DEVICE)


# granitemoe_swa has the attention of granite_swa.
every_family = pytest.mark.parametrize(
    "name", [slow_if(x == "granitemoe_swa", x) for x in FAMILIES]
)


@every_family
def test_they_are_served(name):
    support = supports(made(name).config)
    assert support
    assert support.layers == ("sliding", "h2o") * 2


def test_values_of_another_size_are_refused():
    config = AutoConfig.for_model("llama", head_dim=8)
    for size in (4, 16):
        config.v_head_dim = size
        assert supports(config).reason == "its keys and values differ in size"


@every_family
def test_full_budget_is_the_full_cache(name):
    ours, theirs = made(name), made(name, "eager")
    inputs = batch(prompts(*LENGTHS))
    expected = greedy(theirs, inputs, 32, **with_cache(DynamicCache(config=theirs.config)))
    cache = H2OCache(ours.config, H2OConfig.full())
    assert greedy(ours, inputs, 32, **with_cache(cache)).tolist() == expected.tolist()


@every_family
def test_a_small_budget_is_held_and_changes_the_text(name):
    ours = made(name)
    inputs = batch(prompts(*LENGTHS))
    cache = H2OCache(ours.config, **SMALL)
    tokens = greedy(ours, inputs, 32, **with_cache(cache))
    for layer in (1, 3):
        positions, scores = cache.kept(layer)
        assert positions.shape[-1] == 12
        assert (positions >= 0).all()
        assert (scores >= 0).all()
    assert tokens.tolist() != greedy(ours, inputs, 32).tolist()
    with h2o.patched(ours, **SMALL):
        assert greedy(ours, inputs, 32).tolist() == tokens.tolist()


@pytest.mark.parametrize("chosen", ["h2o", slow_if(True, "sinks, mean")])
@every_family
def test_each_row_is_the_row_alone(name, chosen):
    ours = made(name)
    config = policy(chosen, ours)
    rows = prompts(*LENGTHS)
    tokens = greedy(ours, batch(rows), 12, **with_cache(H2OCache(ours.config, config)))
    for b, row in enumerate(rows):
        alone = H2OCache(ours.config, config)
        expected = greedy(ours, {"input_ids": row}, 12, **with_cache(alone))
        assert tokens[b].tolist() == expected[0].tolist()


@every_family
def test_simulation_is_the_cache(name):
    assert prove(made(name), text(tokens=60), 8, 1e-3, **SMALL) > 0  # the logits go up to 20


@every_family
def test_the_sinks_are_seen(name):
    """Sinks must change the logits. Some tests above would pass if both of their results ignored
    the sinks."""
    ours, (ids,) = made(name), prompts(30)
    before = ours(ids, **with_cache(H2OCache(ours.config, **SMALL))).logits
    for module in ours.modules():
        if isinstance(getattr(module, "sinks", None), torch.nn.Parameter):
            module.sinks.fill_(-torch.inf)
    after = ours(ids, **with_cache(H2OCache(ours.config, **SMALL))).logits
    assert (before - after).abs().max() > 0.01


# ---- Settings that windows exclude ---------------------------------------------------------------

FULL_LAYERS = ["full_attention"] * 2


def test_rolled_positions():
    """Cache-relative positions must not lose the sinks. No model has both, so a single layer is
    given sinks. While all keys are held, ranks equal positions."""
    query, keys, values = drifting(3, B=1, N=30, D=8)
    read = Text(rotate(query), rotate(keys), values)
    sinks, answers = torch.linspace(-1, 2, 4), []
    for positions in ("original", "cache_relative"):
        cache = new_cache(heavy=1000, recent=0, positions=positions)
        pieces = []
        for start, stop in ((0, 12), (12, 13), (13, 29), (29, 30)):
            more = {"position_ids": torch.arange(start, stop)[None], "s_aux": sinks}
            pieces.append(forward(cache, read.cut(start, stop), **more))
        answers.append(torch.cat(pieces, dim=1))
    torch.testing.assert_close(*answers, rtol=0, atol=1e-5)
    plain = feed(new_cache(heavy=1000, recent=0), read, [12, 1, 16, 1])
    assert (plain - answers[0]).abs().max() > 0.01


@needs_compiler
def test_compiled_steps():
    ours, (ids,) = made("gpt_oss", kinds=FULL_LAYERS), prompts(20)
    plain = H2OCache(ours.config, **SMALL)
    cache = H2OCache(ours.config, **SMALL, compileable=True)
    torch._dynamo.reset()
    step = torch.compile(ours.forward, backend="eager")
    for held in (plain, cache):
        ours(ids, **with_cache(held))
    for token in range(5, 25):
        new = torch.tensor([[token]], device=ids.device)
        expected = ours(new, **with_cache(plain)).logits
        torch.testing.assert_close(step(new, **with_cache(cache)).logits, expected)
    torch._dynamo.reset()


# ---- Without a cache -----------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@every_family
def test_dense_attention_is_that_of_transformers(name, side, monkeypatch):
    monkeypatch.setattr(attention, "ROWS", 7)
    ours, theirs = made(name), made(name, "eager")
    inputs = batch(prompts(*LENGTHS), side)
    for more in ({"use_cache": False}, {"use_cache": True}):
        got, expected = (m(**inputs, **more).logits for m in (ours, theirs))
        real = inputs["attention_mask"].bool()
        torch.testing.assert_close(got[real], expected[real], rtol=1e-4, atol=5e-4)
    (row,) = prompts(30)  # without padding there is no mask
    got, expected = (m(row, use_cache=False).logits for m in (ours, theirs))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=5e-4)


@pytest.mark.usefixtures("gradients")
def test_training_without_a_cache_reaches_the_sinks():
    ours, theirs = made("gpt_oss"), made("gpt_oss", "eager")
    (ids,) = prompts(20)
    gradients = []
    for model in (ours, theirs):
        model(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append(torch.stack([x.self_attn.sinks.grad for x in model.model.layers]))
    assert gradients[0].abs().min() > 0
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("gradients")
def test_a_cache_has_no_gradient_for_sinks():
    query, key, value = tensors(drifting(3, B=1, N=20))
    sinks = torch.nn.Parameter(torch.zeros(4))
    key, value = new_cache(**SMALL).update(key, value, 0)
    out, _ = attention.h2o_attention_forward(Attention(), query, key, value, None, s_aux=sinks)
    assert out.requires_grad
    with pytest.raises(RuntimeError, match="no gradient"):
        out.sum().backward()


# ---- What is measured ----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["local", "global", "flexgen"])
def test_the_authors_other_masks_know_no_sinks(variant):
    ours, (ids,) = made("gpt_oss"), prompts(20)
    with (
        h2o.simulated(ours, heavy=4, recent=4, masks=MASKS[variant]),
        pytest.raises(UnsupportedError, match="do not support learned sinks"),
    ):
        ours(ids, use_cache=False)


def in_float64(seen: collect.Attention) -> torch.Tensor:
    """Attention [n, H, D] with learned sinks, computed in float64."""
    H, n, _ = seen.query.shape
    keys, values = (x.double().repeat_interleave(H // len(x), 0) for x in (seen.keys, seen.values))
    logits = seen.scale * seen.query.double() @ keys.transpose(-1, -2)
    logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    sinks = seen.sink_logits.double().view(H, 1, 1).expand(H, n, 1)
    weights = torch.cat([logits, sinks], -1).softmax(-1)[..., :-1]
    return (weights @ values).transpose(0, 1).float()


def test_analysis_sees_the_models_own_attention():
    """An analysis must not ignore the sinks. Its outputs must be the model's, and so must attention
    from which no keys are removed. Blocks of different sizes round differently, so both are
    compared with attention in float64."""
    ours, (ids,) = made("gpt_oss"), prompts(30)
    expected = ours(ids, use_cache=False).logits[0]

    def visit(layer, seen):
        out, scores = collect.attend(seen)
        assert (scores.sum(-1) < 30).all()
        everything = removal.attend_without(seen, "recent", 0.0, torch.zeros(2, 30))
        exact = in_float64(seen)
        torch.testing.assert_close(out, exact, rtol=0, atol=1e-5)
        torch.testing.assert_close(everything, exact, rtol=0, atol=1e-5)
        return out

    got = collect.watch(ours, ids[0], visit, logits=True)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-4)


def test_calibration_sees_the_models_own_attention():
    ours, (ids,) = made("gpt_oss"), prompts(30)
    generator = torch.Generator().manual_seed(0)
    watched = head_costs.watch_gradients(ours, ids[0], generator, draws=1)
    assert sorted(watched) == [1, 3]
    for seen, gradients in watched.values():
        costs = head_costs.measure_costs(seen, gradients, [4, 30])
        assert (costs[:, 0] > 0).all()
        assert costs[:, 1].abs().max() == 0.0
    budgets = torch.full((3, 2, 2), 30).numpy()
    _, divergence = refine.measure_worth(ours, ids[0], budgets)
    assert abs(divergence) < 1e-5  # divergence of the model from itself


def test_retained_mass_is_a_share_of_what_keys_get():
    """The attention that sinks receive must not count as lost. With all keys held the retained mass
    is 1."""
    ours, (ids,) = made("gpt_oss"), prompts(20)
    with h2o.simulated(ours, heavy=30, recent=0, mass=True) as simulation:
        ours(ids, use_cache=False)
    torch.testing.assert_close(simulation.retained_mass(1), torch.ones(1, 4))
    assert attention_blocks.ROWS > 20
