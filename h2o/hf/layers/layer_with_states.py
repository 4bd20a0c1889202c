"""A layer of an `H2OCache` that has convolution or recurrent states beside its keys.

Falcon-H1, Zamba2 and others have attention and a state space model in one layer, and transformers
one cache layer for both (`LinearAttentionAndFullAttentionLayer`). The states stay as transformers
has them, the keys are h2o's.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from h2o.compat import StatesAndKeysLayer, StatesLayer
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.store import states

__all__ = ["H2OLayerWithStates"]


class H2OLayerWithStates(H2OLayer, StatesAndKeysLayer):
    """An `H2OLayer` for the keys, with transformers' states beside it."""

    def __init__(self, *args: Any, number_of_states: int, **kwargs: Any) -> None:
        """`number_of_states`: of each kind."""
        super().__init__(*args, **kwargs)
        StatesLayer.__init__(self, number_of_states)

    def lazy_initialization(self, *keys_and_values: Tensor, **states: Any) -> None:
        """Make the states; slots are made when the prompt's length is known."""
        if states:
            StatesLayer.lazy_initialization(self, **states)

    def reset(self) -> None:
        """Empties the layer."""
        super().reset()
        states.forget(self)

    @property
    def is_croppable(self) -> bool:
        """Never with recurrent states, which are sums over all tokens."""
        return super().is_croppable and not any(self.is_recurrent_states_initialized.values())

    def crop(self, tokens: int) -> None:
        """See `H2OCache.crop`."""
        super().crop(tokens)
        if self.record_past and self.seen:
            StatesLayer.crop(self, tokens)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was."""
        super().reorder_cache(beam_idx)
        states.each(self, lambda x: x.index_select(0, beam_idx.to(x.device)))
