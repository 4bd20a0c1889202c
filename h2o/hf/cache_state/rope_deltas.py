"""`rope_deltas`: state that some models keep outside the cache (Qwen2-VL, Qwen2.5-VL, Qwen3-VL,
GLM-4V and similar models).

For a text with images it is the difference between the next position and the number of tokens. The
model holds only the value of the text that it processed last, also if that was in another thread. A
cache derives the value of its own text from the positions that the model gives to its attention
(`h2o.hf.cache_state.row_state`), and puts it into the model whenever the model asks how much the
cache has seen, which it does before it uses the value.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from h2o import compat_calls
from h2o.hf.cache_state.row_state import RowState
from h2o.hf.model_traits.wrappers import input_device


def put_rope_deltas(states: Sequence[RowState], *, is_empty: bool = False) -> None:
    """Put the value of a cache into the model whose call is under way; None if the cache is empty.

    A model that asks the cache for another reason, or that keeps no such value, is not changed. Nor
    is it changed by a cache converted from a DynamicCache, whose value only the model knows."""
    if torch.compiler.is_compiling():
        return
    module, rows = compat_calls.find_rope_deltas_module()
    if module is None:
        return
    if is_empty:
        module.rope_deltas = None
        return
    offsets = [state.offset for state in states]
    if None in offsets:
        return
    if rows and len(offsets) % rows == 0:
        # generate() asks before it repeats each prompt for beams or num_return_sequences.
        offsets = offsets[:: len(offsets) // rows]
    device = input_device(module)
    module.rope_deltas = torch.tensor(offsets, dtype=torch.long, device=device)[:, None]
