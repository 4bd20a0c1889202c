"""What h2o's connector and scheduler do with requests that vLLM admits, tested without an
engine."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, FullAttentionSpec
from vllm.v1.request import RequestStatus

from h2o import H2OConfig
from h2o.vllm import plugin, scheduler
from h2o.vllm.connector import StoredPromptsConnector
from h2o.vllm.page_budget import PageBudget, example_keys
from h2o.vllm.paged_request import PagedRequest, arguments_of
from h2o.vllm.worker_prompts import WorkerPrompts

PAGE = plugin.PageSpec(
    block_size=plugin.BLOCK, num_kv_heads=1, head_size=8, dtype=torch.uint8, num_head_slots=1,
    tokens_per_state=plugin.BLOCK, state_content_bytes=16,
)  # fmt: skip
FULL = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": torch.float32}


def connector(*specs, is_shared=True):
    """A connector in the process of a scheduler with 8 pages."""
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(kv_connector_extra_config={"is_shared": is_shared}),
        additional_config={"h2o": {"heavy": 8, "recent": 8}},
    )
    groups = [SimpleNamespace(kv_cache_spec=spec, layer_names=[]) for spec in specs]
    kv_cache = SimpleNamespace(kv_cache_groups=groups)
    made = StoredPromptsConnector(config, KVConnectorRole.SCHEDULER, kv_cache)
    made.bind_gpu_block_pool(BlockPool(8, False, 1))
    return made


def request(name="a", prompt=100, computed=0, status=RequestStatus.WAITING, **arguments):
    return SimpleNamespace(
        request_id=name, prompt_token_ids=[*range(prompt)], num_prompt_tokens=prompt,
        num_tokens=prompt, num_computed_tokens=computed, mm_features=[], lora_request=None,
        prompt_embeds=None, cache_salt=None, status=status,
        sampling_params=SimpleNamespace(extra_args=arguments),
    )  # fmt: skip


def pages(*numbers):
    """Blocks of a request, one for each group."""
    return SimpleNamespace(get_block_ids=lambda: tuple([number] for number in numbers))


def admit(made, one, *numbers):
    assert made.get_num_new_matched_tokens(one, 0) == (0, False)
    made.update_state_after_alloc(one, pages(*numbers), 0)


def passes(made, preempted=(), **scheduled):
    output = SimpleNamespace(preempted_req_ids={*preempted}, num_scheduled_tokens=scheduled)
    return made.build_connector_meta(output)


def test_a_request_that_is_preempted_and_admitted_again_at_once_has_left_its_page():
    """vLLM reports a preemption only after it has given the request another page."""
    made = connector(PAGE)
    admit(made, request(), 3)
    assert passes(made, a=32).left == set()
    admit(made, request(), 4)
    assert passes(made, preempted="a", a=32).left == {3}
    assert [*made.prompts.prefilling] == ["a"]
    assert passes(made, preempted="a").left == {4}
    assert not made.prompts.prefilling


def test_a_request_leaves_its_pages_in_every_group_of_ours():
    """Requests must leave their pages in all of h2o's groups, and no blocks of window layers, whose
    numbers belong to others. Without sharing nothing is stored."""
    made = connector(PAGE, FullAttentionSpec(**FULL), PAGE, is_shared=False)
    admit(made, request(), 3, 4, 5)
    assert passes(made, a=32).left == set()
    made.request_finished_all_groups(request(), ([3], [4], [5]))
    assert passes(made).left == {3, 5}
    admit(made, request(), 3, 4, 5)
    assert passes(made, a=100).stores == []


def test_a_request_that_ends_right_after_its_preemption_leaves_its_page():
    """vLLM has taken its blocks by then, but the worker still has its prompt."""
    made = connector(PAGE)
    admit(made, request(), 3)
    assert passes(made, a=32).left == set()
    made.request_finished_all_groups(request(), ([],))
    assert not made.prompts.prefilling
    assert passes(made, preempted="a").left == {3}


def test_a_session_that_goes_on_stores_no_prefix():
    """A session's next turn is fed from where the last one ended, not from the beginning of a
    prompt."""
    made = connector(PAGE)
    made.update_state_after_alloc(request(prompt=130, computed=100, h2o_prefix=30), pages(3), 0)
    assert passes(made, a=30).stores == []
    assert not made.prompts.prefilling


def test_requests_that_cannot_forget(caplog, monkeypatch):
    """The scheduler cannot answer a request with an error, so that the log says it."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    specs = PAGE, FullAttentionSpec(**FULL)
    made, asked = connector(*specs, is_shared=False), {"h2o_prefix": 30, "h2o_evict": "3:9"}
    one = request(prompt=130, **asked)
    made.update_state_after_alloc(one, pages(3, 4), 0)
    assert passes(made, a=30).requests[3] == (130, {"h2o_prefix": 30})
    assert "forget: layers with a sliding window still hold them" in caplog.text
    assert arguments_of(one) == asked


