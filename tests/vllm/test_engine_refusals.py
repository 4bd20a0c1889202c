"""What an engine rejects when it starts, and the reasons it gives."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
import types

import pytest
from transformers import AutoConfig

import h2o.vllm
from h2o.hf.modes import Mode, refusal
from tests.launch import launch
from tests.vllm.engines import engine, prompts, tiny
from tests.vllm.engines import served as served_by

EngineArgs = pytest.importorskip("vllm").EngineArgs
import torch  # noqa: E402 - only where vLLM is installed
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.platforms.interface import DeviceCapability, UnspecifiedPlatform  # noqa: E402
from vllm.v1.attention.backend import AttentionType  # noqa: E402
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402
from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.sample import logits_processor  # noqa: E402

from h2o.config import H2OConfig  # noqa: E402
from h2o.vllm import plugin, unsupported_backends, validation, versions  # noqa: E402
from h2o.vllm.page_budget import PageBudget, example_keys  # noqa: E402

SMALL = {"heavy": 8, "recent": 8}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    tiny("llama", folder, head_dim=32)
    return folder


@pytest.mark.parametrize(
    ("entry", "options", "message"),
    [
        ({"heavy": 8, "window": 8}, {}, "unknown parameter 'window'"),
        (64, {}, "must be an object"),
        (SMALL | {"cut": "page"}, {}, 'expected "prompt" or "chunk"'),
        ({"heavy": [8, 8, 8], "recent": 8}, {}, "3 amounts, but the model has 2 layers"),
        (SMALL, {"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8: set kv_dtype"),
    ],
)
def test_settings_are_refused_with_the_reason(llama, entry, options, message):
    with pytest.raises((TypeError, ValueError), match=message), engine(llama, entry, **options):
        pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism: pages have the size"),
        ({"tensor_parallel_size": 4}, "2 key/value heads on 4 tensor parallel ranks"),
        (
            {"tensor_parallel_size": 4, "decode_context_parallel_size": 2},
            "context parallelism: all keys of a request are ranked together",
        ),
        (
            {"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"},
            "a custom scheduler: h2o needs its own",
        ),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "a KV connector: pages cannot be moved",
        ),
    ],
)
def test_ways_of_splitting_a_model_are_refused(llama, options, message):
    """Parallelism that h2o does not support is rejected by the config that processes would get."""
    arguments = {"model": str(llama), "skip_tokenizer_init": True, "max_model_len": 256}
    config = EngineArgs(**arguments, additional_config={"h2o": SMALL}, **options)
    with pytest.raises(ValueError, match=message):
        validation.check_supported(config.create_engine_config())


def test_models_that_pool_and_micro_batches_are_refused(llama):
    """Micro-batches are tested on the config alone, since vLLM allows them for experts on GPUs
    only."""
    arguments = {"model": str(llama), "skip_tokenizer_init": True, "max_model_len": 256}
    arguments |= {"additional_config": {"h2o": SMALL}}
    with pytest.raises(ValueError, match="pooling models: no decode step follows a prompt"):
        validation.check_supported(EngineArgs(**arguments, runner="pooling").create_engine_config())
    config = EngineArgs(**arguments).create_engine_config()
    validation.check_supported(config)
    config.parallel_config.ubatch_size = 2
    with pytest.raises(ValueError, match="micro-batches: the chunks of a prompt"):
        validation.check_supported(config)


def test_an_installation_without_the_entry_point_is_refused(llama, monkeypatch):
    """Without the entry point, a wrong request would be found only when it ends the scheduler."""
    monkeypatch.setattr(logits_processor, "_load_logitsprocs_plugins", list)
    with pytest.raises(RuntimeError, match=r"lacks the entry point h2o of vllm\.logits_processors"):
        with engine(llama, SMALL):
            pass


def test_models_with_states_are_refused(tmp_path):
    """A model with states is rejected by its config alone."""
    config = AutoConfig.for_model(
        "lfm2", vocab_size=97, hidden_size=64, num_attention_heads=4, num_key_value_heads=2,
        num_hidden_layers=2, intermediate_size=48, layer_types=["conv", "full_attention"],
        architectures=["Lfm2ForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    arguments = {"model": str(tmp_path), "skip_tokenizer_init": True, "max_model_len": 256}
    config = EngineArgs(**arguments, additional_config={"h2o": SMALL})
    with pytest.raises(ValueError, match=re.escape(refusal({Mode.VLLM, Mode.HYBRID}))):
        validation.check_supported(config.create_engine_config())


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("mistral", {"sliding_window": 16}, "layers with a sliding window"),
        ("deepseek_v3", {}, re.escape(refusal({Mode.VLLM, Mode.LATENT}))),
    ],
)
def test_kinds_of_attention_are_refused(name, config, message, tmp_path):
    tiny(name, tmp_path, **config)
    with pytest.raises(ValueError, match=message), engine(tmp_path, SMALL):
        pass


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
        ({"sliding_window": 16}, "layers with a sliding window"),
        ({"sinks": torch.zeros(4)}, "learned sinks"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attention of the kind encoder_only"),
    ],
)
def test_kinds_of_layers_are_refused(given, message):
    """Layers are made as vLLM's models make them."""
    with pytest.raises(ValueError, match=f"h2o does not support {message}.* in vLLM"):
        plugin.H2OAttention(4, 32, 1.0, 2, **given)


