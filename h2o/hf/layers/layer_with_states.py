"""Layers of an `H2OCache` that have convolution or recurrent states beside their keys.

Falcon-H1, Zamba2 and others have attention and a state space model in one layer, and transformers
one cache layer for both (`LinearAttentionAndFullAttentionLayer`). The states stay as transformers
has them, the keys are h2o's.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from h2o.borrowed import StatesAndKeysLayer, StatesLayer
from h2o.hf.layers.cache_relative import CacheRelativeLayer
from h2o.hf.layers.compiled import CompileableLayer
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.layers.random_layer import RandomLayer
from h2o.hf.store import states

__all__ = ["with_states"]


class _States:
    """What has to be done for both parts."""

    def __init__(self, number_of_states: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        StatesLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        """Of the states; slots are made when the prompt's length is known."""
        if states:
            StatesLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        """Empties the layer."""
        super().reset()  # type: ignore[misc]
        states.forget(self)

    @property
    def is_croppable(self) -> bool:
        """Never with recurrent states, which are sums over all tokens."""
        has_sums = any(self.is_recurrent_states_initialized.values())  # type: ignore[attr-defined]
        return super().is_croppable and not has_sums  # type: ignore[misc]

    def crop(self, tokens: int) -> None:
        """See `H2OCache.crop`."""
        super().crop(tokens)  # type: ignore[misc]
        if self.record_past and self.seen:  # type: ignore[attr-defined]
            StatesLayer.crop(self, tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        super().reorder_cache(beam_idx)  # type: ignore[misc]
        states.each(self, lambda x: x.index_select(0, beam_idx.to(x.device)))


class _H2OLayer(_States, H2OLayer, StatesAndKeysLayer): ...


class _CacheRelativeLayer(_States, CacheRelativeLayer, StatesAndKeysLayer): ...


class _RandomLayer(_States, RandomLayer, StatesAndKeysLayer): ...


class _CompileableLayer(_States, CompileableLayer, StatesAndKeysLayer): ...


_CLASSES = {
    H2OLayer: _H2OLayer,
    CacheRelativeLayer: _CacheRelativeLayer,
    CompileableLayer: _CompileableLayer,
    RandomLayer: _RandomLayer,
}


def with_states(layer_class: type[H2OLayer], number_of_states: int) -> Any:
    """What makes a layer of this class that also has so many states of each kind."""
    return functools.partial(_CLASSES[layer_class], number_of_states)
