"""vLLM's V2 model runner. The other tests of this folder run on V1, the CPU build's default."""

from __future__ import annotations

import re

import pytest

from tests.launch import launch

pytest.importorskip("triton")

ENGINES = "tests/vllm/test_engine.py"
ON_V2 = (
    "test_places_that_are_dealt_over_all_layers[32]",
    "test_pins_of_requests[16]",
    "test_full_attention_beside_sliding_windows[entry0-gemma2]",
    "test_requests_that_come_while_others_are_answered",
    "test_requests_have_budgets_of_their_own",
    "test_all_keys_are_dense_attention_and_without_the_entry_nothing_is_ours",
    "test_log_likelihoods_of_a_prompt_are_those_of_all_keys",
    "test_prefix_caching_is_turned_off_with_a_note",
)


def test_engines_on_the_v2_model_runner():
    """In a process of its own, since vLLM decides once in a process whether there is a Triton."""
    options = ["-q", "-p", "tests.vllm.on_v2_runner", "-p", "no:cacheprovider", "-W", "default"]
    out, _ = launch([*options, *(f"{ENGINES}::{name}" for name in ON_V2)], launcher=["pytest"])
    assert re.search(rf"^{len(ON_V2)} passed", out, re.M), out[-4000:]
