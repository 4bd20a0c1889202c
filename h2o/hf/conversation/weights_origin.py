"""`WeightsOrigin`: recognizes the weights that computed the keys of a cache.

Two fine-tunes of a model have the same config, so nothing else tells the caches of one from those
of the other.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from h2o.model_identity import rounded, sample_tensors, weights_difference
from h2o.model_identity.weights import places_inside


class WeightsOrigin:
    """A few numbers from the attention module that computed the keys of a layer.

    They are copied when a text begins, on their devices, and compared if a later pass comes from
    another module. Only then does the CPU wait for a device.
    """

    def __init__(self) -> None:
        self._module: Any = None  # a weak reference, since a cache must not keep a model alive
        self._sample: dict[str, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"_module": None, "_sample": self._sample}

    def check(self, module: nn.Module, *, begins: bool) -> None:
        """Check the module of a forward pass. `begins`: the pass begins a text.

        Raises:
            ValueError: the module's weights differ from those of the module that began the text.
        """
        if torch.compiler.is_compiling():
            return
        is_known = self._module is not None and self._module() is module
        if is_known and not begins:
            return
        if begins or self._sample is None:
            self._sample = sample_tensors(places_inside(module))
        elif reason := weights_difference(module, {x: rounded(y) for x, y in self._sample.items()}):
            raise ValueError(
                f"another model computed the keys in this cache: {reason} in the first layer with "
                "a budget. Use a new H2OCache for each model"
            )
        self._module = weakref.ref(module)
