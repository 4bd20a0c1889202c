"""H2O in plain torch, written to be read. Every kernel is tested against it.

The functions take the same arguments as their namesakes in `h2o.ops` and update the slots in place.
They do without the compiled core and without regard to speed: they loop over batch rows and
key/value heads and compute in float64.

The algorithm is H2O (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of
Large Language Models", NeurIPS 2023, Algorithm 1), with accumulated scores and a part of the budget
reserved for recent tokens:

1. Attend. A new query sees every stored key, and the new keys up to and including its own.
2. Score. A key's score is the attention that it has received, summed over all queries and over the
   query heads of its group. With `score_by="max"` it is the largest attention from any of them.
3. Evict. If there are more than k = sinks + heavy + recent keys, k of them are kept: those at the
   first `sinks` positions, those at the last `recent` positions, and of the others the `heavy` keys
   with the highest scores. The rest are evicted, which means dropped for good. A key whose score
   is infinity, which attention never gives, is pinned: it is always kept, as one of the `heavy`.

Rolled positions are for texts without end (Xiao et al., "Efficient Streaming Language Models with
Attention Sinks", ICLR 2024, section 3.2). Keys are stored before their rotary embedding. Each call
rotates a key by its rank among the keys held, and a query by the number of keys held before it.

Shape letters: B batch rows, H query heads, G key/value heads, R = H / G query heads in a group,
Q new tokens, S slots, D head dimension, n new tokens of a row that are not padding, m stored keys
of a row and head plus n, P ranks, F frequencies.
"""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from h2o.backends.torch_backend.step import rotate_by
from h2o.policy import PAPER, Policy, PolicyFields
from h2o.quantization import CENTER_TOKENS, dequantize, stored_like
from h2o.sink_logits import softmax
from h2o.slots import PER_SLOT, new_slots

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = ["attend", "evict", "kept", "ranks", "simulate", "step"]


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    slots: Any = None,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    out: Tensor | None = None,
    scores: Tensor | None = None,
    rotary: Tensor | None = None,
    sink_logits: Tensor | None = None,
    policy: Policy = PAPER,
    **fields: Unpack[PolicyFields],
) -> tuple[Tensor, Tensor]:
    """Steps 1 and 2. Arguments and results are those of `h2o.ops.attend`. If `values` is None, the
    keys are also the values.

    With `rotary`, a table of angles as in `h2o.ops.Rotary`, positions are rolled: query, keys and
    stored keys have no rotary embedding yet, and this function applies it.
    """
    policy = _policy(policy, fields)
    B, H, Q, D = query.shape
    G = keys.shape[1]
    R = H // G
    values = keys if values is None else values
    if scale is None:
        scale = D**-0.5
    out = query.new_empty(B, Q, H, D) if out is None else out
    scores = query.new_empty(B, G, Q, dtype=torch.float32) if scores is None else scores
    out.zero_()
    scores.zero_()
    for b in range(B):
        new, row = _real_columns(mask, b, Q, query.device), _row(slots, b)
        for g in range(G):
            key, value = keys[b, g, new], values[b, g, new]
            score = torch.zeros_like(scores[b, g, new])
            if slots is not None:
                store = _store(slots, row, g)
                held = _held_slots(store)
                stored_values = store.keys if store.values is None else store.values
                key = torch.cat(
                    [_restore(store.keys[held], store.offset, store.smoothing, D), key.double()]
                )
                value = torch.cat([_restore_value(stored_values[held], store.offset, D), value])
                score = torch.cat([store.scores[held], score])
            key, value, score = (x.double() for x in (key, value, score))
            if rotary is not None:
                key = rotate_by(key, rotary[: len(key)].double())
            group = slice(g * R, (g + 1) * R)
            sinks = None if sink_logits is None else sink_logits[group].double()
            for seen, column in enumerate(new.tolist(), start=len(key) - len(new) + 1):
                queries = query[b, group, column].double()
                if rotary is not None:
                    queries = rotate_by(queries, rotary[seen - 1].double())
                p = _probabilities(queries, key[:seen], scale, softcap, sinks)
                out[b, column, group] = (p @ value[:seen]).to(out.dtype)
                received = p.amax(0) if policy.scores_largest else p.sum(0)
                both = torch.maximum if policy.scores_largest else torch.add
                score[:seen] = both(policy.decay * score[:seen], received)
            if slots is not None:
                store.scores[held] = score[: len(held)].float()
            scores[b, g, new] = score[len(key) - len(new) :].float()
    return out, scores


