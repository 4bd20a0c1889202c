"""One valid call of each operation. Tests make one argument at a time invalid."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from h2o import ops

B, H, G, Q, S, D = 2, 4, 2, 3, 6, 8
HEAVY, RECENT = 2, 3


def slots(seed: int = 1, dtype: Any = np.float32, *, norms: bool = False) -> ops.Slots:
    """Slots of two batch rows. Row 0 has seen 7 tokens and holds 5, with a hole at slot 2. Row 1
    holds its 3 tokens."""
    rng = np.random.default_rng(seed)
    held = ops.new_slots(np.zeros((B, G, 1, D), dtype), S, HEAVY, RECENT, value_weighted=norms)
    held.keys[...] = rng.standard_normal(held.keys.shape)
    held.values[...] = rng.standard_normal(held.values.shape)
    held.positions[0] = [0, 1, -1, 4, 5, 6]
    held.positions[1] = [0, 1, 2, -1, -1, -1]
    held.scores[...] = rng.uniform(0.1, 3.0, held.scores.shape) * (held.positions >= 0)
    held.next_slot[...] = [[2, 2], [3, 3]]
    held.seen_tokens[...] = [7, 3]
    if norms:
        held.norms[...] = np.linalg.norm(held.values.astype(np.float32), axis=-1)
    return held


@dataclasses.dataclass
class Call:
    """A function of h2o.ops with all its arguments. Fields of slots are named like "slots.keys"."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    written: tuple[str, ...]

    def run(self) -> Any:
        return self.function(**self.arguments)

    def get(self, name: str) -> Any:
        head, _, field = name.partition(".")
        return getattr(self.arguments[head], field) if field else self.arguments[head]

    def put(self, name: str, value: Any) -> Call:
        """Return this call with another value for one argument."""
        head, _, field = name.partition(".")
        if field:
            value = self.arguments[head]._replace(**{field: value})
        return dataclasses.replace(self, arguments={**self.arguments, head: value})

    def tensors(self) -> list[str]:
        names = []
        for name, value in self.arguments.items():
            if isinstance(value, ops.Slots | ops.Rotary):
                fields = value._asdict().items()
                names += [f"{name}.{field}" for field, part in fields if part is not None]
            elif isinstance(value, np.ndarray) or hasattr(value, "__dlpack__"):
                names.append(name)
        return names

    def snapshot(self) -> dict[str, bytes]:
        """Bytes of all arrays, except arrays that broadcasting made larger than their memory."""
        arrays = {name: self.get(name) for name in self.tensors()}
        return {
            name: array.tobytes()
            for name, array in arrays.items()
            if isinstance(array, np.ndarray) and array.nbytes < 1 << 20
        }


def ranks(positions: np.ndarray) -> np.ndarray:
    """Rank of each key by position, within its row and head; -1 for empty slots."""
    order = np.where(positions < 0, np.iinfo(np.int32).max, positions).argsort(-1)
    return np.where(positions < 0, -1, order.argsort(-1)).astype(np.int32)


STATE = ("keys", "values", "scores", "positions", "next_slot", "seen_tokens", "evicted_score")


def make(name: str, dtype: Any = np.float32, seed: int = 0) -> Call:
    """A valid call. `name` is a function of h2o.ops, "evict weighted" or "step weighted" for a call
    with norms, "step rolled" for one with rotated keys, or "step numbered" for a step of rows 0 and
    3 of 4."""
    rng = np.random.default_rng(seed)
    name, _, kind = name.partition(" ")
    weighted = kind == "weighted"
    n = 1 if name == "step" else Q

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    query, keys, values = normal(B, H, n, D), normal(B, G, n, D), normal(B, G, n, D)
    mask = np.ones((B, n), bool)
    out = np.zeros((B, n, H, D), dtype)
    scores = rng.uniform(0, 1, (B, G, n)).astype(np.float32)
    policy = {"sinks": 0, "score_by": "mean", "decay": 0.9, "value_weighted": weighted}
    sinks = np.linspace(-2, 2, H, dtype=np.float32)
    logits = {"scale": 0.3, "softcap": 2.0, "sink_logits": sinks}
    state = slots(dtype=dtype, norms=weighted)
    fields = STATE + (("norms",) if weighted else ())
    in_slots = tuple(f"slots.{field}" for field in fields)
    budget = np.array([[HEAVY, RECENT]] * B, np.int32)
    match name:
        case "attend":
            arguments = {"query": query, "keys": keys, "values": values, "slots": state}
            arguments |= {"mask": mask, "decay": 0.9, "out": out, "scores": scores, **logits}
            return Call(ops.attend, arguments, ("out", "scores", "slots.scores"))
        case "evict":
            arguments = {"keys": keys, "values": values, "scores": scores, "slots": state}
            return Call(ops.evict, arguments | {"mask": mask, **policy}, in_slots)
        case "step":
            arguments = {"query": query, "key": keys, "value": values, "slots": state}
            arguments |= {"mask": mask, "out": out, **policy, **logits}
            if kind == "rolled":
                table = rng.uniform(-1, 1, (S, 2, 3)).astype(np.float32)
                arguments["rotary"] = ops.Rotary(table, ranks(state.positions))
                in_slots += ("rotary.ranks",)
            if kind == "numbered":
                whole = ops.Slots(*(x if x is None else np.concatenate([x, x]) for x in state))
                arguments["slots"] = whole._replace(rows=np.array([0, 3], np.int32))
            return Call(ops.step, arguments, ("out", *in_slots))
        case "simulate":
            arguments = {"query": query, "keys": keys, "values": values, "mask": mask}
            arguments |= {"prompt": np.ones(B, np.int32), "budget": budget, "out": out}
            arguments |= {"evicted_at": np.zeros((B, G, n), np.int32), "scores": scores}
            return Call(ops.simulate, arguments | policy | logits, ("out", "evicted_at", "scores"))
    raise ValueError(name)


NAMES = (
    *("attend", "evict", "step", "simulate", "evict weighted", "step weighted", "step rolled"),
    "step numbered",
)

EVERY_TENSOR = [(name, tensor) for name in NAMES for tensor in make(name).tensors()]
EVERY_WRITTEN = [(name, tensor) for name in NAMES for tensor in make(name).written]


def used(name: str, tensor: str) -> bool:
    """Whether the operation uses the tensor. attend uses only some fields of the slots."""
    unused = {
        f"slots.{field}"
        for field in ("next_slot", "seen_tokens", "budget", "evicted_score", "norms")
    }
    return not (name == "attend" and tensor in unused)


EVERY_TENSOR = [pair for pair in EVERY_TENSOR if used(*pair)]
