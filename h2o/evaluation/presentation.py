"""Results as people read them: tables in plain text, and curves over the budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from h2o.processes import launched

__all__ = ["plot_curves", "table", "written"]


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Plain text in columns; all but the first are aligned to the right."""
    cells = [[str(cell) for cell in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for row in cells:
        first, *rest = zip(row, widths, strict=True)
        texts = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]
        lines.append("  ".join(texts).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def written(results: Path, drawn: bool) -> str:
    """The line that names the files of an evaluation: results, and the plot beside them if there
    is one."""
    return f"written: {results}" + (f", {results.with_suffix('.png')}" if drawn else "")


def apart(budgets: Iterable[float], least: float = 0.1) -> list[float]:
    """Of these the ticks of a logarithmic axis whose labels do not touch, the largest first of all.

    least: part of the axis that a label takes.
    """
    shown = sorted({round(budget, 3) for budget in budgets if budget > 0}, reverse=True)
    length = math.log(shown[0] / shown[-1]) if shown else 0.0
    ticks = shown[:1]
    for budget in shown[1:]:
        if math.log(ticks[-1] / budget) >= least * length:
            ticks.append(budget)
    return ticks[::-1]


def plot_curves(
    path: Path,
    panels: Sequence[tuple[str, dict[str, list[tuple[float, float, float]]]]],
    ylabel: str,
    xlabel: str = "keys kept, % of the text",
) -> bool:
    """One panel per (title, {curve: [(budget in per cent, value, standard error)]}), as PNG.

    A curve with one point at 100% is drawn as a dashed line: the full cache. False, and nothing
    is written, without matplotlib; nor by any but the first of several processes.
    """
    if not launched().first:
        return False
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(4.5 * len(panels), 3.6), layout="constrained")
    for index, (title, curves) in enumerate(panels):
        axes = figure.add_subplot(1, len(panels), index + 1)
        ticks = apart(point[0] for points in curves.values() for point in points)
        for name, points in sorted(curves.items()):
            x, y, error = zip(*sorted(points), strict=True)
            if x == (100.0,):
                axes.axhline(y[0], linestyle="--", color="grey", label=name)
            else:
                axes.errorbar(x, y, yerr=error, marker="o", capsize=2, label=name)
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
        axes.set(title=title, xlabel=xlabel, ylabel=ylabel)
        axes.legend(fontsize="small")
    figure.savefig(path, dpi=120)
    return True
