"""`h2o plan`: bytes of requests as caches have them, and bounds that hold for what was measured."""

from __future__ import annotations

import functools
import itertools
import json

import pytest
import torch
from transformers import AutoConfig

from h2o import H2OCache, cli, models
from h2o.borrowed import with_cache
from h2o.errors import UserError
from h2o.evaluate.devices import DEVICES, measured
from h2o.evaluate.plan import model_of, plan, row_bytes
from h2o.evaluate.setting import parse
from tests.evaluate.conftest import exit_code
from tests.hf.tiny import model, prompts


@pytest.fixture(autouse=True, scope="module")
def _configs_are_read_once():
    """That of the default model takes seconds: it stands in the head of a file of GGUF."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "config_of", functools.cache(models.config_of))
        yield


SETTINGS = ["h2o:8+8", "robust:0.3", "robust-bytes:0.3", "h2o:8+4/value_weighted", "echo-bytes:0.4"]


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *itertools.product(("llama", "gemma3"), SETTINGS),
        *itertools.product(("qwen2", "deepseek_v2"), SETTINGS[:2]),
    ],
)
def test_bytes_are_those_of_a_cache(name, setting):
    """To within a slot of each head: fractions are rounded, and one budget for all heads moves
    slots among them."""
    ours, chosen, (ids,) = model(name), parse(setting), prompts(60)
    cache = H2OCache(ours.config, chosen.config, prompt_length=60)
    with torch.no_grad():
        ours(ids, **with_cache(cache))
        ours(ids[:, :1], **with_cache(cache))
    layers = [layer for layer in cache.layers if hasattr(layer, "slots")]
    real = sum(layer.row_bytes() for layer in layers)
    size = model_of(ours.config)
    found = row_bytes(size._replace(window=0), chosen, 60, 61)
    slot = 2 * 8 * 4 + 20
    assert abs(found - real) <= 2 * slot * size.heads * len(layers)


def test_sizes_from_configs():
    smol = model_of(models.config_of(models.DEFAULT_MODEL))
    assert smol.active == 134_515_008
    assert (smol.layers, smol.heads, smol.queries) == (("h2o",) * 30, 3, 576)
    mixtral = AutoConfig.for_model("mixtral", num_hidden_layers=2)
    total = model_of(mixtral)
    assert total.weights / 4 > 2.9e9
    assert total.active == pytest.approx(1.05e9, rel=0.01)  # two of eight experts
    with pytest.raises(UserError, match="not supported"):
        model_of(AutoConfig.for_model("mamba"))


def test_the_bounds_hold_for_the_published_runs():
    """OPT-6.7B on an A100, 24 rows of 2048 + 2048 tokens: 517 tokens/s with all keys and 995 with a
    fifth of them (logs of the authors' FlexGen)."""
    opt = AutoConfig.for_model(
        "opt", hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, ffn_dim=16384,
        word_embed_proj_dim=4096, dtype="float16",
    )  # fmt: skip
    size = model_of(opt)
    assert 13.2e9 < size.weights < 13.8e9
    bounds = []
    for setting, published in (("full", 517), ("h2o:410+409", 995)):
        one = plan(size, DEVICES["A100"], parse(setting), 2048, 2048, rows=24)
        assert 0.4 * one.tokens_per_second < published < one.tokens_per_second
        bounds.append(one)
    ratio = bounds[1].tokens_per_second / bounds[0].tokens_per_second
    assert ratio == pytest.approx(995 / 517, rel=0.25)
    assert (bounds[0].bound, bounds[1].bound) == ("caches", "weights")


def test_kernels_take_what_their_counts_say():
    """Of prompts cut by h2o on a GPU, not of the full cache; a step is never faster than bytes."""
    llama = AutoConfig.for_model(
        "llama", hidden_size=1024, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        num_hidden_layers=4, dtype="bfloat16",
    )  # fmt: skip
    size, device = model_of(llama), DEVICES["H100"]
    full, ours, bytes_ = (
        plan(size, device, parse(setting), 8192, 256, rows=rows)
        for setting, rows in (("full", 1), ("h2o:410+409", 1), ("h2o:410+409/kv_dtype=int8", 256))
    )
    assert full.prompt_seconds < ours.prompt_seconds
    tiles = 8 * 128**2 / 2
    products = 2 * size.active * 8192 / (device.products * 1e12)
    assert ours.prompt_seconds - products == pytest.approx(4 * tiles * device.kernels.tile * 1e-9)
    weights = size.weights / (device.bandwidth * 1e9)
    trips = device.kernels.trips[0] + device.kernels.trips[1] * 0.82
    assert ours.step_seconds - weights == pytest.approx(4e-6 * trips)
    assert bytes_.step_seconds - weights >= 256 * bytes_.row_bytes / (device.bandwidth * 1e9)
    unknown = plan(size, device._replace(kernels=None), parse("h2o:410+409"), 8192, 256, rows=1)
    assert unknown.prompt_seconds == full.prompt_seconds


def test_what_does_not_fit():
    size = model_of(model("llama").config)
    with pytest.raises(UserError, match=r"full: 1 x .* do not fit into the 1,000 for caches"):
        plan(size, DEVICES["T4"], parse("full"), 100, 10, memory=1000)
    with pytest.raises(UserError, match="100 x"):
        plan(size, DEVICES["T4"], parse("full"), 100, 10, memory=50_000, rows=100)


def test_this_machine():
    here = measured()
    assert min(here[:3]) > 0
    assert here.memory > 0.5
    assert here.kernels is None  # those for GPUs


def test_the_command(capsys):
    say = ["plan", "--device", "H100", "--bytes", "10GB", "--dtype", "bfloat16"]
    assert cli.main([*say, "--compare", "full,robust:0.2,calibrated-bytes:0.1", "--json"]) == 0
    full, robust, calibrated = json.loads(capsys.readouterr().out)
    assert full["row_bytes"] == (2048 + 256) * 30 * 3 * 2 * 64 * 2
    assert full["rows"] == 10**10 // full["row_bytes"] < robust["rows"] < calibrated["rows"]
    assert cli.main(say) == 0
    table = capsys.readouterr().out
    assert "robust-bytes:0.1" in table
    assert "bound by" in table


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--device", "H1000"], 2, "invalid choice"),
        (["--prompt", "0"], 2, "at least 1"),
        (["--compare", "mask-local:0.1+0.1"], 2, "a mask, no cache"),
        (["--compare", "full", "--bytes", "1KB", "--device", "T4"], 1, "do not fit"),
        (["--compare", "guess:1"], 2, "unknown"),
    ],
)
def test_mistakes(capsys, arguments, code, words):
    assert exit_code(cli.main, ["plan", *arguments]) == code
    assert words in capsys.readouterr().err