def test_workers_know_what_the_requests_of_pages_ask_for():
    """Workers must know a page's request until it ends, even if the page gets another request, or
    the same one again, in the same pass."""
    made, worker = connector(PAGE, is_shared=False), connector(PAGE)
    budget = PageBudget(H2OConfig(heavy=8, recent=8), 2, 256)
    worker.worker_prompts, worker.keys = WorkerPrompts(), example_keys(2, 8, torch.float32)
    worker.engine, worker.impls = SimpleNamespace(requests={}, budget=budget), []

    def known(**scheduled):
        worker.handle_preemptions(passes(made, **scheduled))
        return worker.engine.requests

    admit(made, request(h2o_heavy=3, h2o_pinned="2:4"), 3)
    own = PagedRequest(100, H2OConfig(heavy=3, recent=8), [(2, 4)])
    assert known(a=32) == {3: own}
    made.request_finished_all_groups(request(), ([3],))
    admit(made, request("b", 50, h2o_prefix=30, h2o_evict="3:9"), 3)
    assert known(b=30) == {3: PagedRequest(50, prefix=30, evicted=[(3, 9)])}
    admit(made, request("b", 50), 3)
    assert known(preempted="b", b=30) == {3: PagedRequest(50)}
    made.request_finished_all_groups(request("b"), ([3],))
    made.request_finished_all_groups(request("c"), ([],))
    assert known() == {}


def test_workers_forget_chunks_of_pages_that_requests_have_left():
    """Chunks in the pages that requests have left must be dropped in every group of layers."""
    worker_prompts = WorkerPrompts()
    worker_prompts.partial += [{3: 0, 4: 1}, {5: 0}]
    worker_prompts.leave({3, 5, 6})
    assert worker_prompts.partial == [{4: 1}, {}]


def planning(kind=scheduler.PrefixScheduler, **entry):
    """A scheduler in the middle of a pass."""
    one = kind.__new__(kind)
    one.num_prefill_lookahead, one.buffered = 1, set()
    one.max_num_scheduled_tokens = 40
    one.scheduler_config = SimpleNamespace(max_num_seqs=8, long_prefill_token_threshold=0)
    one.vllm_config = SimpleNamespace(additional_config={"h2o": entry})
    return one


def test_a_prompt_waits_for_a_place_in_which_its_chunks_are_kept():
    """A prompt must wait for a buffer, or for room for all of it. Tokens after a prefix need no
    buffer."""
    one = planning(whole_prompts=2)
    first, last = request("a", status=RequestStatus.RUNNING), request("d")
    assert one._reserve_prefill_lookahead(first, 60, 20) == 20
    assert one._reserve_prefill_lookahead(request("b", h2o_prefix=90), 0, 20) == 20
    assert one.buffered == {"a", "b"}
    assert one._reserve_prefill_lookahead(request("c", prompt=20), 0, 20) == 20
    assert one._reserve_prefill_lookahead(request("c", h2o_prefix=20), 0, 20) == 20
    assert one._reserve_prefill_lookahead(request("c", h2o_prefix=20), 20, 32) == 32
    assert not one.room_is_awaited
    assert one._reserve_prefill_lookahead(last, 0, 20) == 0
    assert one.room_is_awaited
    one.room_is_awaited = False
    assert one._reserve_prefill_lookahead(first, 80, 20) == 20
    assert one._reserve_prefill_lookahead(last, 0, 20) == 20  # in the buffer of the first request
    cut = planning(cut="chunk")
    assert [cut._reserve_prefill_lookahead(request(x), 0, 20) for x in "abc"] == [20] * 3


@pytest.mark.parametrize("kind", [scheduler.PrefixScheduler, scheduler.PrefixAsyncScheduler])
def test_no_waiting_request_passes_one_that_waits_for_room(kind):
    """Otherwise a request whose chunks have a fixed size could wait forever. Running requests
    continue."""
    one = planning(kind)
    running = request("r", status=RequestStatus.RUNNING)
    first, later = request("f", h2o_prefix=30), request("l")
    assert one._reserve_prefill_lookahead(first, 30, 20) == 0
    assert one._reserve_prefill_lookahead(later, 0, 20) == 0
    assert one._reserve_prefill_lookahead(running, 0, 20) == 20
    one.room_is_awaited = False  # as at the start of the next pass
    assert one._reserve_prefill_lookahead(first, 30, 40) == 32
    assert one._reserve_prefill_lookahead(later, 0, 8) == 8


def test_attention_that_is_not_full_is_refused():
    """Attention to a part of the keys, as in Llama 4, and attention in both directions are
    rejected."""
    spec = ChunkedLocalAttentionSpec(**FULL, attention_chunk_size=16)
    with pytest.raises(ValueError, match="h2o supports only full attention in vLLM"):
        plugin.page_spec(spec, None)
    with pytest.raises(ValueError, match="h2o supports only causal attention in vLLM"):
        plugin.BatchBuilder.build(None, 0, SimpleNamespace(causal=False))
