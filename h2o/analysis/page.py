"""Write an analysis as one HTML file, which needs no network and no other file."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np
from matplotlib.figure import Figure

from h2o.analysis.figures import FIGURES
from h2o.utils.draw import labels, pieces
from h2o.utils.filesystem import atomic_write

if TYPE_CHECKING:
    from h2o.analysis.figures import Configs
    from h2o.analysis.result import Analysis

LONGEST = 65535
"""Maximum number of tokens on a page, since positions have 16 bits"""


def write(
    a: Analysis,
    tokenizer: Any,
    page: Path,
    *,
    model: str,
    source: str,
    budget: str,
    configs: Configs,
    removal: dict[str, Any] | None = None,
) -> None:
    """Write the page of an analysis. It needs about 8/3 (H + G) bytes per layer and token.

    Args:
        model, source, budget: names of the model, the text and the config.
        configs: configs of the caches whose retained attention is drawn.
        removal: arguments of `a.removal`, or None to leave the removal of keys out.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("h2o.analysis", "web"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = _format
    pictures = list(_pictures(a, configs, removal))  # first, since figures add measurements to `a`
    text = environment.get_template("page.html").render(
        a=a,
        model=model,
        source=Path(source).name,
        budget=budget,
        pictures=pictures,
        data=_data(a, tokenizer),
        **_observations(a),
    )
    with atomic_write(page) as draft:
        draft.write_text(text, "utf-8")


def _pictures(
    a: Analysis, configs: Configs, removal: dict[str, Any] | None
) -> Iterator[tuple[str, str]]:
    """Yield each figure's caption, and its PNG as a data URL."""
    options: dict[str, Any] = {
        "removal": removal,
        "retained_mass": {"configs": configs},
        "retained_over_time": {"configs": configs},
    }
    for name, draw in FIGURES.items():
        if (chosen := options.get(name, {})) is None:
            continue
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        draw(a, figure.add_subplot(), **chosen)
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=110)
        caption = (draw.__doc__ or name).partition("\n")[0]
        yield caption, f"data:image/png;base64,{_base64(png.getvalue())}"


def _data(a: Analysis, tokenizer: Any) -> dict[str, Any]:
    """The data for the page's script."""
    scores = np.stack([a.scores(layer, "query") for layer in a.layers])
    evicted_at = np.stack([a.evicted_at(layer) for layer in a.layers])
    texts = pieces(tokenizer, a.ids)
    return {
        "layers": a.layers,
        "heads": a.heads,
        "groups": a.groups,
        "tokens": texts,
        "labels": labels(texts),
        "scores": _base64(scores.clip(0, np.finfo(np.float16).max).astype("<f2").tobytes()),
        "evicted_at": _base64(evicted_at.astype("<u2").tobytes()),
    }


def _base64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


def _format(value: float, form: str = ".4g") -> str:
    """Format a number, or "none" for one that a short text does not have."""
    return format(float(value), form) if math.isfinite(value) else "none"


def _observations(a: Analysis) -> dict[str, Any]:
    """The numbers that answer the paper's questions."""
    n, k = len(a), a.heavy(a.layers[0])
    law = a.power_law()
    overlaps = [
        (name, values[..., ~np.eye(values.shape[-1], dtype=bool)].mean(), _chance(k, n))
        for name, values in (
            ("layers", a.overlap("layer")),
            ("query heads", a.overlap("head", "query")),
        )
        if values.shape[-1] > 1
    ]
    half = n // 2
    by_chance = _chance(min(k, max(half // 2, 1)), half)
    overlaps.append(("early and late queries", a.overlap("half").mean(), by_chance))
    removed: dict[str, list[tuple[float, float]]] = {}
    for (kind, share, *_), loss in a.removals.items():
        removed.setdefault(kind, []).append((100 * share, loss))
    return {
        "small": 100 * a.sparsity().mean(1),
        "law": law,
        "carriers": {share: 100 * count.mean() / n for share, count in law.keys.items()},
        "overlaps": overlaps,
        "frequency": {
            name: values[np.isfinite(values)].mean() if np.isfinite(values).any() else math.nan
            for name, values in a.frequency().items()
        },
        "removed": removed,
        "retained": 100 * np.stack([a.retained_mass(layer).mean() for layer in a.layers]),
    }


def _chance(k: int, n: int) -> float:
    """Approximate Jaccard index of two independent random sets of k out of n."""
    return k * k / n / (2 * k - k * k / n)
