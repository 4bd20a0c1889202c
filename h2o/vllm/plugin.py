"""vLLM's view of h2o: an attention backend and the size of its pages.

It knows vLLM by the internals of the tested versions. On the CPU platform vLLM always takes the
backend CPU_ATTN, so h2o's stands in its place, and is vLLM's own wherever the config has no entry
"h2o". On a GPU it is the backend CUSTOM, for which a user asks.

A request has one page for life (vLLM's CircularBufferSpec), which holds its slots; tokens are not
in blocks, so vLLM's slot mapping is not used, and what requests have in common is copied. Of a
model with sliding windows in some layers these stay vLLM's own, and all blocks are as large as a
page.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple
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

from h2o.vllm.connector import impls_of, set_up, stores_of
from h2o.vllm.forks import Forks
from h2o.vllm.metrics import Meter, Place
from h2o.vllm.page_budget import PageBudget, one_key
from h2o.vllm.page_store import ALIGNMENT, PageStore
from h2o.vllm.paged_request import Request
from h2o.vllm.paged_rows import Batch, PagedLayer, PartialPrompts, plan
from h2o.vllm.validation import Requests, entry_of, has_windows, logger, page_budget

BLOCK = 1 << 20
"""Tokens of a vLLM block: more than a request has, so that one block is all that it takes."""


# ---- Pages -----------------------------------------------------------------------------------


@register_kv_cache_spec(
    manager_class=CircularBufferManager, uniform_type_base_spec=CircularBufferSpec
)
class PageSpec(CircularBufferSpec):
    """A page of `PageStore` for each request. Frozen, without fields of its own."""

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        # In the process of the scheduler, before that is made.
        set_up(vllm_config)
        return super().max_memory_usage_bytes(vllm_config)


def page_spec(spec: AttentionSpec, engine: Engine) -> PageSpec:
    """The page of a layer whose keys and values vLLM describes by `spec`.

    Raises: ValueError for attention in which a query does not see all keys before it, or other ones
    too.
    """
    if type(spec) is not FullAttentionSpec:
        raise ValueError(
            f"h2o serves full attention in vLLM, and a layer of this model has the "
            f"{type(spec).__name__}"
        )
    if spec.head_size_v != spec.head_size:
        raise ValueError(
            f"h2o does not serve keys of {spec.head_size} elements with values of "
            f"{spec.head_size_v} in vLLM"
        )
    keys = one_key(spec.num_kv_heads, spec.head_size, spec.dtype)
    # Layers with a window get blocks of as many bytes, which are to be whole ones of their own.
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
    """The meter of some layers' pages, once their number is known; logs that number."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    pages = vllm_config.cache_config.num_gpu_blocks or 1
    size = kv_cache_dtype_str_to_dtype(vllm_config.cache_config.cache_dtype, model).itemsize
    full = model.max_model_len * spec.num_kv_heads * 2 * spec.head_size * size
    keys = one_key(spec.num_kv_heads, spec.head_size, model.dtype)
    budget = impls[0].engine.budget
    logger.info_once(
        "h2o: %d requests fit, where with all keys %d of the longest would: each takes %d bytes "
        "a layer instead of %d; of prompts read in chunks %d at a time are kept whole, beside the "
        "pages in at most %d bytes a layer",
        *(pages - 1, pages * spec.page_size_bytes // full, spec.page_size_bytes, full),
        *(budget.places, budget.whole_bytes(keys, impls[0].num_heads)),
    )
    if parallel._api_process_count > 1:
        logger.warning_once(
            "h2o: /metrics of several API processes has none of h2o's numbers: give "
            "--api-server-count 1 for them"
        )
    return Meter(
        Place(str(model.served_model_name), str(parallel.data_parallel_index), str(parallel.rank)),
        spec.page_size_bytes * len(impls),
        pages - 1,  # the first is vLLM's
        lambda: stores_of(impls),
        impls[0].engine.forks,
    )


# ---- Attention -------------------------------------------------------------------------------


class Engine(NamedTuple):
    """Everything that the layers of an engine share."""

    config: str
    """`VllmConfig.instance_id`"""
    budget: PageBudget
    has_windows: bool
    """in other layers, which are vLLM's own"""
    echoes: Any
    """`PromptEchoes`; None: prompts keep the scores that attention gives"""
    dealer: Any
    """`Dealer`; None: each layer has pages of its own"""
    stores: WeakValueDictionary[tuple[int, int], PageStore]
    """Stores of all layers together, by address and number of the pages; the layers hold them"""
    forks: Forks
    requests: dict[int, Request]
    """Requests that vLLM serves at the moment, by page"""


def engine_of(vllm_config: VllmConfig) -> Engine:
    """Raises: TypeError, ValueError for a wrong entry, and for what is not served."""
    budget, echoes, dealer = page_budget(vllm_config), None, None
    if not current_platform.is_cpu():
        logger.warning_once(
            "h2o: its attention on GPUs was tested in an emulation and has not run on a GPU: "
            "compare answers first, as examples/serve_on_gpus.py does"
        )
    if budget.config.score_by == "mean-echo":
        from h2o.vllm.echo_of_prompts import Dealer, PromptEchoes  # all that serves transformers

        echoes = PromptEchoes(vllm_config.model_config.hf_config, budget.config)
        dealer = Dealer(budget.layers) if budget.together else None
    set_up(vllm_config)
    stores = WeakValueDictionary[tuple[int, int], PageStore]()
    shared = budget, has_windows(vllm_config), echoes, dealer, stores, Forks()
    return Engine(vllm_config.instance_id, *shared, requests={})


class H2OAttentionBackend(CPUAttentionBackend):
    """vLLM's own on the CPU, but of h2o where the entry is there.

    The layers of an engine are made, then asked for their pages, then for a builder of metadata;
    only the first happens where vLLM says which config is current.
    """

    engine: Engine | None = None
    """That whose layers were made last; None: vLLM's own attention."""

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        vllm_config = get_current_vllm_config()
        if entry_of(vllm_config) is None:
            H2OAttentionBackend.engine = None
            return super().get_impl_cls()
        if cls.engine is None or cls.engine.config != vllm_config.instance_id:
            H2OAttentionBackend.engine = engine_of(vllm_config)
        return H2OAttention

    @classmethod
    def get_builder_cls(cls) -> type[AttentionMetadataBuilder]:
        return super().get_builder_cls() if cls.engine is None else BatchBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> Any:
        if cls.engine is not None and cls.engine.dealer is not None:
            return (KVCacheLayout.BLHNC,)  # a block's pages in all layers lie side by side
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
    """The backend that a user chooses on GPUs, `--attention-backend CUSTOM`."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def get_impl_cls(cls) -> type[AttentionImpl]:
        if entry_of(get_current_vllm_config()) is None:
            raise ValueError(
                "--attention-backend CUSTOM is h2o's, which wants an entry of --additional-config: "
                '{"h2o": {"heavy": 128, "recent": 128}}'
            )
        return super().get_impl_cls()

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []


Planned = Callable[[], Batch]
"""A forward pass for all layers. The plan depends on the stored prompts, which both runners name
after they have asked for it, so the first layer makes it."""


class BatchBuilder(AttentionMetadataBuilder[Planned]):
    """Plans a forward pass for all layers that have h2o's pages; vLLM's own for the others."""

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
        Requests.check_asked(vllm_config)
        self.begun = PartialPrompts(engine.budget.places)
        self.requests, self.forks = engine.requests, engine.forks
        self.forks.partial.append(self.begun.chunks)
        self.meter: Meter | None = None
        if engine.has_windows:
            logger.info_once("h2o: layers with a sliding window are vLLM's own")
        else:
            self.meter = meter_of(vllm_config, impls, kv_cache_spec)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Planned:
        rows = common_attn_metadata
        if rows.causal is not True:
            raise ValueError("h2o serves causal attention in vLLM, and this model's is not")
        if self.meter is not None:
            self.meter.stepped()
        # Of a GPU the host waits for one of these, the pages; lengths are exact without drafts.
        starts, lengths, pages = (
            x.tolist()
            for x in (
                *(rows.query_start_loc_cpu, rows.seq_lens_cpu_upper_bound),
                rows.block_table_tensor[:, 0],
            )
        )
        known = starts, lengths, pages, self.requests
        rest = self.begun, self.device, self.forks.replayed
        return functools.cache(functools.partial(plan, *known, *rest))


class H2OAttention(AttentionImpl[Planned]):
    """One layer's attention; vLLM's own where that has a window and others have not."""

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
            "layers with a sliding window, which bounds their keys already": sliding_window,
            "layers that share the keys of another": kv_sharing_target_layer_name,
            "learned sinks": sinks is not None,
            f"attention of the kind {kind.value}": kind != AttentionType.DECODER,
        }
        for what, present in refused.items():
            if present:
                raise ValueError(f"h2o does not serve {what} in vLLM")
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
        """Attention of query [n, H, D], key and value [n, G, D]; output [n, H, D]."""
        if attn_metadata is None:  # a run that only measures memory, or compiles
            return output.zero_()
        memory = kv_cache.data_ptr(), kv_cache.shape[0]
        if self.paged is None or self.memory != memory:
            self.paged, self.memory = self._pages(layer, kv_cache, key), memory
        self.paged.forward(query, key, value, attn_metadata(), output)
        return output

    def do_kv_cache_update(self, *args: Any) -> None:
        """Nothing: `forward` stores what is kept."""

    def _pages(self, layer: Any, kv_cache: Tensor, key: Tensor) -> PagedLayer:
        if not kv_cache[0].is_contiguous() or kv_cache.stride(0) % ALIGNMENT:
            raise ValueError(f"h2o: pages with strides {kv_cache.stride()}, wanted contiguous ones")
        index = extract_layer_index(layer.layer_name)
        engine, budget = self.engine, self.engine.budget
        keys = key[:1].transpose(0, 1)[None]
        if engine.dealer is None:
            page = budget.empty_page(index, keys)
            store = PageStore(kv_cache.flatten(1), page, alone=not engine.has_windows)
        else:
            store = self._store_of_all(kv_cache, keys)
        scores = engine.echoes and engine.echoes.of_layer(index, self.scale, self.softcap)
        known = store, budget, index, self.scale, self.softcap
        return PagedLayer(*known, scores, engine.dealer, engine.forks)

    def _store_of_all(self, kv_cache: Tensor, keys: Tensor) -> PageStore:
        """The pages of all layers together, whose bytes follow one another in each block."""
        budget, stores = self.engine.budget, self.engine.stores
        whole, pages = kv_cache.untyped_storage(), len(kv_cache)
        known, size = (whole.data_ptr(), pages), kv_cache.stride(0)
        store = stores.get(known)
        if store is None:
            if size != kv_cache[0].numel() * budget.layers or len(whole) < pages * size:
                raise ValueError(
                    f"h2o: blocks of {size} bytes, of which a layer has {kv_cache[0].numel()}: "
                    f"wanted those of {budget.layers} layers side by side"
                )
            memory = kv_cache.as_strided((pages, size), (size, 1), 0)
            store = stores[known] = PageStore(memory, budget.empty_pages(keys), budget.layers)
        return store
