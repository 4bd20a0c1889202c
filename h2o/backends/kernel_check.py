"""Check that kernels agree with the torch backend, on the device on which they will run.

Both run on small inputs from a fixed seed, operation by operation and from the same state, so that
a difference can be attributed to an operation. Positions, slots and lengths must be equal. Floats
may differ by rounding, because sums have another order and a GPU may multiply in fewer bits. The
scores of the inputs are far enough apart that rounding changes no choice.

The program's torch settings are reset during the check. Errors that do not come from a kernel, such
as a lack of memory, propagate.

Shape letters as in `h2o.ops`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o.backends.default_settings import default_settings
from h2o.policy import OperationScore, Policy
from h2o.quantization import dequantize
from h2o.slots import KINDS, PER_SLOT, Slots, new_slots

TOLERANCE = {torch.float32: 4e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Tolerance relative to the largest number of a tensor. A device may multiply float32 in 10 bits
(TF32)."""


class Size(NamedTuple):
    """Number of tokens of a case (a prompt, a step, a chunk, more steps) and the budget."""

    prompt: int
    chunk: int
    steps: int
    heavy: int
    recent: int
    room: int = 0
    """Slots beyond those that the budget and a chunk need."""


SHORT = Size(40, 9, 3, 18, 12)
LONG = Size(200, 70, 3, 100, 80, room=60)
"""A text of realistic size. A head's step has several blocks, some tiles of keys are seen by all
queries, and a key has more than one tile of queries, with quantized slots as well."""
ROOMY = Size(39, 9, 3, 30, 30, room=960)
"""Nothing is evicted. A step has more blocks than it reads at a time, and a block without slots."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A store and a text: a prompt, a chunk and a few steps, and the whole text simulated."""

    D: int
    dtype: torch.dtype
    size: Size = SHORT
    R: int = 2
    score_by: OperationScore = Policy().score_by
    kv_dtype: str | None = None
    value_weighted: bool = False
    ragged: bool = False
    """Heads have different numbers of slots."""
    shared: bool = False
    """The keys are the values too."""
    cache_relative: bool = False
    """Steps rotate half of the elements of query and keys by the keys' ranks."""
    numbered: bool = False
    """Rows of slots are selected by number (`Slots.rows`)."""
    pads: bool = False
    softcap: float = 0.0
    learned_sinks: bool = False
    simulated: bool = True

    @property
    def name(self) -> str:
        facts = [str(self.dtype).removeprefix("torch."), f"D = {self.D}"]
        facts += [f"{self.size.prompt} tokens"] if self.size.prompt > SHORT.prompt else []
        for field in dataclasses.fields(self)[3:-1]:  # from R to learned_sinks
            value = getattr(self, field.name)
            if value != field.default:
                facts.append(field.name if value is True else f"{field.name} = {value}")
        return ", ".join(facts)


CASES = (
    Case(64, torch.float32, cache_relative=True),
    Case(80, torch.float16, kv_dtype="int8", pads=True, numbered=True),
    Case(128, torch.bfloat16, value_weighted=True, ragged=True),
    Case(256, torch.bfloat16, kv_dtype="int8-int4"),
    Case(64, torch.bfloat16, R=11, softcap=2.0),
    Case(128, torch.float32, softcap=1e6),  # changes nothing, but may lose digits
    Case(84, torch.bfloat16, score_by="max", learned_sinks=True),
    Case(48, torch.float32, score_by="max", learned_sinks=True, pads=True),
    Case(160, torch.float16, value_weighted=True, shared=True),
    Case(192, torch.float32, kv_dtype="int8-int4", pads=True),
    Case(576, torch.bfloat16, R=5, shared=True, numbered=True, simulated=False),  # latents
    Case(576, torch.float16, R=16, kv_dtype="int8", shared=True, pads=True, simulated=False),
    Case(64, torch.bfloat16, kv_dtype="int8", simulated=False),  # the other kernels of steps
    Case(56, torch.float16, kv_dtype="int8", simulated=False),
    Case(200, torch.float16, kv_dtype="int8", simulated=False),
    Case(256, torch.bfloat16, simulated=False),
    Case(104, torch.float16, simulated=False),
    Case(64, torch.float16, ROOMY, score_by="mean", simulated=False),
    Case(64, torch.float32, ROOMY, R=5, simulated=False),  # steps without tensor cores
    Case(128, torch.bfloat16, LONG, ragged=True),
    Case(64, torch.float16, LONG, pads=True, softcap=20.0, simulated=False),
    Case(128, torch.float16, LONG, kv_dtype="int8", pads=True, simulated=False),
    Case(96, torch.bfloat16, LONG, kv_dtype="int8-int4", ragged=True, simulated=False),
)

