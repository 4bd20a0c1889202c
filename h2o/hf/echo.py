"""Echo: what a second reading of a document would look for, from its first.

A model that meets a token again looks for what followed it before: it finds a key with the query of
a token shortly before that key (Olsson et al., "In-context Learning and Induction Heads", 2022,
arXiv:2209.11895). So the document's own queries are asked once more as if they stood behind it,
each by as many positions later as its row is long, over all keys of the row without a causal mask.
A key's score is the largest attention that it gets from the queries of its own token and of the
`BEFORE` tokens before it. With rotary positions such a query is the first one, rotated on.

Shape letters: B batch rows, H query heads, G key/value heads, R = H / G, N columns of the padded
batch, n tokens of a row, K of the longest row, D head dimension, F rotary angles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from h2o.errors import Unsupported
from h2o.hf import slot_layout
from h2o.hf.attention_call import NewTokens
from h2o.hf.layer import H2OLayer
from h2o.hf.model_rotary import ROLLED, Rotary, has_rotary, turned
from h2o.hf.patch_lock import unwrapped
from h2o.policy import BEFORE

__all__ = ["SERVED", "Echo", "largest"]

SERVED = ROLLED | frozenset(
    "gemma2 gemma3_text glm glm4 gpt_oss qwen3_next olmo_hybrid bamba lfm2 lfm2_moe falcon_h1 "
    "minimax".split()
)
"""Model types whose queries can be rotated on: tests compare them with the model's own at later
positions."""
ENTRIES = 1 << 21
"""Attention entries that exist at one time."""


class Echo:
    """The queries of a document, those of each layer held until all keys are there.

    They take R times the memory of the keys.
    """

    def __init__(self, model: Any, mask: Tensor) -> None:
        """`mask`: [B, N] bool, False at a pad.

        Raises:
            Unsupported: positions of this model are not rotary, or not known to be plain rotations.
        """
        self.config, self.mask = unwrapped(model).config, mask
        self.lengths: list[int] = mask.sum(1).tolist()
        try:
            self.rotary = Rotary(self.config, served=SERVED, asked='scored_by="echo"')
            self._refuse_longer(max(self.lengths))
        except Unsupported as error:
            raise Unsupported(f'{error}; scored_by="repeat" can serve it') from None
        self.angles = [self.rotary.shift(n) for n in self.lengths]
        self.queries: dict[int, list[Tensor]] = {}
        self.logits: dict[int, dict[str, Any]] = {}

    def _refuse_longer(self, n: int) -> None:
        if self.rotary.by_length and n >= self.rotary.unchanged:
            raise Unsupported(
                f'scored_by="echo": beyond {self.rotary.unchanged} tokens the angles of this model '
                "depend on the length of the text"
            )

    @contextmanager
    def recording(self, layers: list[H2OLayer]) -> Iterator[None]:
        """Within the block the queries that these layers get are recorded.

        The layers are of one reader's own cache, so that any number of threads may read with one
        model; `h2o.hf.attention_hook` would change the model.
        """

        def recorder(layer: H2OLayer, forward: Callable[[NewTokens], Tensor]) -> Any:
            def record(tokens: NewTokens) -> Tensor:
                self.queries.setdefault(layer.layer_idx, []).append(tokens.query)
                names = ("scale", "softcap", "sink_logits")
                self.logits[layer.layer_idx] = {x: getattr(tokens, x) for x in names}
                return forward(tokens)

            return record

        for layer in layers:
            vars(layer)["forward"] = recorder(layer, layer.forward)
        try:
            yield
        finally:
            for layer in layers:
                del vars(layer)["forward"]

    def scores(self, layer: H2OLayer) -> Tensor:
        """[B, G, K] float32 of a layer that holds all keys; its queries are gone afterwards."""
        positions, keys = slot_layout.held(
            layer.slots, layer.capacity.sizes, positions=-1.0, keys=0.0
        )
        query = torch.cat(self.queries.pop(layer.layer_idx), dim=2)
        rotated = has_rotary(self.config, layer.layer_idx)
        mask = self.mask.to(query.device)
        scores = torch.zeros(positions.shape, dtype=torch.float32, device=query.device)
        for b, (n, angles) in enumerate(zip(self.lengths, self.angles, strict=True)):
            scores[b, :, :n] = largest(
                self.rotary.halves(query[b][:, mask[b]]),
                self.rotary.halves(keys[b, :, :n]),
                angles.to(query.device) if rotated else None,
                **self.logits[layer.layer_idx],
            )
        return scores


def largest(
    query: Tensor, keys: Tensor, angles: Tensor | None, *, scale: float | None = None,
    softcap: float = 0.0, sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The score of each key of a row, [G, n] float32; no matrix of n x n entries is made.

    Args:
        query: [H, n, D]; keys: [G, n, D], both rotated and in `Rotary.halves`.
        angles: [2, F] by which the queries are rotated on; None: they have no rotation.
        scale, softcap, sink_logits: as in `h2o.ops.attend`.
    """
    H, n, D = query.shape
    G = len(keys)
    grouped, transposed = query.unflatten(0, (G, H // G)), keys.float()[:, None].mT
    scores = torch.zeros(G, n, dtype=torch.float32, device=keys.device)
    rows = max(1, ENTRIES // max(1, H * n))
    for first in range(0, n, rows):
        asked = grouped[:, :, first : first + rows].float()
        asked = asked if angles is None else turned(asked, angles)
        logits = (asked * (D**-0.5 if scale is None else scale)) @ transposed
        if softcap:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        total = logits.logsumexp(-1)  # [G, R, rows]
        if sink_logits is not None:
            total = torch.logaddexp(total, sink_logits.view(G, H // G, 1))
        for offset in range(first, first + BEFORE + 1):
            near = logits.diagonal(offset, -2, -1)  # of row first + i the key at offset + i
            count = near.shape[-1]
            weights = (near - total[..., :count]).exp().amax(1)
            part = scores[:, offset : offset + count]
            torch.maximum(part, weights, out=part)
    return scores
