"""The core's operations on random scenarios, compared with whole-text matrices as in test_ops."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("hypothesis")  # a machine with a GPU may have pytest only
from hypothesis import assume, given
from hypothesis import strategies as st

from h2o import ops
from tests.conversation import Conversation, numpy_core
from tests.core.dense import answers
from tests.core.test_ops import (
    CLEAR,
    REAL,
    compare,
    compare_simulation,
    rows_alone,
)
from tests.strategies import scenarios


@given(scenarios())
def test_any_conversation(scenario):
    text, mask, sinks = scenario.text(), scenario.mask(), scenario.sink_logits()
    how = {"mask": mask, "softcap": scenario.softcap, "sink_logits": sinks}
    want = answers(text, scenario.calls, scenario.policy, **how)
    assume(want.gap > CLEAR)
    talk = Conversation(numpy_core, text, scenario.policy, **how)
    compare(talk.feed_all(scenario.calls), want, REAL["float32"][1])


@given(scenarios(), st.data())
def test_any_simulation(scenario, data):
    rows = st.lists(st.integers(1, 40), min_size=scenario.B, max_size=scenario.B)
    prompt = np.array(data.draw(rows, label="prompt"), np.int32)
    heavy = data.draw(rows, label="heavy")
    policy, softcap = scenario.policy, scenario.softcap
    budget = np.array([[h, policy.recent] for h in heavy], np.int32)
    text, mask = scenario.text(), scenario.mask()
    alone = list(rows_alone(text, policy, prompt, budget, mask, softcap))
    assume(min(want.gap for want in alone) > CLEAR)
    got = ops.simulate(*text, prompt, budget, mask=mask, softcap=softcap, **policy.ranking)
    compare_simulation(got, mask, alone, REAL["float32"][1])