B, G, SINKS = 2, 2, 2


def mistakes(
    kernels: Any, by_torch: Any, device: Any, cases: Sequence[Case] | None = None
) -> list[str]:
    """Differences between the results of `kernels` and `by_torch`, each with operation and case.
    The default cases are `CASES`.

    Both have the operations of `_core.call`, with its operands.

    Raises: errors that say nothing about the kernels, such as torch.OutOfMemoryError.
    """
    texts: list[str] = []
    with default_settings(torch.device(device)):
        for seed, case in enumerate(CASES if cases is None else cases):
            text = _first_mistake(kernels, by_torch, case, torch.device(device), seed)
            if text is not None:
                texts.append(f"{text} ({case.name})")
            if text is not None and " fails: " in text:
                break  # after a fault all further CUDA calls fail
    return texts


def _first_mistake(
    kernels: Any, by_torch: Any, case: Case, device: torch.device, seed: int
) -> str | None:
    """The first difference in a case. Later ones may follow from it."""
    name = "the text"
    try:
        for name, arguments in _calls(case, device, seed, by_torch):
            copies = _map_tensors(arguments, Tensor.clone)
            getattr(kernels, name)(*copies)
            getattr(by_torch, name)(*arguments)
            wrong = [
                label
                for label, actual, expected in _results(name, copies, arguments, case.D)
                if not _equal(actual, expected, TOLERANCE[case.dtype])
            ]
            if wrong:
                return f"{name} gets {', '.join(wrong)} wrong"
    except RuntimeError as error:  # a device reports a failure when the host waits for it
        text = str(error)
        if "CUDA error" not in text or not any(words in text for words in FAULTS):
            raise
        return f"{name} fails: {text.splitlines()[0]}"
    return None


FAULTS = (
    "unspecified launch failure", "illegal memory access", "misaligned address",
    "illegal instruction", "hardware stack error", "invalid program counter",
    "operation not supported on global/shared address space", "device-side assert",
    "launch timed out", "too many resources requested for launch", "invalid device function",
    "cuLaunchKernel of h2o_cuda",
)  # fmt: skip
"""Texts of CUDA errors that a kernel causes, as torch and the core print them."""


def _map_tensors(arguments: Any, function: Callable[[Tensor], Tensor]) -> list[Any]:
    """Apply a function to the tensors among a call's arguments, including those of slots."""
    mapped = [function(x) if isinstance(x, Tensor) else x for x in arguments]
    return [Slots(*_map_tensors(x, function)) if isinstance(x, Slots) else x for x in mapped]


def _equal(actual: Tensor, expected: Tensor, tolerance: float) -> bool:
    if not actual.is_floating_point():
        return bool(torch.equal(actual, expected))
    actual, expected = actual.double(), expected.double()
    largest = expected.abs().amax().clamp(min=1.0)
    return bool(((actual - expected).abs() <= tolerance * largest).all())


