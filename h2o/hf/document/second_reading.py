"""`h2o.compress_document(readings=2)`: the model reads a document twice before the cache evicts.

Keys that a later question needs often get no attention while the document is read. The model
therefore repeats the document while all keys are held. To write each token again it attends to the
keys that an answer would attend to (Kim et al., "KVzip", NeurIPS 2025, arXiv:2505.23416). The cache
is then pruned once (`h2o.hf.document.pruning`).

Shape letters: B batch rows, G key/value heads, N columns of the document, Q of one forward pass,
K tokens of the longest row. A column is an index in the padded batch.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from h2o import compat
from h2o.config import H2OConfig
from h2o.config.fields import Pinned
from h2o.errors import UnsupportedError
from h2o.hf.cache.cache import H2OCache
from h2o.hf.document.pruning import prune_cache
from h2o.hf.families import tensor_parallel
from h2o.hf.families.layer_kinds import has_states
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.layers.steppers import ScoringStepper
from h2o.hf.prompt import prompt_budget
from h2o.hf.rotary.angles import AnglesByLength
from h2o.hf.store import slot_layout, states
from h2o.policy import Policy

Progress = Callable[[int, int], Any]
"""Called with the columns read so far and the columns to read."""

REPEAT = "\n\nRepeat the previous context exactly.\n"
"""The request for the repetition, in the paper's words."""
CHUNK = 2048
"""Columns of the document in one forward pass."""
OVERLAP = 8
"""Columns of the last piece with which the next piece of the repetition begins."""


def read_twice(
    model: Any,
    ids: Tensor,
    mask: Tensor,
    config: H2OConfig,
    *,
    tokenizer: Any,
    repeat: str | Tensor,
    by_attention: float,
    pinned: Pinned,
    progress: Progress,
) -> H2OCache:
    """The cache of a document ids [B, N] with a mask [B, N] bool; see `h2o.compress_document`."""
    if not 0 <= by_attention <= 1:
        raise ValueError(f"by_attention is {by_attention}, wanted a part of the budget in [0, 1]")
    if config.positions != "original":
        raise UnsupportedError('positions="cache_relative" supports one reading: give readings=1')
    request = _request(repeat, tokenizer).to(ids.device)
    reader = _Reader(model, ids, mask, progress)
    empty = H2OCache(model.config, config.after_reading, pinned=pinned)
    lengths, N = mask.sum(1).tolist(), mask.shape[1]
    prompt_budget.begin_pins(empty.guard, lengths, mask, N)  # which may refuse
    at_once = reader.tokens_repeated(request.shape[1])  # which may refuse
    reader.check_angles(request)
    attention = reader.document(config.policy)
    others = _other_layers(reader.cache)
    largest = reader.repetition(request, at_once, others)
    cache = prune_cache(reader.cache, empty, config, attention, largest, by_attention)
    _put_other_layers(cache, others)
    cache.guard.text.read(ids, mask, 0)
    return cache


def _positions(config: Any) -> int | None:
    """Number of positions of a model with this config; None where it has no limit."""
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    most: int | None = getattr(text, "max_position_embeddings", None)
    return None if rope.get("rope_type") == "dynamic" else most


