"""Draw docs/pictures/results.svg, the picture of README.md, from the tables of the documents.

    python -m tools.draw_results

Left: the loss after a prompt is cut to a share of its bytes. Middle: the facts found among decoys
(both from docs/reference/results.md). Right: the time per token after a prompt
(benchmarks/README.md). The figures are read from those tables. The picture contains a hash of them,
so that tests/test_documentation.py notices an outdated picture.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from tools import pictures

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "reference" / "results.md"
BENCHMARKS = ROOT / "benchmarks" / "README.md"
LABELS = {
    "random": "random keys",
    "authors": "as published (authors)",
    "robust": "robust",
    "echo": "echo: budget=",
    "calibrated": "calibrated",
    "reread": "read twice",
}
"""The settings in the order of their colors. All except "authors" store 8 and 4 bits."""


class Figures(NamedTuple):
    """The figures to draw.

    Attributes:
        bytes_kept: percentages of a full cache's bytes.
        losses: setting -> (loss in nats per token against the full cache, standard error), for each
            of `bytes_kept`.
        found: setting -> share found of the facts that a full cache finds, for each of
            `bytes_kept`.
        prompts: prompt lengths in tokens.
        token_ms: cache -> ms per decoded token, for each of `prompts`.
    """

    bytes_kept: list[float]
    losses: dict[str, list[tuple[float, float]]]
    found: dict[str, list[float]]
    prompts: list[int]
    token_ms: dict[str, list[float]]


def table(path: Path, heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without the line under its header.

    Raises:
        ValueError: there is no table below the heading.
    """
    *_, below = re.split(
        rf"^##+ {re.escape(heading)}$", path.read_text("utf-8"), flags=re.MULTILINE
    )
    first = re.search(r"(?:^\|.*\|\n)+", below, re.MULTILINE)
    if first is None:
        raise ValueError(f"{path} has no table below {heading}")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in first[0].splitlines()]
    return [rows[0], *rows[2:]]


def name_of(cell: str) -> str:
    """The name of a setting, the same for budgets in keys and in bytes."""
    return cell.strip("`").removesuffix("-bytes")


def figures() -> Figures:
    """Read the figures from the documents."""
    head, *rows = table(RESULTS, "A prompt, cut once")
    losses = {
        name_of(row[0]): [
            (float(loss), float(error.strip("()"))) for loss, error in map(str.split, row[1:])
        ]
        for row in rows
    }
    _, *rows = table(RESULTS, "Decoys")
    found = {name_of(row[0]): [float(x.split()[0]) for x in row[1:]] for row in rows}
    _, *rows = table(BENCHMARKS, "Qwen2.5-Coder 1.5B from prompt to text")
    pairs = [tuple(map(float, row[2].split(" -> "))) for row in rows]
    full, h2o = zip(*pairs, strict=True)
    return Figures(
        [float(cell.rstrip("%")) for cell in head[1:]],
        losses,
        found,
        [int(row[0]) for row in rows],
        {"DynamicCache": list(full), "budget=0.2": list(h2o)},
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
        label = None if setting in shown.losses else LABELS[setting]  # colors as on the left
        recall.plot(
            shown.bytes_kept, shares,
            marker="o", markersize=4, label=label, color=colors[setting],
        )  # fmt: skip
    recall.axhline(1, color="grey", linewidth=0.8, label="full cache")
    recall.set(
        title="Facts among decoys: SmolLM2-135M", xlabel="bytes kept, % of a full cache's",
        ylabel="share of what a full cache finds", xlim=(0, None), ylim=(-0.03, 1.04),
        xticks=shown.bytes_kept,
    )  # fmt: skip
    quality.axhline(0, color="grey", linewidth=0.8)
    quality.set(
        title="A prompt cut once: SmolLM2-135M", xlabel="bytes kept, % of a full cache's",
        ylabel="nats lost per token", xlim=(0, None), xticks=shown.bytes_kept,
    )  # fmt: skip
    for cache, times in shown.token_ms.items():
        speed.plot(shown.prompts, times, marker="o", markersize=4, label=cache)
    speed.set(
        title="Speed: Qwen2.5-Coder 1.5B, two cores", xlabel="tokens of the prompt",
        ylabel="ms per token", xlim=(0, None), ylim=(0, None), xticks=shown.prompts,
    )  # fmt: skip
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> None:
    shown = figures()
    pictures.save(draw(shown), "results", shown)


if __name__ == "__main__":
    main()
