"""`h2o.compress_document(readings=2)`: scores a document's keys by having the model repeat it.

The keys that a later question needs often get no attention during prefill. The model therefore
reads the document a second time, as text to reproduce, with the full cache. To reproduce a token it
tends to attend to the keys that an answer would need, and the attention that each key gets is its
score (Kim et al., "KVzip", NeurIPS 2025, arXiv:2505.23416). The cache is then cut to its budget
once (`h2o.hf.document.cut_cache`).

Shape letters as in `h2o.hf`, and N columns of the document, Q columns of a pass, K tokens of the
longest row.
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
from h2o.hf.cache_state import recurrent_states
from h2o.hf.document.cut_cache import cut_cache
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.layers.pass_runners import ScoringRunner
from h2o.hf.model_traits import tensor_parallel
from h2o.hf.model_traits.layer_kinds import has_states
from h2o.hf.prompt import prompt_budget
from h2o.hf.rotary.length_dependent_rope import LengthDependentRope
from h2o.number_checks import is_number
from h2o.policy import Policy

Progress = Callable[[int, int], Any]
"""Called with the number of columns read so far and the total."""

REPEAT = "\n\nRepeat the previous context exactly.\n"
"""The request to repeat the document, in the paper's words."""
CHUNK = 2048
"""Columns of the document per forward pass."""
OVERLAP = 8
"""Tokens of the previous chunk with which each chunk of the repetition begins."""


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
    """Make the cache of a document with ids [B, N] and mask [B, N] bool; see
    `h2o.compress_document`."""
    if not is_number(by_attention) or not 0 <= by_attention <= 1:
        raise ValueError(f"by_attention must be a fraction in [0, 1], not {by_attention!r}")
    if config.positions != "original":
        raise UnsupportedError(
            'positions="cache_relative" does not support a second reading: pass readings=1'
        )
    request = _request(repeat, tokenizer).to(ids.device)
    reader = _Reader(model, ids, mask, progress)
    empty = H2OCache(model.config, config.after_reading, pinned=pinned)
    lengths, N = mask.sum(1).tolist(), mask.shape[1]
    prompt_budget.begin_pins(empty.guard, lengths, mask, N)  # may raise, so before any reading
    at_once = [reader.tokens_at_once(n, request.shape[1]) for n in lengths]  # may raise as well
    reader.check_angles(request)
    attention = reader.document(config.policy)
    others = _other_layers(reader.cache)
    largest = reader.repetition(request, at_once, others)
    cache = cut_cache(reader.cache, empty, config, attention, largest, by_attention)
    _put_other_layers(cache, others)
    cache.guard.text.record_ids(ids, mask, 0)
    return cache


