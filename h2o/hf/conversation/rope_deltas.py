"""`put_rope_deltas`: keeps a model's `rope_deltas` those of the text that a cache has seen."""

from __future__ import annotations

import torch

from h2o import compat_calls
from h2o.hf.conversation.state import CacheState
from h2o.hf.model_traits.wrappers import input_device


def put_rope_deltas(state: CacheState) -> None:
    """Put the value of a cache into the model whose call is under way; None if the cache is empty.

    Qwen2-VL, Qwen2.5-VL, Qwen3-VL, GLM-4V and similar models keep `rope_deltas`, the difference
    between the next position and the number of tokens. They hold only the value of the text that
    they processed last, also if that was in another thread. A model that asks the cache for another
    reason, or that keeps no such value, is not changed. Nor is it changed by a cache converted from
    a DynamicCache, whose value only the model knows."""
    if torch.compiler.is_compiling():
        return
    module, rows = compat_calls.find_rope_deltas_module()
    if module is None:
        return
    if state.columns == 0:
        module.rope_deltas = None
        return
    offsets = [row.offset for row in state.rows]
    if None in offsets:
        return
    if rows and len(offsets) % rows == 0:
        # generate() asks before it repeats each prompt for beams or num_return_sequences.
        offsets = offsets[:: len(offsets) // rows]
    device = input_device(module)
    module.rope_deltas = torch.tensor(offsets, dtype=torch.long, device=device)[:, None]
