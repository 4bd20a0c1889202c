"""Inputs on which reduced precision fails first, and the error of an operation on them.

Trained models have attention sinks, and channels and rows of queries, keys or values that are far
larger than the others. `errors` compares the error of an answer with that of the float path: the
same attention in float32 on the rows as they are stored, with the output rounded to the query's
dtype. No bound here depends on how a kernel computes.

Shape letters: B batch rows, G key/value heads, R query heads of each, n tokens, D head dimension.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o import ops
from h2o.quantization import dequantize, from_stored

B, G = 6, 2


class Text(NamedTuple):
    query: Tensor
    """[B, G * R, n, D]"""
    keys: Tensor
    """[B, G, n, D]"""
    values: Tensor
    """[B, G, n, D]"""


class Errors(NamedTuple):
    """Relative errors against float64 over all heads and queries."""

    path: float
    floats: float

    @property
    def ratio(self) -> float:
        return self.path / self.floats


# ---- Inputs ------------------------------------------------------------------------------------


def plain(R: int, n: int, D: int) -> Text:
    """Gaussian inputs. The queries of a group share a direction, which `_aim` gives to keys."""
    random = torch.Generator().manual_seed(n + D + R)
    query, keys, values = (torch.randn(B, h, n, D, generator=random) for h in (G * R, G, G))
    way = torch.randn(B, G, 1, D, generator=random).repeat_interleave(R, 1)
    return Text(way + 0.3 * query, keys, values)


def _aim(text: Text, rows: slice, logit: float) -> None:
    """Replace keys by keys whose logit is about this large for every query."""
    way = text.query.unflatten(1, (G, -1)).mean((2, 3))[:, :, None]
    D = way.shape[-1]
    text.keys[:, :, rows] = way / way.square().sum(-1, keepdim=True) * logit * D**0.5


def sink(text: Text) -> None:
    _aim(text, slice(1), 12.0)
    text.values[:, :, 0] *= 0.0003


def unseen(text: Text) -> None:
    sink(text)
    _aim(text, slice(5, 6), -20.0)
    text.values[:, :, 5] *= 3000.0


def query_channels(text: Text) -> None:
    text.query[..., 3] = 300.0
    text.query[..., 40] *= 100.0
    text.keys[..., [3, 40]] *= 0.02


def key_channels(text: Text) -> None:
    text.keys[..., 3] += 40.0
    text.keys[..., 40] -= 25.0


def both_channels(text: Text) -> None:
    key_channels(text)
    text.query[..., 3] += 30.0


def value_channels(text: Text) -> None:
    text.values[..., 3] *= 30.0
    text.values[..., 40] += 100.0


def value_rows(text: Text) -> None:
    _aim(text, slice(5, None, 17), -8.0)
    text.values[:, :, 5::17] *= 300.0
    text.values[:, :, 3::11] *= 0.001


def value_elements(text: Text) -> None:
    text.values[:, :, 5::17, 7] = 20000.0


def key_rows(text: Text) -> None:
    _aim(text, slice(5, None, 17), -60.0)


def everything(text: Text) -> None:
    for change in (key_channels, value_rows, value_channels, sink):
        change(text)


KINDS = {
    "plain": lambda text: None,
    "sink": sink,
    "unseen": unseen,
    "query channels": query_channels,
    "key channels": key_channels,
    "both channels": both_channels,
    "value channels": value_channels,
    "value rows": value_rows,
    "value elements": value_elements,
    "key rows": key_rows,
    "everything": everything,
}


def make(kind: str, dtype: torch.dtype, R: int, n: int, D: int) -> Text:
    text = plain(R, n, D)
    KINDS[kind](text)
    return Text(*(x.to(dtype) for x in text))


# ---- Errors ------------------------------------------------------------------------------------


def weights(text: Text, first: int, dtype: torch.dtype) -> Tensor:
    """[B, G * R, n - first, n]: attention weights of the queries from `first` on, computed in
    dtype."""
    query, keys = text.query[:, :, first:].to(dtype), text.keys.to(dtype)
    (H, _, D), n = query.shape[1:], keys.shape[2]
    logits = query @ keys.repeat_interleave(H // G, 1).mT * D**-0.5
    ahead = torch.arange(n) > torch.arange(first, n)[:, None]
    return logits.masked_fill(ahead, -torch.inf).softmax(-1)


def attention(text: Text, first: int, dtype: torch.dtype) -> Tensor:
    """[B, n - first, G * R, D]: outputs of these weights."""
    p = weights(text, first, dtype)
    values = text.values.to(dtype).repeat_interleave(p.shape[1] // G, 1)
    return (p @ values).transpose(1, 2)


def errors(out: Tensor, text: Text, first: int) -> Errors:
    """Errors of out [B, n - first, G * R, D], for a text whose keys and values are as stored.

    Each channel is scaled by its own size, so that an outlier channel cannot hide errors.
    """
    exact = attention(text, first, torch.float64)
    floats = attention(text, first, torch.float32).to(out.dtype)
    channels = exact.square().mean((0, 1, 2)).sqrt()
    size = (exact / channels).norm(dim=-1)
    apart = (((x.double() - exact) / channels).norm(dim=-1) / size for x in (out, floats))
    return Errors(*(float(x.square().mean().sqrt()) for x in apart))


def score_errors(scores: Tensor, text: Text, dtype: torch.dtype) -> Errors:
    """Errors of the scores [B, G, n] of a step. The float path rounds the weights to dtype."""
    first = text.keys.shape[2] - 1
    exact, floats = (weights(text, first, x)[:, :, 0] for x in (torch.float64, torch.float32))
    exact, floats = (x.unflatten(1, (G, -1)).sum(2) for x in (exact, floats.to(dtype).double()))
    apart = ((x.double() - exact).norm(dim=-1) / exact.norm(dim=-1) for x in (scores, floats))
    return Errors(*(float(x.square().mean().sqrt()) for x in apart))


Kind = dict[str, Any]
"""`kv_dtype` and `offsets` of slots"""

# ---- Operations --------------------------------------------------------------------------------


def _hold(text: Text, tokens: int, kind: Kind, prompt: int | None = None) -> ops.Slots:
    """Slots with room for the whole text, holding its first tokens. The first `prompt` of them, by
    default all, determine the offsets of keys."""
    n = text.keys.shape[2]
    slots = ops.new_slots(text.keys, n, n, 0, **kind)
    for part in (slice(prompt), slice(prompt, tokens)) if prompt else (slice(tokens),):
        held = [x[:, :, :tokens][:, :, part].contiguous() for x in text[1:]]
        ops.evict(*held, torch.zeros(held[0].shape[:3]), slots)
    return slots


def _seen(slots: ops.Slots, text: Text, tokens: int) -> Text:
    """The text, with keys and values of the first tokens as the slots store them, in text order."""
    D = text.keys.shape[3]
    rows = [dequantize(x[:, :, :tokens], D).float() for x in (slots.keys, slots.values)]
    rows = from_stored(*rows, None if slots.offsets is None else slots.offsets[:, :, None])
    new = (x[:, :, tokens:].float() for x in text[1:])
    return Text(text.query, *(torch.cat(both, 2) for both in zip(rows, new, strict=True)))


def step(text: Text, kind: Kind) -> list[Errors]:
    """Errors of output and scores of a decode step of the last token."""
    n = text.keys.shape[2]
    slots = _hold(text, n - 1, kind)
    out = ops.step(*(x[:, :, -1:].contiguous() for x in text), slots)
    seen = _seen(slots, text, n)
    return [errors(out, seen, n - 1), score_errors(slots.scores, seen, out.dtype)]


def chunk(text: Text, kind: Kind, new: int = 21) -> list[Errors]:
    """Errors of the output of a chunk of the last tokens."""
    n = text.keys.shape[2]
    slots = _hold(text, n - new, kind)
    out, _ = ops.attend(*(x[:, :, -new:].contiguous() for x in text), slots)
    return [errors(out, _seen(slots, text, n - new), n - new)]


def prompt(text: Text, kind: Kind) -> list[Errors]:
    """Errors of the output of a whole prompt."""
    out, _ = ops.attend(*text)
    return [errors(out, text, 0)]


def simulation(text: Text, kind: Kind) -> list[Errors]:
    """Errors of outputs after a prompt of one token. The last token evicts one key."""
    n = text.keys.shape[2]
    prompts, budget = (torch.tensor(x, dtype=torch.int32) for x in ([1] * B, [[n - 1, 0]] * B))
    out, *_ = ops.simulate(*text, prompts, budget, **kind)
    return [errors(out[:, 1:], _seen(_hold(text, n, kind, 1), text, n), 1)]


OPERATIONS = {"step": step, "chunk": chunk, "prompt": prompt, "simulation": simulation}
