"""Bytes computed from a config equal those of caches: in tables and in `h2o info --memory`."""

from __future__ import annotations

import itertools
import json

import pytest
import torch
from transformers import AutoConfig

from h2o import H2OCache, H2OConfig, cli, models
from h2o.compat import with_cache
from h2o.errors import UserError
from h2o.evaluation.cache_bytes import bytes_share, request_bytes, state_bytes
from h2o.evaluation.setting import parse
from h2o.hf.model_traits.shared_keys import SHARES_KEYS
from tests.evaluation.conftest import exit_code
from tests.hf.tiny import LATENT_AND_STATES, WITH_STATES, model, prompts


@pytest.mark.parametrize(
    "name",
    [
        "h2o:0.1+0.1", "h2o:6+6", "robust:0.3", "robust-bytes:0.5", "authors-bytes:0.4",
        "h2o:0.2+0.2/value_weighted", "h2o:0.2+0.2/kv_dtype=int8",
    ],
)  # fmt: skip
def test_bytes_are_those_that_a_cache_holds(name):
    ours, setting, n = model("llama"), parse(name), 200
    cache = H2OCache(ours.config, setting.config)
    ours(prompts(n)[0], **with_cache(cache))
    total = cache.report().total
    kept = setting.config.for_model(ours).count_held(n)
    share = bytes_share(setting, ours, kept, n)
    held = total.bytes_held + total.bytes_bookkeeping
    assert share == pytest.approx(100 * held / total.bytes_full, rel=0.02)
    if setting.config.budget_unit == "bytes":
        assert share <= 100 * (setting.config.heavy + setting.config.recent)


def test_a_full_cache_takes_all_bytes():
    assert bytes_share(parse("full"), None, 7, 7) == 100


SETTINGS = ["h2o:8+8", "robust:0.3", "robust-bytes:0.3", "echo-bytes:0.4"]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *itertools.product(("llama", "gemma3"), SETTINGS),
        *itertools.product(("qwen2", "deepseek_v2"), SETTINGS[:2]),
    ],
)
def test_bytes_are_those_of_a_cache(name, setting):
    """Computed and held bytes may differ by a slot per head, because fractions are rounded, and
    because one budget for all heads moves slots between them."""
    ours, chosen, (ids,) = model(name), parse(setting), prompts(60)
    cache = H2OCache(ours.config, chosen.config, prompt_length=60)
    with torch.no_grad():
        ours(ids, **with_cache(cache))
        ours(ids[:, :1], **with_cache(cache))
    layers = [layer for layer in cache.layers if hasattr(layer, "slots")]
    real = sum(layer.row_bytes() for layer in layers)
    found = request_bytes(ours.config, chosen, 60, 61)
    text = ours.config.get_text_config(decoder=True)
    head = 2 * 8 * 4  # bytes of a key and its value
    if name == "gemma3":  # its sliding layers belong to transformers
        windows = sum(kind == "sliding_attention" for kind in text.layer_types)
        found -= windows * text.num_key_value_heads * min(61, text.sliding_window) * head
    heads = sum(layer.slots.next_slot.shape[1] for layer in layers)
    assert abs(found - real) <= (head + 20) * heads


@pytest.mark.parametrize("name", [*WITH_STATES, *LATENT_AND_STATES, *SHARES_KEYS * ["gemma4_text"]])
def test_bytes_of_states_and_windows(name):
    """They come on top of the keys, and layers with windows may have keys of another size."""
    ours, (ids,) = model(name), prompts(60)
    ours.to(torch.bfloat16)
    ours.config.get_text_config(decoder=True).dtype = torch.bfloat16
    cache = H2OCache(ours.config, H2OConfig.full())
    with torch.no_grad():
        ours(ids, **with_cache(cache))
    layers = cache.report().layers
    assert state_bytes(ours.config) == sum(x.bytes_states for x in layers)
    keys = {
        kind: sum(x.bytes_held for x in layers if x.kind == kind) for kind in ("h2o", "sliding")
    }
    full = request_bytes(ours.config, parse("full"), 60, 60)
    more = {"lfm3": 10 / 9, "gemma4_text": 10 / 9}.get(name, 1)  # a window's last key goes first
    assert full == keys["h2o"] * 60 // 61 + round(keys["sliding"] * more)