def test_keys_of_other_layers_are_refused():
    """A model shares keys only if vLLM says so to the layer that has none of its own."""
    with pytest.raises(ValueError, match=re.escape(refusal({Mode.VLLM, Mode.SHARED_KEYS}))):
        plugin.H2OAttention(4, 32, 1.0, 2, kv_sharing_target_layer_name="layers.0")


def test_values_of_another_size_than_keys_are_refused(llama):
    config = EngineArgs(
        model=str(llama), skip_tokenizer_init=True, max_model_len=256,
        additional_config={"h2o": SMALL},
    ).create_engine_config()  # fmt: skip
    spec = FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=32, head_size_v=16, dtype=torch.float32
    )
    with pytest.raises(ValueError, match="keys of 32 elements with values of 16 in vLLM"):
        plugin.page_spec(spec, plugin.Engine(config))


def test_an_untested_vllm_is_refused_by_name(llama, monkeypatch):
    """Without the entry it serves as usual, although it finds h2o's logits processor."""
    from vllm.v1.attention import selector

    for module in (versions, unsupported_backends):
        monkeypatch.setattr(module, "TESTED", ("0.31",))
    h2o.vllm.register()
    forget = selector._cached_get_attn_backend, logits_processor.cached_load_custom_logitsprocs
    for cached in forget:
        cached.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"tested with vLLM 0\.31 and this is 0\.3"):
            with engine(llama, SMALL):
                pass
        with engine(llama) as llm:
            assert served_by(llm, prompts((5,)), extra_args={"h2o_heavy": "a lot"})
    finally:
        monkeypatch.undo()
        h2o.vllm.register()
        for cached in forget:
            cached.cache_clear()


def test_a_vllm_without_such_backends_serves_as_ever_and_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.registry", None)
    monkeypatch.setattr(logging.getLogger("vllm.h2o"), "handlers", [caplog.handler])
    h2o.vllm.register()
    assert "h2o supports vLLM 0.32, 0.33, not 0.3" in caplog.text
    assert "an entry h2o in --additional-config is ignored" in caplog.text


