"""Pictures of an analysis. Every function draws on the axes that it is given, or on axes of a
new figure, and returns them; none shows or saves anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from h2o.draw import axes_or_new, need

if TYPE_CHECKING:
    from h2o.analysis.measured_text import MeasuredText
    from h2o.config import H2OConfig

__all__ = ["FIGURES"]


def sparsity(a: MeasuredText, ax: Any = None, *, threshold: float = 0.01) -> Any:
    """Share of negligible entries by layer: the mean over heads, and their range."""
    ax = axes_or_new(ax)
    shares = 100 * a.sparsity(threshold)
    ax.fill_between(a.layers, shares.min(1), shares.max(1), alpha=0.25, label="range of the heads")
    ax.plot(a.layers, shares.mean(1), marker="o", markersize=3, label="mean of the heads")
    ax.axhline(95, color="grey", linestyle=":", label="95%")
    ax.set(
        title=f"Attention entries below {threshold:.0%} of their row's maximum",
        xlabel="layer",
        ylabel="% of entries",
        ylim=(0, 101),
    )
    whole_numbers(ax.xaxis)
    ax.legend(fontsize="small")
    return ax


def power_law(a: MeasuredText, ax: Any = None) -> Any:
    """Sorted scores of each layer, both axes logarithmic: a power law is a straight line."""
    ax = axes_or_new(ax)
    colours = need("matplotlib").colormaps["viridis"]
    law = a.power_law()
    ranks = np.arange(1, len(a) + 1)
    for index, layer in enumerate(a.layers):
        label = str(layer) if layer in (a.layers[0], a.layers[-1]) else None
        falling = -np.sort(-a.scores(layer, "layer"))
        colour = colours(index / max(len(a.layers) - 1, 1))
        ax.plot(ranks, falling, color=colour, linewidth=0.9, label=label)
    ax.set(
        title=f"Attention by rank of the key (slope {law.slope.mean():.2f}, "
        f"R² {law.r2.mean():.2f}, mean of layers)",
        xlabel="rank",
        ylabel="accumulated attention",
        xscale="log",
        yscale="log",
    )
    ax.legend(title="layer", fontsize="small")
    return ax


def carriers(a: MeasuredText, ax: Any = None) -> Any:
    """Which share of the keys carries 50%, 80%, ... of the attention, by layer."""
    ax = axes_or_new(ax)
    for share, counts in a.power_law().keys.items():
        ax.plot(a.layers, 100 * counts / len(a), label=f"{100 * share:g}%")
    ax.set(
        title="Keys that carry most of the attention",
        xlabel="layer",
        ylabel="% of keys",
        ylim=(0, 101),
    )
    whole_numbers(ax.xaxis)
    ax.legend(
        title="of it", fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), reverse=True
    )
    return ax


def overlap(a: MeasuredText, ax: Any = None) -> Any:
    """Common heavy hitters of each two layers (Jaccard), as a heat map."""
    ax = axes_or_new(ax)
    image = ax.imshow(a.overlap("layer"), vmin=0, vmax=1, cmap="magma")
    ticks = range(0, len(a.layers), max(len(a.layers) // 6, 1))
    names = [a.layers[i] for i in ticks]
    ax.set_xticks(ticks, names)
    ax.set_yticks(ticks, names)
    ax.set(title="Common heavy hitters of two layers", xlabel="layer", ylabel="layer")
    ax.figure.colorbar(image, ax=ax, label="Jaccard")
    return ax


def halves(a: MeasuredText, ax: Any = None) -> Any:
    """Heavy hitters of the text's first half: does its second half agree? By layer and head."""
    ax = axes_or_new(ax)
    shares = a.overlap("half")
    ax.plot(a.layers, shares.mean(1), marker="o", markersize=3, label="mean of the heads")
    for head in range(a.groups):
        label = "key/value heads" if head == 0 else None
        ax.plot(a.layers, shares[:, head], ".", color="grey", markersize=3, label=label)
    ax.set(
        title="Heavy hitters that early and late queries share",
        xlabel="layer",
        ylabel="Jaccard",
        ylim=(0, 1.02),
    )
    whole_numbers(ax.xaxis)
    ax.legend(fontsize="small")
    return ax


