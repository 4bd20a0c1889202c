"""Runners: whether passes of a layer after its prompt run eagerly or in captured graphs.

torch.compile captures one graph for all decode steps, and one for all later passes of several
tokens. The core accesses memory through DLPack, which a compiler's fake tensors do not support.
Steps and chunks are therefore registered as custom operators, `torch.ops.h2o.step` and `.chunk`,
with a schema that names the tensors they write to (the slots) and a fake output (like the query).
If a shape or a Python number changed, another graph would be compiled. Slots therefore have their
full size from the prompt on, and the number of columns seen is a tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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
from h2o.slots import CHANGED, KINDS


class EagerRunner:
    """Each pass runs eagerly, in slots that grow with the text."""

    is_compileable = False
    slots_changed: Callable[[Any], None] | None = None
    """Called with the layer after its slots were replaced; None: there is nothing to do"""

    capacities = staticmethod(slot_layout.capacities)


class CapturedRunner(EagerRunner):
    """For `compileable=True`: passes run in captured graphs, or eagerly outside torch.compile."""

    is_compileable = True

    def __init__(self) -> None:
        register()

    def captures(self, layer: Any, tokens: NewTokens) -> bool:
        """Whether a pass over these tokens runs as a custom operator."""
        if not torch.compiler.is_compiling():
            return False
        is_step, waits_for_pins = tokens.query.shape[2] == 1, layer.guard.state.waits_for_pins
        return is_step or waits_for_pins or not layer.plan.needs_prompt_length

    def run(self, layer: Any, tokens: NewTokens) -> Tensor:
        """Run a decode step, or a later forward pass of several tokens."""
        if layer.guard.state.waits_for_pins:
            raise UnsupportedError(
                "compiled steps cannot pin new tokens. Use pinned spans that end within the "
                "prompt, or leave out compileable=True"
            )
        guard, new, Q = layer.guard, tokens[:3], tokens.query.shape[2]
        operator = torch.ops.h2o.step if Q == 1 else torch.ops.h2o.chunk
        out: Tensor = operator(*new, *layer.slots, *layer.policy, **tokens.options)
        if layer.layer_idx == max(guard.plans):
            guard.counter.add_(Q)
        return out

    @staticmethod
    def capacities(widest: list[int], tokens: int) -> list[int]:
        """Number of slots for the whole budget."""
        if max(widest) >= UNLIMITED:
            raise ValueError(
                "compileable=True allocates slots for the whole budget at once, but this budget is "
                "unlimited. Set heavy and recent to numbers of tokens that together cover the "
                "longest text"
            )
        return slot_layout.capacities(widest, max(widest))

    def slots_changed(self, layer: Any) -> None:
        """Mark the addresses of the tensors as static, for CUDA graphs."""
        slots = layer.slots
        if slots is None:
            return
        guard = layer.guard
        if layer.layer_idx == guard.first:
            guard.count_in(guard.counter.to(slots.keys.device))
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

    Fields that it may write to are marked with an exclamation mark."""
    slots = []
    for index, (name, kind) in enumerate(KINDS.items()):
        tensor = f"Tensor(s{index}!)" if name in CHANGED else "Tensor"
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
