"""Perplexity, memory and time over a stream, as a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from h2o.draw import need

__all__ = ["draw", "plot"]

PANELS = (
    ("perplexity", "perplexity of each stretch", 1.0),
    ("kv_bytes", "KV cache, MB", 1e-6),
    ("ms_per_token", "ms a token", 1.0),
)


def plot(result: dict[str, Any], axes: Any, field: str, label: str, scale: float) -> Any:
    """One field of the points of each cache over the tokens read, on matplotlib axes."""
    for name, cache in result["caches"].items():
        x = [point["tokens"] for point in cache["points"]]
        y = [point[field] * scale for point in cache["points"]]
        axes.plot(x, y, label=name + (" (out of positions)" if cache["ended"] else ""), lw=1.2)
    axes.set(xlabel="tokens read", ylabel=label)
    axes.margins(x=0.01)
    axes.grid(alpha=0.3, which="both" if field == "perplexity" else "major")
    axes.xaxis.set_major_locator(need("matplotlib.ticker").MaxNLocator(4))
    if field == "perplexity":
        axes.set_yscale("log")
        for which in ("major", "minor"):  # 20, not 2 x 10^1
            getattr(axes.yaxis, f"set_{which}_formatter")("{x:g}")
        axes.legend(fontsize="small")
    else:
        axes.set_ylim(bottom=0)
    return axes


def draw(result: dict[str, Any], path: Path) -> None:
    """The picture of a result of `h2o stream`, as PNG. ImportError without matplotlib."""
    figure = need("matplotlib.figure").Figure(figsize=(9, 6.5), layout="constrained")
    grid = figure.add_gridspec(2, 2, height_ratios=(2, 1))
    cells = (grid[0, :], grid[1, 0], grid[1, 1])
    for cell, (field, label, scale) in zip(cells, PANELS, strict=True):
        plot(result, figure.add_subplot(cell), field, label, scale)
    chunk = f", {result['chunk']} at a time" if result["chunk"] > 1 else ""
    figure.suptitle(f"{result['model']}: {result['text']}{chunk}, {result['positions']} positions")
    figure.savefig(path, dpi=120, format="png")