def frequency(a: MeasuredText, ax: Any = None) -> Any:
    """Rank correlation of a token's attention with its frequency in the text, by layer."""
    ax = axes_or_new(ax)
    names = {
        "sum_count": "in all, with count",
        "sum_neighbours": "in all, with neighbours",
        "mean_count": "per occurrence, with count",
        "mean_neighbours": "per occurrence, with neighbours",
    }
    for (name, values), style in zip(a.frequency().items(), ("-", "--", "-", "--"), strict=True):
        ax.plot(a.layers, values, style, label=names[name])
    ax.axhline(0, color="grey", linewidth=0.6)
    ax.set(
        title="Attention of a kind of token and its frequency",
        xlabel="layer",
        ylabel="Spearman's rank correlation",
        ylim=(-1, 1),
    )
    whole_numbers(ax.xaxis)
    ax.legend(fontsize="small")
    return ax


def removal(a: MeasuredText, ax: Any = None, **options: Any) -> Any:
    """Perplexity without the heaviest, random and newest keys; options as of `a.removal`."""
    ax = axes_or_new(ax)
    table = a.removal(**options)
    ax.axhline(table.pop("full")[0.0], color="grey", linestyle="--", label="nothing removed")
    for kind, by_share in table.items():
        ax.plot([100 * x for x in by_share], list(by_share.values()), marker="o", label=kind)
    ax.set(
        title="Keys taken away", xlabel="% of the keys before", ylabel="perplexity", yscale="log"
    )
    ax.legend(fontsize="small")
    return ax


Configs = Mapping[str, "H2OConfig | None"]
"""Labels and configs; None is the config of the analysis."""


def retained_mass(a: MeasuredText, ax: Any = None, *, configs: Configs | None = None) -> Any:
    """Share of the attention that a cache retains, by layer, for one config or several."""
    ax = axes_or_new(ax)
    for name, config in _named(configs).items():
        means = [100 * a.retained_mass(layer, h2o_config=config).mean() for layer in a.layers]
        ax.plot(a.layers, means, marker="o", markersize=3, label=name)
    ax.set(
        title="Attention retained, by layer",
        xlabel="layer",
        ylabel="% of a full cache's attention",
        ylim=(0, 101),
    )
    whole_numbers(ax.xaxis)
    ax.legend(fontsize="small")
    return ax


def retained_over_time(a: MeasuredText, ax: Any = None, *, configs: Configs | None = None) -> Any:
    """The same by token, mean over layers and heads, smoothed over a fiftieth of the text."""
    ax = axes_or_new(ax)
    width = max(len(a) // 50, 1)
    for name, config in _named(configs).items():
        rows = [
            a.retained_mass(layer, per_token=True, h2o_config=config).mean(0) for layer in a.layers
        ]
        smooth = np.convolve(np.mean(rows, axis=0), np.ones(width) / width, mode="valid")
        ax.plot(np.arange(width - 1, len(a)), 100 * smooth, label=name)
    ax.set(
        title="Attention retained, as the text grows",
        xlabel="token",
        ylabel="% of a full cache's attention",
        ylim=(0, 101),
    )
    ax.legend(fontsize="small")
    return ax


def _named(configs: Configs | None) -> Configs:
    return configs or {"this analysis": None}


def scores(a: MeasuredText, ax: Any = None, *, layer: int | None = None, per: str = "kv") -> Any:
    """Scores of a layer's keys, a row for each head; without a layer, one for each layer."""
    ax = axes_or_new(ax, figsize=(8, 3))
    from matplotlib.colors import LogNorm

    if layer is None:
        rows = np.stack([a.scores(x, "layer") for x in a.layers])
        title, ylabel = "Accumulated attention by layer", "layer"
    else:
        rows = np.atleast_2d(a.scores(layer, per))
        title, ylabel = f"Accumulated attention in layer {layer}", f"{per} head"
    low, high = np.percentile(rows, 5), rows.max()
    norm = LogNorm(max(low, high * 1e-6), high)
    image = ax.imshow(rows, aspect="auto", norm=norm, cmap="inferno", interpolation="nearest")
    ax.set(title=title, xlabel="position", ylabel=ylabel)
    whole_numbers(ax.yaxis)
    ax.figure.colorbar(image, ax=ax)
    return ax


def whole_numbers(axis: Any) -> None:
    """Ticks of layers or heads, of which there are no parts."""
    axis.set_major_locator(need("matplotlib.ticker").MaxNLocator(integer=True, min_n_ticks=1))


FIGURES: dict[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (
        sparsity,
        power_law,
        carriers,
        overlap,
        halves,
        frequency,
        removal,
        retained_mass,
        retained_over_time,
        scores,
    )
}
"""By the names that `Analysis.plot` takes."""
