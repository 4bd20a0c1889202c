"""Inputs as trained models make them, on which reduced precision fails first, and two errors on them.

Attention sinks, channels that are far larger than the others in queries, keys or values, and rows of
values or keys that are far larger than the others. `errors` gives the error of an operation and that of
the float path: the same attention in float32, over the rows as they are stored, with the output rounded
to the dtype of the query. No bound here knows how a kernel computes.

Shape letters: G key/value heads, R query heads of each, n tokens, D head dimension.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from h2o import ops
from h2o.quantisation import dequantised
from tests.torch.engines import portable

G = 2
KV_DTYPES = [None, "int8", "int8-int4"]


class Text(NamedTuple):
    query: Tensor
    """[1, G * R, n, D]"""
    keys: Tensor
    """[1, G, n, D]"""
    values: Tensor
    """[1, G, n, D]"""


class Errors(NamedTuple):
    """Relative errors against float64, [1, n or 1, G * R]: of the path and of the float path."""

    path: Tensor
    floats: Tensor

    def worst(self) -> float:
        """The largest ratio of the two in any head, over all its queries."""
        path, floats = (x.square().mean(1).sqrt() for x in self)
        return float((path / floats).max())


# ---- Inputs ------------------------------------------------------------------------------------


def plain(R: int, n: int, D: int) -> Text:
    """Queries of a head look about the same way, so that a key has the same logit for all of them."""
    random = torch.Generator().manual_seed(n + D + R)
    query, keys, values = (torch.randn(1, h, n, D, generator=random) for h in (G * R, G, G))
    way = torch.randn(1, G, 1, D, generator=random).repeat_interleave(R, 1)
    return Text(way + 0.3 * query, keys, values)


def _aim(text: Text, rows: slice, logit: float) -> None:
    """Gives keys about this logit for every query, and makes them look no other way."""
    way = text.query.unflatten(1, (G, -1)).mean((2, 3))[:, :, None]
    D = way.shape[-1]
    text.keys[:, :, rows] = (way / way.square().sum(-1, keepdim=True)) * logit * D**0.5


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


def key_rows(text: Text) -> None:
    _aim(text, slice(5, None, 17), -60.0)


def everything(text: Text) -> None:
    for change in (key_channels, value_rows, value_channels, sink):
        change(text)


KINDS = {
    "plain": lambda text: None,
    **{
        f.__name__.replace("_", "-"): f
        for f in (
            sink, unseen, query_channels, key_channels, both_channels,
            value_channels, value_rows, key_rows, everything,
        )
    },
}  # fmt: skip


def make(kind: str, dtype: torch.dtype, R: int, n: int, D: int) -> Text:
    text = plain(R, n, D)
    KINDS[kind](text)
    return Text(*(x.to(dtype) for x in text))


# ---- Errors ------------------------------------------------------------------------------------


def attention(text: Text, first: int, dtype: torch.dtype) -> Tensor:
    """[1, n - first, G * R, D]: of the queries from `first` on, computed in dtype."""
    query, keys, values = (x.to(dtype) for x in text)
    R, (n, D) = query.shape[1] // G, query.shape[2:]
    keys, values = (x.repeat_interleave(R, 1) for x in (keys, values))
    logits = query[:, :, first:] @ keys.mT * D**-0.5
    unseen = torch.arange(n) > torch.arange(first, n)[:, None]
    return (logits.masked_fill(unseen, -torch.inf).softmax(-1) @ values).transpose(1, 2)


def errors(out: Tensor, text: Text, first: int) -> Errors:
    """Of out [1, n - first, G * R, D], attention over keys and values as they are seen."""
    exact = attention(text, first, torch.float64)
    floats = attention(text, first, torch.float32).to(out.dtype)
    size = exact.norm(dim=-1)
    return Errors(*((x.double() - exact).norm(dim=-1) / size for x in (out, floats)))


def stored(text: Text, tokens: int, kv_dtype: str | None) -> tuple[ops.Slots, Text]:
    """Slots with room for the whole text that hold its first tokens, and the text with those as stored."""
    n = text.keys.shape[2]
    slots = ops.new_slots(text.keys, n, n, 0, kv_dtype=kv_dtype)
    ops.evict(
        text.keys[:, :, :tokens], text.values[:, :, :tokens], torch.zeros(1, G, tokens), slots
    )
    return slots, text


def as_stored(slots: ops.Slots, text: Text, tokens: int) -> Text:
    """The text with the first tokens' keys and values as slots hold them, whose order is the text's."""
    D = text.keys.shape[3]
    rows = (dequantised(x[:, :, :tokens], D).float() for x in (slots.keys, slots.values))
    new = (x[:, :, tokens:].float() for x in text[1:])
    return Text(text.query, *(torch.cat(both, 2) for both in zip(rows, new, strict=True)))


def of_step(text: Text, kv_dtype: str | None, step=ops.step) -> Errors:
    n = text.keys.shape[2]
    slots, _ = stored(text, n - 1, kv_dtype)
    out = step(*(x[:, :, -1:].contiguous() for x in text), slots)
    return errors(out, as_stored(slots, text, n), n - 1)


def of_chunk(text: Text, kv_dtype: str | None, attend=ops.attend, new: int = 21) -> Errors:
    n = text.keys.shape[2]
    slots, _ = stored(text, n - new, kv_dtype)
    out, _ = attend(*(x[:, :, -new:].contiguous() for x in text), slots)
    return errors(out, as_stored(slots, text, n - new), n - new)


def of_prompt(text: Text, attend=ops.attend) -> Errors:
    out, _ = attend(*text)
    return errors(out, text, 0)


def of_simulation(text: Text, kv_dtype: str | None, simulate=ops.simulate) -> Errors:
    """Of the rows after a prompt of one token, of whose keys none is evicted."""
    n = text.keys.shape[2]
    slots, _ = stored(text, n, kv_dtype)
    prompt, budget = (torch.tensor(x, dtype=torch.int32) for x in ([1], [[n, 0]]))
    out, *_ = simulate(*text, prompt, budget, kv_dtype=kv_dtype)
    return errors(out[:, 1:], as_stored(slots, text, n), 1)
