"""An `H2OCache` for MiniMax, whose model accepts no cache but one of a class of its own.

That class keeps the states of linear attention in a list beside its layers. Here they are in
transformers' layers with states, as those of every other model.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache
from transformers.models.minimax.modeling_minimax import MiniMaxCache

__all__ = ["class_for"]


@functools.cache
def class_for(cache_class: Any) -> Any:
    """What `H2OCache` is for MiniMax's config: both its class and the model's."""
    return type(cache_class.__name__, (_States, cache_class, MiniMaxCache), {})


def _empty(cache_class: Any) -> Any:
    """An object of `class_for(cache_class)`, of which nothing is set."""
    return object.__new__(class_for(cache_class))


class _States:
    """The model's names for what its layers with states do."""

    __len__ = Cache.__len__

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy, which look a class up by its name: this one has none."""
        return _empty, (type(self).__mro__[2],), vars(self)

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The recurrent state of a layer, before it is changed."""
        self.pass_state.states_of(layer_idx)
        state: Tensor | None = self.get_recurrent_state(layer_idx)
        return state

    def set_linear_cache(self, layer_idx: int, linear_cache: Any) -> None:
        """The state after the new tokens."""
        self.layers[layer_idx].has_previous_state[0] = True
        self.update_recurrent_state(linear_cache, layer_idx)
