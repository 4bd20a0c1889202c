"""`digest`: tells texts apart by two numbers per row.

`generate()` gets a whole conversation and drops as many ids as the cache has seen, without looking
at them. A cache does not store ids. The digest of those that it has seen (`SeenText` in
`h2o.hf.conversation.state`) shows whether the dropped ids are the same, however long the text is.
"""

from __future__ import annotations

import torch
from torch import Tensor

_A, _B, _C = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D, 0x369DEA0F31A53F85


def digest(ids: Tensor, real: Tensor, before: Tensor | int) -> Tensor:
    """Per row, the sum of a hash of each token and its position, and the token count: [2, B].

    Args:
        ids: [B, n].
        real: [B, n] bool, False at padding.
        before: number of earlier tokens in the row, [B, 1] or one number.
    """
    rank = real.long().cumsum(1) + before
    x = ids.long() * _A + rank * _B
    x = (x ^ (x >> 31)) * _C
    x = (x ^ (x >> 29)) * _A
    return torch.stack([torch.where(real, x ^ (x >> 32), 0).sum(1), real.long().sum(1)])
