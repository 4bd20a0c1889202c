"""What a turn of a session asks for in vLLM, and what it has from the turns before it."""

from __future__ import annotations

import pytest

from h2o.spans import subtract
from h2o.vllm.paged_request import PagedRequest, arguments_of_turn
from h2o.vllm.paged_rows import PartialPrompts, plan

PROMPTS = 40, 90
"""Tokens at the end of the prompts of two turns. Between them are 20 of the answer"""


def turn(before, **now):
    return arguments_of_turn(before, PROMPTS, now, 60)


def test_what_holds_for_all_turns():
    """The budget is that of the first turn. A prefix has at least what the session has read."""
    assert turn({}) == turn({"h2o_prefix": 30}) == {}
    assert turn({"h2o_heavy": 4}, h2o_heavy=5, h2o_recent=3, other=1) == {
        "h2o_heavy": 4, "other": 1,
    }  # fmt: skip
    assert turn({}, h2o_prefix=70) == {"h2o_prefix": 70}
    assert turn({}, h2o_context=3) == {"h2o_context": 60}
    gone = {"h2o_prefix": 30, "h2o_evict": "3:9"}
    assert turn(gone) == {"h2o_prefix": 60, "h2o_evict": [(3, 9)]}
    both = {"h2o_prefix": 60, "h2o_evict": [(3, 12), (50, 60)]}
    assert turn(gone, h2o_prefix=60, h2o_evict="4:12,50:60") == both
    assert turn(gone, h2o_prefix=20, h2o_evict="4:9") == turn(gone), "these are gone already"
    assert turn({"h2o_prefix": 50, "h2o_evict": "3:45"}) == {}, "the prompt had 40 tokens"


def test_pins_of_all_turns():
    assert turn({"h2o_pinned": "3:9"}, h2o_pinned=[[60, 70]])["h2o_pinned"] == [(3, 9), (60, 70)]
    assert turn({"h2o_pinned": "prompt"})["h2o_pinned"] == [(0, 40)]
    assert turn({"h2o_pinned": "prompt", "h2o_prefix": 30})["h2o_pinned"] == [(0, 30)]
    assert turn({}, h2o_pinned="prompt")["h2o_pinned"] == [(0, 90)]
    assert turn({"h2o_pinned": "3:45"}) == {}, "the prompt had 40 tokens, so it was not pinned"
    gone = {"h2o_prefix": 30, "h2o_evict": "3:9"}
    assert turn(gone, h2o_pinned="0:5")["h2o_pinned"] == [(0, 3)]


@pytest.mark.parametrize(
    ("before", "now", "reason"),
    [
        ({}, {"h2o_prefix": 61}, "a session that has 60 tokens before this turn, but h2o_prefix"),
        ({}, {"h2o_context": 40}, "but h2o_context is 40. vLLM leaves out the last token of each"),
        ({"h2o_pinned": "0:4"}, {"h2o_prefix": 60}, "token 3, which an earlier turn has pinned"),
        ({"h2o_pinned": "prompt"}, {"h2o_prefix": 60}, "token 3, which an earlier turn has pinned"),
        ({}, {"h2o_prefix": 60, "h2o_pinned": "4:5"}, "names token 4, which h2o_pinned pins"),
        (
            {"h2o_prefix": 40, "h2o_evict": "0:3,9:40"},
            {"h2o_prefix": 60, "h2o_evict": "3:9,40:60"},
            "leaves nothing",
        ),
    ],
)
def test_what_a_turn_cannot_forget(before, now, reason):
    with pytest.raises(ValueError, match=reason):
        turn(before, **{"h2o_evict": "3:9"} | now)


def test_tokens_leave_a_page_once():
    """Spans count all tokens of a session, and a page those that it has."""
    requests = {3: PagedRequest(90, prefix=60, evicted=[(3, 9), (20, 30)], removed=[(3, 9)])}
    known = requests, PartialPrompts(2)
    assert plan([0, 10], [60], [3], *known).removed == []
    assert plan([0, 10], [70], [3], *known).removed == [(3, [(14, 24)])]
    assert plan([0, 10], [70], [3], *known).removed == []


def test_spans_without_others():
    assert subtract([(0, 10), (20, 30)], []) == [(0, 10), (20, 30)]
    assert subtract([(0, 10), (20, 30)], [(2, 4), (6, 22)]) == [(0, 2), (4, 6), (22, 30)]
    assert subtract([(0, 10)], [(0, 10), (12, 13)]) == []
