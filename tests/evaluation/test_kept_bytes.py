"""What of a full cache's bytes a setting takes, as tables of evaluations say it."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")

from h2o import H2OCache
from h2o.borrowed import with_cache
from h2o.evaluation import kept_bytes
from h2o.evaluation.setting import parse
from tests.hf.tiny import model, prompts


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
    if setting.config.budget_unit == "bytes":
        assert share <= 100 * (setting.config.heavy + setting.config.recent)


def test_a_full_cache_takes_all_bytes():
    assert kept_bytes.bytes_share(parse("full"), None, 7, 7) == 100
