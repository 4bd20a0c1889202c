"""Models whose later layers attend to the keys of an earlier layer in the same pass (Gemma 3n, 4).

transformers calls this KV sharing: of each type of layer the last one with keys of its own stores
them in a dict that lives for one forward pass (`shared_kv_states`), and later layers of that type
reuse them. Here is which layer reuses whose, and a mask that goes through such a model.

Shape letters: B batch rows, Q new tokens, N keys that attention sees.
"""

from __future__ import annotations

import contextlib
from typing import Any

from torch import Tensor

from h2o.compat import SHARES_KEYS, as_plain_tensors


def reusing(config: Any) -> dict[int, tuple[int, ...]]:
    """Full-attention layers whose keys later ones reuse, each with these later layers."""
    text = config.get_text_config(decoder=True)
    if not getattr(text, "num_kv_shared_layers", None):
        return {}
    modes = list(zip(text.layer_types, text.kv_sharing_modes, strict=True))
    full = "full_attention"
    later = tuple(i for i, mode in enumerate(modes) if mode == (full, "reuse"))
    return {modes.index((full, "store")): later} if later else {}


def shared_keys_refusal(text: Any) -> str | None:
    """Why a model whose text config has `num_kv_shared_layers` cannot be served; or None."""
    modes: Any = ()
    if not SHARES_KEYS or not hasattr(type(text), "kv_sharing_modes"):
        return "some layers attend to the keys of others, for which transformers 5.23 is needed"
    with contextlib.suppress(ValueError):  # no layer stores keys for those that reuse them
        modes = text.kv_sharing_modes
    if "store" not in modes:
        return "its layers attend to the keys of another model, for which it drafts"
    return None


class Pads(Tensor):
    """A mask [B, N] of pads as a view [B, 1, Q, N], the same for all queries.

    A model that goes on with the last queries alone, in the layers that need no new keys, cuts
    the mask to theirs, and takes it for 4-D.
    """

    @classmethod
    def over(cls, mask: Tensor, queries: int) -> Pads:
        """A mask [B, N] for so many queries; no memory is taken."""
        return mask[:, None, None].expand(-1, -1, queries, -1).as_subclass(cls)


def pads_of(mask: Tensor | None) -> Tensor | None:
    """An attention function's mask: [B, N] out of `Pads`, any other unchanged."""
    if mask is None or type(mask) is not Pads:
        return mask
    with as_plain_tensors():
        return mask[:, 0, 0].as_subclass(Tensor)
