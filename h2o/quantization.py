"""Quantization of keys and values, in plain torch.

The rows equal those of the C core (`csrc/cpu/stored_rows.h`) bit for bit. Keys and values of eight
bits and keys of four bits are quantized symmetrically per token, values of four bits asymmetrically
in groups: compare Liu et al., "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache", ICML
2024.

All elements of a key share a scale. If some elements lie around a constant far from
0, as a bias makes them in Qwen2 and Qwen2.5, the others would be lost. An offset is therefore
subtracted from the keys of a head before they are quantized. Compare Zhang et al., "SageAttention:
Accurate 8-Bit Attention for Plug-and-play Inference Acceleration", ICLR 2025, which subtracts the
mean key.

Single elements may still be much larger than the others. So where keys have offsets, an orthonormal
Hadamard transform then spreads each element of a key or a value over many. Compare Ashkboos et al.,
"QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", NeurIPS 2024.

Queries multiply some elements of a key by much larger numbers than others. Four-bit keys are
therefore divided by smoothing factors before the transform, one for each element, and queries are
multiplied by them, which changes no product. Compare Xiao et al., "SmoothQuant: Accurate and
Efficient Post-Training Quantization for Large Language Models", ICML 2023, which does so between
activations and weights.

Shape letters: n rows, B batch rows, G key/value heads, Q new tokens, D head dimension, N elements
of a block that is transformed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from h2o.arguments.plain_values import check_choice

CENTER_TOKENS = 32
"""Number of a row's first keys whose mean is the offset"""

SMOOTHING_TOKENS = 128
"""Number of a row's first tokens whose queries and keys determine the smoothing"""

SMALLEST = 0.01
"""Smallest mean square of an element in `smoothing_of`, as a share of the mean over all elements"""


def offsets_of(keys: Tensor, mask: Tensor | None) -> Tensor:
    """Offsets [B, G, D] float16 of rows whose first keys are `keys` [B, G, Q, D]: the mean of the
    first `CENTER_TOKENS`. `mask`: [B, Q] bool or uint8, 0 for padding. An element is 0 if the mean
    is not finite in float16, or if there are no keys."""
    mean = _mean(*_first_tokens(keys, mask, CENTER_TOKENS)).float()
    most = torch.finfo(torch.float16).max
    return torch.where(mean.abs() <= most, mean, 0.0).half()  # NaN compares false


def set_offsets(offsets: Tensor, empty: Tensor, keys: Tensor, mask: Tensor | None) -> None:
    """Set the offsets [B, G, D] of rows that hold nothing yet (`empty`, [B] bool) and get keys."""
    if mask is not None:
        empty = empty & mask.bool().any(1)
    offsets.copy_(torch.where(empty[:, None, None], offsets_of(keys, mask), offsets))


def _first_tokens(x: Tensor, mask: Tensor | None, most: int) -> tuple[Tensor, Tensor | None]:
    """The first tokens of each row of x [B, G, Q, D], without padding: [B, G, n, D] with n up to
    `most`. Where a row has fewer, other tokens follow, at which the bool mask [B, n] is False."""
    if mask is None:
        return x[:, :, :most], None
    real = mask.bool()
    order = (~real).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    index = order[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index), real.gather(1, order)


def _mean(x: Tensor, real: Tensor | None) -> Tensor:
    """Mean [B, G, D] over the real tokens of x [B, G, n, D] in float64; 0 if there are none."""
    x = x.to(_wide(x))
    if real is None:
        return x.sum(2) / max(1, x.shape[2])
    chosen = x.masked_fill(~real[:, None, :, None], 0)
    return chosen.sum(2) / real.sum(1).clamp(min=1)[:, None, None]


def _wide(x: Tensor) -> torch.dtype:
    return torch.float32 if x.device.type == "mps" else torch.float64  # mps has no float64


