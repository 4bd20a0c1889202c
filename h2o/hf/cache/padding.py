"""Padding in models with layers that count it: their sliding windows and states take padding that
follows a token for text, and states take any that comes in a pass of its own.

Shape letters: B batch rows, N padded columns.
"""

from __future__ import annotations

from torch import Tensor

from h2o.hf.store.pass_guard import PassGuard


def check_padding(guard: PassGuard, mask: Tensor | None, seen: int, new: int) -> None:
    """Check and note the padding of the forward pass under way over `new` columns.

    Args:
        mask: [B, seen + new], 0 at a pad; None: the pass has no pads.

    Raises:
        ValueError: tokens stand behind padding that follows tokens; padding comes alone.
    """
    was_padded = seen and any(guard.ends_in_padding)
    if mask is None or mask.shape[1] != seen + new:
        if was_padded:
            raise ValueError(
                "the cache has read padding last, and no attention_mask tells what follows it: "
                "pass the mask of the earlier columns as it was, followed by that of the new ones"
            )
        guard.ends_in_padding = []
        return
    if not was_padded and bool(mask[:, -new:].all()):
        guard.ends_in_padding = []
        return
    if guard.has_states and new == 1 and not bool(mask.any(1).all()):
        raise ValueError(
            "a column of padding comes in a forward pass of its own, which this model's states "
            "would count as text: read the prompt in one pass, or in chunks of more tokens"
        )
    note_padding(guard, mask)


def note_padding(guard: PassGuard, mask: Tensor) -> None:
    """Note which rows of a mask [B, N] of all columns end in padding.

    Raises:
        ValueError: tokens stand behind padding that follows tokens.
    """
    is_token = mask.bool()
    ends = ~is_token & (is_token.cumsum(1) > 0)
    behind = is_token & (ends.cumsum(1) > 0)
    if bool(behind.any()):
        row = int(behind.any(1).nonzero()[0])
        raise ValueError(
            f"row {row} has tokens behind padding that follows tokens, which this model's sliding "
            'windows and states count as text: pad on the left (tokenizer.padding_side = "left"), '
            "or give each row a cache of its own"
        )
    guard.ends_in_padding = (~is_token[:, -1]).tolist()
