"""Settings in the form in which people write them."""

from __future__ import annotations

import dataclasses
import json

import pytest

from h2o import H2OConfig
from h2o.config import PARAMETERS
from h2o.config.profile import _load_shipped
from h2o.evaluation.setting import (
    CONSTANT,
    OPTIONS,
    from_config,
    from_options,
    parse,
    parse_all,
    with_profile,
)
from h2o.policy import Policy


def exact(config: H2OConfig) -> H2OConfig:
    """The config as a setting has it: fractions have no lower limit unless the setting names
    one."""
    return dataclasses.replace(config, **CONSTANT)


@pytest.mark.parametrize(
    ("text", "kind", "variant", "config"),
    [
        ("full", "full", "full", H2OConfig.full()),
        ("budget:0.2", "budget", "h2o", H2OConfig(budget=0.2)),
        ("budget:64", "budget", "h2o", H2OConfig(budget=64)),
        ("h2o:0.1+0.2", "h2o", "h2o", H2OConfig(heavy=0.1, recent=0.2)),
        ("h2o:8+16", "h2o", "h2o", H2OConfig(heavy=8, recent=16)),
        ("h2o:0.2", "h2o", "h2o", H2OConfig(heavy=0.1, recent=0.1)),
        ("h2o:0.2+0", "h2o", "h2o", H2OConfig(heavy=0.2, recent=0)),
        ("local:0.2", "local", "h2o", H2OConfig(heavy=0, recent=0.2)),
        ("sink:4+0.2", "sink", "h2o", H2OConfig(heavy=0, recent=0.2, sinks=4)),
        ("authors:0.3", "authors", "h2o", H2OConfig(heavy=0.15, recent=0.15)),
        ("authors:7", "authors", "h2o", H2OConfig(heavy=3, recent=4)),
        ("robust:0.3", "robust", "h2o", H2OConfig.robust(0.3)),
        ("robust:64", "robust", "h2o", H2OConfig.robust(64)),
        ("reread:0.3", "reread", "reread", H2OConfig.robust(0.3)),
        ("reread-bytes:0.1", "reread-bytes", "reread", H2OConfig.robust(0.1, budget_unit="bytes")),
        ("echo:64", "echo", "h2o", H2OConfig.echo(64)),
        ("echo-bytes:0.1", "echo-bytes", "h2o", H2OConfig.echo(0.1, budget_unit="bytes")),
        (
            "random:64",
            "random",
            "h2o",
            H2OConfig(heavy=45, recent=15, sinks=4, score_by="random"),
        ),
        (
            "random-bytes:0.1",
            "random-bytes",
            "h2o",
            dataclasses.replace(
                H2OConfig.robust(0.1, budget_unit="bytes"), score_by="random", value_weighted=False
            ),
        ),
        (
            "mask-local:0.1+0.1",
            "mask-local",
            "local",
            H2OConfig(heavy=0.1, recent=0.1),
        ),
        (
            "mask-global:0.1+0.1",
            "mask-global",
            "global",
            H2OConfig(heavy=0.1, recent=0.1),
        ),
        ("mask-flexgen:9+8", "mask-flexgen", "flexgen", H2OConfig(heavy=9, recent=8)),
        (
            "h2o:0.1+0.1/sinks=4/score_by=mean/decay=0.9/value_weighted=true",
            "h2o",
            "h2o",
            H2OConfig(
                heavy=0.1,
                recent=0.1,
                sinks=4,
                score_by="mean",
                decay=0.9,
                value_weighted=True,
            ),
        ),
        ("h2o:64/score_by=max", "h2o", "h2o", H2OConfig(heavy=32, recent=32, score_by="max")),
        (
            "local:0.2/sinks=2",
            "local",
            "h2o",
            H2OConfig(heavy=0, recent=0.2, sinks=2),
        ),
        ("robust:0.2/value_weighted=false", "robust", "h2o", None),
    ],
)
def test_parse(text, kind, variant, config):
    setting = parse(text)
    assert (setting.name, setting.variant) == (text, variant)
    assert config is None or setting.config == (config if kind == "full" else exact(config))
    assert setting.is_cache == (variant in ("full", "h2o"))
    assert setting.describe()["setting"] == text


