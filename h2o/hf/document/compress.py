"""`h2o.compress_document`: reads a document into a cache, once or twice, for questions that come
later.

The keys that a later question needs often get no attention during prefill. With two readings the
model therefore reads the document a second time, as text to reproduce, with the full cache. To
reproduce a token it tends to attend to the keys that an answer would need, and the attention that
each key gets is its score (Kim et al., "KVzip", NeurIPS 2025, arXiv:2505.23416). The cache is then
cut to its budget once (`h2o.hf.document.cut_cache`).

Shape letters as in `h2o.hf`, and N columns of the document, Q columns of a pass, K tokens of the
longest row.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from typing_extensions import Unpack

from h2o import compat
from h2o.arguments.plain_values import check_choice, check_fraction, wrong
from h2o.arguments.torch_values import check_ids, check_mask
from h2o.compat_calls import ModelCall
from h2o.config import H2OConfig, resolve_config
from h2o.config.fields import ConfigFields, Pinned
from h2o.errors import UnsupportedError
from h2o.hf.cache.cache import H2OCache
from h2o.hf.cache_state import recurrent_states
from h2o.hf.conversation.state import NO_TEXT
from h2o.hf.document.cut_cache import cut_cache
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.model_traits.layer_kinds import counts_padding, has_states
from h2o.hf.model_traits.wrappers import (
    check_no_tuned_prompt,
    decoder_of,
    forward_accepts,
    input_device,
)
from h2o.hf.modes import COUNTS_PADDING, Mode, check_modes, config_modes
from h2o.hf.prompt import prompt_budget
from h2o.hf.rotary.length_dependent_rope import LengthDependentRope
from h2o.hf.support import model_modes, transformers_layers
from h2o.model_identity import vocabulary_of
from h2o.policy import Policy

REPEAT = "\n\nRepeat the previous context exactly.\n"
"""The request to repeat the document, in the paper's words."""
CHUNK = 2048
"""Columns of the document per forward pass."""
OVERLAP = 8
"""Tokens of the previous chunk with which each chunk of the repetition begins."""


@torch.no_grad()
def compress_document(
    model: Any,
    input_ids: Tensor,
    h2o_config: H2OConfig | None = None,
    *,
    readings: int = 1,
    tokenizer: Any = None,
    attention_mask: Tensor | None = None,
    repeat: str | Tensor | None = None,
    by_attention: float | None = None,
    pinned: Pinned = None,
    progress: Callable[[int, int], Any] | None = None,
    **parameters: Unpack[ConfigFields],
) -> H2OCache:
    """Read a document into a cache of a fixed budget, before its questions are known.

    ```python
    ids = tokenizer(document, return_tensors="pt").input_ids
    cache = h2o.compress_document(model, ids, budget=0.1)
    for question in questions:  # each with the document's ids before it
        model.generate(question, cache=cache.fork())
    ```

    One reading is one forward pass, after which the config's policy evicts. With `budget=` the
    policy is echo: it keeps the keys that the document's own queries would look up again. With two
    readings the model also repeats the document while every key is held. The cache is then cut to
    its budget once, by the attention of the repetition (KVzip). At about a tenth of the bytes two
    readings find more facts. They take more than twice the time and hold all keys in the model's
    dtype until then.

    With two readings, a fraction `by_attention` of each head's budget goes to the keys that the
    config's policy ranks highest after the first reading. Heads have equal budgets, or those of
    `head_shares`. The rest of all budgets goes to the keys, across all layers and heads, that
    received the most attention from any single query of the repetition. This cut protects up to 4
    of the config's recent keys in each head, later eviction up to 8. From then on the cache ranks
    keys by the largest attention.

    Args:
        model: a causal language model of transformers with attn_implementation="h2o".
        input_ids: token ids of the document, [B, N]. Later prompts must begin with the same ids, so
            include the beginning of the chat template if the prompts use one.
        h2o_config, parameters: as for `H2OCache`. Fractions are fractions of the document.
        readings: 1 or 2.
        tokenizer: encodes `repeat`. Needed for two readings unless `repeat` is token ids.
        attention_mask: [B, N], 0 at padding.
        repeat: the request to repeat the document in the second reading, a string or token ids
            [n]. None: the request of the KVzip paper.
        by_attention: fraction of the budget, in [0, 1], that goes by the config's own policy if
            there is a second reading (None: 0.5). A smaller fraction finds more facts but predicts
            the next words worse. At 4% of the bytes, 0.5, 0.25 and 0 found 58%, 65% and 69%
            of 26 facts, and lost 0.32, 0.35 and 0.46 nats per token in the continuations of other
            texts.
        pinned: as for `H2OCache`, in positions of the document.
        progress: called with the number of columns read so far and the total.

    Returns:
        A cache that can be saved, forked and continued like any other.

    Raises:
        TypeError: `input_ids` or `repeat` are not token ids.
        UnsupportedError: h2o does not support the model, or the model uses prompt tuning or aLoRA.
            With two readings also if positions are cache-relative, or the model is cut over several
            processes.
        ValueError: `readings` is neither 1 nor 2. The document is empty. The mask has another
            shape, or padding after a token in a model with sliding windows or states.
            `by_attention` is out of range. A second reading has no tokenizer, or the document
            leaves no positions of the model for its repetition. `repeat` or `by_attention` is given
            for a single reading.
    """
    readings = check_choice("readings", readings, (1, 2))
    for name, value in (("repeat", repeat), ("by_attention", by_attention)):
        if readings == 1 and value is not None:
            raise ValueError(f"{name} needs a second reading: pass readings=2, or leave out {name}")
    part = 0.5 if by_attention is None else check_fraction("by_attention", by_attention)
    if progress is not None and not callable(progress):
        raise TypeError(wrong("progress", progress, "a function (columns read, columns)"))
    check_no_tuned_prompt(model, "h2o.compress_document")
    config = resolve_config(h2o_config, parameters, compress_document).for_model(model)
    hint = 'pass tokenizer(document, return_tensors="pt").input_ids'
    vocabulary = vocabulary_of(model)
    ids = check_ids("input_ids", input_ids, vocabulary=vocabulary, hint=hint)
    mask = torch.ones_like(ids, dtype=torch.bool)
    if attention_mask is not None:
        mask = check_mask("attention_mask", attention_mask, ids.shape, "as input_ids")
    if readings == 2:
        check_modes({Mode.REREADING, *config_modes(config), *model_modes(model)})
    device = input_device(model)
    ids, mask = ids.to(device), mask.to(device)
    follows = bool((mask[:, :-1] & ~mask[:, 1:]).any())
    if follows and counts_padding(transformers_layers(model.config)):
        raise ValueError(f"attention_mask has padding after a token, and {COUNTS_PADDING}")
    progress = progress or (lambda done, columns: None)
    if readings == 2:
        request = _request(REPEAT if repeat is None else repeat, tokenizer, vocabulary)
        return _Reader(model, ids, mask, progress).read_twice(config, request, part, pinned)
    cache = H2OCache(model.config, config, pinned=pinned)
    _forward(model, cache, ids, mask, mask[:, :0])
    progress(ids.shape[1], ids.shape[1])
    return cache


