"""h2o's attention backend for vLLM, and the size of its pages.

This module depends on internals of the tested versions of vLLM. On the CPU platform vLLM always
uses the backend CPU_ATTN, so h2o's backend replaces it. Without an entry "h2o" in the config the
replacement behaves as vLLM's own backend. On a GPU h2o's backend is CUSTOM, which the user chooses.

A request has one page for its whole life (vLLM's CircularBufferSpec) instead of blocks, so vLLM's
slot mapping is not used, and prompts that requests share are copied. If only some layers of a model
have a sliding window, these layers use vLLM's own attention, and their blocks have the size of a
page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
from vllm.v1.attention.backend import AttentionImpl, AttentionMetadataBuilder, AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.single_type_kv_cache_manager import CircularBufferManager
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    CircularBufferSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.kv_cache_spec_registry import register_kv_cache_spec

from h2o.hf.modes import Mode, check_modes
from h2o.vllm.connector import check_own, impls_of, set_up, stores_of
from h2o.vllm.metrics import Meter
from h2o.vllm.page_budget import example_keys
from h2o.vllm.page_store import ALIGNMENT, PageStore
from h2o.vllm.paged_request import PagedRequest
from h2o.vllm.paged_rows import Batch, PagedLayer, PartialPrompts, PromptScores, plan
from h2o.vllm.seeded_requests import discard_without_seeds
from h2o.vllm.validation import Requests, entry_of, has_windows, logger, page_budget
from h2o.vllm.worker_prompts import WorkerPrompts

BLOCK = 1 << 20
"""Tokens in a vLLM block. No request has as many, so each needs one block only."""


# ---- Pages -----------------------------------------------------------------------------------


@register_kv_cache_spec(
    manager_class=CircularBufferManager, uniform_type_base_spec=CircularBufferSpec
)
class PageSpec(CircularBufferSpec):
    """One page of a `PageStore` per request. Adds no fields to its frozen base class."""

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        # vLLM calls this in the scheduler's process before it creates the scheduler.
        set_up(vllm_config)
        return super().max_memory_usage_bytes(vllm_config)


def page_spec(spec: AttentionSpec, engine: Engine) -> PageSpec:
    """The page of a layer. `spec` is vLLM's description of the layer's keys and values.

    Raises: ValueError unless a query sees exactly the keys up to its own, and for values of another
    size than the keys.
    """
    if type(spec) is not FullAttentionSpec:
        raise ValueError(
            f"h2o supports only full attention in vLLM, and a layer of this model has a "
            f"{type(spec).__name__}"
        )
    if spec.head_size_v != spec.head_size:
        raise ValueError(
            f"h2o does not support keys of {spec.head_size} elements with values of "
            f"{spec.head_size_v} in vLLM"
        )
    keys = example_keys(spec.num_kv_heads, spec.head_size, spec.dtype)
    # Layers with a sliding window get blocks of the same number of bytes, which must therefore be
    # a multiple of the size of their own blocks.
    unit = spec.page_size_bytes if engine.has_windows else 1
    return PageSpec(
        block_size=BLOCK,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        dtype=torch.uint8,
        num_head_slots=1,
        tokens_per_state=BLOCK,
        state_content_bytes=-(-engine.budget.page_bytes(keys) // unit) * unit,
    )


def meter_of(vllm_config: VllmConfig, impls: list[H2OAttention], spec: PageSpec) -> Meter:
    """Create the meter of these layers' pages, and log how many requests fit. vLLM must have
    determined the number of pages."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    pages = vllm_config.cache_config.num_gpu_blocks or 1
    size = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model).itemsize
    full = model.max_model_len * spec.num_kv_heads * 2 * spec.head_size * size
    keys = example_keys(spec.num_kv_heads, spec.head_size, model.dtype)
    budget = impls[0].engine.budget
    logger.info_once(
        "h2o: %d requests fit, and %d of the longest would with a full cache: each takes %d bytes "
        "per layer instead of %d; up to %d prompts at a time are kept whole while they are "
        "prefilled in chunks, in at most %d bytes per layer outside the pages",
        *(pages - 1, pages * spec.page_size_bytes // full, spec.page_size_bytes, full),
        *(budget.buffers, budget.whole_bytes(keys, impls[0].num_heads)),
    )
    if parallel._api_process_count > 1:
        logger.warning_once(
            "h2o: /metrics lacks h2o's metrics if there are several API processes: pass "
            "--api-server-count 1 to get them"
        )
    return Meter(
        (str(model.served_model_name), str(parallel.data_parallel_index), str(parallel.rank)),
        spec.page_size_bytes * len(impls),
        pages - 1,  # vLLM reserves the first page
        lambda: stores_of(impls),
        impls[0].engine.worker_prompts,
    )


# ---- Attention -------------------------------------------------------------------------------


class Engine:
    """State that the layers of an engine share."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        """
        Raises: TypeError, ValueError for a wrong entry, and for a model or setting that is not
            supported.
        """
        self.instance_id = vllm_config.instance_id
        self.budget = page_budget(vllm_config)
        self.has_windows = has_windows(vllm_config)
        """Whether other layers have a sliding window. Those use vLLM's own attention"""
        self.layer_scorer: Callable[[int, float, float], PromptScores] | None = None
        """See `prompt_scoring.layer_scorer`"""
        self.cross_layer: Any = None
        """`CrossLayerBudget`, or None if each layer has its own pages"""
        self.stores = WeakValueDictionary[tuple[int, int], PageStore]()
        """Stores that all layers share, by address and number of the pages. The layers own them"""
        self.worker_prompts = WorkerPrompts()
        self.requests: dict[int, PagedRequest] = {}
        """The active requests, by page"""
        if self.budget.config.score_by == "mean-echo":
            from h2o.vllm import prompt_scoring  # imports transformers

            model = vllm_config.model_config.hf_config
            self.layer_scorer = prompt_scoring.layer_scorer(model, self.budget.config)
            if self.budget.has_shared_page:
                self.cross_layer = prompt_scoring.CrossLayerBudget(self.budget)
        if current_platform.is_cpu():
            discard_without_seeds()
        else:
            logger.warning_once(
                "h2o: attention on GPUs in vLLM was tested in an emulation and has not run on a "
                "GPU: compare answers first, as examples/serve_on_gpus.py does"
            )
        set_up(vllm_config)


class H2OAttentionBackend(CPUAttentionBackend):
    """h2o's backend if the config has the entry "h2o", otherwise vLLM's own backend for the CPU.

    vLLM creates the layers of an engine, then asks for the specs of their pages, then for a
    metadata builder. Only in the first of these steps does it tell which config is current, so
    `engine` is set there.
    """

    engine: Engine | None = None
    """The engine whose layers were created last, or None for vLLM's own attention"""

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        vllm_config = get_current_vllm_config()
        if entry_of(vllm_config) is None:
            H2OAttentionBackend.engine = None
            return super().get_impl_cls()
        if cls.engine is None or cls.engine.instance_id != vllm_config.instance_id:
            H2OAttentionBackend.engine = Engine(vllm_config)
        return H2OAttention

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
        return super().get_builder_cls() if cls.engine is None else BatchBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        if cls.engine is not None and cls.engine.cross_layer is not None:
            return (KVCacheLayout.BLHNC,)  # the pages of a block are adjacent for all layers
        return super().supported_kv_cache_layouts()

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        if cls.engine is None or isinstance(spec, SlidingWindowSpec):
            return super().customize_spec(spec)
        return page_spec(spec, cls.engine)

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return super().get_supported_head_sizes() if cls.engine is None else []


class H2OCustomBackend(H2OAttentionBackend):
    """h2o's backend on GPUs. The user chooses it by `--attention-backend CUSTOM`."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        if entry_of(get_current_vllm_config()) is None:
            raise ValueError(
                "--attention-backend CUSTOM is h2o's and needs an entry in --additional-config: "
                '{"h2o": {"heavy": 128, "recent": 128}}'
            )
        return super().get_impl_cls()

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []


Planned = Callable[[], Batch]
"""Function that returns the plan of a forward pass. The plan depends on the stored prompts, which
vLLM's model runners announce after they have built the metadata, so the first layer makes the
plan."""


class BatchBuilder(AttentionMetadataBuilder[Planned]):
    """Plans a forward pass for all layers with h2o's pages. For other layers the constructor
    returns vLLM's own builder."""

    def __new__(cls, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kv_cache_spec, PageSpec):
            return super().__new__(cls)
        return CPUAttentionBackend.get_builder_cls()(kv_cache_spec, *args, **kwargs)

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: Any
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        impls = impls_of(vllm_config, layer_names)
        engine = impls[0].engine
        Requests.check_created(vllm_config)
        check_own(vllm_config)
        self.begun = PartialPrompts(engine.budget.buffers)
        self.requests, self.worker_prompts = engine.requests, engine.worker_prompts
        self.worker_prompts.partial.append(self.begun.by_page)
        self.meter: Meter | None = None
        if engine.has_windows:
            logger.info_once("h2o: layers with a sliding window use vLLM's own attention")
        else:
            self.meter = meter_of(vllm_config, impls, kv_cache_spec)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Planned:
        rows = common_attn_metadata
        if rows.causal is not True:
            raise ValueError("h2o supports only causal attention in vLLM, and this model's is not")
        if self.meter is not None:
            self.meter.schedule_write()
        # On a GPU the host waits for one of these only, the pages. Without drafts the upper bounds
        # of the lengths are exact.
        starts, lengths, pages = (
            x.tolist()
            for x in (
                *(rows.query_start_loc_cpu, rows.seq_lens_cpu_upper_bound),
                rows.block_table_tensor[:, 0],
            )
        )
        known = starts, lengths, pages, self.requests
        rest = self.begun, self.device, self.worker_prompts.replayed
        return functools.cache(functools.partial(plan, *known, *rest))


class H2OAttention(AttentionImpl[Planned]):
    """Attention of one layer. For a layer with a sliding window, in a model where others have none,
    the constructor returns vLLM's own."""

    def __new__(
        cls, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None, sliding_window: int | None = None, *args: Any,
        **kwargs: Any,
    ) -> Any:  # fmt: skip
        engine = H2OAttentionBackend.engine
        if not (sliding_window and engine is not None and engine.has_windows):
            return super().__new__(cls)
        own = CPUAttentionBackend.get_impl_cls()
        known = num_heads, head_size, scale, num_kv_heads, alibi_slopes, sliding_window
        return own(*known, *args, **kwargs)

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        kind = AttentionType(attn_type)
        refused = {
            "ALiBi": alibi_slopes is not None,
            "layers with a sliding window (which limits their keys already)": sliding_window,
            "learned sinks": sinks is not None,
            f"attention of the kind {kind.value}": kind != AttentionType.DECODER,
        }
        for what, present in refused.items():
            if present:
                raise ValueError(f"h2o does not support {what} in vLLM")
        if kv_sharing_target_layer_name:
            check_modes({Mode.VLLM, Mode.SHARED_KEYS})
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.sliding_window = None
        self.softcap = float(logits_soft_cap or 0)
        assert H2OAttentionBackend.engine is not None
        self.engine = H2OAttentionBackend.engine
        self.paged: PagedLayer | None = None
        self.memory = (0, 0)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Planned | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute attention of query [n, H, D], key and value [n, G, D] into output [n, H, D]."""
        if attn_metadata is None:  # vLLM only measures memory or compiles
            return output.zero_()
        memory = kv_cache.data_ptr(), kv_cache.shape[0]
        if self.paged is None or self.memory != memory:
            self.paged, self.memory = self._pages(layer, kv_cache, key), memory
        self.paged.forward(query, key, value, attn_metadata(), output)
        return output

    def do_kv_cache_update(self, *args: Any) -> None:
        """Do nothing: `forward` stores keys and values."""

    def _pages(self, layer: Any, kv_cache: Tensor, key: Tensor) -> PagedLayer:
        if not kv_cache[0].is_contiguous() or kv_cache.stride(0) % ALIGNMENT:
            raise ValueError(f"h2o: pages must be contiguous; strides are {kv_cache.stride()}")
        index = extract_layer_index(layer.layer_name)
        engine, budget = self.engine, self.engine.budget
        keys = key[:1].transpose(0, 1)[None]
        if engine.cross_layer is None:
            page = budget.empty_page(index, keys)
            store = PageStore(kv_cache.flatten(1), page, alone=not engine.has_windows)
        else:
            store = self._store_of_all(kv_cache, keys)
        how = index, self.scale, self.softcap
        scores = engine.layer_scorer and engine.layer_scorer(*how)
        return PagedLayer(store, budget, *how, engine.worker_prompts, scores, engine.cross_layer)

    def _store_of_all(self, kv_cache: Tensor, keys: Tensor) -> PageStore:
        """The store that all layers share. Their pages are adjacent in each block."""
        budget, stores = self.engine.budget, self.engine.stores
        whole, pages = kv_cache.untyped_storage(), len(kv_cache)
        known, size = (whole.data_ptr(), pages), kv_cache.stride(0)
        store = stores.get(known)
        if store is None:
            if size != kv_cache[0].numel() * budget.layers or len(whole) < pages * size:
                raise ValueError(
                    f"h2o: blocks have {size} bytes, of which a layer has {kv_cache[0].numel()}: "
                    f"expected the pages of {budget.layers} layers to be adjacent"
                )
            memory = kv_cache.as_strided((pages, size), (size, 1), 0)
            store = stores[known] = PageStore(memory, budget.empty_pages(keys), budget.layers)
        return store