def test_what_h2o_read_makes_is_for_needles():
    for text, reads_twice in (("reread:0.1", True), ("echo:0.1", False), ("robust:0.1", False)):
        assert parse(text).reads_twice == reads_twice
    assert parse("reread:0.1/sinks=2").config.sinks == 2
    assert parse("reread:0.1").why_no_cache == "reread:0.1: reads twice, for needles and tasks"
    assert parse("reread:0.1").answering_config.score_by == "max"


def test_what_sees_the_future_is_marked():
    settings = parse_all("full,h2o,mask-local,mask-global,mask-flexgen", "0.2")
    assert [s.sees_future for s in settings] == [False, False, False, True, False]
    assert [s.describe().get("sees_future") for s in settings] == [None] * 3 + [True, None]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "best:0.2",
        "h2o",
        "h2o:",
        "h2o:a+b",
        "h2o:0.1+0.1+0.1",
        "h2o:1.5+0.1",
        "h2o:-1+4",
        "h2o:0+0",
        "full:0.2",
        "full/sinks=4",
        "local:0.1+0.1",
        "sink:0.1+0.2",
        "mask-local:0.1+0.1/sinks=4",
        "h2o:0.2/sink=4",
        "h2o:0.2/sinks=few",
        "h2o:0.2/score_by=best",
        "h2o:0.2/decay=2",
        "h2o:0.2/head_shares=shipped",
        "h2o:0.2/score_by=echo",
        "retrieval:0.2",
        "calibrated-reread:0.2",
        "h2o:0.2/value_weighted=perhaps",
        "h2o:0.2/sinks=4/sinks=8",
        "random:0.2/ratio_of=seen",
    ],
)
def test_refused(text):
    with pytest.raises(ValueError, match=r"^(setting|no settings)[^\n]{,250}$"):
        parse_all(text) if not text else parse(text)


def test_every_field_of_a_config_can_be_written():
    """Each field can be written before the slashes, after them, or as the kind of the setting."""
    assert {*OPTIONS} == {*PARAMETERS} - {"budget", "heavy", "recent"}
    assert OPTIONS[: len(Policy._fields)] == Policy._fields
    written = "h2o:4+5/decay=0.5/value_weighted=True/kv_dtype=int8"
    config = H2OConfig(
        heavy=4, recent=5, decay=0.5, value_weighted=True, kv_dtype="int8", **CONSTANT
    )
    assert parse(written).config == config
    assert from_config(config).name == written
    assert (
        from_options(heavy=4, recent=5, decay=0.5, value_weighted=True, kv_dtype="int8").name
        == written
    )
    assert parse("h2o:4+5/positions=cache_relative").config.positions == "cache_relative"
    written = "h2o:4+5/score_by=mean-echo/head_shares=echo"
    config = exact(H2OConfig(heavy=4, recent=5, score_by="mean-echo", head_shares="echo"))
    assert parse(written).config == config
    assert from_config(config).name == from_options(
        heavy=4, recent=5, score_by="mean-echo", head_shares="echo"
    ).name == written  # fmt: skip


def test_budgets():
    names = [s.name for s in parse_all("full, h2o,sink/score_by=mean,mask-flexgen", "0.1,8")]
    assert names == [
        "full",
        "h2o:0.1",
        "h2o:8",
        "sink:4+0.1/score_by=mean",
        "sink:4+8/score_by=mean",
        "mask-flexgen:0.1",
        "mask-flexgen:8",
    ]
    assert parse("mask-flexgen:9").config == parse("mask-flexgen:4+5").config
    assert [s.name for s in parse_all("h2o:0.1,h2o:0.1,h2o", "0.1")] == ["h2o:0.1"]
    with pytest.raises(ValueError, match=r"write h2o:0.2, or add --budgets 0.2$"):
        parse_all("h2o")
    with pytest.raises(ValueError, match=r"'sink' has no budget: write sink:4[+]0.2$"):
        parse_all("full,sink", None)  # as in commands without --budgets
    assert parse_all("sink:4+0.2")