def test_attention_of_other_platforms_is_refused_and_without_the_entry_is_vllms(llama):
    """A backend must raise an error, because a GPU's platform skips backends that cannot be
    imported and uses the next one."""
    arguments = {"model": str(llama), "skip_tokenizer_init": True, "max_model_len": 256}
    config = EngineArgs(**arguments, additional_config={"h2o": SMALL}).create_engine_config()
    with set_current_vllm_config(config):
        for name in ("FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "TRITON_MLA"):
            with pytest.raises(ValueError, match=f"not support the attention backend {name}: "):
                AttentionBackendEnum[name].get_class()
    flex = AttentionBackendEnum.FLEX_ATTENTION
    for config in (EngineArgs(**arguments).create_engine_config(), None):
        with contextlib.nullcontext() if config is None else set_current_vllm_config(config):
            assert flex.get_class().full_cls_name() == tuple(flex.value.rsplit(".", 1))


def test_gpus_are_served_by_the_backend_that_is_asked_for(llama, monkeypatch):
    """The platform of NVIDIA's GPUs, which is not present, chooses h2o's backend, and h2o checks
    it."""
    monkeypatch.setitem(sys.modules, "vllm._C_stable_libtorch", types.ModuleType("kernels"))
    from vllm.platforms.cuda import NonNvmlCudaPlatform

    monkeypatch.setattr(validation, "current_platform", NonNvmlCudaPlatform())
    arguments = {"model": str(llama), "skip_tokenizer_init": True, "max_model_len": 256}
    config = EngineArgs(
        **arguments, additional_config={"h2o": SMALL}, attention_backend="CUSTOM"
    ).create_engine_config()
    validation.check_supported(config)
    monkeypatch.setattr(
        NonNvmlCudaPlatform, "get_device_capability", lambda *_: DeviceCapability(9, 0)
    )
    asked = AttentionSelectorConfig(
        head_size=40, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None
    )
    chosen = NonNvmlCudaPlatform.get_attn_backend_cls(config.attention_config.backend, asked)
    assert chosen == "h2o.vllm.plugin.H2OCustomBackend"

    config.attention_config.backend = None
    with pytest.raises(ValueError, match="own attention on a GPU: pass --attention-backend C"):
        validation.check_supported(config)
    config.attention_config.backend = AttentionBackendEnum.CUSTOM
    config.model_config.hf_text_config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(ValueError, match="sliding window in some layers on a GPU: these layers"):
        validation.check_supported(config)
    monkeypatch.setattr(validation, "current_platform", UnspecifiedPlatform())
    with pytest.raises(ValueError, match="platforms other than the CPU and NVIDIA GPUs: none"):
        validation.check_supported(config)


def test_drafts_are_refused(llama):
    """Drafts import llvmlite, whose modules make vLLM fail when the process starts its next engine.
    So this runs in a process of its own."""
    program = f"""
from tests.vllm.engines import Path, engine
drafts = {{"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}}
with engine(Path({str(llama)!r}), {SMALL}, speculative_config=drafts):
    pass
"""
    _, error = launch(["-c", program], launcher=[], code=1)
    assert "ValueError: h2o does not support speculative decoding: rejected drafts" in error


def test_a_second_engine_in_the_same_process(llama):
    """vLLM would tell the layers of the second engine about the requests of the first."""
    with engine(llama, SMALL):
        with pytest.raises(RuntimeError, match="this process has an engine already"):
            with engine(llama, SMALL):
                pass
    with engine(llama, SMALL) as llm:
        assert len(served_by(llm, prompts((5,)))) == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (
            {"h2o_heavy": 0.1, "h2o_recent": 0.1},
            "min_tokens=128 raises fractions to 64 heavy and 64 recent keys, but a page has 16 "
            "keys, which would all be recent. Give h2o_heavy and h2o_recent as numbers of tokens",
        ),
        ({"h2o_recent": 16}, "16 recent keys fill a page of 16 keys, so that none of 8 heavy"),
        ({"h2o_recent": 12}, None),
        ({"h2o_heavy": 0, "h2o_recent": 16}, None),
        ({"h2o_heavy": 0.1, "h2o_recent": 4}, "raises fractions to 96 heavy and 32 recent keys"),
    ],
)
def test_a_budget_that_would_keep_recent_keys_only(arguments, reason, monkeypatch, caplog):
    """A request whose recent keys fill a page would lose all heavy hitters without a word."""
    monkeypatch.setattr(logging.getLogger("vllm.h2o"), "handlers", [caplog.handler])
    server = PageBudget(H2OConfig(**SMALL), layers=2, longest=256)
    keys = example_keys(2, 32, torch.float32)
    request = validation.read_request(arguments, 60, server, keys)
    assert request.config is not None
    assert ("a request keeps no heavy hitters" in caplog.text) == bool(reason)
    assert reason is None or reason in caplog.text
