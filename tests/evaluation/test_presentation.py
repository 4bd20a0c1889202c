"""Plots and tables of evaluations: which settings make a line, and what of a cache is compared."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from h2o import H2OCache
from h2o.borrowed import with_cache
from h2o.evaluation import kept_bytes
from h2o.evaluation.presentation import apart
from h2o.evaluation.setting import parse, parse_all
from tests.hf.tiny import model, prompts

CURVES = {
    "full": "full",
    "h2o:0.1+0.1": "h2o",
    "h2o:0.3": "h2o",
    "h2o:9": "h2o",
    "h2o:4+5": "h2o",
    "h2o:0.2+0": "h2o 100% heavy",
    "h2o:0.15+0.05": "h2o 75% heavy",
    "h2o:0.1+0.1/sinks=3": "h2o/sinks=3",
    "h2o:0.1+0.1/sinks=3/decay=0.5": "h2o/decay=0.5/sinks=3",
    "h2o:0.2+0.2/decay=0.5/sinks=3": "h2o/decay=0.5/sinks=3",
    "robust:0.2": "robust",
    "robust:0.2/kv_dtype=int8": "robust/kv_dtype=int8",
    "robust-bytes:0.2": "robust-bytes",
    "authors-bytes:0.2": "authors-bytes",
    "sink:4+0.2": "sink",
    "sink:8+0.2": "sink from 8",
    "local:0.2": "local",
    "mask-global:0.1+0.1": "mask-global *",
}


@pytest.mark.parametrize(("name", "curve"), CURVES.items())
def test_a_line_is_of_settings_that_differ_by_budget(name, curve):
    assert parse(name).curve == curve


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
    kept = setting.config.for_model(ours).held(n)
    share = kept_bytes.bytes_share(setting, ours, kept, n)
    held = total.bytes_held + total.bytes_bookkeeping
    assert share == pytest.approx(100 * held / total.bytes_full, rel=0.02)
    rows = [{"kept": kept, "seen": n}, {"kept": kept, "prompt_tokens": n}]
    assert kept_bytes.of_rows(setting, ours, rows) == pytest.approx(share)
    if setting.config.budget_unit == "bytes":
        assert share <= 100 * (setting.config.heavy + setting.config.recent)


def test_the_axis_is_of_bytes_where_budgets_are():
    assert not kept_bytes.by_bytes(parse_all("full,h2o:0.1,local:0.2"))
    assert kept_bytes.by_bytes(parse_all("full,h2o:0.1,robust-bytes:0.2"))
    assert kept_bytes.by_bytes(parse_all("full,h2o:0.1/kv_dtype=int8"))
    assert kept_bytes.bytes_share(parse("full"), None, 7, 7) == 100


def test_ticks_have_room():
    assert apart([4, 10, 20, 100]) == [4, 10, 20, 100]
    assert apart([10.0, 10.2, 9.9, 50, 100]) == [10.2, 50, 100]
    assert apart([20, 20.0004]) == [20]
    assert apart([]) == []
    many = apart([x / 2 for x in range(2, 201)])
    assert 5 <= len(many) <= 11