def test_a_profile_of_ones_own():
    (profile,) = _load_shipped()
    settings = parse_all("full,calibrated-bytes,h2o,calibrated,reread-bytes", "0.1")
    settings = with_profile(settings, profile)
    assert [s.config.head_shares is profile for s in settings] == [False, True, False, True, False]
    described = settings[1].describe()
    assert described["head_shares"] != settings[2].describe()["head_shares"]
    assert len(json.dumps(described)) < 1000
    other = dataclasses.replace(profile, window=512)
    again = with_profile(parse_all("calibrated-bytes:0.1"), other)
    assert again[0].describe()["head_shares"] != described["head_shares"], (
        "results of another profile"
    )
    with pytest.raises(ValueError, match="--profile requires a calibrated setting"):
        with_profile(parse_all("full,h2o:0.1"), profile)


def test_a_profile_is_named_by_its_path(tmp_path):
    """Options and lm-eval's model arguments name a profile by its path."""
    (profile,) = _load_shipped()
    profile.save(tmp_path / "profile.json")
    setting = from_options(heavy=0.1, recent=0.1, head_shares=str(tmp_path / "profile.json"))
    assert setting.config.head_shares == profile
    assert setting.name == "h2o:0.1+0.1"
    echo = from_options(score_by="mean-echo", head_shares="echo")
    assert echo.name == "budget:0.2"
    echo = from_options(heavy=0.1, score_by="mean-echo", head_shares="echo")
    assert echo.name == "h2o:0.1+0.1/score_by=mean-echo/head_shares=echo"
    with pytest.raises(FileNotFoundError):
        from_options(head_shares="nowhere.json")


def test_settings_keep_what_they_say():
    """A lower limit of fractions must be written out. Otherwise there is none."""
    assert parse("robust:0.1/min_tokens=64").config.min_tokens == 64
    assert [x.config.min_tokens for x in parse_all("h2o,robust,calibrated-bytes", "0.1")] == [0] * 3
    assert from_options(heavy=0.1, recent=0.1).config.min_tokens == 0
    assert from_options(budget=0.1).name == from_config(exact(H2OConfig(budget=0.1))).name
    assert from_config(H2OConfig()).name == "budget:0.2/ratio_of=seen/min_tokens=128"
    assert from_config(H2OConfig(heavy=0.1)).name == "h2o:0.1+0.1/ratio_of=seen/min_tokens=128"
    for text in ("budget:0.1/min_tokens=128", "h2o:0.1+0.2/min_tokens=9", "budget:64/sinks=2"):
        assert from_config(parse(text).config).name == text
    assert parse("h2o:0.2/min_tokens=64").describe()["min_tokens"] == 64


def test_presets():
    assert H2OConfig.authors(0.2) == H2OConfig(heavy=0.1, recent=0.1, **CONSTANT)
    ranking = {"score_by": "mean", "value_weighted": True}
    assert H2OConfig.robust(0.2) == H2OConfig(heavy=0.15, recent=0.05, sinks=4, **ranking)
    assert H2OConfig.robust(44) == H2OConfig(heavy=30, recent=10, sinks=4, **ranking)
    for budget in (2, 3, 5, 8, 64, 65):
        for preset in (H2OConfig.authors, H2OConfig.robust):
            config = preset(budget)
            assert config.sinks + sum(config.tokens(1000)) == budget
    with pytest.raises(ValueError, match="budget"):
        H2OConfig.authors(1.5)
    with pytest.raises(TypeError, match="budget"):
        H2OConfig.robust("much")
