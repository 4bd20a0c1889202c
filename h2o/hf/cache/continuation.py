"""Checks that new tokens continue the text that a cache has seen.

`generate()` drops as many input_ids as the cache has seen, without comparing them. If the caller
passes the prompt again, or another text, its beginning is therefore silently lost and the rest is
taken for a continuation of the old text. The positions, the attention mask or the dropped ids
(`h2o.hf.cache_state.seen_text`) of the forward pass reveal such a mistake.

Shape letters as in `h2o.hf`, and n padded columns.
"""

from __future__ import annotations

import functools
import json
import warnings
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from h2o.compat import NewText, new_text
from h2o.errors import UnsupportedError
from h2o.hf.cache_state.pass_guard import WITHOUT_CACHE, PassGuard
from h2o.hf.cache_state.seen_text import SeenText
from h2o.model_identity import difference, rotary_difference


def check_text(cache: Any, seen: int, new: int) -> None:
    """Check the mask, positions and ids of a forward pass with `new` columns.

    This runs before any layer stores the tokens. For a first pass, record how the model counts
    positions.

    Raises:
        UnsupportedError: a wrapper inserts embeddings before each decode step.
        ValueError: the cache was made for another model. Or the new tokens overlap the text that
            the cache has seen, follow a different text, or change the rotary angles of earlier
            tokens. Or the mask disagrees with the cache about earlier padding, or sliding windows
            or states would count padding as text.
    """
    guard = cache.guard
    guard.padding_of_pass = None
    if guard.has_independent_rows:
        return
    if guard.drops_cache_after is not None:
        guard.check_angles(seen, new)
    text = new_text(cache)
    if text is None:
        guard.text.mark_unknown()
        return
    _check_model(cache, text.config)
    if seen:
        _check_continuation(cache, seen, text, new)
    else:
        guard.skips_pads = _skips_pads(text, new)
    if guard.counts_padding and not (
        seen and _is_step_on_gpu(text, new) and not guard.ends_in_padding
    ):
        guard.padding_of_pass = _check_padding(guard, text.mask, seen, new)
    guard.text.record_ids(text.ids, text.mask, seen)


def _check_model(cache: Any, config: Any) -> None:
    """Raise ValueError if a cache was made for another model than the one with this config."""
    if not isinstance(config, PreTrainedConfig) or id(config) == cache.guard.checked_config:
        return
    reason = difference(config, cache.model_shape, {})
    reason = reason or rotary_difference(config, json.loads(cache.model_settings))
    if reason:
        raise ValueError(
            f"this cache was made for another model: {reason}. Make the H2OCache from the config "
            "of the model that uses it"
        )
    cache.guard.checked_config = id(config)  # comparing takes longer than a decode step's checks


def check_ids(text: SeenText, ids: Tensor, mask: Tensor | None = None) -> None:
    """Check that the token ids [B, n] are those of the n columns that a cache has seen.

    Raises:
        ValueError: a row has different ids.
    """
    if rows := text.differing_rows(ids, mask):
        raise ValueError(
            f"the first {ids.shape[1]} tokens of row {rows[0]} are not the ones that the cache has "
            "seen. input_ids must be everything seen so far, followed by new tokens. Append the "
            "ids of the new turn to the ids that generate() returned: a chat template that drops "
            "earlier reasoning, or tokenizing the answer again, gives different ids. After a beam "
            "search the cache holds the beams that were searched last, not the returned sequences. "
            "To start another text call cache.reset(), or use a new H2OCache or h2o.patched()"
        )


def no_new_tokens(seen: int) -> ValueError:
    return ValueError(
        f"no new tokens: the cache has seen {seen} tokens, and input_ids adds none. Pass the "
        "earlier tokens followed by new ones, or call cache.reset() for another text"
    )


def _check_continuation(cache: Any, seen: int, text: NewText, new: int) -> None:
    if text.positions is not None and text.positions.numel() == 0:
        # With prefill_chunk_size generate() prefills ids of the text seen again if none are left.
        raise no_new_tokens(seen)
    if text.is_injected:
        raise UnsupportedError(
            "a wrapper inserts embeddings before every decode step. With transformers 5.24 or "
            "later PEFT's prompt tuning mistakes each step for a prompt, because it does not find "
            "the cache under its new name. Use h2o.generate_all, or transformers before 5.24"
        )
    if _is_step_on_gpu(text, new):
        return
    first = next((cache.layers[index] for index in cache.guard.plans), None)
    lengths: Tensor | None = None  # tokens in each row [B], which only h2o's layers count
    if first is not None and first.slots is not None:
        lengths = first.slots.seen_tokens
        if text.mask is not None and text.mask.shape == (len(lengths), seen + new):
            _check_counts(text.mask[:, :seen].bool().sum(1).tolist(), lengths, seen)
        elif text.mask is None and cache.guard.skips_pads:
            _check_counts([seen] * len(lengths), lengths, seen)
    elif text.mask is None or bool(text.mask.all()):  # no row has padding
        lengths = torch.tensor([seen], dtype=torch.long, device="cpu")
    is_whole = text.mask is None or text.mask.shape[1] == seen + new
    if is_whole and text.dropped is not None and text.dropped.shape[1] == seen:
        check_ids(cache.guard.text, text.dropped, text.mask)
    if lengths is not None and text.positions is not None and text.positions.shape[1] == new:
        if len({len(lengths), len(text.positions)} - {1}) > 1:
            return  # wrong batch size, which the first layer reports
        least = lengths + cache.guard.rope_deltas.least
        is_relative = cache.config.positions == "cache_relative"
        _check_positions(text, least, seen, new, zero_is_free=is_relative)