def _request(repeat: str | Tensor, tokenizer: Any) -> Tensor:
    """Token ids [1, n] of the request for the repetition."""
    if isinstance(repeat, str):
        if tokenizer is None:
            raise ValueError(
                "readings=2 needs the tokenizer: pass tokenizer=, or token ids as repeat="
            )
        repeat = tokenizer(repeat, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return torch.as_tensor(repeat, device="cpu").reshape(1, -1)


class _Reader:
    """Reads and repeats a document, in a cache without a budget."""

    def __init__(self, model: Any, ids: Tensor, mask: Tensor, progress: Progress) -> None:
        self.model, self.ids, self.mask = model, ids, mask
        self.columns = 2 * ids.shape[1]
        self.cache = H2OCache(model.config, H2OConfig.full())
        self.layers = [x for x in self.cache.layers if isinstance(x, H2OLayer)]
        self.progress = progress

    def check_angles(self, request: Tensor) -> None:
        """Raise UnsupportedError if the rotary angles would change between the passes."""
        N, angles = self.ids.shape[1], LengthDependentRope(self.model)
        ends = [min(N, begin + CHUNK) for begin in range(0, N, CHUNK)]
        ends.append(N + request.shape[1] + min(N, CHUNK + OVERLAP))
        if len({angles.regime(end) for end in ends}) > 1:
            raise UnsupportedError(
                f"the rotary angles of this model change within the {ends[-1]} tokens of two "
                "readings: pass readings=1"
            )
        angles.forget()

    def document(self, policy: Policy) -> list[Tensor]:
        """Read the document, and return each layer's scores [B, G, K] by a policy."""
        for layer in self.layers:
            layer.policy = policy._replace(value_weighted=False)
        N = self.ids.shape[1]
        for begin in range(0, N, CHUNK):
            piece = slice(begin, begin + CHUNK)
            tokens = self.ids[:, piece], self.mask[:, piece]
            forward(self.model, self.cache, *tokens, self.mask[:, :begin])
            self.progress(min(N, begin + CHUNK), self.columns)
        if any(layer.part != tensor_parallel.WHOLE for layer in self.layers):
            raise UnsupportedError(
                "readings=2 does not support a model that is cut over several processes: pass "
                "readings=1"
            )
        return [layer.kept().scores for layer in self.layers]

    def repetition(
        self, request: Tensor, at_once: list[int], others: dict[int, Any]
    ) -> list[Tensor]:
        """Repeat the document, and return the largest attention [B, G, K] that each layer's keys
        received.

        Args:
            request: token ids [1, n] of the request for the repetition.
            at_once: tokens of each row per forward pass. They do not depend on the other rows, so
                that a row in a batch gives the same scores as the row alone.
            others: sliding windows and states after the document (`_other_layers`), which are
                restored after each pass.
        """
        for layer in self.layers:
            layer.policy = Policy(score_by="max")
            layer.slots.scores.zero_()
            layer.runner = ScoringRunner()
        rows = [row[real] for row, real in zip(self.ids, self.mask, strict=True)]
        passes = max(math.ceil(len(x) / n) for x, n in zip(rows, at_once, strict=True))
        N = self.ids.shape[1]
        for number in range(passes):
            pieces = []
            for row, n in zip(rows, at_once, strict=True):
                piece = row[max(0, number * n - OVERLAP) : (number + 1) * n]
                is_over = number * n >= len(row)
                pieces.append(row[:0] if is_over else torch.cat([request[0], piece]))
            forward(self.model, self.cache, *_pad(pieces), self.mask)
            _put_other_layers(self.cache, others)
            self.progress(N + min(N, (number + 1) * max(at_once)), self.columns)
        return [layer.kept().scores for layer in self.layers]

    def tokens_at_once(self, tokens: int, request: int) -> int:
        """Tokens to repeat per forward pass, for a row of `tokens` tokens. Every pass uses the
        positions after the document again, and the model has a limited number of positions."""
        text = self.model.config.get_text_config(decoder=True)
        positions: int | None = getattr(text, "max_position_embeddings", None)
        rope = getattr(text, "rope_parameters", None) or {}
        if positions is None or rope.get("rope_type") == "dynamic":
            return CHUNK
        if tokens + request + min(CHUNK + OVERLAP, tokens) <= positions:
            return CHUNK
        at_once = positions - tokens - request - OVERLAP
        if at_once < 1:
            raise ValueError(
                f"input_ids has {tokens} tokens, and the model's {positions} positions leave no "
                f"room to repeat them: pass at most {positions - request - OVERLAP - 1} tokens, or "
                "readings=1"
            )
        return at_once


def _pad(rows: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Token ids and mask [B, Q] of rows of different lengths, padded on the right. Left padding,
    between a document and its repetition, would enter sliding windows and states."""
    longest = max(map(len, rows))
    ids = torch.stack([nn.functional.pad(x, (0, longest - len(x))) for x in rows])
    real = [torch.ones_like(x, dtype=torch.bool) for x in rows]
    return ids, torch.stack([nn.functional.pad(x, (0, longest - len(x))) for x in real])


def _other_layers(cache: H2OCache) -> dict[int, Any]:
    """Copies of sliding windows and states by layer number."""
    others: dict[int, Any] = {}
    for index, layer in enumerate(cache.layers):
        if not isinstance(layer, H2OLayer):
            others[index] = copy.deepcopy(layer)
        elif has_states(layer):
            copies = {name: x.clone() for name, x in recurrent_states.tensors_of(layer).items()}
            others[index] = copies, recurrent_states.numbers_of(layer)
    return others


def _put_other_layers(cache: H2OCache, others: dict[int, Any]) -> None:
    """Restore the layers that `_other_layers` copied."""
    for index, other in copy.deepcopy(others).items():
        if isinstance(cache.layers[index], H2OLayer):
            recurrent_states.put(cache.layers[index], *other)
        else:
            cache.layers[index] = other


def forward(model: Any, cache: Any, ids: Tensor, mask: Tensor, before: Tensor) -> None:
    """Run the model on ids [B, Q] with a mask [B, Q], without computing logits. The cache has seen
    the columns of the mask `before` [B, n]."""
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
