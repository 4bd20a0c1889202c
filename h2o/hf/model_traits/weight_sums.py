"""`weight_sum`: a sum that shows writes to a weight which torch does not count.

torch counts writes in place (`h2o.compat.tensor_version`), but not those through `.data`, such as
those of PEFT's `hotswap_adapter`, or of a trainer that copies weights to a generator. What h2o
derives from a weight is therefore compared with its sum whenever a text begins.
"""

from __future__ import annotations

import torch
from torch import Tensor


def weight_sum(weight: Tensor) -> int:
    """The sum of a tensor's bytes, in words of 8 bytes, with other factors for each row.

    It takes as long as reading the memory. Writes that only reorder the words of a row, or whose
    sum is 0 modulo 2 ** 64, do not show.
    """
    rows = weight.detach().contiguous().reshape(-1, weight.shape[-1] if weight.ndim else 1)
    if weight.is_meta or not rows.numel():
        return 0
    is_even = rows.shape[1] * rows.element_size() % 8 == 0
    is_aligned = rows.storage_offset() * rows.element_size() % 8 == 0
    words = rows.view(torch.int64 if is_even and is_aligned else torch.uint8)
    sums = words.sum(1)
    return int((sums * torch.arange(1, 2 * len(sums), 2, device=sums.device)).sum())
