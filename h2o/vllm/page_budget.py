"""What a page holds: the budgets of a request in each layer, and the slots that they need.

vLLM has pages of one size. A request's page is as large as the widest layer needs for the longest
request; within it requests have budgets of their own.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import torch

from h2o import ops
from h2o.config import H2OConfig, one_config
from h2o.head_budgets import levelled
from h2o.vllm.page_store import page_bytes

__all__ = ["PageBudget", "config_of", "cuts_chunks"]


def config_of(entry: Any) -> H2OConfig:
    """The config that the entry `h2o` of `--additional-config` says: fields of `H2OConfig`, or
    {"preset": "robust", "budget": 256}, with "of" if wanted; beside them "cut" (`cuts_chunks`).

    Raises: TypeError, ValueError for what is no such thing, or is not served here.
    """
    if not isinstance(entry, Mapping):
        raise TypeError(
            f'additional_config["h2o"] must be an object such as {{"heavy": 64, "recent": 64}}, '
            f"not {json.dumps(entry, default=str)}"
        )
    cuts_chunks(entry)
    fields = {name: _plain(value) for name, value in entry.items() if name != "cut"}
    preset = fields.pop("preset", None)
    config = one_config(None, fields) if preset is None else H2OConfig.preset(preset, **fields)
    refused = {
        'positions="rolled"': (config.positions == "rolled", "keys come rotated"),
        'rank_by="echo"': (config.by_echo, "queries come rotated, and none is remembered"),
        f"shares={config.shares!r:.40}": (
            config.shares_by_rank,
            "a layer's page cannot grow by what the others' keys rank",
        ),
    }
    for what, (present, reason) in refused.items():
        if present:
            raise ValueError(f"{what} is not served by h2o in vLLM: {reason}")
    return config


def cuts_chunks(entry: Mapping[str, Any]) -> bool:
    """Whether the entry `h2o` wants a prompt that is read in chunks cut to its budget after each of
    them ("cut": "chunk"), not once at its end ("prompt", the default). Then nothing but pages is
    held; but what is evicted depends on where vLLM cuts a prompt, hence on other requests.

    Raises: ValueError for another value.
    """
    cut = entry.get("cut", "prompt")
    if cut not in ("prompt", "chunk"):
        raise ValueError(f'cut is "prompt" or "chunk", not {json.dumps(cut, default=str)}')
    return cut == "chunk"


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
    part: tuple[int, int] = (0, 1)
    """(i, n): the i-th of n equal parts of each layer's key/value heads is here"""

    def by_head(
        self, layer: int, keys: torch.Tensor, prompt: int, config: H2OConfig | None = None
    ) -> list[tuple[int, int]]:
        """(heavy, recent) of each head of a layer, or one for all; never more than a page holds.

        Args:
            keys: like [B, G, any, D].
            prompt: tokens of the request's prompt.
            config: of the request, by default the server's.

        Raises: ValueError for another number of layers or heads.
        """
        kept = self._kept(layer, keys)
        budgets = self._by_head(config or self.config, layer, keys, prompt)
        if len(budgets) < len(kept):
            budgets = budgets * len(kept)
        rooms = [k - self.config.sinks for k in kept]
        return [
            (min(heavy, room - min(recent, room)), min(recent, room))
            for (heavy, recent), room in zip(budgets, rooms, strict=True)
        ]

    def _by_head(
        self, config: H2OConfig, layer: int, keys: torch.Tensor, prompt: int
    ) -> list[tuple[int, int]]:
        of_layer = config.for_layer(layer, self.layers)
        of_layer = of_layer.for_keys(keys.shape[-1], keys.element_size())
        return levelled([of_layer.head_tokens(prompt)], keys.shape[1], self.part)[0]

    def _kept(self, layer: int, keys: torch.Tensor) -> list[int]:
        """Keys of each head, or of all, that a page holds."""
        budgets = self._by_head(self.config, layer, keys, self.longest)
        return [self.config.sinks + sum(budget) for budget in budgets]

    def empty_page(self, layer: int, keys: torch.Tensor) -> ops.Slots:
        """Slots of one row for what the longest request keeps in a layer, and its next token."""
        sizes = [min(k, self.longest) + 1 for k in self._kept(layer, keys)]
        return ops.new_slots(
            keys[:1],
            sizes[0] if len(sizes) == 1 else sizes,
            value_weighted=self.config.value_weighted,
            kv_dtype=self.config.kv_dtype,
            merge=self.config.merge is not None,
        )

    def page_bytes(self, keys: torch.Tensor) -> int:
        """Bytes of a page: what the widest layer needs on any rank, since vLLM has all the same."""
        ranks = self.part[1]
        parts = [dataclasses.replace(self, part=(rank, ranks)) for rank in range(ranks)]
        return max(page_bytes(x.empty_page(i, keys)) for x in parts for i in range(self.layers))
