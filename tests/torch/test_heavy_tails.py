"""Reduced precision on inputs with heavy tails has at most twice the error of the float path."""

from __future__ import annotations

import pytest
import torch

from tests.cases import checkered
from tests.torch import heavy_tails

CASES = [
    (operation, kv_dtype)
    for operation in heavy_tails.OPERATIONS
    for kv_dtype in ([None] if operation == "prompt" else [None, "int8", "int8-int4", "int4"])
]


@pytest.mark.parametrize(
    ("dtype", "shape"), checkered([torch.float16, torch.bfloat16], [(64, 1), (128, 4)]), ids=str
)
@pytest.mark.parametrize(("operation", "kv_dtype"), CASES)
@pytest.mark.parametrize("kind", heavy_tails.KINDS)
def test_at_most_twice_the_error_of_floats(kind, operation, kv_dtype, shape, dtype):
    D, R = shape
    text = heavy_tails.make(kind, dtype, R, 150, D)
    for errors in heavy_tails.OPERATIONS[operation](text, {"kv_dtype": kv_dtype}):
        assert errors.path <= 2 * errors.floats, errors


@pytest.mark.parametrize(("D", "R", "n"), [(192, 3, 700), (512, 5, 300), (64, 33, 400)])
@pytest.mark.parametrize("kv_dtype", ["int8", "int8-int4", "int4"])
@pytest.mark.parametrize("kind", ["query channels", "everything"])
def test_steps_of_other_shapes(kind, kv_dtype, D, R, n):
    text = heavy_tails.make(kind, torch.bfloat16, R, n, D)
    for errors in heavy_tails.step(text, {"kv_dtype": kv_dtype}):
        assert errors.path <= 2 * errors.floats, errors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("operation", ["step", "chunk", "simulation"])
@pytest.mark.parametrize("kind", heavy_tails.KINDS)
def test_keys_with_offsets(kind, operation, dtype):
    text = heavy_tails.make(kind, dtype, 4, 150, 64)
    slots = {"kv_dtype": "int8-int4", "offsets": True}
    for errors in heavy_tails.OPERATIONS[operation](text, slots):
        assert errors.path <= 2 * errors.floats, errors
