"""Contents of a page: the budgets of a request in each layer, and the slots that they need.

vLLM has pages of one size. A request's page is as large as the widest layer needs for the longest
request; within it requests have budgets of their own. Where places are dealt over all layers
(`head_shares="echo"`) those of all layers are one page, as large as equal budgets of heads would
need.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from operator import index
from typing import Any

import torch

from h2o import ops
from h2o.budgets import check_amount
from h2o.config import PARAMETERS, H2OConfig, one_config
from h2o.config.head_budgets import expand_to_heads
from h2o.config.layer_plan import LayerPlan
from h2o.config.profile import Profile
from h2o.spans import Row, count, merge_spans, parse_spans
from h2o.vllm.page_store import ALIGNMENT, page_bytes

PINS = "h2o_pinned"
"""Argument in `vllm_xargs`: spans as text, 0:40,100:120, or as pairs of numbers; or "prompt" """

PREFIX = "h2o_prefix"
"""Argument in `vllm_xargs`: tokens of a prefix that is read and cut by itself, and held
in common with other requests that say so"""

CONTEXT = "h2o_context"
"""Argument in `vllm_xargs`: tokens of a context, after which the prompt is read token by token, so
that its log-likelihoods are those of the kept keys"""

OF_REQUESTS = ("h2o_heavy", "h2o_recent", PINS, PREFIX, CONTEXT)

PLACES = 2
"""Prompts that are kept whole at a time. vLLM reads one prompt in chunks after the other, unless
`--long-prefill-token-threshold` says otherwise."""


def served_budget_config(
    entry: Any, model: Any = None, *, can_deal: Callable[[], bool] = lambda: False
) -> H2OConfig:
    """The config that the entry `h2o` of `--additional-config` says: fields of `H2OConfig`, or
    {"preset": "robust", "budget": 256}, with "budget_unit" if wanted, and other fields; beside
    what `entry_places` reads. {"budget": 0.2} alone is what is recommended for the model.

    Args:
        model: a config of transformers, for whose model it is.
        can_deal: tells whether the places of a prompt can be dealt over all layers, whose pages are
            then one; asked where the entry wants that.

    Raises: TypeError, ValueError for what is no such thing, or is not served here.
    """
    if not isinstance(entry, Mapping):
        raise TypeError(
            f'additional_config["h2o"] must be an object such as {{"heavy": 64, "recent": 64}}, '
            f"not {json.dumps(entry, default=str)}"
        )
    places = entry_places(entry)
    config = _config(entry)
    if model is not None:
        config = _of_pages(config.for_model(model), model, can_deal, places)
    refused = {
        'positions="cache_relative"': (config.positions == "cache_relative", "keys come rotated"),
        'score_by="mean-echo" with prompts that are cut after each chunk': (
            config.score_by == "mean-echo" and places == 0,
            'a prompt\'s echo is known at its end; give score_by="mean"',
        ),
        'score_by="random"': (config.score_by == "random", "it is a baseline of h2o eval"),
    }
    for what, (present, reason) in refused.items():
        if present:
            raise ValueError(f"{what} is not served by h2o in vLLM: {reason}")
    return config


def _config(entry: Mapping[str, Any]) -> H2OConfig:
    """The config of an entry, before anything is refused."""
    fields = {name: _plain(x) for name, x in entry.items() if name not in ("cut", "whole_prompts")}
    if "preset" not in fields:
        return one_config(None, fields)
    preset = {name: fields.pop(name) for name in ("budget", "budget_unit") if name in fields}
    config = H2OConfig.preset(fields.pop("preset"), **preset)
    if unknown := sorted({*fields} - {*PARAMETERS}):
        raise TypeError(f"unknown parameter {unknown[0]!r}; there are {', '.join(PARAMETERS)}")
    return dataclasses.replace(config, **fields)


def _of_pages(
    config: H2OConfig, model: Any, can_deal: Callable[[], bool], places: int
) -> H2OConfig:
    """The config as pages can serve it. Where each layer has its own, equal for all, places cannot
    be dealt over these: heads share as the model's shipped profile says, or alike, and echo ranks
    within a head."""
    if config.head_shares != "echo" or (places and can_deal()):
        return config
    score_by = "mean-echo" if places else "mean"
    return dataclasses.replace(config, head_shares=Profile.shipped(model), score_by=score_by)


def one_key(heads: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    """[1, G, 1, D] that stands for the keys of a layer."""
    return torch.empty(1, heads, 1, size, dtype=dtype, device="cpu")


def entry_places(entry: Mapping[str, Any]) -> int:
    """How many prompts that are read in chunks are kept whole at a time until their end, where they
    are cut to their budget ("whole_prompts"); 0 for "cut": "chunk". Then nothing but pages is held,
    and each chunk is cut to the budget; but what is evicted depends on where vLLM cuts a prompt,
    hence on other requests.

    Raises: ValueError for other values.
    """
    cut = entry.get("cut", "prompt")
    if cut not in ("prompt", "chunk"):
        raise ValueError(f'cut is "prompt" or "chunk", not {json.dumps(cut, default=str)}')
    places = entry.get("whole_prompts", PLACES)
    if isinstance(places, bool) or not isinstance(places, int) or places < 1:
        raise ValueError(
            f"whole_prompts is {json.dumps(places, default=str)}, wanted a number from 1 on; "
            '"cut": "chunk" keeps none whole'
        )
    return 0 if cut == "chunk" else places


def with_budget(config: H2OConfig, arguments: dict[str, Any]) -> H2OConfig | None:
    """A config with the budget that a request's `vllm_xargs` say; None: they say none.

    Raises: TypeError, ValueError for a wrong one, which name what is wrong.
    """
    wanted = {name: x for name, x in arguments.items() if name.startswith("h2o_")}
    if unknown := sorted({*wanted} - {*OF_REQUESTS}):
        raise ValueError(f"{unknown[0]}: a request has {', '.join(OF_REQUESTS)}")
    for name in (PINS, PREFIX, CONTEXT):
        wanted.pop(name, None)
    if not wanted:
        return None
    amounts = {name.removeprefix("h2o_"): check_amount(name, x) for name, x in wanted.items()}
    return dataclasses.replace(config, **amounts)


def prefix_tokens(arguments: Mapping[str, Any], prompt: int) -> int:
    """The tokens of a prompt's prefix, `h2o_prefix` or `h2o_context` of a request's `vllm_xargs`; 0
    where none is said, and where it is all of a prompt of so many tokens.

    Raises: ValueError for what is no number of tokens, and for both.
    """
    said = {name: arguments[name] for name in (PREFIX, CONTEXT) if arguments.get(name) is not None}
    if len(said) > 1:
        raise ValueError(f"{PREFIX} and {CONTEXT} both say where a prompt is cut: give one")
    for name, prefix in said.items():
        if isinstance(prefix, bool) or not isinstance(prefix, int) or prefix < 1:
            raise ValueError(
                f"{name} must be a number of tokens from 1, such as 40, not {prefix!r}"
            )
        return prefix if prefix < prompt else 0
    return 0


def reads_by_token(arguments: Mapping[str, Any]) -> bool:
    """Whether what follows the prefix is read token by token."""
    return arguments.get(CONTEXT) is not None


def with_pins(config: H2OConfig, arguments: dict[str, Any], prompt: int | None = None) -> Row:
    """The spans that a request's `vllm_xargs` pin, `h2o_pinned`, of a prompt of so many tokens, if
    that is known, or of its prefix.

    Raises: TypeError, ValueError for a wrong one, which name what is wrong.
    """
    pinned = arguments.get(PINS)
    if pinned is None:
        return []
    if config.decay < 1:
        raise ValueError(f"{PINS}: of the server's scores nothing may fade, give decay=1")
    pinned = parse_spans(pinned) if isinstance(pinned, str) else _merge_pairs(pinned)
    if pinned == "system":
        raise ValueError(
            f"{PINS}: this process does not see chats, so give the system turn as a span, such as "
            "0:40, which h2o.system_span(tokenizer, messages) finds"
        )
    if pinned == "prompt":
        return [(0, prompt)] if prompt else []
    if pinned and prompt is not None and pinned[-1][1] > prompt:
        part = "prefix" if prefix_tokens(arguments, prompt + 1) else "prompt"
        raise ValueError(f"{PINS} ends at token {pinned[-1][1]}, and the {part} has {prompt}")
    return pinned


def _merge_pairs(pinned: Any) -> Row:
    """The spans that pairs of numbers say. Raises ValueError for anything else."""
    try:
        pairs = [(index(start), index(stop)) for start, stop in pinned]
    except (TypeError, ValueError):
        raise ValueError(
            f'{PINS} must be spans of tokens as text, such as "0:40,100:120", not {pinned!r}'
        ) from None
    return merge_spans(pairs)


def _fit(heavy: int, recent: int, room: int, pins: int) -> tuple[int, int]:
    """(heavy, recent) for which there is room, with so many pinned keys among the heavy ones."""
    recent = min(recent, room)
    heavy = min(heavy, room - recent)
    return (heavy, recent) if heavy >= pins else (pins, min(recent, room - pins))


def _plain(value: Any) -> Any:
    """Lists as tuples, which may be looked up."""
    return tuple(map(_plain, value)) if isinstance(value, list) else value


@dataclasses.dataclass(frozen=True)
class PageBudget:
    """The budgets of requests in each layer of a model, or of a tensor parallel rank's part."""

    config: H2OConfig
    layers: int
    longest: int
    """Tokens that a request may have, prompt and answer"""
    places: int = PLACES
    """Prompts that are kept whole at a time, see `entry_places`"""
    part: tuple[int, int] = (0, 1)
    """(i, n): the i-th of n equal parts of each layer's key/value heads is here"""

    @property
    def together(self) -> bool:
        """Whether the pages that a request has in all layers are one."""
        return self.config.shares_by_echo

    def by_head(
        self,
        layer: int,
        keys: torch.Tensor,
        prompt: int,
        config: H2OConfig | None = None,
        pinned: Row | None = None,
    ) -> list[tuple[int, int]]:
        """(heavy, recent) of each head of a layer, or one for all; never more than a page holds.
        Where pinned keys do not fit beside recent ones, fewer are recent.

        Args:
            keys: like [B, G, any, D].
            prompt: tokens of the request's prompt.
            config: of the request, by default the server's.
            pinned: of the request, for which there is room (`check_room`).

        Raises: ValueError for another number of layers or heads.
        """
        pins = count(pinned or [], self.config.sinks)
        kept = self._kept(layer, keys)
        budgets = self._by_head(config or self.config, layer, keys, prompt)
        if len(budgets) < len(kept):
            budgets = budgets * len(kept)
        rooms = [k - self.config.sinks for k in kept]
        return [_fit(*x, room, pins) for x, room in zip(budgets, rooms, strict=True)]

    def check_room(self, keys: torch.Tensor, pinned: Row) -> None:
        """Raises ValueError where a page has no room for so many pinned keys and a newest one."""
        pins = count(pinned, self.config.sinks)
        least = min(k for layer in range(self.layers) for k in self._kept(layer, keys))
        if pinned and self.config.sinks + pins >= least:
            raise ValueError(
                f"{pins} pinned keys do not fit in a page, of which a head holds {least} keys, "
                f"{self.config.sinks} sinks among them: pin fewer tokens, or give the server a "
                f"budget of {self.config.sinks + pins + 1} or more"
            )

    def _by_head(
        self, config: H2OConfig, layer: int, keys: torch.Tensor, prompt: int
    ) -> list[tuple[int, int]]:
        plan = self.layer_plan(config, layer, keys)
        return expand_to_heads([plan.head_tokens(prompt)], keys.shape[1], self.part)[0]

    def layer_plan(self, config: H2OConfig, layer: int, keys: torch.Tensor) -> LayerPlan:
        """The budgets of a layer for keys like these."""
        plan = LayerPlan.of(config, layer, self.layers)
        return plan.for_keys(keys.shape[-1], keys.element_size())

    def _kept(self, layer: int, keys: torch.Tensor) -> list[int]:
        """Keys of each head, or of all, that a page holds."""
        budgets = self._by_head(self.config, layer, keys, self.longest)
        return [self.config.sinks + sum(budget) for budget in budgets]

    def empty_page(self, layer: int, keys: torch.Tensor) -> ops.Slots:
        """Slots of one row for what the longest request keeps in a layer, and its next token."""
        sizes = [self.slots(k) for k in self._kept(layer, keys)]
        return self._new_slots(keys[:1], sizes[0] if len(sizes) == 1 else sizes)

    def empty_pages(self, keys: torch.Tensor) -> ops.Slots:
        """An empty page of all layers: their heads one after the other on one axis, with
        seen_tokens [1, L] and starts [1, L * G + 1]."""
        sizes: list[int] = []
        for layer in range(self.layers):
            each = [self.slots(k) for k in self._kept(layer, keys)]
            sizes += each * (keys.shape[1] // len(each))
        slots = self._new_slots(keys[:1, :1].expand(-1, len(sizes), -1, -1), sizes)
        assert slots.starts is not None
        lengths = slots.seen_tokens.expand(1, self.layers).clone()
        return slots._replace(seen_tokens=lengths, starts=slots.starts[None])

    def slots(self, budget: int) -> int:
        """Slots of a head that keeps so many keys, of any request, and its next token."""
        return min(budget, self.longest) + 1

    def _new_slots(self, keys: torch.Tensor, sizes: int | list[int]) -> ops.Slots:
        config = self.config
        return ops.new_slots(
            keys, sizes, value_weighted=config.value_weighted, kv_dtype=config.kv_dtype
        )

    def whole(self, keys: torch.Tensor) -> ops.Slots:
        """Slots without a budget, of one layer, for as many of the longest prompts as are kept
        whole."""
        keys = keys.new_empty(self.places, *keys.shape[1:])
        return ops.new_slots(keys, self.longest, value_weighted=self.config.value_weighted)

    def whole_bytes(self, keys: torch.Tensor, heads: int) -> int:
        """Bytes of these, with the queries of so many heads where prompts are ranked by echo."""
        if self.places == 0:
            return 0
        slots = sum(x.nbytes for x in self.whole(keys.to("meta")) if x is not None)
        row = heads * keys.shape[-1] * keys.element_size()
        return slots + (self.config.score_by == "mean-echo") * self.places * self.longest * row

    def page_bytes(self, keys: torch.Tensor) -> int:
        """Bytes of a page: what the widest layer needs on any rank, since vLLM has all the same; or
        a layer's part of what all need together."""
        if self.together:
            part = -(-page_bytes(self.empty_pages(keys)) // self.layers)
            return -(-part // ALIGNMENT) * ALIGNMENT
        ranks = self.part[1]
        parts = [dataclasses.replace(self, part=(rank, ranks)) for rank in range(ranks)]
        return max(page_bytes(x.empty_page(i, keys)) for x in parts for i in range(self.layers))
