"""`RowBatch`: one `H2OCache` whose rows are conversations of their own, replaced one at a time.

A row's state has a constant size, so the slots of a row that has come to its end are taken by the
next conversation in place: nothing of the other rows is copied. An idle row is masked, and a decode
step leaves it as it is.

Shape letters: B batch rows.
"""

from __future__ import annotations

import textwrap
import warnings
from typing import Any

import torch
from torch import Tensor

from h2o.config import H2OConfig
from h2o.errors import Unsupported
from h2o.hf.cache import H2OCache
from h2o.hf.layer import H2OLayer
from h2o.hf.patch_lock import input_device

__all__ = ["RowBatch", "row_bytes"]


class RowBatch:
    """A cache of `rows` rows for a model, into which `join` puts caches of one row each.

    compileable: torch.compile takes a step whole, in one graph for all of them.

    Raises:
        Unsupported: a model with layers that are not H2O's.
    """

    def __init__(self, model: Any, config: H2OConfig, rows: int, compileable: bool = False) -> None:
        self.model = model
        self.compiled = torch.compile(model.forward, fullgraph=True) if compileable else None
        self.cache = H2OCache(model.config, config, compileable=compileable)
        for index, layer in enumerate(self.cache.layers):
            if not isinstance(layer, H2OLayer):
                raise Unsupported(
                    f"rows that are refilled need full attention in all layers, and layer {index} "
                    f"is a {type(layer).__name__}: call model.generate() with an H2OCache for each "
                    "batch of prompts"
                )
        self.tokens = [0] * rows
        """Seen by each row; 0: idle"""

    def join(self, row: int, joining: H2OCache) -> None:
        """A row becomes what the one row of another cache of the same settings is.

        Raises:
            ValueError: a cache of several rows, or with another kind of slots.
        """
        self.tokens[row] = int(joining.get_seq_length())
        for layer, other in zip(self.cache.layers, joining.layers, strict=True):
            layer.take_row(row, other, len(self.tokens), max(self.tokens))

    def leave(self, row: int) -> None:
        """A row is idle from now on."""
        self.tokens[row] = 0

    @torch.no_grad()
    def step(self, ids: list[int]) -> Tensor:
        """The next token of every row; what stands for an idle row is not looked at.

        Returns:
            Logits [B, vocabulary].
        """
        device = input_device(self.model)
        position_ids = torch.tensor([[n] for n in self.tokens], dtype=torch.long, device=device)
        mask = position_ids > 0
        inputs = {
            "input_ids": torch.tensor([[i] for i in ids], dtype=torch.long, device=device),
            # Without a mask there is nothing to look up; but that would take another graph.
            "attention_mask": None if all(self.tokens) and not self.compiled else mask,
            "position_ids": position_ids,
            "past_key_values": self.cache,
            "use_cache": True,
        }
        output = self._compiled(inputs) if self.compiled else self.model(**inputs)
        self.tokens = [n and n + 1 for n in self.tokens]
        logits: Tensor = output.logits[:, -1]
        return logits

    def _compiled(self, inputs: dict[str, Any]) -> Any:
        """The model's output; eagerly from the first time that its graph cannot be made."""
        from torch._dynamo.exc import TorchDynamoException

        try:
            return self.compiled(**inputs)
        except TorchDynamoException as error:  # nothing has run yet
            reason = textwrap.shorten(str(error), 300, placeholder=" ...")
            warnings.warn(f"steps are not compiled: {reason}", RuntimeWarning, stacklevel=2)
            self.compiled = None
            return self.model(**inputs)


def row_bytes(cache: H2OCache) -> int:
    """Bytes of all tensors that one row takes once its budget is full, by a cache of one row that
    has read its prompt."""
    return sum(layer.row_bytes() for layer in cache.layers)