def smoothing_of(query: Tensor | None, keys: Tensor, mask: Tensor | None) -> Tensor:
    """Smoothing factors [B, G, D] float16 of rows whose first tokens have the queries [B, H, Q, D]
    and keys [B, G, Q, D].

    A factor is the square root of the key element's standard deviation over the root mean square of
    the query element, among the first `SMOOTHING_TOKENS`. This minimizes the expected squared error
    of logits if all elements of a transformed key are rounded alike. Factors are scaled to a
    geometric mean of 1. Those of few tokens are uncertain, so n tokens determine n / (n + 1) of a
    factor's logarithm, as if a token with equal elements had come first. Factors are 1 if a row has
    fewer than two tokens, or if they are not finite in float16. `mask`: [B, Q] bool or uint8, 0 for
    padding. `query`: None if it is not known, and then its elements count as equal.
    """
    G = keys.shape[1]
    first, real = _first_tokens(keys, mask, SMOOTHING_TOKENS)
    centered = first.to(_wide(keys)) - offsets_of(first, real)[:, :, None].to(_wide(keys))
    logarithm = _floored(_mean(centered.square(), real)).log()
    if query is not None:
        first_queries, _ = _first_tokens(query, mask, SMOOTHING_TOKENS)
        squares = _mean(first_queries.to(_wide(query)).square(), real)
        logarithm = logarithm - _floored(squares.unflatten(1, (G, -1)).mean(2)).log()
    count: Any = first.shape[2] if real is None else real.sum(1)[:, None, None]
    logarithm = (logarithm - logarithm.mean(-1, keepdim=True)) * (count / (count + 1))
    factors = (logarithm / 4).exp().half()
    usable = (factors.isfinite() & (factors > 0)).all(-1, keepdim=True) & (count > 1)
    return torch.where(usable, factors, 1.0)


def _floored(squares: Tensor) -> Tensor:
    """Mean squares [B, G, D], none of which is negligible beside the others."""
    return squares + SMALLEST * squares.mean(-1, keepdim=True)


def set_smoothing(
    smoothing: Tensor | None, seen: Tensor, query: Tensor, keys: Tensor, mask: Tensor | None
) -> None:
    """Set the smoothing [B, G, D] of rows that have seen no tokens (`seen`, [B]) and get some; do
    nothing for slots without smoothing. Call it before the keys are stored."""
    empty = seen == 0
    if smoothing is None or (empty.is_cpu and not empty.any()):
        return
    if mask is not None:
        empty = empty & mask.bool().any(1)
    factors = smoothing_of(query, keys, mask)
    smoothing.copy_(torch.where(empty[:, None, None], factors, smoothing))


