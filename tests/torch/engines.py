"""Both implementations of the operations behind one face: the C core and the oracle."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from h2o import ops, reference
from tests.inputs import Policy, Text, kept


class Engine(NamedTuple):
    """A module with attend, evict, step and simulate."""

    name: str
    module: Any


oracle = Engine("oracle", reference)
core = Engine("core", ops)


class Conversation:
    """A text fed piece by piece to one engine, with what it held after each piece.

    Pieces of one column go through `step`, longer ones through `attend` and `evict`;
    `stepwise=False` sends those of one column the long way too.
    """

    def __init__(
        self,
        engine: Engine,
        text: Text,
        policy: Policy,
        *,
        mask: np.ndarray | None = None,
        softcap: float = 0.0,
        budget: np.ndarray | None = None,
        dtype: torch.dtype = torch.float32,
        capacity: int | None = None,
        stepwise: bool = True,
    ):
        self.engine, self.policy, self.softcap, self.stepwise = engine, policy, softcap, stepwise
        self.query, self.keys, self.values = (torch.from_numpy(x).to(dtype) for x in text)
        self.mask = None if mask is None else torch.from_numpy(mask)
        N = self.query.shape[2]
        rows = np.array([[policy.heavy, policy.recent]]) if budget is None else budget
        if capacity is None:
            capacity = min(N, int(rows.sum(1).max()) + policy.sinks + 1)
        self.slots = ops.new_slots(self.keys, capacity, value_weighted=policy.value_weighted)
        self.slots.budget[:] = torch.from_numpy(rows)
        self.column = 0
        self.out: list[torch.Tensor] = []
        """[B, Q, H, D] of each piece"""
        self.kept: list[tuple[np.ndarray, np.ndarray]] = []
        """positions and scores after each piece"""

    def feed(self, columns: int) -> torch.Tensor:
        """The next columns of the text; returns their outputs."""
        new = slice(self.column, self.column + columns)
        self.column += columns
        q, k, v = (x[:, :, new] for x in (self.query, self.keys, self.values))
        mask = None if self.mask is None else self.mask[:, new]
        do, ranking = self.engine.module, self.policy.ranking
        if columns == 1 and self.stepwise:
            out = do.step(q, k, v, self.slots, mask=mask, softcap=self.softcap, **ranking)
        else:
            out, scores = do.attend(
                q, k, v, self.slots, mask=mask, softcap=self.softcap, decay=self.policy.decay
            )
            do.evict(k, v, scores, self.slots, mask=mask, **ranking)
        self.out.append(out)
        self.kept.append(kept(self.slots))
        return out

    def feed_all(self, calls: list[int]) -> Conversation:
        for columns in calls:
            self.feed(columns)
        return self
