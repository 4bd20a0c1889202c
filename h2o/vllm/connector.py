"""Shared prompts: how vLLM's scheduler and workers learn of stored prompts.

A KV connector is vLLM's interface for prompt tokens that need no prefill. h2o's connector keeps
stored prompts in pages of vLLM's pool. Such a page counts as free (`BlockPool.unpin_blocks`) until
vLLM gives it to a request; the least recently used page goes first. Even if no prompts are stored,
the connector tells workers the arguments of new requests and which requests have left.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import CircularBufferSpec

from h2o.vllm.page_budget import example_keys
from h2o.vllm.page_store import PageStore
from h2o.vllm.paged_request import EVICT, arguments_of, prefix_of
from h2o.vllm.scheduler import PrefixAsyncScheduler, PrefixScheduler
from h2o.vllm.stored_prompts import Beginning, Prefill, StoredPrompts, identify
from h2o.vllm.validation import CONNECTOR, has_windows, logger, read_request


def set_up(vllm_config: VllmConfig) -> None:
    """Put h2o's scheduler and KV connector into vLLM's config, and turn off vLLM's own prefix
    caching. Must be called in the processes of the scheduler and of the workers before they create
    a connector."""
    scheduling, cache = vllm_config.scheduler_config, vllm_config.cache_config
    scheduling.scheduler_cls = PrefixAsyncScheduler if (
        scheduling.async_scheduling
    ) else PrefixScheduler  # fmt: skip
    if vllm_config.kv_transfer_config is None:
        # With sliding windows nothing is stored, since vLLM itself holds the keys of those layers.
        is_shared = bool(cache.enable_prefix_caching) and not has_windows(vllm_config)
        vllm_config.kv_transfer_config = KVTransferConfig(
            kv_connector=CONNECTOR,
            kv_connector_module_path=__name__,
            kv_role="kv_producer",
            kv_connector_extra_config={"is_shared": is_shared},
        )
    cache.enable_prefix_caching = False


def check_own(vllm_config: VllmConfig) -> None:
    """Raise RuntimeError if this process's connector belongs to another engine. vLLM has only one
    connector per process, which would tell the layers of this engine about the other's requests."""
    if not has_kv_transfer_group():
        return
    if get_kv_transfer_group()._vllm_config.instance_id != vllm_config.instance_id:
        raise RuntimeError(
            "h2o: this process has an engine already, and vLLM cannot tell the requests of two "
            "engines with h2o apart: shut down the first one, or give each engine a process of its "
            "own (VLLM_ENABLE_V1_MULTIPROCESSING=1, vLLM's default)"
        )


def impls_of(vllm_config: VllmConfig, layers: list[str]) -> list[Any]:
    """The `H2OAttention` of each of these layers."""
    known = vllm_config.compilation_config.static_forward_context
    return [known[name].impl for name in layers]


def stores_of(impls: list[Any]) -> list[PageStore]:
    """The stores of the layers that have pages by now. A store that layers share is listed once."""
    return [*dict.fromkeys(impl.paged.store for impl in impls if impl.paged is not None)]


# ---- Connector -------------------------------------------------------------------------------


