"""Going back: the last forward pass of a layer is remembered, undone, and done again with less.

What was evicted is gone, so a layer that records keeps a copy of what it held before its last pass,
and what the pass was given. To take tokens back it puts the copy in place and attends once more to
the tokens that stay: as if the others had never come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from h2o.hf.state import restore, state_of

__all__ = ["NO_RECORD", "LastPass", "crop"]

NO_RECORD = (
    "an H2OCache cannot go back on its own: what was evicted is gone. Call "
    "cache.activate_past_recording() before the forward pass of which tokens are to be taken back"
)


class LastPass:
    """What it takes to do the last forward pass of a layer again."""

    def __init__(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        **logits: Any,
    ) -> None:
        """Before the pass; arguments as of `H2OLayer.attend`."""
        self.before = state_of(layer).each(Tensor.clone)
        self.tensors = query, key.detach(), value  # without its reference to the layer
        self.mask = mask
        self.logits = logits

    def refuse(self, left: int, seen: int) -> None:
        """Errors: NotImplementedError where fewer columns are to be left than the pass found."""
        if left < self.before.numbers["seen"]:
            raise NotImplementedError(
                f"an H2OCache goes back within its last forward pass, which began after "
                f"{self.before.numbers['seen']} of {seen} tokens, and {left} were to be left"
            )

    def again(self, layer: Any, left: int) -> None:
        """The layer as if so many columns had been all it has seen. It takes the copy: only once.

        What the layer held is in tensors of their own, and stays as it is.
        """
        restore(layer, self.before)
        if columns := left - layer.seen:
            query, key, value = (x[:, :, :columns] for x in self.tensors)
            mask = None if self.mask is None else self.mask[:, :columns]
            layer.forward(query, key, value, mask, **self.logits)


def crop(layers: Sequence[Any], tokens: int, left: int) -> None:
    """`H2OCache.crop` of layers that have all seen the same: they go back together or not at all.

    Errors: NotImplementedError as of `LastPass.refuse`, with nothing done. After another one, of
    memory for example, or an interrupt, all is as it was, but the pass is no longer remembered.
    """
    own = [layer for layer in layers if not layer.is_sliding]
    shorter = left < int(layers[0].get_seq_length())
    for layer in own if shorter else []:
        layer.refuse_crop(left)
    before = [(layer, state_of(layer)) for layer in own]
    try:
        for layer in own:
            layer.crop(tokens)
        for layer in layers:  # transformers' own, which may refuse it
            if layer.is_sliding and (shorter or getattr(layer, "record_past", False)):
                layer.crop(tokens)
    except BaseException:
        for layer, state in before:
            restore(layer, state)
        raise