def to_stored(
    keys: Tensor, values: Tensor | None, offsets: Tensor | None, smoothing: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Keys and values [B, G, n, D] as they are quantized, in float32: the keys without the offsets
    [B, G, D] and divided by the smoothing [B, G, D], then both transformed. Unchanged without
    offsets. Values may be None."""
    if offsets is None:
        return keys, values
    keys = keys.float() - offsets[:, :, None].float()
    if smoothing is not None:
        keys = keys / smoothing[:, :, None].float()
    return hadamard(keys), None if values is None else hadamard(values)


def from_stored(
    keys: Tensor, values: Tensor | None, offsets: Tensor | None, smoothing: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The inverse of `to_stored`, for dequantized keys and values [..., D]. Offsets and smoothing
    broadcast against them."""
    if offsets is None:
        return keys, values
    keys = hadamard(keys)
    if smoothing is not None:
        keys = keys * smoothing.float()
    return keys + offsets.float(), None if values is None else hadamard(values)


def smoothed_query(query: Tensor, smoothing: Tensor | None) -> Tensor:
    """The query [B, H, Q, D] for keys of `to_stored`, in float32."""
    if smoothing is not None:
        query = query.float().unflatten(1, (smoothing.shape[1], -1))
        query = (query * smoothing[:, :, None, None].float()).flatten(1, 2)
    return hadamard(query)


def hadamard(x: Tensor) -> Tensor:
    """The orthonormal Hadamard transform of x [..., D], in float32. It is its own inverse.

    It applies to blocks of N elements, where N is the largest power of two that divides D. On a CPU
    sums are formed in the order of the C core, so that the bytes that are stored are the same.
    """
    x, D = x.float(), x.shape[-1]
    N = D & -D
    if not x.is_cpu:  # one product, since launching a kernel for each sum would take longer
        return (x.unflatten(-1, (-1, N)) @ _hadamard_matrix(N, x.device)).flatten(-2)
    for h in (1 << stage for stage in range(N.bit_length() - 1)):
        a, b = x.unflatten(-1, (-1, 2, h)).unbind(-2)
        x = torch.stack([a + b, a - b], -2).flatten(-3)
    return x * N**-0.5


def _hadamard_matrix(N: int, device: torch.device) -> Tensor:
    """The matrix of `hadamard`, [N, N] float32. It is kept for later calls, except while a compiler
    or a CUDA graph records it."""
    known = _matrices.get((N, device))
    if known is not None:
        return known
    index = torch.arange(N, device=device)
    common = index[:, None] & index
    for shift in (16, 8, 4, 2, 1):  # the lowest bit becomes the parity of all bits
        common = common ^ common >> shift
    matrix = (1 - 2 * (common & 1)).float() * N**-0.5
    if type(matrix) is not Tensor or torch.compiler.is_compiling():  # fake tensors are subclasses
        return matrix
    if device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        _matrices[N, device] = matrix
    return matrix


_matrices: dict[tuple[int, torch.device], Tensor] = {}
"""The results of `_hadamard_matrix`"""


def quantize(x: Tensor, size: int) -> Tensor:
    """Quantize x [..., D] to rows [..., size] uint8. The size chooses the format:

    - D + 2: keys or values in 8 bits. D signed bytes q, then a float16 scale; x is about q * scale.
    - D/2 + 2: keys in 4 bits. 16 bytes for each group of 32 elements, where byte j holds element j
      in its low half and element j + 16 in its high half. A half n stands for q = 16 n - 120. Then
      a float16 scale; x is about q * scale. So 16 intervals divide the range of a row evenly, and
      an element becomes the middle of its interval.
    - D/2 + D/8: values in 4 bits. The same halves, then a float16 scale and minimum of each group;
      x is about minimum + n * scale.

    Scales are rounded up and minima down, q and n to nearest with ties to even, all computed in
    float32. An element that is not finite makes the scale NaN.

    Raises: ValueError for another size, or if D is not a multiple of 32 for one with 4 bits.
    """
    D, x = x.shape[-1], x.float()
    formats = {D + 2: _to_bytes}
    if D % 32 == 0:
        formats |= {D // 2 + 2: _keys_to_halves, D // 2 + D // 8: _values_to_halves}
    return formats[check_choice("size", size, tuple(formats))](x)


def _to_bytes(x: Tensor) -> Tensor:
    scale = _float16(_divide(_most(x), 127), up=True, finite=_finite(x))
    q = _ratio(x, scale).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([q.view(torch.uint8), scale.view(torch.uint8)], dim=-1)


def _keys_to_halves(x: Tensor) -> Tensor:
    scale = _float16(_divide(_most(x), 128), up=True, finite=_finite(x))
    n = (_ratio(x, 16 * scale.float()) + 7.5).round().clamp(0, 15)
    n = torch.where(scale > 0, n, 0).to(torch.uint8)
    return torch.cat([_pairs(n.unflatten(-1, (-1, 32))), scale.view(torch.uint8)], dim=-1)


def _values_to_halves(x: Tensor) -> Tensor:
    groups = x.unflatten(-1, (-1, 32))
    finite = _finite(groups)
    least = _float16(groups.amin(-1, keepdim=True), up=False, finite=None)
    least = least.masked_fill(~finite, 0)
    width = _divide(groups.amax(-1, keepdim=True) - least.float(), 15).clamp(min=0)
    scale = _float16(width, up=True, finite=finite)
    n = _ratio(groups - least.float(), scale).round().clamp(0, 15).to(torch.uint8)
    # As bytes, because autocast on a CPU does not concatenate float16.
    numbers = torch.cat([scale.view(torch.uint8), least.view(torch.uint8)], -1)
    return torch.cat([_pairs(n), numbers.flatten(-2)], -1)


def _pairs(n: Tensor) -> Tensor:
    """Bytes [..., D / 2] from the numbers [..., D / 32, 32] of their halves."""
    return (n[..., :16] | n[..., 16:] << 4).flatten(-2)


def dequantize(rows: Tensor, D: int) -> Tensor:
    """Convert stored rows [..., D] of floats or [..., bytes] from `quantize` to floats [..., D].
    Those of slots with offsets are still transformed: see `from_stored`."""
    return floats(*codes(rows, D)) if rows.dtype == torch.uint8 else rows


def codes(rows: Tensor, D: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split rows [..., bytes] into codes [..., N, D / N], int8 or uint8, and scales and minima
    [..., N, 1], float32, for N groups that share a scale. Minima are None for keys, and for values
    of 8 bits."""
    if rows.shape[-1] == D + 2:
        scale = _copy(rows[..., D:]).view(torch.float16).float()
        return rows[..., None, :D].view(torch.int8), scale[..., None], None
    pairs = rows[..., : D // 2].unflatten(-1, (D // 32, 16))
    n = torch.cat([pairs & 15, pairs >> 4], -1)
    numbers = _copy(rows[..., D // 2 :]).view(torch.float16).float()
    if numbers.shape[-1] == 1:
        q = (16 * n.to(torch.int16) - 120).to(torch.int8)
        return q.flatten(-2)[..., None, :], numbers[..., None], None
    numbers = numbers.unflatten(-1, (D // 32, 2))
    return n, numbers[..., :1], numbers[..., 1:]


def floats(q: Tensor, scale: Tensor, least: Tensor | None) -> Tensor:
    """Compute float32 numbers [..., D] from the results of `codes`."""
    x = q.float().mul_(scale)
    return (x if least is None else x.add_(least)).flatten(-2)


def stored_like(x: Tensor, rows: Tensor) -> Tensor:
    """Convert x [..., D] to the format of stored `rows`: floats [..., D] or [..., bytes]."""
    return x.to(rows.dtype) if rows.dtype != torch.uint8 else quantize(x, rows.shape[-1])


def round_to_bytes(
    keys: Tensor,
    values: Tensor | None,
    sizes: Sequence[int],
    offsets: Tensor | None,
    smoothing: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Round keys and values [B, G, n, D] as slots with `sizes` bytes per key and value and these
    offsets and smoothing [B, G, D] would. Values may be None."""
    D, (keys, values) = keys.shape[-1], to_stored(keys, values, offsets, smoothing)
    keys = dequantize(quantize(keys, sizes[0]), D)
    if values is not None:
        values = dequantize(quantize(values, sizes[1]), D)
    by_key = (None if x is None else x[:, :, None] for x in (offsets, smoothing))
    return from_stored(keys, values, *by_key)


def _copy(rows: Tensor) -> Tensor:
    """Copy into contiguous memory, so that the copy can be viewed as another dtype."""
    return rows.clone(memory_format=torch.contiguous_format)


def _most(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def _finite(x: Tensor) -> Tensor:
    return x.isfinite().all(-1, keepdim=True)


def _float16(x: Tensor, *, up: bool, finite: Tensor | None) -> Tensor:
    """Round float32 numbers up or down to float16. NaN where `finite` is False."""
    most = torch.finfo(torch.float16).max
    near = (x.clamp(-most, most) + 0.0).half()  # -0 becomes 0
    off = near.float() < x if up else near.float() > x
    bits = near.view(torch.int16)
    away = torch.where(near.float() > 0, 1, -1) if up else torch.where(near.float() > 0, -1, 1)
    tiny = (near == 0) & off  # becomes the first subnormal on that side
    bits = torch.where(off, bits + away.to(torch.int16), bits)
    bits = bits.masked_fill(tiny, 1 if up else -32767)
    rounded = bits.view(torch.float16).clamp(-most, most)
    return rounded if finite is None else rounded.masked_fill(~finite, torch.nan)


def _divide(x: Tensor, number: float) -> Tensor:
    """x / number, rounded once. (On CUDA torch divides by a Python number by multiplying with its
    inverse.)"""
    return x / x.new_full((1,), number)


def _ratio(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale; 0 where the scale is 0 or NaN."""
    usable = scale.float() > 0
    return torch.where(usable, x / scale.float().masked_fill(~usable, 1), 0)
