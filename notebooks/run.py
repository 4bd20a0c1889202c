"""Executes every notebook of this folder, or those that are named, and compares what they show with
what is committed.

    make notebooks, or: python notebooks/run.py [--write] [01_heavy_hitters.ipynb ...]

Numbers may differ as those of two machines do, pictures in what a font changes. With --write the
new outputs take the place of the old ones; what only this machine knows, times and folders, is
left out of both.
"""

from __future__ import annotations

import argparse
import base64
import difflib
import io
import os
import re
import struct
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).resolve().parent
SECONDS = 1200
"""For one cell."""

SHOWN = ("image/png", "text/html", "text/plain")
"""Of the forms of an output the first that there is, besides its text."""

NUMBER = re.compile(r"(?<![\w.])[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
TOLERANCE = 0.03


def executed(path: Path) -> Any:
    """The notebook with new outputs. A cell's error ends this program with its traceback."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=SECONDS, resources={"metadata": {"path": str(HERE)}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # times
        if cell.cell_type == "code":
            cell.outputs = [x for x in map(plain, joined(cell.outputs)) if x is not None]
    notebook.metadata = {name: notebook.metadata[name] for name in ("kernelspec", "language_info")}
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def joined(outputs: list[Any]) -> list[Any]:
    """Pieces that were printed one after the other as one."""
    whole: list[Any] = []
    for output in outputs:
        if whole and output.output_type == "stream" == whole[-1].output_type:
            if output.name == whole[-1].name:
                whole[-1].text += output.text
                continue
        whole.append(output)
    return whole


def plain(output: Any) -> Any:
    """An output in one form, without what only this machine knows; None for progress."""
    if output.output_type == "stream":
        output.text = anonymous(output.text)
        return output if output.name == "stdout" else None
    form = next(form for form in SHOWN if form in output.data)
    content = output.data[form]
    kept = {form: in_palette(content) if form == "image/png" else anonymous(content)}
    return nbformat.v4.new_output(
        output.output_type,
        kept,
        **({"execution_count": output.execution_count} if "execution_count" in output else {}),
    )


def in_palette(picture: str) -> str:
    """A PNG of 128 colors, which takes half of the bytes; as base64 both."""
    from PIL import Image

    small = io.BytesIO()
    whole = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    whole.quantize(128, dither=Image.Dither.NONE).save(small, "PNG", optimize=True)
    return base64.b64encode(small.getvalue()).decode()


def anonymous(text: str) -> str:
    """Without seconds, temporary folders and addresses in memory."""
    text = re.sub(r" +\d+ s$", "", text, flags=re.MULTILINE)
    text = re.sub(r"^(.*?) +time\n(-.*?) +-+$", r"\1\n\2", text, flags=re.MULTILINE)
    text = re.sub(r"/tmp/\w+", "FOLDER", text)
    return re.sub(r" at 0x[0-9a-f]+", "", text)


def differences(old: Any, new: Any) -> list[str]:
    """Lines that say where two notebooks show something else."""
    found = []
    for number, (before, after) in enumerate(zip(old.cells, new.cells, strict=True)):
        if before.cell_type == "code":
            one, other = list(map(seen, before.outputs)), list(map(seen, after.outputs))
            if len(one) != len(other) or not all(map(alike, one, other)):
                lines = difflib.unified_diff(
                    "\n".join(one).splitlines(), "\n".join(other).splitlines(), lineterm="", n=0
                )
                found.append("\n".join([f"cell {number}:", *list(lines)[2:40]]))
    return found


def seen(output: Any) -> str:
    """What a reader reads of an output: HTML without colors, and the size of a picture."""
    if output.output_type == "stream":
        return output.text
    form, content = next(iter(output.data.items()))
    if form == "text/html":  # a shade too faint to be seen is there on one processor only
        return re.sub(r' style="[^"]*"', "", content)
    if form != "image/png":
        return content
    return "a picture of {} x {} pixels".format(
        *struct.unpack(">II", base64.b64decode(content)[16:24])
    )


def alike(one: str, other: str) -> bool:
    """Whether two texts say the same, but for what rounding changes in their numbers."""
    texts = [NUMBER.sub("#", re.sub(r" +", " ", text)) for text in (one, other)]
    return texts[0] == texts[1] and all(map(near, NUMBER.findall(one), NUMBER.findall(other)))


def near(one: str, other: str) -> bool:
    """Up to 3%, or two of the last digit that is shown."""
    last = 10.0 ** -len(one.partition(".")[2].partition("e")[0])
    return abs(float(one) - float(other)) <= max(2 * last, TOLERANCE * abs(float(one)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="keep the new outputs")
    parser.add_argument("notebooks", nargs="*", type=Path)
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"  # kernels inherit it: the embedded model must do
    wrong = []
    for path in options.notebooks or sorted(HERE.glob("*.ipynb")):
        start = time.perf_counter()
        new = executed(path)
        found = differences(nbformat.read(path, as_version=4), new)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s", flush=True)
        if options.write:
            nbformat.write(new, path)
        else:
            wrong += [f"{path.name}, {text}" for text in found]
    if wrong:
        sys.exit("\n".join([*wrong, "shown otherwise than committed: look, then --write"]))


if __name__ == "__main__":
    main()
