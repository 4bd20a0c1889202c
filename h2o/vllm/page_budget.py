"""Contents of a page: the budgets of a request in each layer, and the slots that they need.

All of vLLM's pages have the same size. A page is as large as the largest layer needs for the
longest request. Within a page, requests can have their own budgets. If budgets are divided across
all layers (`head_shares="echo"`), the layers of a request share one page. It has the size that
equal budgets for all heads would need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch

from h2o import ops
from h2o.config import H2OConfig
from h2o.config.layer_plan import LayerPlan, expand_to_heads
from h2o.kv_dtype import has_four_bit_keys
from h2o.quantization import SMOOTHING_TOKENS
from h2o.spans import Row, count
from h2o.vllm.config_entry import WHOLE_PROMPTS
from h2o.vllm.page_store import ALIGNMENT, page_bytes
from h2o.vllm.paged_request import PagedRequest


def example_keys(heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """A tensor [1, G, 1, D] with the shape and dtype of a layer's keys."""
    return torch.empty(1, heads, 1, size, dtype=dtype, device="cpu")


def _reduce_to_room(heavy: int, recent: int, room: int, pins: int) -> tuple[int, int]:
    """Reduce (heavy, recent) to `room` keys, of which at least `pins` are heavy."""
    recent = min(recent, room)
    heavy = min(heavy, room - recent)
    return (heavy, recent) if heavy >= pins else (pins, min(recent, room - pins))


def _without_heavy(heavy: int, recent: int, page: int, config: H2OConfig) -> str:
    """What to change about a request whose recent keys fill a page."""
    if config.needs_prompt_length and config.min_tokens > page:
        return (
            f"the server's min_tokens={config.min_tokens} raises fractions to {heavy} heavy and "
            f"{recent} recent keys, but a page has {page} keys, which would all be recent. Give "
            'h2o_heavy and h2o_recent as numbers of tokens, or start the server with "min_tokens": '
            f"0 or a budget of {config.min_tokens} or more"
        )
    return (
        f"{recent} recent keys fill a page of {page} keys, so that none of {heavy} heavy keys "
        "would fit. Give a smaller h2o_recent, or start the server with a larger budget"
    )


