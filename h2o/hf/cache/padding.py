"""Checks of padding for models whose sliding windows or states cannot skip it.

Both treat padding that follows a token as text. States also do so with padding in a forward pass of
one column.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

from torch import Tensor

from h2o.hf.cache_state.pass_guard import PassGuard


def check_padding(guard: PassGuard, mask: Tensor | None, seen: int, new: int) -> list[bool]:
    """Check the padding of a forward pass with `new` columns, which is about to begin.

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
    last: list[bool] = (~is_token[:, -1]).tolist()
    return last
