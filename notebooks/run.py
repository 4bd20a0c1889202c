"""Executes every notebook of this folder, or those that are named, and keeps no outputs.

make notebooks, or: python notebooks/run.py [01_heavy_hitters.ipynb ...]
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
SECONDS = 1200
"""For one cell."""


def stripped(notebook: nbformat.NotebookNode) -> bool:
    """Whether no cell has an output or says that it has been run."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return not any(cell.outputs or cell.execution_count for cell in cells)


def main(names: list[str]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"  # kernels inherit it: the embedded model must do
    for path in [Path(name) for name in names] or sorted(HERE.glob("*.ipynb")):
        start = time.perf_counter()
        notebook = nbformat.read(path, as_version=4)
        if not stripped(notebook):
            sys.exit(f"{path}: strip its outputs before you commit it")
        # A kernel's errors end this program with the cell and its traceback.
        NotebookClient(
            notebook, timeout=SECONDS, resources={"metadata": {"path": str(HERE)}}
        ).execute()
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
