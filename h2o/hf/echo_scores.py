"""The scores of `rank_by="echo"`: what a text's own queries find when they are asked once more.

A model that meets a token again finds what followed it by the query of a token shortly before (see
`h2o.hf.echo`). So each query is asked again from further on, and a key's score is the largest
attention that any head of its group gives it by the queries of its own token and of the `BEFORE`
tokens before it. It is made in the pass that brings the key, and stays:

    in a prompt of n tokens each query is asked n positions later, over all n keys;
    in a later pass `LATER` positions later, over the keys held before it and the new ones up to
    the key in question.

Of the earlier tokens a layer remembers the last `BEFORE` queries of each row, rotated on. Such a
query is the first one, rotated; where a layer has no rotary positions it is the first one itself.

Shape letters: B batch rows, H query heads, G key/value heads, R = H / G, Q columns of new tokens,
q new tokens of a row, K keys held, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o import ops
from h2o.errors import Unsupported
from h2o.hf import slot_layout
from h2o.hf.attention_call import NewTokens
from h2o.hf.echo import ENTRIES, largest, rotary_of
from h2o.hf.model_rotary import Rotary, turned
from h2o.policy import BEFORE, Policy
from h2o.quantisation import dequantised, quantised, stored_like

__all__ = ["LATER", "EchoScores", "Pass", "as_stored", "echo_rotary", "newly_found"]

LATER = 256
"""How many positions later queries are asked again whose text has no end yet."""


def echo_rotary(config: Any) -> Rotary:
    """The rotary embedding of a model that `rank_by="echo"` serves.

    Raises:
        Unsupported: positions of this model are not rotary, or not known to be plain rotations.
    """
    try:
        return rotary_of(config, 'rank_by="echo"')
    except Unsupported as error:
        raise Unsupported(f'{error}; use rank_by="max", or h2o.read for a document') from None


class Pass(NamedTuple):
    """What a forward pass of one layer makes; the slots, and their scores, are as before."""

    out: Tensor
    """[B, Q, H, D]"""
    scores: Tensor
    """[B, G, Q] float32, of the new keys"""
    asked: Tensor
    """[B, H, BEFORE, D or bytes], as `EchoScores.remembered` makes it"""


class EchoScores:
    """Makes the scores of one layer."""

    def __init__(self, rotary: Rotary, layer: int, kv_dtype: str | None) -> None:
        """`rotary`: the model's. `kv_dtype`: where keys are stored in eight bits, queries that are
        remembered are too."""
        self.rotary, self.rotated = rotary, rotary.turns(layer)
        self.quantises = kv_dtype is not None
        self._later: tuple[Any, Tensor] | None = None  # of a length and device: the angles

    def of_prompt(self, tokens: NewTokens) -> Tensor:
        """[B, G, Q] float32 of the tokens of a first pass; 0 at a pad."""
        B, G, Q, _ = tokens.key.shape
        scores = torch.zeros(B, G, Q, dtype=torch.float32, device=tokens.key.device)
        length = self._length(tokens, None)
        for b in range(B):
            real = _columns(tokens.mask, b)
            query, key = tokens.query[b][:, real], tokens.key[b][:, real]
            n = query.shape[1]
            angles = self.rotary.shift(n, length).to(query.device) if self.rotated and n else None
            scores[b, :, real] = largest(
                self.rotary.halves(query), self.rotary.halves(key), angles, **_logits(tokens)
            )
        return scores

    def of_chunk(
        self, tokens: NewTokens, asked: Tensor, slots: ops.Slots, sizes: list[int]
    ) -> Tensor:
        """[B, G, Q] float32 of new tokens behind what the slots hold; 0 at a pad.

        `asked`: of the tokens before, as `remembered` makes it; `sizes`: as `Capacity.sizes`.
        """
        B, G, Q, D = tokens.key.shape
        again = self._again(tokens.query, self._length(tokens, slots))
        asked = dequantised(asked, D).to(again.dtype)
        positions, keys = slot_layout.held(slots, sizes, positions=-1.0, keys=0.0)
        keys = dequantised(keys, D)
        scores = torch.zeros(B, G, Q, dtype=torch.float32, device=keys.device)
        for b, length in enumerate(slots.lengths.tolist()):
            real, before = _columns(tokens.mask, b), min(BEFORE, length)
            scores[b, :, real] = newly_found(
                torch.cat([asked[b, :, BEFORE - before :], again[b][:, real]], dim=1),
                keys[b], positions[b] >= 0, tokens.key[b][:, real], **_logits(tokens),
            )  # fmt: skip
        return scores

    def of_one(self, tokens: NewTokens, asked: Tensor, slots: ops.Slots) -> Tensor:
        """As `of_chunk` for one new token of each row, by the kernels: the queries of one head and
        several tokens are to them as many heads of one token."""
        again = self._again(tokens.query, self._length(tokens, slots))
        asked = dequantised(asked, again.shape[-1]).to(again.dtype)
        missing = BEFORE - torch.arange(BEFORE, device=asked.device) > _lengths(slots)[:, None]
        before = torch.where(missing[:, None, :, None], again, asked)
        queries = torch.cat([before, again], dim=2).flatten(1, 2)[:, :, None]  # [B, H * 5, 1, D]
        sinks = tokens.sink_logits
        _, scores = ops.attend(
            queries, tokens.key, tokens.value, _without_scores(slots),
            mask=tokens.mask, scale=tokens.scale, softcap=tokens.softcap,
            sink_logits=None if sinks is None else sinks.repeat_interleave(BEFORE + 1),
            policy=Policy(rank_by="max"),
        )  # fmt: skip
        return scores

    def remembered(
        self, tokens: NewTokens, asked: Tensor | None, slots: ops.Slots | None
    ) -> Tensor:
        """[B, H, BEFORE, D or bytes] queries of each row's last tokens, rotated on; of a row with
        fewer tokens the first ones have no meaning. `asked`, `slots`: before these tokens."""
        last = tokens.query[:, :, -BEFORE:] if tokens.mask is None else tokens.query
        again = self._again(last, self._length(tokens, slots))
        B, H, Q, D = again.shape
        if self.quantises:
            again = quantised(again.reshape(-1, D), 8).view(B, H, Q, -1)
        if asked is None:
            asked = again.new_zeros(B, H, BEFORE, again.shape[-1])
        asked = asked.to(again.dtype)  # autocast may have begun or ended
        if tokens.mask is None:
            return torch.cat([asked, again], dim=2)[:, :, -BEFORE:]
        # Real columns last, in their order: the last ones of a row are then its last tokens.
        remembers = torch.ones(len(asked), BEFORE, dtype=torch.bool, device=asked.device)
        is_token = torch.cat([remembers, tokens.mask.bool()], dim=1)
        order = is_token.long().argsort(dim=1, stable=True)[:, -BEFORE:, None]
        index = order[:, None].expand(-1, again.shape[1], -1, again.shape[-1])
        return torch.cat([asked, again], dim=2).gather(2, index)

    def prompt(self, tokens: NewTokens) -> Pass:
        """A first pass."""
        return Pass(
            _attention(tokens, None), self.of_prompt(tokens), self.remembered(tokens, None, None)
        )

    def chunk(self, tokens: NewTokens, asked: Tensor, slots: ops.Slots, sizes: list[int]) -> Pass:
        """A pass over several tokens behind what the slots hold."""
        out, scores = _attention(tokens, slots), self.of_chunk(tokens, asked, slots, sizes)
        return Pass(out, scores, self.remembered(tokens, asked, slots))

    def step(self, tokens: NewTokens, asked: Tensor, slots: ops.Slots) -> Pass:
        """A pass over one token of each row, which reads itself as it is stored."""
        out = _attention(as_stored(tokens, slots), slots)
        scores = self.of_one(tokens, asked, slots)
        return Pass(out, scores, self.remembered(tokens, asked, slots))

    def _length(self, tokens: NewTokens, slots: ops.Slots | None) -> int:
        """Tokens of the longest row with the new ones, where angles depend on it; else 0."""
        if not (self.rotated and self.rotary.by_length):
            return 0
        new = tokens.key.new_full([len(tokens.key)], tokens.key.shape[2], dtype=torch.long)
        new = new if tokens.mask is None else tokens.mask.sum(1)
        return int((new if slots is None else new + _lengths(slots)).max())

    def _again(self, query: Tensor, length: int) -> Tensor:
        """Queries [B, H, Q, D] of a text of this length, rotated on by `LATER` positions, of the
        same dtype."""
        if not self.rotated:
            return query
        of = length, query.device
        if self._later is None or self._later[0] != of:
            self._later = of, self.rotary.shift(LATER, length).to(query.device)
        return self.rotary.unhalved(turned(self.rotary.halves(query), self._later[1]))


def _lengths(slots: ops.Slots) -> Tensor:
    """Tokens that each row of a batch has seen, [B]."""
    return slots.lengths if slots.rows is None else slots.lengths[slots.rows.long()]


def newly_found(
    queries: Tensor, held: Tensor, is_held: Tensor, keys: Tensor, *, scale: float | None = None,
    softcap: float = 0.0, sink_logits: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The scores of the new keys of one row, [G, q] float32.

    Args:
        queries: [H, up to BEFORE + q, D], those of the last tokens before and of the new ones,
            rotated on.
        held: [G, K, D] keys held, where `is_held` [G, K].
        keys: [G, q, D], the new ones.
        scale, softcap, sink_logits: as in `h2o.ops.attend`.
    """
    H, n, D = queries.shape
    G, q = keys.shape[:2]
    scaled = queries.unflatten(0, (G, H // G)).float() * (D**-0.5 if scale is None else scale)
    both = torch.cat([held.float(), keys.float()], dim=1).mT
    K = held.shape[1]
    scores = torch.zeros(G, q, dtype=torch.float32, device=keys.device)
    rows = max(1, ENTRIES // max(1, H * (K + q)))
    for begin in range(0, n, rows):
        block = scaled[:, :, begin : begin + rows]
        count = block.shape[2]
        first_key = begin - (n - q)  # which of the new keys is the one of the block's first query
        columns = K + max(0, min(q, first_key + count + BEFORE))
        logits = (block.reshape(G, -1, D) @ both[..., :columns]).unflatten(1, block.shape[1:3])
        if softcap:
            logits = logits.div_(softcap).tanh_().mul_(softcap)
        new = logits[..., K:]
        near = {  # logits of the new keys from max(offset, 0) on
            offset: new.diagonal(offset, -2, -1).clone()
            for offset in range(first_key, first_key + BEFORE + 1)
        }
        logits[..., :K].masked_fill_(~is_held[:, None, None], -torch.inf)
        unseen = max(0, min(new.shape[-1], first_key + 1))  # those before it are seen by all
        last_seen = first_key + torch.arange(count, device=keys.device)[:, None]
        later = torch.arange(unseen, new.shape[-1], device=keys.device) > last_seen
        new[..., unseen:].masked_fill_(later, -torch.inf)
        total = logits.logsumexp(-1)  # [G, R, rows]
        if sink_logits is not None:
            total = torch.logaddexp(total, sink_logits.view(G, H // G, 1))
        for offset, logit in near.items():
            keys_there = logit.shape[-1]
            of_queries = total[..., max(-offset, 0) :][..., :keys_there]
            if offset > first_key:
                of_queries.copy_(torch.logaddexp(of_queries, logit))
            weights = (logit - of_queries).exp().amax(1)
            place = scores[:, max(offset, 0) :][:, :keys_there]
            torch.maximum(place, weights, out=place)
    return scores


def _columns(mask: Tensor | None, b: int) -> Any:
    """What chooses the real columns of a row."""
    return slice(None) if mask is None else mask[b].bool()


def _logits(tokens: NewTokens) -> dict[str, Any]:
    return {name: getattr(tokens, name) for name in ("scale", "softcap", "sink_logits")}


def _attention(tokens: NewTokens, slots: ops.Slots | None) -> Tensor:
    """Attention that gives no key a score, [B, Q, H, D]."""
    seen = None if slots is None else _without_scores(slots)
    out: Tensor
    out, _ = ops.attend(*tokens[:3], seen, mask=tokens.mask, **_logits(tokens))
    return out


def _without_scores(slots: ops.Slots) -> ops.Slots:
    """The same, with scores that may be written to."""
    return slots._replace(scores=torch.zeros_like(slots.scores))


def as_stored(tokens: NewTokens, slots: ops.Slots) -> NewTokens:
    """New tokens as they are read from the slots."""
    if slots.keys.dtype != torch.uint8 or tokens.value is None:
        return tokens

    def read_back(x: Tensor, store: Any) -> Tensor:
        return dequantised(stored_like(x, store), x.shape[-1]).to(x.dtype)

    return tokens._replace(
        key=read_back(tokens.key, slots.keys), value=read_back(tokens.value, slots.values)
    )
