"""torch's default settings, for the time in which h2o checks and measures kernels."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def default_settings(device: torch.device) -> Iterator[None]:
    """Temporarily reset the program's torch settings: default device and dtype, deterministic
    algorithms, gradients, autocast, and reduced precision of float32 products (TF32)."""
    dtype, strict = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        torch.set_default_dtype(torch.float32)
        if strict:
            torch.use_deterministic_algorithms(False)
        with (
            _whole_products(),
            device,
            torch.no_grad(),
            torch.autocast(device.type, enabled=False),
        ):
            yield
    finally:
        torch.set_default_dtype(dtype)
        if strict:
            torch.use_deterministic_algorithms(True, warn_only=warns)


@contextlib.contextmanager
def _whole_products() -> Iterator[None]:
    """Compute float32 products on CUDA in full precision. Since torch 2.9 CUDA has its own setting
    for this, and reading the older, global one raises an error if the two differ."""
    products = torch.backends.cuda.matmul
    if not hasattr(products, "fp32_precision"):
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            yield
        finally:
            torch.set_float32_matmul_precision(precision)
        return
    precision, products.fp32_precision = products.fp32_precision, "ieee"
    try:
        yield
    finally:
        products.fp32_precision = "none"  # follows torch.backends.fp32_precision
        if products.fp32_precision != precision:
            products.fp32_precision = precision
