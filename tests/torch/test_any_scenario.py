"""Rolled positions in random scenarios: the core matches the reference."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("hypothesis")  # a machine with a GPU may have pytest only
from hypothesis import given

from tests.conversation import Conversation, assert_same_kept
from tests.strategies import scenarios
from tests.torch.engines import core, oracle
from tests.torch.test_cache_relative import Angles, rolling

pytestmark = pytest.mark.usefixtures("on_one_thread")


@given(scenarios())
def test_the_core_keeps_what_the_oracle_keeps(scenario):
    """The core keeps the reference's keys for any padding, policy and calls. Half of the elements
    are rotated."""
    if scenario.D < 2:
        return
    talks = [
        Conversation(
            rolling(engine, Angles(max(1, scenario.D // 4))), scenario.text(), scenario.policy,
            mask=scenario.mask(), softcap=scenario.softcap, sink_logits=scenario.sink_logits(),
        ).feed_all(scenario.calls)
        for engine in (oracle(), core())
    ]  # fmt: skip
    assert_same_kept(*talks, atol=1e-4)
    np.testing.assert_allclose(talks[0].answer, talks[1].answer, rtol=0, atol=1e-4)
