"""Removing named tokens from the layers of a cache (`H2OCache.evict`).

A layer without the tokens looks as if it had never seen them: positions count the tokens that stay,
which are in the lowest slots. What stays keeps its distance to later tokens. Those will be as many
positions lower as tokens were removed. Their queries and keys are therefore rotated forward by that
number (`move_forward`). Stored keys are not rotated, since each rotation would round them once
more, and keys in four bits would soon be lost. Sliding windows, which hold a key for a short time
and in the model's dtype, are rotated back instead.

A head may then hold fewer keys than its budget allows. Later tokens fill the room.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from h2o.errors import UnsupportedError
from h2o.hf.cache_state.slot_layout import Capacity
from h2o.hf.cache_state.slot_removal import remove_tokens
from h2o.hf.conversation.named_removal import Removal
from h2o.hf.layers.cache_relative_variant import CacheRelativeVariant
from h2o.hf.model_traits.layer_kinds import free_keys_before_window, kind_of
from h2o.hf.modes import REREAD
from h2o.hf.rotary.model_rotary import ModelRotary, find_rotary


class Rotaries:
    """The rotary embeddings of the layers of a cache, by the kind of layer."""

    def __init__(self, config: Any) -> None:
        """`config`: the model's config, which must not be modified later."""
        self._config = config
        self._known: dict[str, ModelRotary | str] = {}  # by the kind of layer

    def __deepcopy__(self, memo: Any) -> Rotaries:
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_known": {}}

    def of(self, layer: Any, index: int) -> ModelRotary | None:
        """The rotary embedding of the keys that a layer stores. None if positions do not show in
        them.

        Raises:
            UnsupportedError: the rotation of the model is not known, with the reason.
        """
        if isinstance(getattr(layer, "variant", None), CacheRelativeVariant):
            return None
        kind = str(kind_of(layer))
        if kind not in self._known:
            self._known[kind] = find_rotary(self._config, kind)
        found = self._known[kind]
        if isinstance(found, ModelRotary) and not found.by_length:
            return found if index in found.rotated_layers else None
        reason = "its rotary angles depend on the length of the text"
        if isinstance(found, str):
            reason = found
        raise UnsupportedError(
            f"evict does not support {self._config.model_type}, because later tokens would have "
            f"wrong positions: {reason}. {REREAD}"
        )


def check_windows(layers: Sequence[Any], removal: Removal, tokens: list[int]) -> None:
    """Raise ValueError if a sliding window still holds tokens that are to be removed."""
    held = [x.keys.shape[2] for x in layers if kind_of(x) == "sliding" and x.is_initialized]
    longest = max(held, default=0)
    for number, (row, seen) in enumerate(zip(removal.rows, tokens, strict=True)):
        if row and row[-1][1] > seen - longest:
            raise ValueError(
                f"evict: the sliding windows of this model still hold the last {longest} tokens "
                f"of row {number}, and a span ends at {row[-1][1]} of {seen}. End it at "
                f"{seen - longest} or before, or remove it once {longest} more tokens were read"
            )


def remove(layers: Sequence[Any], rotaries: Rotaries, removal: Removal, longest: int) -> None:
    """Remove tokens from all layers of a cache, or from none after an error.

    Args:
        longest: at least as many tokens as any row has left.

    Raises:
        UnsupportedError: the rotation of the model is not known.
    """
    with_keys = [x for x in enumerate(layers) if kind_of(x[1]) in ("h2o", "sliding")]
    angles = {index: rotaries.of(layer, index) for index, layer in with_keys}
    before = [(layer, dict(vars(layer))) for _, layer in with_keys]
    try:
        for index, layer in with_keys:
            if kind_of(layer) == "sliding":
                _remove_from_window(layer, removal, angles[index])
            elif layer.slots is not None:
                _remove_from_slots(layer, removal, longest)
    except BaseException:
        for layer, attributes in before:  # no tensor was written to
            vars(layer).update(attributes)
        raise


def _remove_from_window(layer: Any, removal: Removal, rotary: ModelRotary | None) -> None:
    """Make a layer of transformers' own, with a sliding window, count the remaining text only."""
    layer.cumulative_length -= removal.columns
    if rotary is not None and layer.is_initialized:
        layer.keys = rotary.move(layer.keys, [-shift for shift in removal.shifts])
        free_keys_before_window(layer)


def _remove_from_slots(layer: Any, removal: Removal, longest: int) -> None:
    """Remove tokens from an `H2OLayer`."""
    sizes = layer.capacity.sizes
    left = layer.runner.capacities(widest := layer.capacity.widest, longest)
    if layer.guard.state.unscored:  # keys of a DynamicCache have no budget yet
        left = [longest + 1]
    capacity = Capacity(widest, left)
    slots = remove_tokens(layer.slots, sizes, capacity.sizes, removal.rows, layer.policy)
    layer.set_slots(slots, capacity)
    layer.facts = layer.facts._replace(has_removed=True)
    layer.last = None


def move_forward(layer: Any, x: Tensor, sign: int = 1) -> Tensor:
    """Rotate new queries or keys [B, heads, n, D] of an `H2OLayer` to the positions that they would
    have if no tokens had been removed, as stored keys have. `sign`: -1 rotates stored ones back."""
    moved = layer.guard.state.moved_back
    if not moved or (rotary := layer.rotaries.of(layer, layer.layer_idx)) is None:
        return x
    each = [sign * distance for distance in moved for _ in range(len(x) // len(moved))]
    return rotary.move(x, each)
