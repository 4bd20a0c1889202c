"""Which model a file belongs to: weights, adapters and settings, under PEFT too."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from h2o import H2OCache, Profile, model_identity
from h2o.compat import with_cache
from h2o.model_identity import describe, sample
from tests.hf.tiny import model, prompts

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning"
)

SMALL = {"heavy": 6, "recent": 6}
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}


def base(seed=0):
    ours = model("llama")
    if seed:
        generator = torch.Generator().manual_seed(seed)
        for parameter in ours.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return ours


def adapted(ours=None, seed=0, **more):
    torch.manual_seed(seed)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **(LORA | more))
    return peft.get_peft_model(base() if ours is None else ours, config).eval()


def filed(ours, path):
    cache = H2OCache(ours.config, **SMALL)
    ours(input_ids=prompts(20)[0], **with_cache(cache))
    cache.save(path, ours)
    return path


def profile_of(ours):
    shares = [[[0.6, 1.4], [1.2, 0.8]]]
    return Profile((0.2,), shares, 100, describe(ours.config), sample(ours))


def merged(ours):
    ours.merge_adapter()
    return ours


def scaled(ours):
    for module in ours.modules():
        if hasattr(module, "scale_layer"):
            module.scale_layer(0.5)
    return ours


def with_two(active="default"):
    ours = adapted()
    torch.manual_seed(5)
    ours.add_adapter("other", peft.LoraConfig(task_type="CAUSAL_LM", **LORA))
    ours.set_adapter(active)
    return ours.eval()


def switched_off(ours):
    ours.base_model.disable_adapter_layers()
    return ours


def injected(seed=0):
    """A model with an adapter but without PEFT's wrapper, as after transformers' `add_adapter`."""
    ours = base()
    torch.manual_seed(seed)
    return peft.inject_adapter_in_model(peft.LoraConfig(**LORA), ours).eval()


def prompt_tuned(seed=0):
    torch.manual_seed(seed)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    return peft.get_peft_model(base(), config).eval()


def slightly_tuned():
    ours = base()
    ours.model.layers[1].mlp.up_proj.weight.mul_(1.001)
    return ours


def with_head(**more):
    return adapted(modules_to_save=["lm_head"], **more)


def other_head():
    ours = with_head()
    ours.base_model.model.lm_head.modules_to_save.default.weight.mul_(1.5)
    return ours


OTHER = {
    "other weights": (base, lambda: base(9)),
    "other weights in PEFT": (base, lambda: adapted(base(9))),
    "an adapter": (base, adapted),
    "an adapter of another base": (adapted, lambda: base(9)),
    "without its adapter": (adapted, base),
    "switched off": (adapted, lambda: switched_off(adapted())),
    "another adapter": (adapted, lambda: adapted(seed=3)),
    "another scale": (adapted, lambda: scaled(adapted())),
    "another alpha": (adapted, lambda: adapted(lora_alpha=32)),
    "merged": (base, lambda: merged(adapted())),
    "merged and unloaded": (base, lambda: adapted().merge_and_unload()),
    "another of two": (with_two, lambda: with_two("other")),
    "injected": (base, injected),
    "another that was injected": (injected, lambda: injected(3)),
    "virtual tokens": (base, prompt_tuned),
    "other virtual tokens": (prompt_tuned, lambda: prompt_tuned(3)),
    "another module saved with it": (with_head, other_head),
}
SAME = {
    "itself": (base, base),
    "switched off": (base, lambda: switched_off(adapted())),
    "the same adapter": (adapted, adapted),
    "the same beside another": (adapted, with_two),
    "injected": (adapted, injected),
    "merged": (lambda: merged(adapted()), lambda: adapted().merge_and_unload()),
    "the same virtual tokens": (prompt_tuned, prompt_tuned),
    "in another dtype": (base, lambda: base().to(torch.bfloat16)),
    "compiled": (base, lambda: torch.compile(base())),
    "an adapter, compiled": (adapted, lambda: torch.compile(adapted())),
}


@pytest.mark.parametrize("case", OTHER)
def test_others_are_refused(case, tmp_path):
    wrote, reads = (make() for make in OTHER[case])
    with pytest.raises(ValueError, match="belongs to another model"):
        H2OCache.load(filed(wrote, tmp_path / "file"), reads)
    assert model_identity.model_fingerprint(wrote) != model_identity.model_fingerprint(reads)


@pytest.mark.parametrize("case", SAME)
def test_the_same_is_known_again(case, tmp_path):
    wrote, reads = (make() for make in SAME[case])
    path = filed(wrote, tmp_path / "file")
    assert H2OCache.load(path, reads).get_seq_length() in (20, 24)
    assert H2OCache.load(path, reads.config)
    profile_of(wrote).check(reads)
    if case != "in another dtype":
        assert model_identity.model_fingerprint(wrote) == model_identity.model_fingerprint(reads)


@pytest.mark.parametrize("case", [x for x in OTHER if "merged" not in x])
def test_profiles(case):
    """A profile must be refused for other weights or adapters, by a cache as well. It records a
    sample of the weights, which may miss a merged adapter, so merged cases are left out."""
    wrote, reads = (make() for make in OTHER[case])
    profile = profile_of(wrote)
    for refuse in (profile.check, lambda x: H2OCache(x, **SMALL, head_shares=profile)):
        with pytest.raises(ValueError, match="profile is of another model"):
            refuse(reads)


WAYS = {
    "itself": lambda cache: cache,
    "a fork": lambda cache: cache.fork(),
    "a pickle": lambda cache: pickle.loads(pickle.dumps(cache)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", ["other weights", "an adapter", "merged"])
def test_a_live_cache_is_refused_by_another_model(way, case):
    """Fine-tunes of one model have the same config. A copy of the model is accepted, and after the
    error the cache continues with its own model."""
    wrote, reads = (make() for make in OTHER[case])
    (ids,) = prompts(24)
    cache = H2OCache(wrote.config, **SMALL)
    wrote(input_ids=ids[:, :20], **with_cache(cache))
    expected = wrote(input_ids=ids[:, 20:21], **with_cache(cache.fork())).logits
    cache = WAYS[way](cache)
    with pytest.raises(ValueError, match="another model computed the keys in this cache"):
        reads(input_ids=ids[:, 20:21], **with_cache(cache))
    twin = copy.deepcopy(wrote)
    del wrote
    torch.testing.assert_close(twin(ids[:, 20:21], **with_cache(cache)).logits, expected)
    with pytest.raises(ValueError, match="another model computed the keys in this cache"):
        reads(input_ids=ids[:, 21:], **with_cache(cache))
    cache.reset()
    assert reads(input_ids=ids, **with_cache(cache)).logits.shape[1] == 24


def test_the_model_of_a_live_cache_may_change():
    """An adapter may be switched on, or weights trained, in the middle of a text."""
    ours, (ids,) = adapted(), prompts(24)
    cache = H2OCache(ours.config, **SMALL)
    ours(input_ids=ids[:, :20], **with_cache(cache))
    merged(ours)(input_ids=ids[:, 20:], **with_cache(cache))
    assert cache.get_seq_length() == 24


def test_profiles_are_held_against_each_layer_as_well():
    """A cache that is made from a config alone must refuse the profile of another model in its
    first pass."""
    ours, prompt = adapted(), prompts(20)[0]
    for profile in (profile_of(base()), profile_of(adapted(seed=3))):
        cache = H2OCache(ours.config, heavy=6, recent=6, head_shares=profile)
        with pytest.raises(ValueError, match="profile is of another model"):
            ours(input_ids=prompt, **with_cache(cache))
    cache = H2OCache(ours.config, heavy=6, recent=6, head_shares=profile_of(ours))
    ours(input_ids=prompt, **with_cache(cache))
    plain = base()
    cache = H2OCache(plain.config, heavy=6, recent=6, head_shares=profile_of(ours))
    with pytest.raises(ValueError, match="is not active in this model"):
        plain(prompt, **with_cache(cache))
    cache = H2OCache(plain.config, heavy=6, recent=6, head_shares=profile_of(base(9)))
    with pytest.raises(ValueError, match=r"weights of .* differ"):
        plain(prompt, **with_cache(cache))


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config.rope_parameters.update(rope_theta=1e6),
        lambda config: config.rope_parameters.update(rope_type="linear", factor=4.0),
        lambda config: setattr(config, "rms_norm_eps", 0.1),
        lambda config: setattr(config, "hidden_act", "gelu"),
    ],
)
def test_the_same_weights_that_compute_otherwise(change, tmp_path):
    path = filed(base(), tmp_path / "file")
    other = base()
    change(other.config)
    with pytest.raises(ValueError, match=r"another model: this model's config\..* is .*, not "):
        H2OCache.load(path, other)
    with pytest.raises(ValueError, match="belongs to another model"):
        H2OCache.load(path, other.config)


def test_small_changes_in_the_same_dtype(tmp_path):
    path = filed(base(), tmp_path / "file")
    with pytest.raises(
        ValueError, match=r"weights of model\.layers\.1\.mlp\.up_proj\.weight differ"
    ):
        H2OCache.load(path, slightly_tuned())


def test_what_a_pass_changes_or_a_user_sets_does_not_count(tmp_path):
    """A file must be accepted although a long text has changed the rotary angles, or settings of
    generate() differ."""
    ours = model("llama")
    ours.config.rope_parameters |= {"rope_type": "dynamic", "factor": 2.0}
    ours.config.max_position_embeddings = 16
    ours = type(ours)(ours.config).eval()
    ours.set_attn_implementation("h2o")
    fresh = copy.deepcopy(ours)
    path = filed(ours, tmp_path / "file")
    fresh.config.eos_token_id, fresh.config.use_cache = 5, False
    assert H2OCache.load(path, fresh).get_seq_length() == 20


def test_calibrations_go_on_with_the_same_adapters_only(tmp_path):
    from h2o import calibrate

    ids = torch.arange(2, 90).repeat(3)
    counted = []

    def calibrated(ours):
        passes = []
        calibrate(
            ours, ids, window=64, windows=1, refine=0, fractions=(0.5,), draws=1,
            resume=tmp_path / "calibration.json", progress=lambda done, _: passes.append(done),
        )  # fmt: skip
        counted.append(len(passes))

    ours = adapted()
    calibrated(ours)
    calibrated(ours)
    calibrated(scaled(ours))
    calibrated(switched_off(ours))
    assert counted == [2, 1, 2, 2]