@pytest.mark.skipif(not SHARES_KEYS, reason="newer versions of transformers")
def test_windows_with_more_heads_than_full_attention():
    """Gemma 4 has such layers: its windows have more and smaller heads."""
    numbers = {"num_key_value_heads": 8, "num_global_key_value_heads": 2, "attention_k_eq_v": True}
    config = AutoConfig.for_model(
        "gemma4_text", **numbers, head_dim=256, global_head_dim=512, num_kv_shared_layers=0,
        layer_types=["sliding_attention", "full_attention"], num_hidden_layers=2,
        sliding_window=512, dtype="bfloat16",
    )  # fmt: skip
    assert request_bytes(config, parse("full"), 900, 1000) == 2 * 2 * (
        2 * 512 * 1000 + 8 * 256 * 512
    )


@pytest.mark.skipif(not WITH_STATES, reason="newer versions of transformers")
def test_a_model_whose_states_are_unknown_says_so(monkeypatch, capsys):
    ours = model("qwen3_5")
    monkeypatch.setattr(models, "load_config", lambda name: ours.config)
    say = ["info", "--model", "tiny", "--memory", "1MB"]
    assert cli.main(say) == 0
    assert "MB of a request are states" in capsys.readouterr().out
    monkeypatch.setattr(type(ours), "forward", None)
    assert state_bytes(ours.config) is None
    assert cli.main(say) == 0
    assert "states, whose size is unknown" in capsys.readouterr().out


def test_a_model_that_is_not_supported():
    with pytest.raises(UserError, match="not supported"):
        request_bytes(AutoConfig.for_model("mamba"), parse("full"), 10, 20)


@pytest.fixture
def _small_config(monkeypatch):
    """Replace the default model's config, which takes seconds to read."""
    monkeypatch.setattr(models, "load_config", lambda name: model("llama").config)


@pytest.mark.usefixtures("_small_config")
def test_the_command(capsys):
    say = ["info", "--model", "tiny", "--memory", "1MB", "--prompt", "100", "--new", "20"]
    assert cli.main([*say, "--compare", "full,budget:0.5", "--json"]) == 0
    full, half = json.loads(capsys.readouterr().out)
    assert full["bytes"] == request_bytes(model("llama").config, parse("full"), 100, 120)
    assert full["requests"] == 10**6 // full["bytes"] < half["requests"]
    assert cli.main(say) == 0
    shown = capsys.readouterr().out
    assert "budget:0.1" in shown
    weights = sum(x.nbytes for x in model("llama").parameters())
    assert f"The weights take another {weights / 1e9:.2f} GB" in shown
    assert cli.main([*say, "--budget", "0.1", "--json"]) == 0  # as a cache with this budget
    floored = parse("budget:0.1/min_tokens=128")
    (budget,) = json.loads(capsys.readouterr().out)
    assert budget["bytes"] == request_bytes(model("llama").config, floored, 100, 120)
    assert cli.main(["info", "--memory", "1MB"]) == 0
    assert capsys.readouterr().out.startswith("SmolLM2-135M-Instruct: prompts of 2048 tokens")


@pytest.mark.usefixtures("_small_config")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--memory", "much", "--model", "tiny"], 2, "not a number of bytes"),
        (["--memory", "8", "--model", "tiny"], 2, "'8' is 8 bytes: add a unit"),
        (["--memory=-1GB", "--model", "tiny"], 2, "not a number of bytes"),
        (["--memory", "1MB", "--model", "tiny", "--prompt", "0"], 2, "at least 1"),
        (["--memory", "1MB", "--model", "tiny", "--compare", "mask-local:4+4"], 2, "a mask"),
        (["--memory", "1MB", "--model", "tiny", "--compare", "guess:1"], 2, "unknown"),
    ],
)
def test_mistakes(capsys, arguments, code, words):
    assert exit_code(cli.main, ["info", *arguments]) == code
    assert words in capsys.readouterr().err