def _calls(case: Case, device: torch.device, seed: int, by_torch: Any) -> Iterator[Any]:
    """Yield (operation, arguments) for each call of a case. The caller must run the torch backend
    on the arguments before it asks for the next call, which continues from them."""
    D, H = case.D, G * case.R
    prompt, chunk, steps, heavy, recent, room = case.size
    total = prompt + chunk + steps
    query, keys, values = _text(case, total, device, seed)
    mask = torch.ones(B, total, dtype=torch.bool, device=device)
    if case.pads:
        mask[1, : prompt // 4] = False
    sinks = torch.linspace(-2, 3, H, dtype=torch.float32, device=device)
    sinks = sinks if case.learned_sinks else None
    policy = Policy(SINKS, case.score_by, 0.97, case.value_weighted)
    numbers = (D**-0.5, case.softcap, policy)
    capacity = SINKS + heavy + recent + chunk + room
    slots = new_slots(
        torch.cat([keys, keys])[: B + case.numbered],
        [capacity, capacity + 3] if case.ragged else capacity, heavy, recent,
        value_weighted=case.value_weighted, kv_dtype=case.kv_dtype, shared=case.shared,
    )  # fmt: skip
    angles = torch.linspace(0, 2, D // 4, dtype=torch.float32, device=device) * torch.arange(
        capacity, dtype=torch.float32, device=device
    ).unsqueeze(1)
    table = torch.stack([angles.cos(), angles.sin()], 1)

    if case.numbered:
        slots = slots._replace(rows=torch.arange(B, 0, -1, dtype=torch.int32, device=device))

    def number(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    last = 0
    for tokens in (prompt, 1, chunk, *[1] * (steps - 1)):
        first, last = last, last + tokens
        now = slice(first, last)
        out = number(B, tokens, H, D, dtype=case.dtype)
        new = (keys[:, :, now], None if case.shared else values[:, :, now])
        if tokens == 1:
            rotary = (table, _ranks(slots.positions)) if case.cache_relative else (None, None)
            arguments = (query[:, :, now], *new, None, slots, out, *numbers, *rotary, sinks)
            yield "step", arguments
            continue
        scores = number(B, G, tokens)
        new = tuple(None if x is None else x.contiguous() for x in new)
        pads = mask[:, now].contiguous() if case.pads else None
        stored = slots if first else None
        seen, rest = (query[:, :, now], *new, pads), (out, scores, *numbers, sinks)
        log_sums, fresh = number(B, H, tokens), _map_tensors([stored], Tensor.clone)[0]
        yield "attend", (*seen, stored, *rest, None, None)
        by_torch.attend(*seen, stored, *rest, log_sums, None)  # writes only log_sums
        yield "attend", (*seen, fresh, *rest, None, log_sums)  # writes only scores
        if first == 0 and case.size is LONG:  # scores that differ only in their last bits
            order = torch.arange(scores.numel(), dtype=torch.float32, device=device)
            near = 1 + (37 * order % 101).view_as(scores) / 2**23
            fresh = _map_tensors([slots], Tensor.clone)[0]
            yield "evict", (*new, near, pads, fresh, policy)
        yield "evict", (*new, scores, pads, slots, policy)
    if case.simulated:
        text = (query, keys, None if case.shared else values)
        yield from _simulation(case, text, mask, numbers, sinks, number)


def _ranks(positions: Tensor) -> Tensor:
    """Rank of each key by position within its head, -1 for an empty slot. Shaped like positions."""
    order = positions.masked_fill(positions < 0, torch.iinfo(torch.int32).max).argsort(-1)
    return order.argsort(-1).int().masked_fill(positions < 0, -1)


def _simulation(
    case: Case, text: Any, mask: Tensor, numbers: Any, sinks: Tensor | None, number: Any
) -> Iterator[Any]:
    """Calls that simulate the whole text. Each further row has a prompt one token shorter."""
    query, keys, values = text
    total = query.shape[2]
    pads = mask if case.pads else None
    stored: tuple[Tensor | None, Tensor | None] = (None, None)
    if case.kv_dtype is not None:
        store = new_slots(keys, total, kv_dtype=case.kv_dtype, shared=case.shared)
        arguments = (keys, values, number(B, G, total), pads, store, Policy())
        yield "evict", arguments
        stored = (store.keys, store.values)
    prompt = case.size.prompt - torch.arange(B, dtype=torch.int32, device=keys.device)
    budget = number(B, 2, dtype=torch.int32)
    budget[:, 0], budget[:, 1] = case.size.heavy, case.size.recent
    out = number(B, total, G * case.R, case.D, dtype=case.dtype)
    evicted = number(B, G, total, dtype=torch.int32)
    scores = number(B, G, total)
    results = out, evicted, scores
    arguments = (*text, pads, prompt, budget, *results, *numbers, *stored, None, None, sinks)
    yield "simulate", arguments


WRITTEN = {
    "attend": {5: "out", 6: "scores"},
    "evict": {},
    "step": {5: "out"},
    "simulate": {6: "out", 7: "evicted_at", 8: "scores"},
}
"""Operands that an operation writes besides slots and ranks, by place."""


def _results(
    operation: str, actual: Any, expected: Any, D: int
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name and both versions of each tensor that a call may write."""
    for place, name in WRITTEN[operation].items():
        yield name, actual[place], expected[place]
    if isinstance(actual[4], Slots):
        yield from _slots(actual[4], expected[4], D)
    if operation == "step" and actual[10] is not None:  # sorted like the slots
        ranks = [x[10].gather(-1, x[4].positions.argsort(-1)) for x in (actual, expected)]
        yield "ranks", ranks[0], ranks[1]


def _slots(actual: Slots, expected: Slots, D: int) -> list[tuple[str, Tensor, Tensor]]:
    """Pairs of the slot fields that an operation wrote, sorted, since the slots used may differ."""
    a, b = _sort_slots(actual, D), _sort_slots(expected, D)
    pairs = [(f"slots.{field}", a[field], b[field]) for field in a]
    return pairs + [
        (f"slots.{field}", getattr(actual, field), getattr(expected, field))
        for field, kind in KINDS.items()
        if kind.written and field not in (*PER_SLOT, "next_slot", "offsets")
    ]


def _sort_slots(slots: Slots, D: int) -> dict[str, Tensor]:
    """Contents of each head, sorted by position, and the position in its next free slot."""
    positions = slots.positions
    free = slots.next_slot.long().clamp(0, positions.shape[-1] - 1)
    by_head = positions.long()
    if slots.starts is not None:  # keeps the order of heads
        slot = torch.arange(positions.shape[1], dtype=torch.int32, device=positions.device)
        by_head = by_head + (torch.searchsorted(slots.starts[1:], slot, right=True) << 32)
        free = free + slots.starts[:-1]
    order = by_head.argsort(-1)
    empty = positions.gather(-1, order) < 0
    contents = {
        "next_slot": positions.gather(-1, free if free.ndim == positions.ndim else free[..., None])
    }
    for field in PER_SLOT:
        x = getattr(slots, field)
        if x is None:
            continue
        if x.ndim > order.ndim:
            x = x.gather(-2, order[..., None].expand(*order.shape, x.shape[-1]))
            contents[field] = dequantize(x, D).masked_fill(empty[..., None], 0)
        else:
            contents[field] = x.gather(-1, order).masked_fill(empty, -1)
    return contents


def _text(case: Case, tokens: int, device: torch.device, seed: int) -> tuple[Tensor, ...]:
    """Drifting queries [B, H, tokens, D], and keys and values [B, G, tokens, D]. Each key has its
    own weight in the direction that all queries share, so that scores are far apart."""
    generator = torch.Generator("cpu").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")

    D = case.D
    common, drift = normal(B, G, 1, D), normal(B, G, 1, D)
    orders = [torch.randperm(tokens, generator=generator, device="cpu") for _ in range(B * G)]
    weights = torch.stack(orders).view(B, G, tokens, 1).float()
    time = torch.arange(tokens, dtype=torch.float32, device="cpu").view(1, 1, -1, 1) / tokens
    noise = 0.5 * min(1.0, 60 / tokens)  # the more keys, the closer their scores
    keys = noise * normal(B, G, tokens, D) + common * (weights / tokens - 0.5)
    toward = common * (1 - 0.5 * time) + drift * time
    query = toward.repeat_interleave(case.R, 1) + 0.3 * normal(B, G * case.R, tokens, D)
    values = normal(B, G, tokens, D)
    return tuple(x.to(case.dtype).to(device) for x in (query, keys, values))
