"""H2OConfig: which parameters it accepts, which budgets they give, and the errors for others."""

from __future__ import annotations

import dataclasses
import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

import h2o
from h2o import H2OCache, H2OConfig, Profile
from h2o.config import PRESETS, UNLIMITED
from h2o.config.layer_plan import LayerPlan
from h2o.policy import Policy
from tests.hf.tiny import model

PROFILE = next((Path(h2o.__file__).parent / "data").glob("*.profile.json"))


def test_a_tenth_is_the_part_that_is_not_given():
    """One part alone must mean the policy of the paper, with a tenth for the other part."""
    for config in (H2OConfig(heavy=0.1), H2OConfig(recent=0.1)):
        assert (config.budget, config.heavy, config.recent) == (None, 0.1, 0.1)
        assert config.policy == Policy(sinks=0, score_by="sum", decay=1.0, value_weighted=False)
        of_prompt = dataclasses.replace(config, min_tokens=0, ratio_of="prompt")
        assert of_prompt == H2OConfig.authors(0.2)


def test_fractions_are_of_the_prompt_and_truncated():
    config = H2OConfig(heavy=0.29, recent=0.5, min_tokens=0)
    assert config.tokens(100) == (28, 50)  # 0.29 * 100 < 29 in double
    assert H2OConfig(heavy=1.0, recent=1, min_tokens=0).tokens(7) == (7, 1)
    assert H2OConfig(heavy=0.0, recent=3).tokens(7) == (0, 3)


def test_what_a_row_holds_at_its_end():
    assert H2OConfig(heavy=3, recent=4, sinks=2).count_held(100) == 9
    assert H2OConfig(heavy=3, recent=4, sinks=2).count_held(8) == 8
    assert H2OConfig(heavy=0.25, recent=2, min_tokens=0).count_held(40) == 12
    of_prompt = {"min_tokens": 0, "ratio_of": "prompt"}
    assert H2OConfig(heavy=0.25, recent=2, **of_prompt).count_held(40, prompt=20) == 7
    assert H2OConfig(heavy=0.25, recent=2, min_tokens=0).count_held(40, prompt=20) == 12
    assert H2OConfig(heavy=0.25, recent=2, min_tokens=0).count_held(47, prompt=20) == 13
    assert H2OConfig.full().count_held(7) == 7
    assert H2OConfig(heavy=[[2, 60]], recent=4).count_held(20) == 13, "6 and 20, not 20 and 20"
    assert H2OConfig(heavy=0.1, recent=0.1, **of_prompt).count_held(100, prompt=5) == 2


def test_numbers_of_other_libraries_become_plain():
    config = H2OConfig(heavy=np.int64(3), recent=np.float32(0.5), sinks=np.int32(1), decay=1)
    assert [type(x) for x in (config.heavy, config.recent, config.sinks, config.decay)] == [
        int, float, int, float,
    ]  # fmt: skip
    assert config == H2OConfig(heavy=3, recent=0.5, sinks=1)


def test_presets_are_parameters():
    assert H2OConfig.full() == H2OConfig(heavy=UNLIMITED, recent=0)
    assert H2OConfig.local(9) == H2OConfig(heavy=0, recent=9)
    assert H2OConfig.heavy_only(0.2) == H2OConfig(heavy=0.2, recent=0)
    assert H2OConfig.streaming(8) == H2OConfig(heavy=0, recent=8, sinks=4)


def test_budgets_per_layer():
    recent = {"recent": lambda layer, layers: layers - layer}
    config = H2OConfig(heavy=[8, 0.5, 2], **recent, sinks=1, min_tokens=0)
    assert [LayerPlan.of(config, i, 3).tokens(10) for i in range(3)] == [(8, 3), (5, 2), (2, 1)]
    assert LayerPlan.of(config, 1, 3).needs_prompt_length
    assert not LayerPlan.of(config, 0, 3).needs_prompt_length


def test_one_token_is_not_the_whole_prompt():
    """Results and plans that are kept by config would be those of the other."""
    for one, whole in (
        ({"heavy": 1, "recent": 1}, {"heavy": 1.0, "recent": 1.0}),
        ({"heavy": [1, [1, 2]], "recent": 3}, {"heavy": [1, [1.0, 2]], "recent": 3}),
    ):
        assert H2OConfig(**one) != H2OConfig(**whole)
        assert H2OConfig(**one) == H2OConfig(**one)
    assert H2OConfig() != "another type"


