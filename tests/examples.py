"""Run the programs in examples within this process, which has already imported what they need."""

from __future__ import annotations

import contextlib
import io
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name: str, *arguments: str | Path) -> str:
    """Run an example. Returns its standard output."""
    path, printed = str(EXAMPLES / name), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.syspath_prepend(str(EXAMPLES))
        patch.setattr("sys.argv", [path, *map(str, arguments)])
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()