def _skips_pads(text: NewText, new: int) -> bool:
    """Whether the positions of a first pass over `new` columns skip padding."""
    if text.mask is None or text.positions is None or bool(text.mask.all()):
        return False
    return bool((text.positions.max(1).values < new - 1).any())


def _is_step_on_gpu(text: NewText, new: int) -> bool:
    """Whether this is a decode step whose tensors are on a GPU. Checking would stall each step."""
    mask, positions = text.mask, text.positions
    is_elsewhere = mask is not None and not mask.is_cpu
    return new == 1 and (is_elsewhere or (positions is not None and not positions.is_cpu))


def _check_counts(said: list[int], lengths: Tensor, seen: int) -> None:
    """`said`: tokens per row according to the attention mask; without a mask, all columns."""
    if said != lengths.tolist():
        raise ValueError(
            f"attention_mask has {said} tokens per row in the {seen} columns that the cache has "
            f"seen, but the cache counted {lengths.tolist()}. Pass the earlier mask unchanged, "
            "followed by the mask of the new columns"
        )


def _check_positions(
    text: NewText, least: Tensor, seen: int, new: int, *, zero_is_free: bool
) -> None:
    """Check that no new token has a position below `least` [B or 1].

    `zero_is_free`: accept positions that are all 0, because the cache computes its own."""
    B = max(len(least), len(text.positions))
    positions, least = text.positions.expand(B, -1).to(least.device), least.expand(B)
    late = positions >= least[:, None]
    if bool(late.all()):
        return
    if text.mask is not None:
        late |= ~text.mask[:, -new:].bool().to(late.device)
    if bool(late.all()) or (zero_is_free and not positions.any()):
        return
    if new == seen + 1 and not positions[:, 0].any():
        raise ValueError(WITHOUT_CACHE)
    if text.is_assisted and not positions[:, 0].any():
        raise ValueError(
            f"assisted decoding (prompt_lookup_num_tokens, a draft model) starts with a pass over "
            f"the whole text, and the cache has already seen {seen} tokens of it. Generate later "
            "turns without it, or use a new H2OCache for each turn"
        )
    row = int((~late).any(1).nonzero()[0])
    before = None if text.mask is None else text.mask.expand(B, -1)[row, :-new]
    if before is not None and len(before) and not before[-1]:
        raise ValueError(
            f"row {row} is padded on the right, and generate() counts that padding in the "
            'positions of new tokens. Pad on the left (tokenizer.padding_side = "left"), or pass '
            f"position_ids that continue at {int(least[row])}"
        )
    raise ValueError(
        f"the cache has seen {seen} tokens, and the new ones begin at position "
        f"{int(positions[row][~late[row]][0])} of row {row}, where at least {int(least[row])} was "
        "expected. input_ids must be everything seen so far, followed by new tokens. To start "
        "another text call cache.reset(), or use a new H2OCache or h2o.patched()"
    )


def _check_padding(guard: PassGuard, mask: Tensor | None, seen: int, new: int) -> list[bool]:
    """Check the padding of a forward pass with `new` columns, which is about to begin, for a model
    whose sliding windows or states count padding after a token as text. States also count padding
    in a forward pass of one column.

    Args:
        mask: [B, seen + new], 0 at padding; None if the pass has no padding.

    Returns:
        `PassGuard.ends_in_padding` after the pass.

    Raises:
        ValueError: a row has padding between tokens, or a pass of one column has padding.
    """
    was_padded = seen and any(guard.ends_in_padding)
    if mask is None or mask.shape[1] != seen + new:
        if was_padded:
            raise ValueError(
                "the last column that the cache has seen is padding in some row, and no "
                "attention_mask says what follows. Pass the earlier mask unchanged, followed by "
                "the mask of the new columns"
            )
        return []
    if not was_padded and bool(mask[:, -new:].all()):
        return []
    if guard.has_states and new == 1 and not bool(mask.any(1).all()):
        raise ValueError(
            "a forward pass has a single column, and it is padding in some row. This model's "
            "states would count it as text. Prefill the prompt in one pass, or in larger chunks"
        )
    return ends_in_padding(mask)


def ends_in_padding(mask: Tensor) -> list[bool]:
    """Whether each row of a mask [B, N] over all columns ends in padding.

    Raises:
        ValueError: a row has padding between tokens.
    """
    is_token = mask.bool()
    ends = ~is_token & (is_token.cumsum(1) > 0)
    behind = is_token & (ends.cumsum(1) > 0)
    if bool(behind.any()):
        row = int(behind.any(1).nonzero()[0])
        raise ValueError(
            f"row {row} has padding between tokens, and this model's sliding windows or states "
            'count it as text. Pad on the left (tokenizer.padding_side = "left"), or give each row '
            "its own cache"
        )
    return (~is_token[:, -1]).tolist()


@torch.compiler.disable
@functools.cache
def warn_of_many_graphs() -> None:
    """Warn once per process that a cache breaks a compiled model into many graphs."""
    warnings.warn(
        "torch.compile(model) cannot capture this H2OCache: the model breaks into several graphs "
        "per layer, which are recompiled as the slots grow. Make the cache with "
        "H2OCache(..., compileable=True), or call the model without torch.compile",
        RuntimeWarning,
        stacklevel=2,
    )