def test_is_frozen_and_pickles():
    config = H2OConfig(heavy=[1, 2], recent=3)
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(H2OConfig(heavy=(1, 2), recent=3))
    with pytest.raises(AttributeError):
        config.heavy = 5


@pytest.mark.parametrize(
    ("parameters", "error", "words"),
    [
        ({"heavy": True}, TypeError, "heavy is True; expected a number of tokens"),
        ({"recent": "9"}, TypeError, "recent is '9'; expected .* write 9 without quotes"),
        ({"recent": None}, TypeError, "recent is None; expected"),
        ({"sinks": 0.5}, TypeError, "sinks is 0.5; expected an integer"),
        ({"sinks": False}, TypeError, "sinks is False; expected"),
        ({"heavy": -1}, ValueError, "expected an integer from 0 to"),
        ({"heavy": 2**31}, ValueError, "expected an integer from 0 to"),
        ({"heavy": 1.5}, ValueError, "for a number of tokens give an int"),
        ({"heavy": -0.1}, ValueError, r"expected .* in \[0, 1\]"),
        ({"recent": float("nan")}, ValueError, r"expected .* in \[0, 1\]"),
        (
            {"score_by": "maks"},
            ValueError,
            'expected "sum", "mean", "max", "mean-echo" or "random"',
        ),
        ({"score_by": np.array(["sum"])}, ValueError, 'expected "sum", "mean", "max"'),
        (
            {"kv_dtype": np.array(["int8"])},
            ValueError,
            'expected None, "auto", "int8", "int8-int4" or',
        ),
        ({"heavy": Fraction(10**400)}, ValueError, "for a number of tokens give an int"),
        ({"head_shares": [[1, 10**400]]}, ValueError, r"head_shares\[0\]\[1\] is 1000"),
        ({"decay": 1.1}, ValueError, r"decay is .*; expected a number in \[0, 1\]"),
        ({"decay": float("nan")}, ValueError, r"decay is .*; expected a number in \[0, 1\]"),
        ({"decay": "1"}, TypeError, "decay is .*; expected a number"),
        ({"decay": True}, TypeError, "decay is .*; expected a number"),
        ({"value_weighted": 1}, TypeError, "value_weighted is 1; expected True or False"),
        ({"heavy": 0, "recent": 0}, ValueError, "keeps nothing"),
        ({"heavy": 0.0, "recent": 0}, ValueError, "keeps nothing"),
        ({"heavy": [3, 0], "recent": [0, 0.0]}, ValueError, "keeps nothing"),
        ({"heavy": [3, 1], "recent": [1, 1, 1]}, ValueError, "2 amounts and recent 3"),
        ({"heavy": []}, ValueError, "heavy is an empty list"),
        ({"budget": 1}, ValueError, "write budget=1.0 for the bytes of a full cache"),
        ({"heavy": [1, True]}, TypeError, r"heavy\[1\] is True; expected"),
        ({"budget": 9, "budget_unit": "bytes"}, ValueError, "a share: write a float, such as"),
    ],
)
def test_refusals(parameters, error, words):
    with pytest.raises(error, match=words):
        H2OConfig(**parameters)


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_has_a_budget_of_one_key(preset):
    with pytest.raises(ValueError, match="budget=1 would keep one key in each head"):
        H2OConfig.preset(preset, 1)
    assert H2OConfig.preset(preset, 1.0) != H2OConfig.preset(preset, 2)