def _request(repeat: Any, tokenizer: Any, vocabulary: float) -> Tensor:
    """Token ids [1, n] of the request for the repetition."""
    if isinstance(repeat, str):
        if tokenizer is None:
            raise ValueError(
                "readings=2 needs the tokenizer: pass tokenizer=, or token ids as repeat="
            )
        repeat = tokenizer(repeat, add_special_tokens=False, return_tensors="pt")["input_ids"]
    return check_ids("repeat", repeat, one_row=True, vocabulary=vocabulary).cpu()


class _Reader:
    """Reads and repeats a document, in a cache without a budget."""

    def __init__(
        self, model: Any, ids: Tensor, mask: Tensor, progress: Callable[[int, int], Any]
    ) -> None:
        """ids [B, N], and mask [B, N] bool, False at padding."""
        self.model, self.ids, self.mask = model, ids, mask
        self.columns = 2 * ids.shape[1]
        self.cache = H2OCache(model.config, H2OConfig.full())
        self.layers = [x for x in self.cache.layers if isinstance(x, H2OLayer)]
        self.progress = progress

    def read_twice(
        self, config: H2OConfig, request: Tensor, by_attention: float, pinned: Pinned
    ) -> H2OCache:
        """Read and repeat the document. Return a cache cut to the budget; see `compress_document`.

        `request`: token ids [1, n] of the request for the repetition.
        """
        empty = H2OCache(self.model.config, config.after_reading, pinned=pinned)
        lengths, N = self.mask.sum(1).tolist(), self.mask.shape[1]
        # These three raise before any reading.
        pinned_rows = prompt_budget.resolve_pins(empty.guard, lengths, lengths, self.mask, N)
        at_once = [self.tokens_at_once(n, request.shape[1]) for n in lengths]
        self.check_angles(request)
        attention = self.document(config.policy)
        read = self.cache.guard.state._replace(text=NO_TEXT.add(self.ids, self.mask))
        others = _other_layers(self.cache)
        largest = self.repetition(request.to(self.ids.device), at_once, others)
        rows = prompt_budget.PromptRows(lengths, lengths, pinned_rows)
        cache = cut_cache(self.cache, empty, rows, config, attention, largest, by_attention)
        _put_other_layers(cache, others)
        grows = cache.guard.grows
        cache.guard.put(
            prompt_budget.state_after_prompt(
                read, lengths, lengths, lengths, pinned_rows, grows=grows
            )
        )
        return cache

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
            _forward(self.model, self.cache, *tokens, self.mask[:, :begin])
            self.progress(min(N, begin + CHUNK), self.columns)
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
        rows = [row[real] for row, real in zip(self.ids, self.mask, strict=True)]
        passes = max(math.ceil(len(x) / n) for x, n in zip(rows, at_once, strict=True))
        N = self.ids.shape[1]
        for number in range(passes):
            pieces = []
            for row, n in zip(rows, at_once, strict=True):
                piece = row[max(0, number * n - OVERLAP) : (number + 1) * n]
                is_over = number * n >= len(row)
                pieces.append(row[:0] if is_over else torch.cat([request[0], piece]))
            # Left padding, between a document and its repetition, would enter windows and states.
            real = [torch.ones_like(piece, dtype=torch.bool) for piece in pieces]
            padded = (pad_sequence(x, batch_first=True) for x in (pieces, real))
            _forward(self.model, self.cache, *padded, self.mask, only_scores=True)
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


def _forward(
    model: Any,
    cache: Any,
    ids: Tensor,
    mask: Tensor,
    before: Tensor,
    *,
    only_scores: bool = False,
) -> None:
    """Run the model on ids [B, Q] with a mask [B, Q], without computing logits. The cache has seen
    the columns of the mask `before` [B, n]. `only_scores`: see `PassGuard.telling`."""
    decoder, whole = decoder_of(model), torch.cat([before, mask], 1)
    more = {}
    if forward_accepts(decoder, "position_ids"):
        positions = before.sum(1, keepdim=True) + mask.cumsum(1) - 1
        more["position_ids"] = positions.clamp(min=0)
    call = ModelCall.of(model, ids, whole, more.get("position_ids"))
    with cache.guard.telling(call, only_scores=only_scores):
        decoder(
            input_ids=ids,
            attention_mask=whole,
            use_cache=True,
            **compat.with_cache(cache),
            **more,
        )
