"""Random policies and scenarios, for property tests.

Needs hypothesis. A module that imports this one and must also be collected where hypothesis is
missing calls `pytest.importorskip("hypothesis")` first.
"""

from __future__ import annotations

from hypothesis import strategies as st

from tests.inputs import Policy, Scenario


@st.composite
def policies(draw: st.DrawFn, largest: int = 12) -> Policy:
    heavy = draw(st.integers(0, largest))
    recent = draw(st.integers(0, largest))
    sinks = draw(st.integers(0, 3))
    if heavy + recent + sinks == 0:
        heavy = 1
    return Policy(
        heavy,
        recent,
        sinks,
        draw(st.sampled_from(["sum", "mean", "max"])),
        draw(st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.0])),
        draw(st.booleans()),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    lengths = draw(st.lists(st.integers(0, 24), min_size=1, max_size=3))
    prompt = max(1, *lengths) + draw(st.integers(0, 5))
    rest = draw(st.lists(st.sampled_from([1, 1, 1, 1, 2, 5]), max_size=12))
    return Scenario(
        seed=draw(st.integers(0, 2**20)),
        lengths=lengths,
        calls=[prompt, *rest],
        G=draw(st.integers(1, 3)),
        R=draw(st.integers(1, 4)),
        D=draw(st.sampled_from([1, 2, 3, 8, 20])),
        padding=draw(st.sampled_from(["left", "right", "holes"])),
        policy=draw(policies()),
        softcap=draw(st.sampled_from([0.0, 0.0, 3.0])),
        learned_sinks=draw(st.booleans()),
    )