@dataclasses.dataclass(frozen=True)
class PageBudget:
    """The budgets of requests in each layer of a model, or in a tensor parallel rank's part."""

    config: H2OConfig
    layers: int
    longest: int
    """Maximum number of tokens of a request, prompt and answer together"""
    buffers: int = WHOLE_PROMPTS
    """Number of prompts that are kept whole at a time, see `whole_prompts_of`"""
    part: tuple[int, int] = (0, 1)
    """(i, n): this rank has the i-th of n equal parts of each layer's key/value heads"""

    @property
    def has_shared_page(self) -> bool:
        """Whether all layers of a request share one page."""
        return self.config.shares_by_echo

    def by_head(
        self, layer: int, keys: torch.Tensor, request: PagedRequest
    ) -> list[tuple[int, int]]:
        """(heavy, recent) of each head of a layer, or one pair for all; never more than a page
        holds. If pinned and recent keys do not fit together, fewer recent keys are kept.

        Args:
            keys: tensor [B, G, any, D] like the keys of the layer.
            request: its pinned spans have room (`check_room`).

        Raises: ValueError for a config of another number of layers or heads.
        """
        pins, sinks = count(request.pinned, self.config.sinks), self.config.sinks
        wanted = self._kept_and_wanted(request.config or self.config, layer, keys, request.first)
        return [_reduce_to_room(*budget, kept - sinks, pins) for kept, budget in wanted]

    def check_room(self, keys: torch.Tensor, pinned: Row) -> None:
        """Raise ValueError unless a page has room for the pinned keys and one recent key, on every
        rank."""
        pins = count(pinned, self.config.sinks)
        layers = range(self.layers)
        least = min(k for part in self._parts() for i in layers for k in part._kept(i, keys))
        if pinned and self.config.sinks + pins >= least:
            raise ValueError(
                f"{pins} pinned keys do not fit in a page, where a head has {least} keys including "
                f"{self.config.sinks} sinks: pin fewer tokens, or give the server a budget of "
                f"{self.config.sinks + pins + 1} or more"
            )

    def why_no_heavy(self, keys: torch.Tensor, prompt: int, config: H2OConfig) -> str:
        """The reason why a request's own budget keeps no heavy hitters in some page, although it
        asks for some: its recent keys fill the page. Empty if there is no such page."""
        for layer in range(self.layers):
            for kept, (heavy, recent) in self._kept_and_wanted(config, layer, keys, prompt):
                if heavy and recent >= kept - self.config.sinks:
                    return _without_heavy(heavy, recent, kept, config)
        return ""

    def _kept_and_wanted(
        self, config: H2OConfig, layer: int, keys: torch.Tensor, prompt: int
    ) -> Iterator[tuple[int, tuple[int, int]]]:
        """Number of keys that a page holds, and (heavy, recent) that a request's config asks for,
        for each head, or once for all heads."""
        kept, wanted = self._kept(layer, keys), self._by_head(config, layer, keys, prompt)
        heads = max(len(kept), len(wanted))
        return zip(kept * (heads // len(kept)), wanted * (heads // len(wanted)), strict=True)

    def _by_head(
        self, config: H2OConfig, layer: int, keys: torch.Tensor, prompt: int
    ) -> list[tuple[int, int]]:
        plan = self.layer_plan(config, layer, keys)
        return expand_to_heads([plan.head_tokens(prompt)], keys.shape[1], self.part)[0]

    def layer_plan(self, config: H2OConfig, layer: int, keys: torch.Tensor) -> LayerPlan:
        """The plan of a layer with keys of this shape and dtype."""
        plan = LayerPlan.of(config, layer, self.layers)
        return plan.for_keys(keys.shape[-1], keys.element_size())

    def _kept(self, layer: int, keys: torch.Tensor) -> list[int]:
        """Number of keys that a page holds for each head, or one number for all heads."""
        budgets = self._by_head(self.config, layer, keys, self.longest)
        return [self.config.sinks + sum(budget) for budget in budgets]

    def empty_page(self, layer: int, keys: torch.Tensor) -> ops.Slots:
        """Slots of one row, for the keys of the longest request in a layer and its next token."""
        sizes = [self.slots(k) for k in self._kept(layer, keys)]
        return self._new_slots(keys[:1], sizes[0] if len(sizes) == 1 else sizes)

    def empty_pages(self, keys: torch.Tensor) -> ops.Slots:
        """An empty page for all layers. The heads of all layers are on one axis; seen_tokens is
        [1, L] and starts is [1, L * G + 1]."""
        sizes: list[int] = []
        for layer in range(self.layers):
            each = [self.slots(k) for k in self._kept(layer, keys)]
            sizes += each * (keys.shape[1] // len(each))
        slots = self._new_slots(keys[:1, :1].expand(-1, len(sizes), -1, -1), sizes)
        assert slots.starts is not None
        lengths = slots.seen_tokens.expand(1, self.layers).clone()
        return slots._replace(seen_tokens=lengths, starts=slots.starts[None])

    def slots(self, budget: int) -> int:
        """Number of slots for a head that keeps `budget` keys, including one for the next token."""
        return min(budget, self.longest) + 1

    def _new_slots(self, keys: torch.Tensor, sizes: int | list[int]) -> ops.Slots:
        config = self.config
        return ops.new_slots(
            keys, sizes, value_weighted=config.value_weighted, kv_dtype=config.kv_dtype,
            offsets=True,
        )  # fmt: skip

    def whole(self, keys: torch.Tensor) -> ops.Slots:
        """Slots of one layer for the prompts that are kept whole: `buffers` rows of the longest
        length, without a budget."""
        keys = keys.new_empty(self.buffers, *keys.shape[1:])
        return ops.new_slots(keys, self.longest, value_weighted=self.config.value_weighted)

    def whole_bytes(self, keys: torch.Tensor, heads: int) -> int:
        """Bytes of `whole`, and of the queries of `heads` heads if they are kept."""
        if self.buffers == 0:
            return 0
        slots = sum(x.nbytes for x in self.whole(keys.to("meta")) if x is not None)
        row = heads * keys.shape[-1] * keys.element_size()
        return slots + self.buffers * self.kept_queries * row

    @property
    def kept_queries(self) -> int:
        """Number of first tokens of a prompt kept whole whose queries are kept: all for echo, and
        otherwise those that determine the smoothing."""
        if self.config.score_by == "mean-echo":
            return self.longest
        return min(self.longest, has_four_bit_keys(self.config.kv_dtype) * SMOOTHING_TOKENS)

    def page_bytes(self, keys: torch.Tensor) -> int:
        """Bytes of a layer's page. All pages have the size that the largest layer needs on any
        rank, since vLLM requires equal sizes. If layers share a page, the result is one layer's
        part of that page."""
        if self.has_shared_page:
            part = -(-page_bytes(self.empty_pages(keys)) // self.layers)
            return -(-part // ALIGNMENT) * ALIGNMENT
        layers = range(self.layers)
        return max(page_bytes(x.empty_page(i, keys)) for x in self._parts() for i in layers)

    def _parts(self) -> list[PageBudget]:
        """The budgets of each rank, for values that must be the same on all ranks."""
        ranks = self.part[1]
        return [dataclasses.replace(self, part=(rank, ranks)) for rank in range(ranks)]
