"""Quantization of keys and values, in plain torch.

The rows equal those of the C core (`csrc/cpu/stored_rows.h`) bit for bit. Keys are quantized
symmetrically per token, values asymmetrically in groups: compare Liu et al., "KIVI: A Tuning-Free
Asymmetric 2bit Quantization for KV Cache", ICML 2024.

Shape letters: n rows, D head dimension.
"""

from __future__ import annotations

import functools
import math
import warnings

import torch
from torch import Tensor

from h2o.arguments.plain_values import check_choice


def quantize(x: Tensor, bits: int) -> Tensor:
    """Quantize x [n, D] to rows [n, bytes] uint8.

    With 8 bits a row is D signed bytes q and a float16 scale, and x is about q * scale. With 4 bits
    it has 16 bytes for each group of 32 elements, where byte j holds element j in its low half and
    element j + 16 in its high half, followed by the float16 scale and minimum of each group, and x
    is about minimum + q * scale. Scales are rounded up and minima down, q to nearest with ties to
    even, all computed in float32. An element that is not finite makes the scale NaN.
    """
    bits = check_choice("bits", bits, (4, 8))
    x = x.float()
    if bits == 8:
        scale = _float16(_divide(x.abs().amax(-1, keepdim=True), 127), up=True, finite=_finite(x))
        q = _ratio(x, scale).clamp(-127, 127).to(torch.int8)
        return torch.cat([q.view(torch.uint8), scale.view(torch.uint8)], dim=-1)
    n, D = x.shape
    groups = x.view(n, D // 32, 32)
    finite = _finite(groups)
    least = _float16(groups.amin(-1, keepdim=True), up=False, finite=None)
    least = least.masked_fill(~finite, 0)
    width = _divide(groups.amax(-1, keepdim=True) - least.float(), 15).clamp(min=0)
    scale = _float16(width, up=True, finite=finite)
    q = _ratio(groups - least.float(), scale).clamp(0, 15).to(torch.uint8)
    nibbles = (q[..., :16] | q[..., 16:] << 4).view(n, D // 2)
    # As bytes, because autocast on a CPU does not concatenate float16.
    numbers = torch.cat([scale.view(torch.uint8), least.view(torch.uint8)], -1)
    return torch.cat([nibbles, numbers.view(n, -1)], -1)


def dequantize(rows: Tensor, D: int) -> Tensor:
    """Convert stored rows [..., D] of floats or [..., bytes] from `quantize` to floats [..., D]."""
    if rows.dtype != torch.uint8:
        return rows
    return floats(*codes(rows, D))


def codes(rows: Tensor, D: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Split rows [..., bytes] into codes [..., N, D / N], int8 or uint8, and scales and minima
    [..., N, 1], float32, for N groups that share a scale. Minima are None with 8 bits."""
    if rows.shape[-1] == D + 2:
        scale = _copy(rows[..., D:]).view(torch.float16).float()
        return rows[..., None, :D].view(torch.int8), scale[..., None], None
    numbers = _copy(rows[..., D // 2 :]).view(torch.float16).float().unflatten(-1, (D // 32, 2))
    nibbles = rows[..., : D // 2].unflatten(-1, (D // 32, 16))
    return torch.cat([nibbles & 15, nibbles >> 4], -1), numbers[..., :1], numbers[..., 1:]


def floats(q: Tensor, scale: Tensor, least: Tensor | None) -> Tensor:
    """Compute float32 numbers [..., D] from the results of `codes`."""
    x = q.float().mul_(scale)
    return (x if least is None else x.add_(least)).flatten(-2)


def stored_like(x: Tensor, rows: Tensor) -> Tensor:
    """Convert x [..., D] to the format of stored `rows`: floats [..., D] or [..., bytes]."""
    return x.to(rows.dtype) if rows.dtype != torch.uint8 else _to_bytes(x, rows.shape[-1])


def round_to_bytes(x: Tensor, size: int) -> Tensor:
    """Round x [..., D] as slots with `size` bytes per row would."""
    return dequantize(_to_bytes(x, size), x.shape[-1])


def _to_bytes(x: Tensor, size: int) -> Tensor:
    """Quantize x [..., D] to rows of `size` bytes."""
    D = x.shape[-1]
    return quantize(x.reshape(-1, D), 8 if size == D + 2 else 4).view(*x.shape[:-1], -1)


def _copy(rows: Tensor) -> Tensor:
    """Copy into contiguous memory, so that the copy can be viewed as another dtype."""
    return rows.clone(memory_format=torch.contiguous_format)


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
    """x / scale, rounded to an integer; 0 where the scale is 0 or NaN."""
    usable = scale.float() > 0
    return torch.where(usable, (x / scale.float().masked_fill(~usable, 1)).round(), 0)


COARSE = 0.5
"""Rounding error of attention logits from which answers suffer. Most models have less than 0.1."""
SAMPLE = 64
"""Number of a prompt's tokens, evenly spaced, that tell the error"""


def warn_of_coarse_keys(query: Tensor, key: Tensor, scale: float | None) -> None:
    """Warn if eight bits are too few for the keys of a prompt.

    All elements of a stored key share a scale. If a few are far larger than the others, as a bias
    makes them in Qwen2 and Qwen2.5, the others are lost. The typical error of a logit tells. It is
    not computed on a GPU, for which the host would have to wait.

    Args:
        query: [B, H, Q, D].
        key: [B, G, Q, D]. Nothing is checked if the keys are latents, which have another D.
        scale: factor of q.k; None means 1 / sqrt(D).
    """
    D = key.shape[-1]
    if torch.compiler.is_compiling() or not key.is_cpu or query.shape[-1] != D:
        return
    norm = functools.partial(torch.linalg.vector_norm, dim=-1, dtype=torch.float32)
    some = slice(None, None, -(-key.shape[2] // SAMPLE))
    rounding = norm(key[:, :, some], math.inf).median() / 127 / 12**0.5
    error = rounding * norm(query[:, :, some]).median() * (D**-0.5 if scale is None else abs(scale))
    if bool(error > COARSE):
        warnings.warn(
            "eight bits are too few for the keys of this model: a few elements of each key are far "
            "larger than the others, so rounding changes what the model attends to. Pass "
            'kv_dtype=None besides the budget (in vLLM "kv_dtype": null)',
            stacklevel=2,
        )
