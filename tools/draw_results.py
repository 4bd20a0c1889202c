"""Draws docs/results.svg, the picture of README.md, from the tables of the documents.

    python tools/draw_results.py

Left, what eviction costs at equal bytes, in the middle, what is found of facts that nobody had
asked for (docs/results.md); right, what a token takes after a prompt (benchmarks/README.md). The
figures are read from those tables alone, and a hash of them goes into the picture, so that
tests/test_documentation.py tells a picture that has fallen behind.
"""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PICTURE = ROOT / "docs" / "results.svg"
LABELS = {
    "authors": "as published (authors)",
    "robust": "robust, 8 and 4 bits",
    "calibrated": "calibrated, 8 and 4 bits",
    "reread": "read twice, 8 and 4 bits",
}
FULL = "full cache"


class Figures(NamedTuple):
    """What is drawn.

    Attributes:
        bytes_kept: per cent of a full cache's bytes.
        losses: setting -> (nats a token lost to the full cache, standard error), as `bytes_kept`.
        found: setting -> share found of the facts that a full cache finds, as `bytes_kept`; None
            where it was not measured.
        prompts: lengths in tokens.
        token_ms: cache -> ms a decoded token, as `prompts`.
    """

    bytes_kept: list[float]
    losses: dict[str, list[tuple[float, float]]]
    found: dict[str, list[float | None]]
    prompts: list[int]
    token_ms: dict[str, list[float]]

    def hash(self) -> str:
        return hashlib.sha256(json.dumps(self).encode()).hexdigest()[:16]


def table(path: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading of the second level, without its ruler.

    Raises: ValueError where there is none.
    """
    below = path.read_text("utf-8").partition(f"\n## {heading}\n")[2]
    first = re.search(r"(?:^\|.*\|\n)+", below, re.MULTILINE)
    if first is None:
        raise ValueError(f"{path} has no table below ## {heading}")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in first[0].splitlines()]
    return [rows[0], *rows[2:]]


def name_of(cell: str) -> str:
    """Of a setting, whatever its fractions are of."""
    return cell.strip("`").removesuffix("-bytes")


def figures() -> Figures:
    """Those that stand in the documents today."""
    head, *rows = table(ROOT / "docs" / "results.md", "Equal bytes")
    losses = {
        name_of(row[0].removeprefix("loss of ")): [
            (float(loss), float(error.strip("()"))) for loss, error in map(str.split, row[1:])
        ]
        for row in rows
        if row[0].startswith("loss of ")
    }
    _, *rows = table(ROOT / "docs" / "results.md", "Needles")
    found = {name_of(row[0]): [float(x.split()[0]) if x else None for x in row[1:]] for row in rows}
    _, *rows = table(ROOT / "benchmarks" / "README.md", "SmolLM2 from prompt to text")
    rows = [row for row in rows if row[0] == "bfloat16"]
    pairs = [tuple(map(float, row[4].split(" -> "))) for row in rows]
    full, h2o = zip(*pairs, strict=True)
    return Figures(
        [float(cell.rstrip("%")) for cell in head[1:]],
        losses,
        found,
        [int(row[1]) for row in rows],
        {"DynamicCache": list(full), "H2OCache, 20% of the keys": list(h2o)},
    )


def draw(shown: Figures) -> Any:
    """The picture, a `matplotlib.figure.Figure`."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.4), layout="constrained")
    quality, recall, speed = figure.subplots(1, 3)
    colors = {setting: f"C{i}" for i, setting in enumerate(LABELS)}
    for setting, losses in shown.losses.items():
        quality.errorbar(
            shown.bytes_kept, [loss for loss, _ in losses], [error for _, error in losses],
            marker="o", markersize=4, capsize=2, label=LABELS[setting], color=colors[setting],
        )  # fmt: skip
    for setting, shares in shown.found.items():
        points = [x for x in zip(shown.bytes_kept, shares, strict=True) if x[1] is not None]
        if setting == FULL:
            recall.axhline(points[0][1], color="grey", linewidth=0.8, label=FULL)
        else:
            label = None if setting in shown.losses else LABELS[setting]  # colors as on the left
            recall.plot(
                *zip(*points, strict=True),
                marker="o", markersize=4, label=label, color=colors[setting],
            )  # fmt: skip
    recall.set(
        title="Facts found that nobody had asked for", xlabel="bytes kept, % of a full cache's",
        ylabel="share of what a full cache finds", xlim=(0, None), ylim=(-0.03, 1.04),
        xticks=shown.bytes_kept,
    )  # fmt: skip
    quality.axhline(0, color="grey", linewidth=0.8)
    quality.set(
        title="Quality: SmolLM2-135M on WikiText-2", xlabel="bytes kept, % of a full cache's",
        ylabel="nats a token lost", xlim=(0, None), xticks=shown.bytes_kept,
    )  # fmt: skip
    for cache, times in shown.token_ms.items():
        speed.plot(shown.prompts, times, marker="o", markersize=4, label=cache)
    speed.set(
        title="Speed: bfloat16, two cores", xlabel="tokens of the prompt", ylabel="ms a token",
        ylim=(0, None), xticks=shown.prompts,
    )  # fmt: skip
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    import matplotlib

    shown = figures()
    with matplotlib.rc_context({"svg.hashsalt": "h2o", "font.size": 9, "axes.titlesize": 10}):
        draw(shown).savefig(
            PICTURE, metadata={"Date": None, "Description": f"figures {shown.hash()}"}
        )
    print(f"{PICTURE}: {PICTURE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