@dataclasses.dataclass
class Plan(KVConnectorMetadata):
    """Instructions to workers for one pass: which requests have begun and left, and what to do with
    stored prompts."""

    left: set[int] = dataclasses.field(default_factory=set)
    """Pages of requests that have ended or start over"""
    requests: dict[int, tuple[int, dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """(tokens of the prompt, `vllm_xargs`) of requests that begin, by page"""
    begins: list[tuple[int, int, int, bool]] = dataclasses.field(default_factory=list)
    """Requests that begin with a stored prompt: the prompt's page, the request's page, the number
    of tokens that need no prefill, and whether these are the request's whole prompt"""
    dropped: list[int] = dataclasses.field(default_factory=list)
    """Pages whose stored prompts are gone, for example because vLLM gave the pages to requests"""
    stores: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """Prompts to store after the pass: the request's page, and the page that gets a copy"""


class StoredPromptsConnector(KVConnectorBase_V1, SupportsHMA):
    """The KV connector. In the scheduler's process it finds and keeps stored prompts; in a worker
    it copies pages.

    In each pass stored prompts are first copied to the pages of new requests, then the tokens are
    processed, and then new prompts are stored. Workers run the passes in the order in which the
    scheduler has planned them, so a prompt that one plan stores is available to the next.
    """

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self.plan = Plan()
        self.prompts = StoredPrompts()
        transfer: Any = vllm_config.kv_transfer_config
        self.is_shared = transfer.kv_connector_extra_config["is_shared"]
        """Whether prompts are stored"""
        self.groups = {
            i: group
            for i, group in enumerate(kv_cache_config.kv_cache_groups)
            if isinstance(group.kv_cache_spec, CircularBufferSpec)
        }
        """The groups of layers with h2o's pages. There is one group if prompts are stored"""
        self.num_groups = len(kv_cache_config.kv_cache_groups)
        self.found: dict[str, tuple[int, int, bool]] = {}
        """The stored prompt of each request that waits for a page"""
        self.beginnings: dict[str, list[Beginning]] = {}
        """Those of each request, cached because a waiting request needs them in every pass"""
        self.held: dict[str, list[int]] = {}
        """Pages of each request that has some"""

    requires_kv_delivery = False

    # ---- Scheduler side --------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        self.pool = gpu_block_pool

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return the number of tokens that a stored prompt provides, and False, since they are
        loaded synchronously. The number is None while another request is prefilling them."""
        wanted = self._beginnings_of(request)
        self.found.pop(request.request_id, None)
        found = self.prompts.find(wanted)
        if found is not None:
            self.found[request.request_id] = found
            return found[1], False
        return (None if self.prompts.is_being_prefilled(request.request_id, wanted) else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Note that a request has its page and its prefill begins. If a session continues instead,
        nothing of it will be stored."""
        pages = self._pages(blocks.get_block_ids())
        asked = request.num_prompt_tokens, self._arguments_of(request)
        self.plan.requests |= dict.fromkeys(pages, asked)
        if request.num_computed_tokens:
            return
        name, page, whole = request.request_id, pages[0], False
        self._leave([name])  # it may start over after a preemption
        self.held[name] = pages
        found = self.found.pop(name, None)
        if num_external_tokens:
            assert found is not None
            stored, tokens, whole = found
            self.plan.begins.append((stored, page, tokens, whole))
            if stored != page:  # if equal, the stored prompt's page was the last free one
                self._keep(self.pool.blocks[stored], again=True)
        if not whole and (wanted := self._beginnings_of(request)):
            self.prompts.prefilling[name] = Prefill(wanted, num_external_tokens)

    def _arguments_of(self, request: Any) -> dict[str, Any]:
        """The `vllm_xargs` of a request, without `h2o_evict` if that is not supported."""
        arguments = arguments_of(request)
        if EVICT not in arguments or len(self.groups) == self.num_groups:
            return arguments
        logger.warning(
            "h2o: a request keeps the tokens that it asks to forget: layers with a sliding window "
            "still hold them"
        )
        return {name: x for name, x in arguments.items() if name != EVICT}

    def build_connector_meta(self, scheduler_output: Any) -> Plan:
        preempted = {*(scheduler_output.preempted_req_ids or ())}
        # A preempted request with scheduled tokens has already started over.
        self._leave(preempted - {*scheduler_output.num_scheduled_tokens})
        plan, self.plan = self.plan, Plan()
        for name, key in self.prompts.advance(scheduler_output.num_scheduled_tokens):
            if key in self.prompts.pages or not self.pool.get_num_free_blocks():
                continue
            (block,) = self.pool.get_new_blocks(1)
            (page,) = self.held[name]  # one, since all layers are in one group
            plan.stores.append((page, block.block_id))
            self.prompts.put(key, block.block_id)
            self._keep(block)
        plan.dropped, self.plan.dropped = plan.dropped + self.plan.dropped, []
        return plan

    def _beginnings_of(self, request: Any) -> list[Beginning]:
        """The beginnings that a request may share with others. Empty if it shares nothing."""
        if not (self.is_shared and _may_share(request)):
            return []
        known = self.beginnings.get(request.request_id)
        if not known or known[0].tokens != request.num_prompt_tokens:  # a session's prompt grows
            said = request.prompt_token_ids, prefix_of(request), arguments_of(request)
            known = self.beginnings[request.request_id] = identify(*said, request.cache_salt)
        return known

    def _pages(self, blocks: Any) -> list[int]:
        """The page of a request in each group, from its blocks in all groups."""
        return [blocks[i][0] for i in self.groups if i < len(blocks) and blocks[i]]

    def _leave(self, requests: Iterable[str]) -> None:
        """Forget requests that have left or start over, and report their pages."""
        for name in requests:
            self.prompts.prefilling.pop(name, None)
            self.plan.left.update(self.held.pop(name, ()))

    def _keep(self, block: Any, *, again: bool = False) -> None:
        """Put the page of a stored prompt at the end of the free pages."""
        if again:
            self.pool.touch([block])
        self.pool.unpin_blocks([block], self._forget_page)

    def _forget_page(self, block: Any) -> None:
        self.prompts.drop(block.block_id)
        self.plan.dropped.append(block.block_id)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        for known in (self.found, self.beginnings):
            known.pop(request.request_id, None)
        self._leave([request.request_id])
        return False, None

    def reset_cache(self) -> bool:
        """Drop all stored prompts, for example after a change of the model's weights."""
        self.plan.dropped += self.prompts.clear()
        return True

    # ---- Worker side -----------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Any) -> None:
        """Look up the layers with h2o's pages and the state that they share."""
        names = [name for group in self.groups.values() for name in group.layer_names]
        self.impls = impls_of(self._vllm_config, names)
        self.engine = self.impls[0].engine
        self.worker_prompts = self.engine.worker_prompts
        heads, size = self.impls[0].num_kv_heads, self.impls[0].head_size
        self.keys = example_keys(heads, size, self._vllm_config.model_config.dtype)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Update the active requests. vLLM calls this before every pass."""
        stores = stores_of(self.impls)
        self.worker_prompts.leave(kv_connector_metadata.left)
        for page in kv_connector_metadata.left:
            self.engine.requests.pop(page, None)
            for store in stores:
                store.release(page)
        for page, (prompt, arguments) in kv_connector_metadata.requests.items():
            request = read_request(arguments, prompt, self.engine.budget, self.keys)
            if before := self.engine.requests.get(page):  # a session goes on
                request = request._replace(removed=before.removed)
            self.engine.requests[page] = request

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        plan: Any = self._get_connector_metadata()
        for page, other, tokens, whole in plan.begins:
            self.worker_prompts.begin(stores_of(self.impls), page, other, tokens, whole=whole)
            if whole:
                request = self.engine.requests[other]
                self.engine.requests[other] = request._replace(removed=request.evicted)
        self.worker_prompts.drop(plan.dropped)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: pages are copied before the pass."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: pages are stored after the pass."""

    def wait_for_save(self) -> None:
        plan: Any = self._get_connector_metadata()
        for page, other in plan.stores:
            self.worker_prompts.store(stores_of(self.impls), page, other)
        self.worker_prompts.end()


def _may_share(request: Any) -> bool:
    """Whether a request's keys are determined by its prompt's tokens, with no answer begun."""
    return not (
        request.prompt_token_ids is None
        or request.prompt_embeds is not None  # some tokens are placeholders
        or request.mm_features
        or request.lora_request
        or request.sampling_params is None
        or request.num_tokens > request.num_prompt_tokens
        or request.num_prompt_tokens < 2
    )
