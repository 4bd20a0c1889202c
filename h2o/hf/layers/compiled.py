"""A layer whose forward pass torch.compile captures: one graph serves all decode steps, another one
all later passes of several tokens.

The core reads memory through DLPack, and a compiler's fake tensors have none. So both are
registered as custom operators, `torch.ops.h2o.step` and `.chunk`, with a schema that says which
tensors they write to (the slots) and a fake output (like the query). They update the slots in
place, without a copy. Any change of a shape or a Python number would compile another graph: so
slots have their full size from the prompt on, and the number of columns seen is a tensor.
"""

from __future__ import annotations

import functools
from typing import Any, get_type_hints

import torch
from torch import Tensor

from h2o import borrowed, ops
from h2o.config import UNLIMITED
from h2o.errors import UnsupportedError
from h2o.hf.call.attend_and_evict import attention, evicting
from h2o.hf.call.attention_call import NewTokens
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.store import slot_layout
from h2o.hf.store.slot_layout import Capacity
from h2o.policy import Policy, RankBy
from h2o.slots import KINDS, empty_row

__all__ = ["CompileableLayer"]


class CompileableLayer(H2OLayer):
    """An `H2OLayer` of a cache with `compileable=True`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        register()
        self._columns = slot_layout.writable(torch.tensor(0, dtype=torch.int64, device="cpu"))
        super().__init__(*args, **kwargs)

    @property
    def is_compileable(self) -> bool:  # type: ignore[override]
        """Whether `generate()` may compile the steps: not those that may be taken back."""
        return not self.record_past

    @property
    def seen(self) -> int:
        """Columns seen."""
        return int(self._columns)

    @seen.setter
    def seen(self, columns: int) -> None:
        self._columns.fill_(columns)

    def get_seq_length(self) -> Any:
        """As a tensor, which the next step changes, as transformers' StaticLayer has it."""
        return self._columns

    def _attend_one(self, tokens: NewTokens) -> Tensor:
        if not torch.compiler.is_compiling():
            return super()._attend_one(tokens)
        return self._captured(torch.ops.h2o.step, tokens)

    def _attend_chunk(self, tokens: NewTokens) -> Tensor:
        if not torch.compiler.is_compiling() or self.config.needs_prompt_length:
            return super()._attend_chunk(tokens)
        return self._captured(torch.ops.h2o.chunk, tokens)

    def _captured(self, operator: Any, tokens: NewTokens) -> Tensor:
        if self.waits_for_pins:
            raise UnsupportedError(
                "compiled steps cannot pin the tokens that they read: give pinned spans that end "
                "within the prompt, or leave out compileable=True"
            )
        out: Tensor = operator(
            tokens.query,
            tokens.key,
            tokens.value,
            *self.slots,
            *self.policy,
            mask=tokens.mask,
            scale=tokens.scale,
            softcap=tokens.softcap,
            sink_logits=tokens.sink_logits,
        )
        self._columns.add_(tokens.query.shape[2])
        return out

    def empty_in_place(self) -> None:
        """As `empty`, but the slots stay where they are, for a graph that goes on with them."""
        for row in range(self.batch_size):
            empty_row(self.slots, row)
        self.seen = self.longest = self.prompt_columns = 0

    def _capacities(self, widest: list[int], tokens: int) -> list[int]:
        if max(widest) >= UNLIMITED:
            raise ValueError(
                "compileable=True makes room for the whole budget at once, and this one has no "
                "end: give heavy and recent as many tokens as the longest text will have"
            )
        return slot_layout.capacities(widest, max(widest))

    def _hold(self, slots: ops.Slots | None, capacity: Capacity) -> None:
        super()._hold(slots, capacity)
        if slots is not None:
            slots = self.slots
            self._columns = slot_layout.writable(self._columns.to(slots.keys.device))
            if slots.keys.device.type == "cpu":
                return  # a compiler told to freeze weights would take them for weights
            # A CUDA graph reads them where they were when it was captured.
            for tensor in (self._columns, *slots):
                if tensor is not None:
                    borrowed.mark_static_address(tensor)


@functools.cache
def register() -> torch.library.Library:
    """Makes the operations known for as long as the process runs."""
    library = torch.library.Library("h2o", "FRAGMENT")
    for name, run in (("step", _step), ("chunk", _chunk)):
        library.define(_schema(name))
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"h2o::{name}", _fake, lib=library)
    return library


def _schema(operator: str) -> str:
    """Arguments of `h2o.ops.step`, with the fields of slots and policy one by one; what is written
    to is marked with an exclamation mark."""
    slots = []
    for index, (name, kind) in enumerate(KINDS.items()):
        tensor = f"Tensor(s{index}!)" if kind.written else "Tensor"
        slots.append(f"{tensor}{'?' if kind.optional else ''} {name}")
    policy = [f"{_TYPES[hint]} {name}" for name, hint in get_type_hints(Policy).items()]
    return (
        f"{operator}(Tensor query, Tensor key, Tensor value, {', '.join(slots + policy)}, *, "
        "Tensor? mask, float? scale, float softcap, Tensor? sink_logits=None) -> Tensor"
    )


_TYPES = {int: "int", RankBy: "str", float: "float", bool: "bool", float | None: "float?"}
"""How torch's schemas spell the types of the policy's fields."""


def _step(query: Tensor, key: Tensor, value: Tensor, *records: Any, **more: Any) -> Tensor:
    slots, policy = _records(records)
    out: Tensor = ops.step(query, key, value, slots, policy=policy, **more)
    return out


def _chunk(query: Tensor, key: Tensor, value: Tensor, *records: Any, **more: Any) -> Tensor:
    slots, policy = _records(records)
    tokens = NewTokens(query, key, value, **more)
    lengths = slots.lengths
    is_prompt = lengths.is_cpu and not lengths.any()  # spares empty slots; a CUDA graph cannot ask
    held = None if is_prompt else slots
    return evicting(lambda: attention(tokens, held, policy), tokens, slots, policy)


def _records(fields: tuple[Any, ...]) -> tuple[ops.Slots, Policy]:
    return ops.Slots(*fields[: len(KINDS)]), Policy(*fields[len(KINDS) :])


def _fake(query: Tensor, *_: Any, **__: Any) -> Tensor:
    B, H, Q, D = query.shape
    return query.new_empty(B, Q, H, D)