def _request(repeat: str | Tensor, tokenizer: Any) -> Tensor:
    """Token ids [1, n] of the request for the repetition."""
    if isinstance(repeat, str):
        if tokenizer is None:
            raise ValueError(
                "readings=2 needs the tokenizer: give tokenizer=, or token ids as repeat"
            )
        repeat = tokenizer(repeat, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return torch.as_tensor(repeat, device="cpu").reshape(1, -1)


class _Reader:
    """A document in a cache that holds all of it."""

    def __init__(self, model: Any, ids: Tensor, mask: Tensor, progress: Progress) -> None:
        self.model, self.ids, self.mask = model, ids, mask
        self.columns = 2 * ids.shape[1]
        self.cache = H2OCache(model.config, H2OConfig.full())
        self.layers = [x for x in self.cache.layers if isinstance(x, H2OLayer)]
        self.progress = progress

    def check_angles(self, request: Tensor) -> None:
        """Raises UnsupportedError where the passes would not all have the same rotary angles."""
        N, angles = self.ids.shape[1], AnglesByLength(self.model)
        ends = [min(N, begin + CHUNK) for begin in range(0, N, CHUNK)]
        ends.append(N + request.shape[1] + min(N, CHUNK + OVERLAP))
        if len({angles.regime(end) for end in ends}) > 1:
            raise UnsupportedError(
                f"the rotary angles of this model change within the {ends[-1]} tokens of two "
                "readings: give readings=1"
            )
        angles.forget()

    def document(self, policy: Policy) -> list[Tensor]:
        """Reads it; scores [B, G, K] of each layer by this policy."""
        for layer in self.layers:
            layer.policy = policy._replace(value_weighted=False)
        N = self.ids.shape[1]
        for begin in range(0, N, CHUNK):
            piece = slice(begin, begin + CHUNK)
            self._pass(self.ids[:, piece], self.mask[:, piece], self.mask[:, :begin])
            self.progress(min(N, begin + CHUNK), self.columns)
        if any(layer.part != tensor_parallel.WHOLE for layer in self.layers):
            raise UnsupportedError(
                "readings=2 does not support a model that is cut over several processes"
            )
        return self._scores()

    def repetition(
        self, request: Tensor, at_once: list[int], others: dict[int, Any]
    ) -> list[Tensor]:
        """Repeats it; the largest attention [B, G, K] that each key got, of each layer. `at_once`:
        tokens of each row in one forward pass, whatever other rows there are."""
        for layer in self.layers:
            layer.policy = Policy(score_by="max")
            layer.slots.scores.zero_()
            layer.stepper = ScoringStepper()
        rows = [row[real] for row, real in zip(self.ids, self.mask, strict=True)]
        passes = max(math.ceil(len(x) / n) for x, n in zip(rows, at_once, strict=True))
        N = self.ids.shape[1]
        for number in range(passes):
            pieces = []
            for row, n in zip(rows, at_once, strict=True):
                piece = row[max(0, number * n - OVERLAP) : (number + 1) * n]
                is_over = number * n >= len(row)
                pieces.append(row[:0] if is_over else torch.cat([request[0], piece]))
            self._pass(*_pad(pieces), self.mask)
            _put_other_layers(self.cache, others)
            self.progress(N + min(N, (number + 1) * max(at_once)), self.columns)
        return self._scores()

    def tokens_repeated(self, request: int) -> list[int]:
        """Tokens of each row that are repeated at once: each time the positions behind the document
        are used anew, and a model has only so many."""
        return [self._tokens_repeated(n, request) for n in self.mask.sum(1).tolist()]

    def _tokens_repeated(self, tokens: int, request: int) -> int:
        positions = _positions(self.model.config)
        if positions is None or tokens + request + min(CHUNK + OVERLAP, tokens) <= positions:
            return CHUNK
        at_once = positions - tokens - request - OVERLAP
        if at_once < 1:
            raise ValueError(
                f"input_ids has {tokens} tokens, and the model's {positions} positions leave no "
                f"room to repeat them: give at most {positions - request - OVERLAP - 1} tokens, or "
                "readings=1"
            )
        return at_once

    def _pass(self, ids: Tensor, mask: Tensor, before: Tensor) -> None:
        forward(self.model, self.cache, ids, mask, before)

    def _scores(self) -> list[Tensor]:
        return [
            slot_layout.gather_held(x.slots, x.capacity.sizes, scores=0.0)[0] for x in self.layers
        ]


def _pad(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Token ids and mask [B, Q] of rows of different lengths, padded on the right: padding between
    a document and its repetition would stand in windows and states."""
    longest = max(map(len, rows))
    ids = torch.stack([nn.functional.pad(x, (0, longest - len(x))) for x in rows])
    real = [torch.ones_like(x, dtype=torch.bool) for x in rows]
    return ids, torch.stack([nn.functional.pad(x, (0, longest - len(x))) for x in real])


def _other_layers(cache: H2OCache) -> dict[int, Any]:
    """Copies of sliding windows and states, by layer."""
    others: dict[int, Any] = {}
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, H2OLayer):
            others[index] = copy.deepcopy(layer)
        elif has_states(layer):
            copies = {name: x.clone() for name, x in states.tensors_of(layer).items()}
            others[index] = copies, states.numbers_of(layer)
    return others


def _put_other_layers(cache: H2OCache, others: dict[int, Any]) -> None:
    """Restore the layers that `_other_layers` has copied."""
    for index, other in copy.deepcopy(others).items():
        if isinstance(cache.layers[index], H2OLayer):
            states.put(cache.layers[index], *other)
        else:
            cache.layers[index] = other


def forward(model: Any, cache: Any, ids: Tensor, mask: Tensor, before: Tensor) -> None:
    """Put columns ids [B, Q] with a mask [B, Q] into a cache, after columns of the mask `before`
    [B, n]. The model makes no logits."""
    model = model.base_model
    more = {}
    if compat.accepts(model.forward, "position_ids"):
        positions = before.sum(1, keepdim=True) + mask.cumsum(1) - 1
        more["position_ids"] = positions.clamp(min=0)
    model(
        ids,
        attention_mask=torch.cat([before, mask], 1),
        use_cache=True,
        **compat.with_cache(cache),
        **more,
    )
