"""`WeightsOrigin`: recognizes the weights that computed the keys of a cache.

Two fine-tunes of a model have the same config, so nothing else tells the caches of one from those
of the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from h2o.model_identity import rounded, sample_tensors, weights_difference
from h2o.model_identity.weights import places_inside


class WeightsOrigin:
    """A few numbers from the attention module that computed the keys of a layer.

    They are copied when a text begins, on their devices, and compared if a later pass comes from
    another module. Only then does the CPU wait for a device.
    """

    def __init__(self) -> None:
        self.module: Callable[[], Any] = _no_module
        """A weak reference to the module that was checked last, since a cache must not keep a model
        alive"""
        self._sample: dict[str, Tensor] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"module": _no_module, "_sample": self._sample}

    def check(self, module: nn.Module, *, begins: bool) -> None:
        """Check the module of a forward pass, if it is another one than `self.module()`, or if the
        pass `begins` a text.

        Raises:
            ValueError: the module's weights differ from those of the module that began the text.
        """
        if begins or self._sample is None:
            self._sample = sample_tensors(places_inside(module))
        elif reason := weights_difference(module, {x: rounded(y) for x, y in self._sample.items()}):
            raise ValueError(
                f"another model computed the keys in this cache: {reason} in the first layer with "
                "a budget. Use a new H2OCache for each model"
            )
        self.module = weakref.ref(module)


def _no_module() -> None:
    """What a reference to no module returns."""
