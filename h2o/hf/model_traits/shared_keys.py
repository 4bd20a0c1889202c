"""Models whose later layers attend to the keys of an earlier layer in the same pass (Gemma 3n, 4).

transformers calls this KV sharing. For each layer type, the last layer with its own keys stores
them in a dict that lives for one forward pass (`shared_kv_states`), and later layers of that type
reuse them. This file says which layers reuse which, and has a mask that such models can slice.

Shape letters as in `h2o.hf`, and N keys that attention sees.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from h2o.compat import SHARES_KEYS, as_plain_tensors


def shared_key_layers(config: Any) -> dict[int, tuple[int, ...]]:
    """The full-attention layer whose keys later layers reuse, mapped to these later layers; empty
    if there is none."""
    text = config.get_text_config(decoder=True)
    if not getattr(text, "num_kv_shared_layers", None):
        return {}
    modes = list(zip(text.layer_types, text.kv_sharing_modes, strict=True))
    full = "full_attention"
    later = tuple(i for i, mode in enumerate(modes) if mode == (full, "reuse"))
    return {modes.index((full, "store")): later} if later else {}


def shared_keys_refusal(text: Any) -> str | None:
    """Why h2o does not support a model with `num_kv_shared_layers` in its text config, or None."""
    modes: Any = ()
    if not SHARES_KEYS or not hasattr(type(text), "kv_sharing_modes"):
        return "some layers attend to the keys of others, which needs transformers 5.23 or newer"
    with contextlib.suppress(ValueError):  # raised if no layer stores keys for others to reuse
        modes = text.kv_sharing_modes
    if "store" not in modes:
        return "it is a draft model, whose layers attend to the keys of another model"
    return None


class Pads(Tensor):
    """A padding mask [B, N] as a view [B, 1, Q, N], the same for all queries.

    In layers that need no new keys, a model may compute the last queries only. It then slices the
    mask to these queries, and expects a 4-D mask.
    """

    @classmethod
    def over(cls, mask: Tensor, queries: int) -> Pads:
        """View a mask [B, N] as one for that many `queries`, without a copy."""
        return mask[:, None, None].expand(-1, -1, queries, -1).as_subclass(cls)


def pads_of(mask: Tensor | None) -> Tensor | None:
    """The mask [B, N] inside `Pads`. Any other mask is returned unchanged."""
    if mask is None or type(mask) is not Pads:
        return mask
    with as_plain_tensors():
        return mask[:, 0, 0].as_subclass(Tensor)
