"""Runners: how a layer runs a forward pass after its prompt (eager, scoring only, or captured).

torch.compile captures one graph for all decode steps, and one for all later passes of several
tokens. The core accesses memory through DLPack, which a compiler's fake tensors do not support.
Steps and chunks are therefore registered as custom operators, `torch.ops.h2o.step` and `.chunk`,
with a schema that names the tensors they write to (the slots) and a fake output (like the query).
If a shape or a Python number changed, another graph would be compiled. Slots therefore have their
full size from the prompt on, and the number of columns seen is a tensor.
"""

from __future__ import annotations

import functools
from typing import Any, get_type_hints

import torch
from torch import Tensor

from h2o import ops
from h2o.compat_wrappers import mark_static_address
from h2o.config import UNLIMITED
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_call import (
    NewTokens,
    attention,
    evict_after,
    round_like_slots,
)
from h2o.hf.cache_state import slot_layout
from h2o.policy import OperationScore, Policy
from h2o.slots import KINDS


class EagerRunner:
    """Runs each pass eagerly, in slots that grow with the text. Each layer has its own object."""

    is_compileable = False

    def __init__(self) -> None:
        self._out: Tensor | None = None  # the last decode step's output, in the query's dtype

    def step(self, layer: Any, tokens: NewTokens) -> Tensor:
        """Run a decode step."""
        slots, longest = layer.slots, layer.guard.state.longest
        if layer.capacity.tokens <= longest:
            slots = layer.make_room(longest + 1)
        last = self._out
        fits = last is not None and last.dtype == tokens.query.dtype  # autocast may change it
        new = torch.empty_like(last) if fits else None
        out: Tensor = layer.variant.step(layer, tokens, slots, new)
        self._out = out
        layer.stored(1, tokens.mask)
        return out

    def chunk(self, layer: Any, tokens: NewTokens) -> Tensor:
        """Run a later forward pass of several tokens, such as a prompt chunk or a chat turn."""
        Q = tokens.key.shape[2]
        slots = layer.make_room(layer.guard.state.longest + Q)
        out: Tensor = layer.attend_and_evict(tokens, slots)
        layer.stored(Q, tokens.mask)
        return out

    def capacities(self, widest: list[int], tokens: int) -> list[int]:
        """Number of slots per head (or for all heads) for these budgets and rows of `tokens`."""
        return slot_layout.capacities(widest, tokens)

    def slots_changed(self, layer: Any) -> None:
        """Called after the layer's slots were replaced."""
        self._out = None


class CapturedRunner(EagerRunner):
    """For `compileable=True`: runs passes in captured graphs, or eagerly outside torch.compile."""

    is_compileable = True

    def __init__(self) -> None:
        super().__init__()
        register()

    def step(self, layer: Any, tokens: NewTokens) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().step(layer, tokens)
        return self._captured(torch.ops.h2o.step, layer, tokens)

    def chunk(self, layer: Any, tokens: NewTokens) -> Tensor:
        if not torch.compiler.is_compiling():
            return super().chunk(layer, tokens)
        if layer.plan.needs_prompt_length and not layer.guard.state.waits_for_pins:
            return super().chunk(layer, tokens)
        return self._captured(torch.ops.h2o.chunk, layer, tokens)

    def _captured(self, operator: Any, layer: Any, tokens: NewTokens) -> Tensor:
        if layer.guard.state.waits_for_pins:
            raise UnsupportedError(
                "compiled steps cannot pin new tokens. Use pinned spans that end within the "
                "prompt, or leave out compileable=True"
            )
        new = tokens.query, tokens.key, tokens.value
        out: Tensor = operator(*new, *layer.slots, *layer.policy, **tokens.options)
        guard = layer.guard
        if layer.layer_idx == max(guard.plans):
            guard.count_captured(tokens.query.shape[2])
        return out

    def capacities(self, widest: list[int], tokens: int) -> list[int]:
        """Number of slots for the whole budget."""
        if max(widest) >= UNLIMITED:
            raise ValueError(
                "compileable=True allocates slots for the whole budget at once, but this budget is "
                "unlimited. Set heavy and recent to numbers of tokens that together cover the "
                "longest text"
            )
        return super().capacities(widest, max(widest))

    def slots_changed(self, layer: Any) -> None:
        """Mark the addresses of the tensors as static, for CUDA graphs."""
        super().slots_changed(layer)
        slots = layer.slots
        if slots is None:
            return
        guard = layer.guard
        if layer.layer_idx == min(guard.plans):
            guard.move_counter(slots.keys.device)
        if slots.keys.device.type == "cpu":
            return  # a compiler that freezes weights would mistake marked tensors for weights
        # A CUDA graph always uses the addresses from its capture.
        for tensor in (guard.counter, *slots):
            if tensor is not None:
                mark_static_address(tensor)


@functools.cache
def register() -> torch.library.Library:
    """Register the custom operators for the lifetime of the process."""
    library = torch.library.Library("h2o", "FRAGMENT")
    for name, run in (("step", _step), ("chunk", _chunk)):
        library.define(_schema(name))
        library.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"h2o::{name}", _fake, lib=library)
    return library


def _schema(operator: str) -> str:
    """Schema of an operator: the arguments of `h2o.ops.step`, with slots and policy field by field.

    Fields that are written to are marked with an exclamation mark."""
    slots = []
    for index, (name, kind) in enumerate(KINDS.items()):
        tensor = f"Tensor(s{index}!)" if kind.written else "Tensor"
        slots.append(f"{tensor}{'?' if kind.optional else ''} {name}")
    policy = [f"{_TYPES[hint]} {name}" for name, hint in get_type_hints(Policy).items()]
    return (
        f"{operator}(Tensor query, Tensor key, Tensor value, {', '.join(slots + policy)}, *, "
        "Tensor? mask, float? scale, float softcap, Tensor? sink_logits=None) -> Tensor"
    )


_TYPES = {int: "int", OperationScore: "str", float: "float", bool: "bool", float | None: "float?"}
"""Types of the policy's fields, as torch's schemas spell them."""


def _step(query: Tensor, key: Tensor, value: Tensor, *records: Any, **more: Any) -> Tensor:
    slots, policy = _records(records)
    return ops.step(query, key, value, slots, policy=policy, **more)


def _chunk(query: Tensor, key: Tensor, value: Tensor, *records: Any, **more: Any) -> Tensor:
    slots, policy = _records(records)
    tokens = NewTokens(query, key, value, **more)
    read = round_like_slots(tokens, slots)
    return evict_after(lambda: attention(read, slots, policy), tokens, slots, policy)


def _records(fields: tuple[Any, ...]) -> tuple[ops.Slots, Policy]:
    return ops.Slots(*fields[: len(KINDS)]), Policy(*fields[len(KINDS) :])


def _fake(query: Tensor, *_: Any, **__: Any) -> Tensor:
    B, H, Q, D = query.shape
    return query.new_empty(B, Q, H, D)
