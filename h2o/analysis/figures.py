"""Draw the figures of an analysis with matplotlib.

Every function draws an `h2o.analysis.result.Analysis` on given axes. The first line of its
docstring is the figure's caption on the page of `h2o analyze`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from h2o.config import H2OConfig

MEAN = {"marker": "o", "markersize": 3, "label": "mean of the heads"}


def sparsity(a: Any, ax: Any, *, threshold: float = 0.01) -> None:
    """Share of negligible attention entries by layer: the mean over heads, and their range."""
    shares = 100 * a.sparsity(threshold)
    ax.fill_between(a.layers, shares.min(1), shares.max(1), alpha=0.25, label="range of the heads")
    ax.plot(a.layers, shares.mean(1), **MEAN)
    ax.axhline(95, color="grey", linestyle=":", label="95%")
    title = f"Attention entries below {threshold:.0%} of their row's maximum"
    _by_layer(ax, title=title, ylabel="% of entries")


def power_law(a: Any, ax: Any) -> None:
    """Accumulated attention of the sorted keys by layer. A power law is a straight line."""
    from matplotlib import colormaps

    law = a.power_law()
    ranks = np.arange(1, len(a) + 1)
    for index, layer in enumerate(a.layers):
        label = str(layer) if layer in (a.layers[0], a.layers[-1]) else None
        falling = -np.sort(-a.scores(layer, "layer"))
        color = colormaps["viridis"](index / max(len(a.layers) - 1, 1))
        ax.plot(ranks, falling, color=color, linewidth=0.9, label=label)
    ax.set(
        title=f"Attention by rank of the key (slope {law.slope.mean():.2f}, "
        f"R² {law.r2.mean():.2f}, mean of layers)",
        xlabel="rank",
        ylabel="accumulated attention",
        xscale="log",
        yscale="log",
    )
    ax.legend(title="layer", fontsize="small")


def carriers(a: Any, ax: Any) -> None:
    """Share of the keys that carries 50, 80, 90, 95 and 99% of the attention, by layer."""
    for share, counts in a.power_law().keys.items():
        ax.plot(a.layers, 100 * counts / len(a), label=f"{100 * share:g}%")
    _by_layer(ax, title="Keys that carry most of the attention", ylabel="% of keys")
    ax.legend(
        title="of it", fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5), reverse=True
    )


def overlap(a: Any, ax: Any) -> None:
    """Heavy hitters that two layers have in common (Jaccard), as a heat map."""
    image = ax.imshow(a.overlap("layer"), vmin=0, vmax=1, cmap="magma")
    ticks = range(0, len(a.layers), max(len(a.layers) // 6, 1))
    names = [a.layers[i] for i in ticks]
    ax.set_xticks(ticks, names)
    ax.set_yticks(ticks, names)
    ax.set(title="Common heavy hitters of two layers", xlabel="layer", ylabel="layer")
    ax.figure.colorbar(image, ax=ax, label="Jaccard")


def halves(a: Any, ax: Any) -> None:
    """Heavy hitters that early and late queries have in common, by layer and head."""
    shares = a.overlap("half")
    ax.plot(a.layers, shares.mean(1), **MEAN)
    dots = ax.plot(a.layers, shares, ".", color="grey", markersize=3)
    dots[0].set_label("key/value heads")
    title = "Heavy hitters that early and late queries share"
    _by_layer(ax, title=title, ylabel="Jaccard", ylim=(0, 1.02))


def frequency(a: Any, ax: Any) -> None:
    """Rank correlation of a token's attention with its frequency in the text, by layer."""
    for name, values in a.frequency().items():
        ax.plot(a.layers, values, label={"sum": "in all", "mean": "per occurrence"}[name])
    ax.axhline(0, color="grey", linewidth=0.6)
    title, ylabel = "Attention of a kind of token and its count", "Spearman's rank correlation"
    _by_layer(ax, title=title, ylabel=ylabel, ylim=(-1, 1))


def removal(a: Any, ax: Any, **options: Any) -> None:
    """Perplexity without the heaviest, random or newest keys."""
    table = a.removal(**options)
    ax.axhline(table.pop("full")[0.0], color="grey", linestyle="--", label="nothing removed")
    for kind, by_share in table.items():
        ax.plot([100 * x for x in by_share], list(by_share.values()), marker="o", label=kind)
    ax.set(title="Removed keys", xlabel="% of the keys before", ylabel="perplexity", yscale="log")
    ax.legend(fontsize="small")


Configs = Mapping[str, "H2OConfig | None"]
"""Configs by label. None is the config of the analysis."""

OWN: Configs = {"this analysis": None}
RETAINED = "% of a full cache's attention"


def retained_mass(a: Any, ax: Any, *, configs: Configs = OWN) -> None:
    """Share of a full cache's attention that caches retain, by layer."""
    for name, config in configs.items():
        means = [100 * a.retained_mass(layer, h2o_config=config).mean() for layer in a.layers]
        ax.plot(a.layers, means, marker="o", markersize=3, label=name)
    _by_layer(ax, title="Attention retained, by layer", ylabel=RETAINED)


def retained_over_time(a: Any, ax: Any, *, configs: Configs = OWN) -> None:
    """Share of a full cache's attention that caches retain, by token, smoothed."""
    width = max(len(a) // 50, 1)
    for name, config in configs.items():
        masses = [a.retained_mass(x, per_token=True, h2o_config=config).mean(0) for x in a.layers]
        smooth = np.convolve(np.mean(masses, axis=0), np.ones(width) / width, mode="valid")
        ax.plot(np.arange(width - 1, len(a)), 100 * smooth, label=name)
    title = "Attention retained, as the text grows"
    ax.set(title=title, xlabel="token", ylabel=RETAINED, ylim=(0, 101))
    ax.legend(fontsize="small")


def scores(a: Any, ax: Any, *, layer: int | None = None, per: str = "kv") -> None:
    """Accumulated attention of every key: a row for each layer, or for each head of one layer."""
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
    use_whole_numbers(ax.yaxis)
    ax.figure.colorbar(image, ax=ax)


def use_whole_numbers(axis: Any) -> None:
    """Put ticks of layers or heads at whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _by_layer(ax: Any, ylim: tuple[float, float] = (0, 101), **texts: str) -> None:
    """Label axes whose x is the layer."""
    ax.set(xlabel="layer", ylim=ylim, **texts)
    use_whole_numbers(ax.xaxis)
    ax.legend(fontsize="small")


FIGURES: dict[str, Callable[..., None]] = {
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
"""The figures, by their names in `Analysis.plot`"""