def test_refusals_that_need_the_model_or_the_prompt():
    with pytest.raises(ValueError, match="heavy has 2 amounts, but the model has 3 layers"):
        LayerPlan.of(H2OConfig(heavy=[1, 2], recent=1), 0, 3)
    with pytest.raises(TypeError, match=r"heavy\(1, 3\) is None; expected"):
        LayerPlan.of(H2OConfig(heavy=lambda layer, layers: None), 1, 3)
    assert H2OConfig(heavy=0.1, recent=0.0, sinks=1, min_tokens=0).tokens(5) == (1, 0)
    exact = H2OConfig(heavy=0.1, recent=0.1, sinks=1, min_tokens=0)
    assert LayerPlan.of(exact, 0, 1).truncate_tokens(5) == (0, 0)
    raised = LayerPlan.of(H2OConfig(heavy=0.1, recent=3, min_tokens=0), 0, 1)
    assert [raised.is_rounded_up(n) for n in (9, 10)] == [True, False]
    with pytest.raises(ValueError, match="keeps nothing"):
        LayerPlan.of(H2OConfig(heavy=lambda layer, layers: 0, recent=0), 0, 1)


def test_imports_nothing_heavy():
    code = (
        "import h2o.config, sys; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_presets_by_name():
    for name in PRESETS:
        make = getattr(H2OConfig, name)
        assert H2OConfig.preset(name, 0.2) == make(0.2)
        assert H2OConfig.preset(name, 0.2, budget_unit="bytes") == make(0.2, budget_unit="bytes")
        assert make(0.2, budget_unit="bytes").budget_unit == "bytes"
    with pytest.raises(ValueError, match='expected "authors", "robust", "echo" or "calibrated"'):
        H2OConfig.preset("full", 0.2)
    with pytest.raises(ValueError, match="only the preset calibrated accepts a profile"):
        H2OConfig.preset("robust", 0.2, profile=Profile.load(PROFILE))


def test_calibrated_is_robust_with_a_profile_and_echo_in_prompts():
    profile = Profile.load(PROFILE)
    for budget, of in ((0.2, "keys"), (0.1, "bytes"), (64, "keys")):
        robust, calibrated = H2OConfig.robust(budget, of), H2OConfig.calibrated(budget, profile, of)
        assert (calibrated.score_by, calibrated.head_shares) == ("mean-echo", profile)
        assert calibrated.policy == robust.policy  # the operations rank by the mean
        assert dataclasses.replace(calibrated, score_by="mean", head_shares=None) == robust
    table = np.array([[1, 2], [3, 4]])
    assert H2OConfig.calibrated(0.2, table).head_shares == ((1, 2), (3, 4))
    with pytest.raises(ValueError, match="the same number of heads, at least one, in each layer"):
        H2OConfig.calibrated(0.2, [])
    assert H2OConfig.calibrated(0.2).head_shares == "shipped"


def test_a_cache_tells_its_config():
    config = model("llama").config
    for config_given in (
        H2OConfig(heavy=0.2, recent=4, sinks=2, min_tokens=0, score_by="mean"),
        H2OConfig(heavy=[4, 0.5], recent=[[1, 2], [3, 4]]),
        H2OConfig(head_shares=[[1, 2], [3, 4]]),
        H2OConfig.robust(0.2, budget_unit="bytes"),
    ):
        cache = H2OCache(config, config_given)
        assert cache.config == config_given.for_model(config)
        assert H2OCache(config, cache.config).config == cache.config
    by_function = H2OCache(config, heavy=lambda layer, layers: layer + 1, recent=2)
    assert by_function.config == H2OConfig(heavy=[1, 2], recent=2)
    assert pickle.loads(pickle.dumps(by_function)).config == by_function.config


def test_the_budget_of_a_cache_is_shown():
    config = model("llama").config
    assert repr(H2OCache(config, heavy=8, recent=4)) == "H2OCache(heavy=8, recent=4, layers=2)"
    assert repr(H2OCache(config, H2OConfig.robust(0.4, budget_unit="bytes"))) == (
        "H2OCache(heavy=0.3, recent=0.1, sinks=4, score_by='mean', value_weighted=True, "
        "kv_dtype='int8', budget_unit='bytes', layers=2)"
    )
    shared = repr(H2OCache(config, heavy=0.1, head_shares=[[1, 2], [3, 4]]))
    assert shared == "H2OCache(heavy=0.1, recent=0.1, head_shares=..., layers=2)"
    assert repr(H2OCache(config)) == "H2OCache(budget=0.2, kv_dtype='int8', layers=2)"
    own = repr(H2OCache(config, budget=64, sinks=2, head_shares=None))
    assert own == "H2OCache(budget=64, sinks=2, head_shares=None, layers=2)"
