"""Echo: what a second reading of a document would look for, from its first.

A model that meets a token again looks for what followed it before: it finds a key with the query of
a token shortly before that key (Olsson et al., "In-context Learning and Induction Heads", 2022,
arXiv:2209.11895). So the document's own queries are asked once more as if they stood behind it,
each by as many positions later as its row is long, over all keys of the row without a causal mask.
A key's score is the largest attention that it gets from the queries of its own token and of the
`BEFORE` tokens before it. With rotary positions such a query is the first one, rotated on.

Shape letters: B batch rows, H query heads, G key/value heads, R = H / G, N columns of the padded
batch, n tokens of a row, m of them, K of the longest row, D head dimension, F rotary angles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from h2o import backends, ops
from h2o.errors import Unsupported
from h2o.hf import slot_layout
from h2o.hf.attention_call import NewTokens
from h2o.hf.layer import H2OLayer
from h2o.hf.model_rotary import Rotary, turned
from h2o.hf.patch_lock import unwrapped
from h2o.model_identity import latent_row
from h2o.policy import BEFORE

__all__ = ["Echo", "largest", "rotary_of"]

ENTRIES = 1 << 21
"""Attention entries that exist at one time, where torch makes them."""
ROWS = 1024
"""Queries of each head that the kernels are asked at a time."""
TILE = 32
"""Queries whose nearest keys come from one product of matrices."""


def rotary_of(config: Any, asked: str) -> Rotary:
    """As `Rotary`, for echo; of latents it knows no queries to ask again."""
    if latent_row(config):
        raise Unsupported(f"{asked} cannot serve {config.model_type}: its keys are latents")
    return Rotary(config, asked=asked)


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
            self.rotary = rotary_of(self.config, 'scored_by="echo"')
            self._refuse_longer(max(self.lengths))
        except Unsupported as error:
            raise Unsupported(f'{error}; scored_by="repeat" can serve it') from None
        self.angles = [self.rotary.shift(n) if self.rotary.turning else None for n in self.lengths]
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
        turns = self.rotary.turns(layer.layer_idx)
        mask = self.mask.to(query.device)
        scores = torch.zeros(positions.shape, dtype=torch.float32, device=query.device)
        for b, (n, angles) in enumerate(zip(self.lengths, self.angles, strict=True)):
            scores[b, :, :n] = largest(
                self.rotary.halves(query[b][:, mask[b]]),
                self.rotary.halves(keys[b, :, :n]),
                angles.to(query.device) if turns and angles is not None else None,
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
    grouped, keys = query.unflatten(0, (G, H // G)), keys.to(query.dtype)
    how = _Logits(D**-0.5 if scale is None else scale, softcap, sink_logits)
    scores = torch.zeros(G, n, dtype=torch.float32, device=keys.device)
    probed, rows = None, max(1, ENTRIES // max(1, H * n))
    if n and backends.HAS_CORE and backends.serving(keys) is backends.core:
        probed, rows = _probed(keys), ROWS
    for first in range(0, n, rows):
        asked = grouped[:, :, first : first + rows]
        asked = asked if angles is None else turned(asked, angles)
        near = _nearest(asked, keys[:, first : first + rows + BEFORE], how.scale)
        if probed is None:
            total = _totals(asked, keys, how)
        else:
            total = _totals_by_kernels(asked, probed, keys[:, :1], how)
        weights = (how.capped(near) - total[..., None]).exp().amax(1)  # [G, rows, BEFORE + 1]
        for offset in range(BEFORE + 1):
            part = scores[:, first + offset : first + offset + rows]
            torch.maximum(part, weights[:, : part.shape[1], offset], out=part)
    return scores


class _Logits(NamedTuple):
    """How a product of query and key becomes a logit, and what else is in the softmax."""

    scale: float
    softcap: float
    sink_logits: Tensor | None

    def capped(self, logits: Tensor) -> Tensor:
        """In place."""
        if self.softcap:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits


def _nearest(asked: Tensor, keys: Tensor, scale: float) -> Tensor:
    """Products, scaled, of queries [G, R, m, D] with the key of their own token and of the `BEFORE`
    tokens behind it, [G, R, m, BEFORE + 1] float32; of the keys [G, m to m + BEFORE, D], which
    begin with the first query's. Behind the last of them stands nothing that counts.

    Of tiles of queries by keys the diagonals are taken: one product of matrices for all.
    """
    _, R, m, _ = asked.shape
    tiles = -(-m // TILE)
    whole = asked if m == tiles * TILE else pad(asked, (0, 0, 0, tiles * TILE - m))
    queries = whole.unflatten(2, (tiles, TILE)).transpose(1, 2).flatten(2, 3).float()
    behind = pad(keys.float() * scale, (0, 0, 0, tiles * TILE + BEFORE - keys.shape[1]))
    windows = behind.unfold(1, TILE + BEFORE, TILE)  # [G, tiles, D, TILE + BEFORE]
    products = (queries @ windows).unflatten(2, (R, TILE))
    diagonals = [products.diagonal(offset, -2, -1) for offset in range(BEFORE + 1)]
    return torch.stack(diagonals, -1).transpose(1, 2).flatten(2, 3)[:, :, :m]


def _totals(asked: Tensor, keys: Tensor, how: _Logits) -> Tensor:
    """The log of the sum of all exponentials of queries [G, R, m, D], [G, R, m]; each by itself."""
    products = (asked.float() * how.scale).flatten(1, 2) @ keys.float().mT
    total = how.capped(products).logsumexp(-1).view(asked.shape[:3])
    if how.sink_logits is not None:
        total = torch.logaddexp(total, how.sink_logits.view(*asked.shape[:2], 1))
    return total


def _totals_by_kernels(asked: Tensor, probed: ops.Slots, first: Tensor, how: _Logits) -> Tensor:
    """As `_totals`, by one fused operation for all keys, which gives attention, not sums.

    So each query sees one key a second time: the first one, [G, 1, D], a probe whose value is 1
    where the others' (`_probed`) is 0. Their answer is the attention that the probe gets, e^logit /
    (e^logit + the sum): at most 1/2, so that the sum comes from it to as many digits as the
    answer's dtype has. Where the probe gets less than that dtype has all digits of, torch makes the
    sum. Each query comes as a head of its own: that is how all of them see all keys.
    """
    G, R, m, D = asked.shape
    logit = how.capped((asked.float() * how.scale * first.float()[:, None]).sum(-1))
    sinks = how.sink_logits
    out, _ = ops.attend(
        asked.reshape(1, -1, 1, D), first[None], torch.ones_like(first[None]), probed,
        scale=how.scale, softcap=how.softcap,
        sink_logits=None if sinks is None else sinks.repeat_interleave(m),
    )  # fmt: skip
    part = out.view(G, R, m, D)[..., 0].float()
    total = logit + torch.log1p(-part) - part.log()
    lost, keys = part < torch.finfo(out.dtype).tiny, probed.keys[0, :, :-1]
    for g, r in lost.any(-1).nonzero().tolist():
        one = how._replace(sink_logits=None if sinks is None else sinks[g * R + r])
        for at in lost[g, r].nonzero()[:, 0].split(max(1, ENTRIES // keys.shape[1])):
            total[g, r, at] = _totals(asked[g, r, at][None, None], keys[g : g + 1], one)[0, 0]
    return total


def _probed(keys: Tensor) -> ops.Slots:
    """Slots that hold keys [G, n, D] in their order, with values of 0."""
    return slot_layout.filled(keys[None], torch.zeros_like(keys[None]), None, value_weighted=False)
