"""The operations of H2O on tensors of any library.

The functions accept DLPack tensors (torch, NumPy, CuPy, JAX, ...), all on one device and of one
floating dtype (float32, float16 or bfloat16; scores are always float32). They read inputs in place
and write results into tensors that the caller owns. None of them is differentiable.

Shape letters: B batch rows, Z rows of slots, H query heads, G key/value heads (H = G * R), Q
new tokens, S slots, T slots of all heads of a row, D head dimension.

The algorithm is H2O (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of
Large Language Models", NeurIPS 2023, Algorithm 1 with accumulated scores and a reserved recent
window):

1. `attend`: new queries see all stored keys and, causally, the new ones;
2. the attention that a key received is added to its score, or replaces the score if it is larger;
3. `evict`: the sinks, the most recent and the highest-ranked keys are kept.

`step` does all three in one call for a single new token, without moving a byte of the cache.

All functions raise ValueError for a wrong shape, stride, value or overlap, TypeError for a wrong
dtype or an argument that is not a tensor, BufferError for memory that cannot be shared, for masked
arrays of NumPy and for tensors that require grad outside `torch.no_grad()`, RuntimeError for
tensors of other libraries than torch that are not on the CPU, and MemoryError. An error names the
argument and is raised before anything is written. The values in torch tensors on other devices are
not checked, because the host does not read them.

Inputs may have any strides, including 0 and negative ones, and may be read-only. JAX arrays are
read-only and can therefore be inputs only. DLPack ignores torch's lazy negation: if `x.is_neg()` is
true (as for `z.conj().imag`), pass `x.resolve_neg()`, or the sign is lost. h2o does not check this,
because the check would slow down every decode step.

Outputs must have positive strides without overlap. The memory that an output spans must not overlap
that of another tensor of the call, with one exception: two tensors may interleave if both have the
same row stride in bytes and none of their rows overlap. A row of slots can therefore be a page of
memory with all fields next to each other (`Slots.rows` selects pages by number). The last stride of
the keys, values, scores, positions and norms of slots, and of a table of angles, must be 1. No
dimension may have size 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from h2o import backends
from h2o.arguments.plain_values import check_flag
from h2o.policy import PAPER, Policy, PolicyFields, resolve_policy
from h2o.slots import Slots, new_slots, sizes_of_keys
from h2o.tensors import (
    check_memory,
    default_scale,
    fill_in,
    get_4d_sizes,
    needs_check,
    new_tensors,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Tensor = Any  # any object that supports DLPack

__all__ = [
    "Policy",
    "Rotary",
    "Slots",
    "attend",
    "evict",
    "info",
    "log_sums",
    "new_slots",
    "open_device",
    "simulate",
    "step",
]


class Rotary(NamedTuple):
    """Cache-relative positions for `step`.

    Keys are stored without their rotary embedding. Whenever a step reads a key, it rotates the key
    by its rank among the keys held. It rotates the query by the number of keys held before it. No
    position therefore exceeds the budget, however long the text is (Xiao et al., "Efficient
    Streaming Language Models with Attention Sinks", ICLR 2024, section 3.2).

    Angle i < F rotates elements i and F + i of a key or query, as in Llama. Elements from 2 F on
    are not rotated. P must be greater than the number of keys that any row holds, and F at most
    D / 2.
    """

    table: Tensor
    """[P, 2, F] float32: cosines and sines of the angles of each rank. The last stride is 1."""
    ranks: Tensor
    """[Z, G, S] (or [Z, T]) int32, updated in place: number of keys of the same head at lower
    positions; -1 for an empty slot. `evict` does not update it: compute it again afterwards, as
    `ranks` in `tests/reference/operations.py` does."""


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor | None,
    slots: Slots | None = None,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    out: Tensor | None = None,
    scores: Tensor | None = None,
    sink_logits: Tensor | None = None,
    policy: Policy = PAPER,
    **fields: Unpack[PolicyFields],
) -> tuple[Tensor, Tensor]:
    """Compute the attention of new queries, and score every key that they see.

    Args:
        query: [B, H, Q, D].
        keys, values: [B, G, Q, D] of the new tokens. In all operations values is None if the keys
            are the values too, and must be None exactly when the slots have no values.
        slots: stored keys, which the queries see as well. `slots.scores` becomes decay^n * scores
            plus the attention from the n new queries that are not padding (or the larger of the
            two); nothing else changes.
        mask: [B, Q] bool or uint8. 0 marks padding, which is never attended to, scored or counted,
            and whose output is 0. Padding may be anywhere.
        scale: factor of q.k, 1 / sqrt(D) by default.
        softcap: c > 0 turns logits x into c * tanh(x / c).
        out: [B, Q, H, D], written. If not given, it is allocated like `query` (torch and NumPy
            only).
        scores: [B, G, Q] float32, written.
        sink_logits: [H] float32, learned attention sinks (OpenAI, "gpt-oss-120b & gpt-oss-20b
            Model Card", 2025): one logit per query head that is added to the softmax's denominator
            and has no value. Its share of the attention goes to no key's score, so the keys get
            less than 1 per query. -inf: no sink; +inf: the sink takes everything. The policy's
            `sinks` are something else: tokens.
        policy, fields: as in `evict`. Only `decay` and whether `score_by` is "max" matter here.

    Returns:
        (out, scores). The score of a new key j is the sum over new queries i >= j and over the R
        query heads of its group of decay^(n-1-i) * p(i, j). With "max" it is the largest of these.

    Memory is O(Q + S) beyond the outputs; no Q x S matrix is formed. A value that is not finite
    affects the outputs of the tokens that see it and no others. An infinite value makes them
    infinite, or NaN where its weight underflows a float32 (a logit about 87 below the row's
    highest), since 0 times infinity is NaN. If torch's own attention computes prompts on CUDA
    (`h2o info` says so), outputs of up to about a hundred earlier tokens may be NaN too.
    """
    check_memory(
        slots, query=query, keys=keys, values=values, mask=mask, out=out, scores=scores,
        sink_logits=sink_logits,
    )  # fmt: skip
    if fields:
        policy = resolve_policy(policy, fields, attend)
    backend = backends.backend_for(query)
    scale, out, scores = fill_in(query, keys, scale, out=out, scores=scores)
    backend.attend(
        query, keys, values, mask, slots, out, scores, scale, softcap, policy, sink_logits, None,
        None,
    )  # fmt: skip
    return out, scores


def log_sums(
    query: Tensor,
    keys: Tensor,
    slots: Slots | None = None,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Log of each query's softmax denominator, [B, H, Q] float32; 0 for padding.

    The weight of a single key is exp(logit - log sum). If the weights of only a few keys are
    needed, this takes half the work of `attend`. Arguments are as in `attend`. None is modified.
    """
    check_memory(slots, query=query, keys=keys, mask=mask, sink_logits=sink_logits)
    scale, out, scores, sums = fill_in(query, keys, scale, out=None, scores=None, sums=None)
    values = keys if slots is None or slots.values is not None else None
    backends.backend_for(query).attend(
        query, keys, values, mask, slots, out, scores, scale, softcap, PAPER, sink_logits, sums,
        None,
    )  # fmt: skip
    return sums


def evict(
    keys: Tensor,
    values: Tensor | None,
    scores: Tensor,
    slots: Slots,
    *,
    mask: Tensor | None = None,
    policy: Policy = PAPER,
    **fields: Unpack[PolicyFields],
) -> None:
    """Store new keys in the slots, and permanently drop the keys that exceed the budget.

    Of the stored and new keys of a row, the operation keeps those at the first `sinks` positions,
    those at the `recent` highest positions, and the `heavy` highest-ranked of the others. Among
    equal ranks the lower position stays. A NaN rank is lower than every number.

    Args:
        keys, values: [B, G, Q, D] new tokens, as given to `attend`.
        scores: [B, G, Q] float32, as returned by `attend`. An infinite score, which `attend` never
            returns, pins a key: the key is never evicted, and counts as one of the `heavy`.
        slots: updated in place: the keys kept, their scores and positions, `seen_tokens`,
            `evicted_score`, `next_slot`. S must be at least min(k, stored + new).
        mask: [B, Q] bool or uint8, 0 for padding.
        policy, fields: a `Policy`, or its fields as keywords. `decay` must be that given to
            `attend`. `score_by="max"` needs scores that `attend` computed with "max". "mean" with a
            decay divides by the sum of decay^age over the queries.
    """
    check_memory(slots, keys=keys, values=values, scores=scores, mask=mask)
    if fields:
        policy = resolve_policy(policy, fields, evict)
    backends.backend_for(keys).evict(keys, values, scores, mask, slots, policy)


def step(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    slots: Slots,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    out: Tensor | None = None,
    rotary: Rotary | None = None,
    sink_logits: Tensor | None = None,
    policy: Policy = PAPER,
    **fields: Unpack[PolicyFields],
) -> Tensor:
    """Run one decode step: store the new key, attend, score, and choose the key to evict.

    The result is that of `attend` and `evict` with Q = 1. The new key and value are written
    directly into `slots.next_slot`, and the evicted key's slot becomes the next free one, so that
    keys and values are read once and never moved. If `step` is the first operation on a CUDA
    device, torch computes it and a warning is issued: see `open_device`.

    Args:
        query: [B, H, 1, D].
        key, value: [B, G, 1, D].
        slots: updated in place. Each row's `next_slot` must be below S.
        mask: [B, 1] bool or uint8. A row with 0 is left unchanged, and its output is 0.
        out: [B, 1, H, D], written. If not given, it is allocated like `query`.
        rotary: cache-relative positions. Pass the query and key without their rotary embedding
            then; stored keys have none either.
        policy, fields, others: as in `attend` and `evict`.

    Returns:
        out
    """
    if needs_check(query):
        check_memory(
            slots, rotary, query=query, key=key, value=value, mask=mask, out=out,
            sink_logits=sink_logits,
        )  # fmt: skip
    if fields:
        policy = resolve_policy(policy, fields, step)
    backend = backends.backend_if_open(query)
    # Not `fill_in`: compiled steps run this in every layer for every new token, with both given.
    sizes = get_4d_sizes(query) if out is None or scale is None else None
    if out is None and sizes is not None:
        B, H, Q, D = sizes
        (out,) = new_tensors(query, ((B, Q, H, D), None, None))
    if scale is None:
        scale = default_scale(query, sizes)
    table, ranks = (None, None) if rotary is None else rotary
    backend.step(
        query, key, value, mask, slots, out, scale, softcap, policy, table, ranks, sink_logits
    )
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
    """Compute in one call the outputs that a cache would give for a whole text.

    The result is that of passing the first `prompt[b]` tokens of each row through `attend` and
    `evict`, and each later token through `step`. A dropped key never returns, so one number per key
    records its history: query i sees key j exactly when j <= i < evicted_at[j] and j is not
    padding.

    Args:
        query: [B, H, Q, D], all Q tokens of the text.
        keys, values: [B, G, Q, D].
        prompt: [B] int32, at least 1: length of the prompt in tokens, not counting padding. With 1
            eviction starts at the very beginning, as in the paper's Algorithm 1.
        budget: [B, 2], or [B, G, 2] if heads have different budgets, int32: heavy, recent.
        mask: [B, Q] bool or uint8, 0 for padding.
        kv_dtype, offsets: format of the stored keys and values, as in `new_slots`. If `kv_dtype` is
            given, the call needs memory to store all tokens in this format.
        smoothing: [B, G, D] float16, as in `Slots`, for four-bit keys with offsets; None: 1.
        policy, fields, others: as in `attend` and `evict`.

    Returns:
        (out, evicted_at, scores). out is [B, Q, H, D]. evicted_at is [B, G, Q] int32, the index of
        the first query that no longer sees the key, counting padding; Q if there is none, and 0 for
        padding. scores is [B, G, Q] float32, the score at the end or at eviction.
    """
    check_memory(
        None, query=query, keys=keys, values=values, prompt=prompt, budget=budget, mask=mask,
        smoothing=smoothing, out=out, evicted_at=evicted_at, scores=scores, sink_logits=sink_logits,
    )  # fmt: skip
    if fields:
        policy = resolve_policy(policy, fields, simulate)
    offsets = check_flag("offsets", offsets)
    backend = backends.backend_for(query)
    stored: tuple[Tensor | None, ...] = (None, None, None, smoothing)
    if kv_dtype is not None:
        kind = {"kv_dtype": kv_dtype, "offsets": offsets}
        stored = _quantized(keys, values, prompt, mask, smoothing, **kind)
    scale, out, evicted_at, scores = fill_in(
        query, keys, scale, out=out, evicted_at=evicted_at, scores=scores
    )
    backend.simulate(
        query, keys, values, mask, prompt, budget, out, evicted_at, scores,
        scale, softcap, policy, *stored, sink_logits,
    )  # fmt: skip
    return out, evicted_at, scores


def _quantized(
    keys: Tensor,
    values: Tensor,
    prompt: Tensor,
    mask: Tensor | None,
    smoothing: Tensor | None,
    **kind: Any,
) -> tuple[Tensor | None, ...]:
    """Quantized keys and values [B, G, Q, bytes] of all tokens, ordered by position, and the
    offsets [B, G, D] and smoothing of the keys. As in a cache, only the prompt determines offsets.
    `kind`: other arguments of `new_slots`."""
    B, G, Q, _ = sizes_of_keys(keys)
    slots = new_slots(keys, Q, shared=values is None, **kind)._replace(smoothing=smoothing)
    real = new_tensors(keys, ((B, Q), "bool", 1))[0] if mask is None else mask
    parts = [mask]
    if tuple(real.shape) == (B, Q) and tuple(prompt.shape) == (B,):  # or the core raises, below
        late = (real != 0).cumsum(1) > prompt[:, None]
        parts = [(real != 0) & ~late, (real != 0) & late]
    (scores,) = new_tensors(keys, ((B, G, Q), "float32", 0))
    for part in parts:
        evict(keys, values, scores, slots, mask=part)
    return slots.keys, slots.values, slots.offsets, slots.smoothing


def open_device(tensor: Tensor) -> None:
    """Choose the backend of a tensor's device, and on a CUDA device load and check h2o's kernels.

    The first `attend`, `evict` or `simulate` on a device does this automatically. Call it yourself
    if `step` comes first, for example with slots that were moved to the device."""
    backends.backend_for(tensor)


def info() -> dict[str, Any]:
    """Facts about the core and the machine.

    Keys: level (the instruction set in use), levels (those that this machine supports), operations
    (the level of each operation), features, threads (their number), thread_source ("torch", "gomp"
    or "own", whose number `H2O_THREADS` sets), version, and backends (the backend of each kind of
    device).
    """
    return backends.info()
