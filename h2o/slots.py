"""`Slots`: the tensors of one layer's cache (keys, values, scores, positions, ...).

`new_slots` makes empty ones, with the library and device of the keys that it is given.

Shape letters: B batch rows, Z rows of slots (B, unless `rows` is given), G key/value heads, S
slots, T slots of all heads of a row, D head dimension.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from h2o.arguments.plain_values import (
    check_choice,
    check_count,
    check_flag,
    check_numbers,
    is_list,
    nested,
)
from h2o.budgets import UNLIMITED, check_tokens
from h2o.kv_dtype import QUANTIZED, stored_bytes
from h2o.tensors import get_4d_sizes, new_tensors

Tensor = Any  # any object that supports DLPack


class Slots(NamedTuple):
    """Keys and values of one layer. The operations update the tensors in place.

    A slot is an index on axis S. A row that has seen `seen_tokens[b]` tokens and may keep
    k = sinks + heavy + recent of them holds min(seen_tokens[b], k) tokens, in the lowest slots,
    except that `next_slot[b, g]` may be a gap among them.

    Heads may have different budgets and, to save memory, different numbers of slots. `starts` is
    then given, and the slots of a row's heads follow each other on one axis T: keys are [Z, T, D]
    instead of [Z, G, S, D], and scores [Z, T] instead of [Z, G, S]. The axis may be longer than
    one layer needs, because several layers may share it.

    If `rows` is given, a call uses only the rows that it lists, one for each row of the batch.
    """

    keys: Tensor
    """[Z, G, S, D]; quantized: [Z, G, S, bytes] uint8, read by `h2o.quantization.dequantize`, and
    with `offsets` by `from_stored` after it."""
    values: Tensor | None
    """Like `keys`. None if the keys are the values too (multi-head latent attention)."""
    scores: Tensor
    """[Z, G, S] float32: attention that each key has received, the sum or the maximum."""
    positions: Tensor
    """[Z, G, S] int32: index of the token in its row, not counting padding; -1: empty."""
    next_slot: Tensor
    """[Z, G] int32: slot for the next token."""
    seen_tokens: Tensor
    """[Z] int64: number of tokens that the row has seen, not counting padding."""
    budget: Tensor
    """[Z, 2], or [Z, G, 2] if heads have different budgets, int32: heavy, recent."""
    evicted_score: Tensor
    """[Z, G] float64 (float32 on mps): sum of the scores that evicted keys had at eviction."""
    norms: Tensor | None = None
    """[Z, G, S] float32: L2 norm of each value. Given if and only if value_weighted."""
    starts: Tensor | None = None
    """[G + 1] int32: head g has the slots starts[g] to starts[g + 1] - 1 of axis T. [Z, G + 1] if
    the boundaries differ by row."""
    rows: Tensor | None = None
    """[B] int32: row b of the batch is row rows[b] of the other fields. No number occurs twice.
    None: row b of the batch is row b."""
    offsets: Tensor | None = None
    """[Z, G, D] float16: subtracted from a head's keys before they are quantized. `evict` sets it
    in rows that hold nothing yet: the mean of the row's first keys (`h2o.quantization.offsets_of`).
    Keys and values are then stored transformed (`h2o.quantization.hadamard`). None: neither
    happens, as always if keys are not quantized or are the values too."""
    smoothing: Tensor | None = None
    """[Z, G, D] float16, above 0: four-bit keys are divided by it after their offset is subtracted,
    and queries are multiplied by it. Operations only read it. Write it before a row's first keys
    are stored (`h2o.quantization.smoothing_of`); 1 until then. None: neither happens."""


class Kind(NamedTuple):
    """Properties of a field of `Slots`."""

    shape: str
    """One shape letter for each axis."""
    written: bool = True
    """Whether the operations write to the field."""
    optional: bool = False
    """Whether the field may be None."""
    dtype: str = "float32"
    """"" is the floating dtype of the call, or uint8 for quantized rows."""


KINDS: dict[str, Kind] = {
    "keys": Kind("ZGSD", dtype=""),
    "values": Kind("ZGSD", optional=True, dtype=""),
    "scores": Kind("ZGS"),
    "positions": Kind("ZGS", dtype="int32"),
    "next_slot": Kind("ZG", dtype="int32"),
    "seen_tokens": Kind("Z", dtype="int64"),
    "budget": Kind("Z2", written=False, dtype="int32"),
    "evicted_score": Kind("ZG", dtype="float64"),
    "norms": Kind("ZGS", optional=True),
    "starts": Kind("+", written=False, optional=True, dtype="int32"),
    "rows": Kind("B", written=False, optional=True, dtype="int32"),
    "offsets": Kind("ZGD", optional=True, dtype="float16"),
    "smoothing": Kind("ZGD", written=False, optional=True, dtype="float16"),
}
"""Properties of the fields of `Slots`, in their order. `csrc/h2o.h` has the same list
(`H2O_SLOTS_FIELDS`)."""

MOST_TRANSFORMED = 1024
"""Largest D of slots with offsets. `csrc/types.h` has the same number."""

PER_SLOT = tuple(name for name, kind in KINDS.items() if "S" in kind.shape)
"""Fields with an entry for each slot."""
ROWS = ("keys", "values")
"""Fields with the row of each key and value."""
PER_ROW = tuple(name for name, kind in KINDS.items() if kind.shape.startswith("Z"))
"""Fields with an entry for each row."""
CHANGED = tuple(name for name in PER_ROW if name != "budget")
"""Fields that forward passes write to: those that operations write to, and `smoothing`."""


EMPTY = dict.fromkeys(KINDS, 0) | {"positions": -1, "smoothing": 1}
"""Values of the fields, other than the budget, where no key is held."""


def empty_row(slots: Slots, row: int) -> None:
    """Empty a row but keep its budget."""
    for name in CHANGED:
        field = getattr(slots, name)
        if field is not None and name not in ROWS:
            field[row] = EMPTY[name]


def sizes_of_keys(keys: Tensor) -> tuple[int, int, int, int]:
    """B, G, tokens and D. Raises: ValueError for keys of another shape."""
    sizes = get_4d_sizes(keys)
    if sizes is None:
        raise ValueError(f"keys: has shape {getattr(keys, 'shape', None)}, wanted [B, G, any, D]")
    return sizes


def should_center(keys: Tensor, softcap: float, sink_logits: Tensor | None) -> bool:
    """Whether to give slots of quantized keys offsets.

    h2o's kernels for GPUs know no offsets. They do without if a softmax is over products with keys
    alone, since subtracting the same vector from all keys does not change it. A softcap and learned
    sinks change that, and then offsets would leave every operation to torch."""
    if keys.shape[-1] > MOST_TRANSFORMED:
        return False
    return not getattr(keys, "is_cuda", False) or not (softcap or sink_logits is not None)


def new_slots(
    keys: Tensor,
    capacity: int | Sequence[int],
    heavy: int = UNLIMITED,
    recent: int = 0,
    *,
    value_weighted: bool = False,
    kv_dtype: str | None = None,
    shared: bool = False,
    offsets: bool = False,
) -> Slots:
    """Make empty slots for keys like `keys` [B, G, any, D], a torch tensor or NumPy array.

    `capacity` is S, or one number for each of the G heads; the slots then have `starts` and budgets
    [B, G, 2]. A row of budget k needs min(k, tokens) slots after `evict` and one more for each
    `step`, at most k + 1. `heavy` and `recent` are numbers of tokens, the same for every row. Write
    into `budget` to give rows and heads their own.

    `kv_dtype`: None stores keys and values in their own dtype. "int8" stores 8-bit integers with
    one 16-bit scale for each key and value. "int8-int4" stores values in four bits instead, with a
    16-bit scale and a 16-bit minimum for every 32 elements; D must then be a multiple of 32. "int4"
    stores keys in four bits too, with one 16-bit scale for each key.
    `value_weighted`: allocate `norms`, which a policy with `value_weighted` needs.
    `shared`: allocate no `values`, because the keys are the values too.
    `offsets`: give quantized keys `offsets`, unless they are shared, so that eight bits suffice
    for keys around any constant, and four for values with outliers. D may then be
    `MOST_TRANSFORMED` at most. See `should_center`. Four-bit keys also get `smoothing`.
    """
    even = not is_list(nested(capacity))
    listed = [capacity] if even else check_numbers("capacity", capacity)
    each = [check_count("capacity", x, hint="k + 1 for rows of budget k") for x in listed]
    heavy, recent = check_tokens("heavy", heavy), check_tokens("recent", recent)
    G = sizes_of_keys(keys)[1]
    if not even and len(each) != G:
        raise ValueError(f"capacity: has {len(each)} numbers, wanted one for each of {G} heads")
    slots = empty_slots(
        keys, each[0] if even else each,
        value_weighted=check_flag("value_weighted", value_weighted),
        kv_dtype=check_choice("kv_dtype", kv_dtype, (None, *QUANTIZED)),
        shared=check_flag("shared", shared), offsets=check_flag("offsets", offsets),
    )  # fmt: skip
    slots.budget[..., 0], slots.budget[..., 1] = heavy, recent
    return slots


def empty_slots(
    keys: Tensor,
    capacity: int | list[int],
    *,
    value_weighted: bool = False,
    kv_dtype: str | None = None,
    shared: bool = False,
    offsets: bool = False,
    budget: Tensor | None = None,
) -> Slots:
    """`new_slots` for arguments that were checked when a cache was made. `budget`: `Slots.budget`;
    None: unlimited."""
    B, G, _, D = keys.shape
    ends = [0, *itertools.accumulate(capacity)] if isinstance(capacity, list) else []
    slots = (B, ends[-1]) if ends else (B, G, capacity)
    dtype, key_size, value_size = None, D, D
    if kv_dtype is not None:
        dtype, (key_size, value_size) = "uint8", stored_bytes(kv_dtype, D)
    shapes: dict[str, tuple[Any, ...]] = {
        "keys": (*slots, key_size), "scores": slots, "positions": slots, "next_slot": (B, G),
        "seen_tokens": (B,), "evicted_score": (B, G),
    }  # fmt: skip
    if budget is None:
        shapes["budget"] = (B, G, 2) if ends else (B, 2)
    if ends:
        shapes["starts"] = (G + 1,)
    if not shared:
        shapes["values"] = (*slots, value_size)
    if value_weighted:
        shapes["norms"] = slots
    if offsets and kv_dtype is not None and not shared:
        shapes["offsets"] = (B, G, D)
        if key_size < D:  # four bits
            shapes["smoothing"] = (B, G, D)
    wanted = [(shape, KINDS[name].dtype or dtype, EMPTY[name]) for name, shape in shapes.items()]
    fields: dict[str, Any] = {"values": None, "budget": budget}
    fields |= zip(shapes, new_tensors(keys, *wanted), strict=True)
    if budget is None:
        fields["budget"][..., 0] = UNLIMITED
    for g, end in enumerate(ends):
        fields["starts"][g] = end
    return Slots(**fields)
