"""Every call that creates a tensor names its device and dtype, so that torch's default device and
default dtype, which belong to the user, have no effect."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

PACKAGE = Path(__file__).resolve().parent.parent / "h2o"

FACTORIES = {function.__name__ for function in _device_constructors()}
"""Functions that torch's default device affects, as torch itself lists them."""
OF_INTEGERS = {"arange", "randint", "randperm", "range", "tril_indices", "triu_indices"}
"""Functions whose default dtype is int64, unless an argument is a float."""
AS_GIVEN = {"as_tensor", "asarray"}
"""Functions that keep the dtype of their argument."""


def unnamed(source: str) -> Iterator[str]:
    """Calls of torch's factories that leave device or dtype to the defaults."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if not (isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"):
            continue
        name, named = node.func.attr, {keyword.arg for keyword in node.keywords}
        if name == "Generator":
            wanted = set() if node.args else {"device"}
        elif name not in FACTORIES:
            continue
        else:
            points = [x for x in ast.walk(node) if isinstance(getattr(x, "value", None), float)]
            known = name in AS_GIVEN or (name in OF_INTEGERS and not points)
            wanted = {"device"} if known else {"device", "dtype"}
        if missing := wanted - named:
            yield f"line {node.lineno}: {ast.unparse(node)} without {', '.join(sorted(missing))}"


@pytest.mark.parametrize(
    "call",
    [
        "torch.zeros(3, device=x.device)",
        "torch.zeros(3, dtype=torch.float32)",
        "torch.tensor([0.5], device='cpu')",
        "torch.arange(3)",
        "torch.arange(0.0, 3, device='cpu')",
        "torch.full((2,), 1.0, device='cpu')",
        "torch.as_tensor(x)",
        "torch.Generator()",
    ],
)
def test_a_call_that_leaves_it_open_is_seen(call):
    assert list(unnamed(call))


def test_tensors_name_their_device_and_dtype():
    assert {"zeros", "tensor", "arange", "as_tensor", "empty"} <= FACTORIES
    files = sorted(PACKAGE.rglob("*.py"))
    assert len(files) > 100
    found = [f"{file.name}, {x}" for file in files for x in unnamed(file.read_text("utf-8"))]
    assert not found