def _policy(policy: Policy, fields: Any) -> Policy:
    return Policy(**fields) if fields else policy


def _probabilities(
    query: Tensor, keys: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention [R, seen] of one token's queries [R, D] to the keys [seen, D] that they see.

    `sinks` [R] has for each head one more logit in the softmax, which belongs to no key.
    """
    logits = scale * (query @ keys.T)
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    return softmax(logits, None if sinks is None else sinks[:, None])


def ranks(slots: Any) -> Tensor:
    """Rank of each key by position among the keys of its head, int32 [B, G, S]. -1: empty slot."""
    ranks = torch.full_like(slots.positions, -1)
    for b, g in itertools.product(*map(range, slots.next_slot.shape)):
        held = _held_slots(_store(slots, b, g))
        _store(slots._replace(positions=ranks), b, g).positions[held] = _range_like(held).int()
    return ranks


def evict(
    keys: Tensor,
    values: Tensor | None,
    scores: Tensor,
    slots: Any,
    *,
    mask: Tensor | None = None,
    policy: Policy = PAPER,
    **fields: Unpack[PolicyFields],
) -> None:
    """Step 3. Arguments and effect are those of `h2o.ops.evict`, except that this function stores
    the kept keys in order of position."""
    policy = _policy(policy, fields)
    B, G, Q, _ = keys.shape
    values = keys if values is None else values
    for b in range(B):
        new, row = _real_columns(mask, b, Q, keys.device), _row(slots, b)
        seen = int(slots.seen_tokens[row]) + len(new)
        for g in range(G if len(new) else 0):
            heavy, recent = _budget(slots.budget, row, g)
            store = _store(slots, row, g)
            if store.offset is not None and seen == len(new):  # the row held nothing
                mean = keys[b, g, new[:CENTER_TOKENS]].double().mean(0).half()
                store.offset.copy_(mean.where(mean.isfinite(), 0))
            candidates = _candidates(
                store, keys[b, g, new], values[b, g, new], scores[b, g, new], seen
            )
            rank = candidates.scores.double()
            if policy.score_by == "mean":
                ages = seen - 1 - candidates.positions.long()
                rank = rank / _queries(ages, policy.decay)
            if policy.value_weighted:
                rank = rank * candidates.norms
            positions = candidates.positions.tolist()
            is_pinned = (candidates.scores == torch.inf).tolist()
            kept, evicted = _choose(
                positions, rank.tolist(), is_pinned, policy.sinks, heavy, recent
            )
            slots.evicted_score[row, g] += candidates.scores[evicted].double().sum()
            store.positions[:] = -1
            for name in PER_SLOT:
                if getattr(store, name) is not None:
                    getattr(store, name)[: len(kept)] = getattr(candidates, name)[kept]
            slots.next_slot[row, g] = len(kept)
        slots.seen_tokens[row] = seen


def _candidates(
    store: Any, keys: Tensor, values: Tensor, scores: Tensor, seen: int
) -> SimpleNamespace:
    """The stored keys of one row and head followed by n new ones, by ascending position. All fields
    are in the form in which the slots store them."""
    held, n = _held_slots(store), len(keys)
    new = {
        "keys": stored_like(_center(keys, store.offset, store.smoothing), store.keys),
        "values": None
        if store.values is None
        else _stored_value(values, store.offset, store.values),
        "scores": scores,
        "positions": torch.arange(seen - n, seen, device=keys.device).int(),
        "norms": values.double().norm(dim=-1).float(),
    }
    both = {}
    for name in PER_SLOT:
        stored = getattr(store, name)
        both[name] = None if stored is None else torch.cat([stored[held], new[name]])
    return SimpleNamespace(**both)


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Hadamard transform of blocks of x [..., D], whose length is the largest power
    of two that divides D. It is its own inverse."""
    D = x.shape[-1]
    N, h = D & -D, 1
    while h < N:
        a, b = x.unflatten(-1, (-1, 2, h)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
        h *= 2
    return x * N**-0.5


def _center(keys: Tensor, offset: Tensor | None, smoothing: Tensor | None) -> Tensor:
    """Keys [..., D] as they are quantized: without the offset of their head, divided by its
    smoothing, and transformed."""
    if offset is None:
        return keys
    centered = keys.float() - offset.float()
    return hadamard(centered if smoothing is None else centered / smoothing.float())


def _restore(keys: Tensor, offset: Tensor | None, smoothing: Tensor | None, D: int) -> Tensor:
    """Stored keys [..., D or bytes] as floats [..., D]: the inverse of `_center`."""
    keys = dequantize(keys, D).double()
    if offset is None:
        return keys
    centered = hadamard(keys) if smoothing is None else hadamard(keys) * smoothing.double()
    return centered + offset.double()


def _stored_value(values: Tensor, offset: Tensor | None, rows: Tensor) -> Tensor:
    """Values [..., D] in the form of stored `rows`, transformed if keys have an offset."""
    return stored_like(values if offset is None else hadamard(values.float()), rows)


def _restore_value(rows: Tensor, offset: Tensor | None, D: int) -> Tensor:
    """Stored values [..., D or bytes] as floats [..., D]."""
    values = dequantize(rows, D)
    return values if offset is None else hadamard(values.double())


def _read_back(key: Tensor, value: Tensor | None, slots: Any) -> tuple[Tensor, Tensor | None]:
    """A key and a value [B, G, 1, D] after a round trip through the store; float if it is
    quantized. The value is None if there are none."""
    D, rows = key.shape[-1], slice(None) if slots.rows is None else slots.rows.long()
    offset, smoothing = (
        None if x is None else x[rows][:, :, None] for x in (slots.offsets, slots.smoothing)
    )
    stored = stored_like(_center(key, offset, smoothing), slots.keys)
    key = _restore(stored, offset, smoothing, D)
    if value is None:
        return key, None
    return key, _restore_value(_stored_value(value, offset, slots.values), offset, D)


def _choose(
    position: list[int], rank: list[float], is_pinned: list[bool], sinks: int, heavy: int,
    recent: int,
) -> tuple[list[int], list[int]]:  # fmt: skip
    """Indices of the kept keys and of the evicted keys, both ascending. The keys must be ordered by
    position. Of equal ranks the lower position is kept, and NaN ranks lowest."""
    count, k = len(position), sinks + heavy + recent
    if count <= k:
        return [*range(count)], []
    candidates = [i for i in range(count - recent) if position[i] >= sinks and not is_pinned[i]]
    places = k - (count - len(candidates))  # left over by sinks, recent and pinned keys

    def worst_last(i: int) -> tuple[bool, float, int]:
        nan = rank[i] != rank[i]
        return nan, 0.0 if nan else -rank[i], position[i]

    evicted = sorted(sorted(candidates, key=worst_last)[places:])
    return [i for i in range(count) if i not in evicted], evicted


def _queries(age: Tensor, decay: float) -> Tensor:
    """Number of queries that have seen a key of this age: its own token's and those of `age` later
    tokens, each weighted by the decay since."""
    terms = decay ** torch.arange(int(age.max()) + 1, dtype=torch.float64, device=age.device)
    return terms.cumsum(0)[age]


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    slots: Any,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    out: Tensor | None = None,
    rotary: Any = None,
    sink_logits: Tensor | None = None,
    policy: Policy = PAPER,
    **fields: Unpack[PolicyFields],
) -> Tensor:
    """`attend` and `evict` for one new token. The token attends to its own key and value as they
    are stored.

    Arguments and result are those of `h2o.ops.step`.
    """
    policy = _policy(policy, fields)
    k, v = _read_back(key, value, slots)
    out, scores = attend(
        query, k, v, slots, mask=mask, scale=scale, softcap=softcap, out=out, policy=policy,
        rotary=None if rotary is None else rotary.table, sink_logits=sink_logits,
    )  # fmt: skip
    evict(key, value, scores, slots, mask=mask, policy=policy)
    if rotary is not None:
        rotary.ranks.copy_(ranks(slots))
    return out


def simulate(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    prompt: Tensor,
    budget: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    kv_dtype: str | None = None,
    offsets: bool = False,
    smoothing: Tensor | None = None,
    out: Tensor | None = None,
    evicted_at: Tensor | None = None,
    scores: Tensor | None = None,
    sink_logits: Tensor | None = None,
    policy: Policy = PAPER,
    **fields: Unpack[PolicyFields],
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a whole text through a cache, token by token. Arguments and results are those of
    `h2o.ops.simulate`.

    A key that is evicted after the token in column c has `evicted_at` c + 1.
    """
    policy = _policy(policy, fields)
    B, H, Q, D = query.shape
    G = keys.shape[1]
    out = query.new_empty(B, Q, H, D) if out is None else out
    if evicted_at is None:
        evicted_at = query.new_empty(B, G, Q, dtype=torch.int32)
    scores = query.new_empty(B, G, Q, dtype=torch.float32) if scores is None else scores
    out.zero_()
    evicted_at.zero_()
    scores.zero_()
    for b in range(B):
        real = _real_columns(mask, b, Q, query.device)
        evicted_at[b, :, real] = Q
        slots = new_slots(
            keys[:1], max(1, len(real)),
            value_weighted=policy.value_weighted, kv_dtype=kv_dtype, shared=values is None,
            offsets=offsets,
        )._replace(budget=budget[b : b + 1])  # fmt: skip
        if smoothing is not None:
            slots = slots._replace(smoothing=smoothing[b : b + 1])
        start, first = 0, max(1, min(int(prompt[b]), len(real)))
        for stop in range(first, len(real) + 1):
            new, start = real[start:stop], stop
            q, k = (x[b : b + 1, :, new] for x in (query, keys))
            v = None if values is None else values[b : b + 1, :, new]
            seen = (k, v)
            if stop > first:
                seen = _read_back(k, v, slots)
            answer, new_scores = attend(
                q, *seen, slots,
                scale=scale, softcap=softcap, sink_logits=sink_logits, policy=policy,
            )  # fmt: skip
            out[b, new] = answer[0]
            scores[b, :, new] = new_scores[0]
            held = [real[slots.positions[0, g, : slots.next_slot[0, g]].long()] for g in range(G)]
            for g in range(G):
                scores[b, g, held[g]] = slots.scores[0, g, : len(held[g])]
            evict(k, v, new_scores, slots, policy=policy)
            for g in range(G):
                before = torch.cat([held[g], new])
                after = real[slots.positions[0, g, : slots.next_slot[0, g]].long()]
                scores[b, g, after] = slots.scores[0, g, : len(after)]
                evicted_at[b, g, before[~torch.isin(before, after)]] = int(new[-1]) + 1
    return out, evicted_at, scores


def kept(slots: Any) -> tuple[Tensor, Tensor]:
    """The keys in the slots: positions [B, G, K] int64, ascending, and scores [B, G, K] float32.

    K is the largest number of keys that any row and head holds. Heads with fewer keys are padded
    with position -1 and score 0.
    """
    B, G = slots.next_slot.shape
    held = [len(_held_slots(_store(slots, b, g))) for b in range(B) for g in range(G)]
    K = max(held)
    positions = slots.positions.new_full((B, G, K), -1, dtype=torch.int64)
    scores = slots.scores.new_zeros((B, G, K))
    for b in range(B):
        for g in range(G):
            store = _store(slots, b, g)
            held = _held_slots(store)
            positions[b, g, : len(held)] = store.positions[held].long()
            scores[b, g, : len(held)] = store.scores[held]
    return positions, scores


def _row(slots: Any, b: int) -> int:
    """The row of the slots that belongs to row b of the batch."""
    return b if slots is None or slots.rows is None else int(slots.rows[b])


def _store(slots: Any, b: int, g: int) -> SimpleNamespace:
    """Views of the slots of one row and head: keys [S, D], scores [S] and so on."""
    where: tuple[Any, ...] = (b, g)
    if slots.starts is not None:  # the slots of all heads share one axis
        starts = slots.starts if slots.starts.ndim == 1 else slots.starts[b]
        where = (b, slice(int(starts[g]), int(starts[g + 1])))
    tensors = {name: getattr(slots, name) for name in PER_SLOT}
    views = {n: None if x is None else x[where] for n, x in tensors.items()}
    offset, smoothing = (None if x is None else x[b, g] for x in (slots.offsets, slots.smoothing))
    return SimpleNamespace(**views, offset=offset, smoothing=smoothing)


def _budget(budget: Tensor, b: int, g: int) -> tuple[int, int]:
    """The heavy and recent budgets of one row and head, from [B, 2] or [B, G, 2]."""
    heavy, recent = (budget[b] if budget.ndim == 2 else budget[b, g]).tolist()
    return heavy, recent


def _held_slots(store: Any) -> Tensor:
    """The filled slots of one row and head, in ascending order of position."""
    position = store.positions
    order = position.argsort(stable=True)
    return order[position[order] >= 0]


def _real_columns(mask: Tensor | None, b: int, Q: int, device: torch.device) -> Tensor:
    """The columns of row b that are not padding, ascending."""
    if mask is None:
        return torch.arange(Q, device=device)
    return mask[b].nonzero()[:, 0]


def _range_like(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)
