"""Keys and values that say whose they are, so that a misplaced slot shows without a tolerance.

Within `with payload(model):` every cache stores, instead of the model's keys and values, numbers
that encode layer, head, whether it is a key or a value, token id and position. They pass through
storage in int8 and, as values, in four bits unchanged, except in slots with offsets.
Whatever then happens to a cache, `check_payload` knows what each slot must hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from h2o import H2OCache
from h2o.compat import cache_in
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.layers.named_eviction import move_forward
from h2o.hf.model_traits.tagged_tensor import plain

_PRIMES = (1_000_003, 998_244_353, 7_919, 104_729, 15_485_863, 32_452_843)
KEY, VALUE = 0, 1
FOUR_BITS: dict[str | None, tuple[int, ...]] = {"int8-int4": (VALUE,), "int4": (KEY, VALUE)}
"""What has four bits, by `kv_dtype`"""
ROUNDED = {8: 0.06, 4: 0.5}
"""Rounding by bits in slots with offsets. They store other numbers, which are not exact: keys
without their offset, and both transformed."""


def encode(
    layer: int,
    role: int,
    ids: Tensor,
    positions: Tensor,
    shape: Sequence[int],
    few_bits: Sequence[int] = (),
    factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """float32 [B, G, Q, D] for tokens with these ids and positions [B, Q] or [B, G, Q].

    Multiples of 1/64 whose largest is 127/64, or, for roles with `few_bits`, odd multiples of 1/16
    from -15/16 to 15/16.
    """
    B, G, Q, D = shape
    ids, positions = (x if x.ndim == 3 else x[:, None].expand(B, G, Q) for x in (ids, positions))
    head = torch.arange(G, device=ids.device)[:, None, None]
    element = torch.arange(D, device=ids.device)
    parts = ids[..., None], positions[..., None], layer, role, head, element
    mixed = sum(x * prime for x, prime in zip(parts, _PRIMES, strict=True))
    mixed = (mixed ^ (mixed >> 13)) * 0x5851F42D4C957F2D
    mixed = (mixed ^ (mixed >> 29)) & 0xFFFFF
    if role in few_bits:
        numbers = mixed % 16
        numbers[..., 0::32], numbers[..., 1::32] = 0, 15
        return factor * (numbers.float() - 7.5) / 8
    numbers = mixed % 253 - 126
    numbers[..., 0] = 127
    return factor * numbers.float() / 64


@contextlib.contextmanager
def payload(model: Any, few_bits: Sequence[int] = (), factor: float = 1.0) -> Iterator[None]:
    """Replace what all caches store in passes of a model. With a `factor` that is no power of two,
    quantization rounds it, always in the same way."""
    tokens: list[tuple[Tensor, Tensor]] = []

    def read(_module: Any, args: Any, given: dict[str, Any]) -> None:
        ids = given["input_ids"] if given.get("input_ids") is not None else args[0]
        cache = cache_in(given)
        seen = 0 if cache is None else int(cache.get_seq_length())
        tokens[:] = [(ids, _positions(ids, given, seen))]

    def replacing(update: Any) -> Any:
        def replace(self: Any, keys: Tensor, values: Tensor, layer: int, *more: Any, **kw: Any):
            ids, positions = tokens[0]
            new = (
                encode(layer, role, ids, positions, x.shape, few_bits, factor).to(x.dtype)
                for role, x in ((KEY, keys), (VALUE, values))
            )
            return update(self, *new, layer, *more, **kw)

        return replace

    before = Cache.update, H2OCache.update
    hook = model.register_forward_pre_hook(read, with_kwargs=True)
    Cache.update, H2OCache.update = map(replacing, before)
    try:
        yield
    finally:
        Cache.update, H2OCache.update = before
        hook.remove()


def _positions(ids: Tensor, given: dict[str, Any], seen: int) -> Tensor:
    """The number of each token in its row [B, Q], without padding, after `seen` columns."""
    mask, positions = given.get("attention_mask"), given.get("position_ids")
    Q = ids.shape[1]
    if positions is not None and bool(positions.any()):
        return positions.expand_as(ids)
    if mask is None:  # no row has padding
        return torch.arange(seen, seen + Q, device=ids.device).expand_as(ids)
    return (mask.long().cumsum(1) - 1).clamp(min=0)[:, -Q:]


def check_payload(
    cache: H2OCache,
    texts: Sequence[Sequence[int]],
    read_at: Sequence[Sequence[tuple[int, bool]]],
    few_bits: Sequence[int] = (),
    factor: float = 1.0,
) -> None:
    """Check that each slot of a cache holds the key and value of its position in its row's text.

    `read_at`: for each token of each row its position when it was read, and whether tokens had been
    removed by then. The key of such a token was rotated after it was replaced, so it is not
    checked."""
    about = 0.0 if factor == 1 else 0.1
    for layer in cache.layers:
        if not isinstance(layer, H2OLayer) or layer.slots is None:
            continue
        positions, _ = layer.kept()
        longest = max(map(len, texts))
        facts = [
            [(x, *y) for x, y in zip(row, each, strict=True)] + [(0, 0, False)] * longest
            for row, each in zip(texts, read_at, strict=True)
        ]
        known = torch.tensor([row[:longest] for row in facts]).unbind(2)
        index = positions.clamp(0, longest - 1)
        ids, at, late = (x[:, None].expand(*index.shape[:2], -1).gather(2, index) for x in known)
        for role, got in enumerate(layer.kept_rows()):
            want = encode(layer.layer_idx, role, ids, at, got.shape, few_bits, factor)
            bits = 4 if role in few_bits else 8
            near = about if layer.slots.offsets is None else about + ROUNDED[bits]
            if role == KEY and layer.facts.has_removed:
                got, near = move_forward(layer, got), near + 4 * torch.finfo(got.dtype).eps
            wrong = ((plain(got).float() - want).abs() > near).any(-1) & (positions >= 0)
            if role == KEY:
                wrong &= late == 0
            if bool(wrong.any()):
                row, head, slot = wrong.nonzero()[0].tolist()
                raise AssertionError(
                    f"layer {layer.layer_idx}, row {row}, head {head}: the "
                    f"{('key', 'value')[role]} of position {int(positions[row, head, slot])} is "
                    f"{got[row, head, slot].tolist()}, not {want[row, head, slot].tolist()}"
                )
