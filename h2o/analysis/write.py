"""An analysis on disk: the page, and beside it a folder with pictures and numbers."""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from h2o.analysis import figures
from h2o.analysis.page import Picture, budget, observations, render
from h2o.analysis.tables import TABLES, frame
from h2o.draw import labels, need, pieces
from h2o.filesystem import atomic_write

if TYPE_CHECKING:
    from h2o.analysis.result import Analysis
    from h2o.config import H2OConfig

__all__ = ["draw", "write"]

SAYS = {
    "sparsity": "Share of attention entries that are negligible, by layer.",
    "power_law": "Accumulated attention of the keys, sorted, by layer; both axes logarithmic.",
    "carriers": "How many of the keys carry 50, 80, 90, 95 and 99% of the attention, by layer.",
    "overlap": "How many heavy hitters each two layers have in common.",
    "halves": "How many heavy hitters early and late queries have in common, by layer.",
    "frequency": "How a token's attention goes with its frequency in the text, by layer.",
    "removal": "Perplexity when heavy, random or recent keys are taken away.",
    "retained_mass": "Share of the attention that caches retain, by layer.",
    "retained_over_time": "Share of the attention that caches retain, as the text grows.",
    "scores": "Accumulated attention of every key, a row for each layer.",
}


def draw(
    a: Analysis,
    configs: Mapping[str, H2OConfig | None] | None = None,
    removal: Mapping[str, Any] | None = None,
) -> list[Picture]:
    """All figures as PNG; that of removal only where its options are given."""
    Figure = need("matplotlib.figure").Figure
    options: dict[str, dict[str, Any]] = {
        "removal": dict(removal or {}),
        "retained_mass": {"configs": configs},
        "retained_over_time": {"configs": configs},
    }
    pictures = []
    for name, says in SAYS.items():
        if name == "removal" and removal is None:
            continue
        figure = Figure(figsize=(6.4, 4.2), layout="constrained")
        figures.FIGURES[name](a, figure.add_subplot(), **options.get(name, {}))
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=110)
        pictures.append(Picture(name, png.getvalue(), says))
    return pictures


def write(
    a: Analysis,
    tokenizer: Any,
    page: Path,
    *,
    model: str,
    source: str,
    configs: Mapping[str, H2OConfig | None] | None = None,
    removal: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Writes the page and the folder beside it that has its name without suffix.

    Returns the paths of the page and the folder. The page's name must have a suffix.
    """
    pictures = draw(a, configs, removal)
    text = render(
        a,
        tokenizer,
        title=f"Heavy hitters of {Path(source).name}",
        subtitle=f"{model}, {len(a)} tokens, {len(a.layers)} layers of {a.heads} query and "
        f"{a.groups} key/value heads; cache: {budget(a)}",
        footer="Made by h2o analyze. Everything is in this file.",
        pictures=pictures,
    )
    folder = page.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (folder / f"{picture.name}.png").write_bytes(picture.png)
    numbers = a.as_dict() | {
        "model": model,
        "text": Path(source).name,
        "observations": [
            dict(zip(("question", "paper", "here"), row, strict=True)) for row in observations(a)
        ],
        "heavy_hitters": heavy_hitters(a, tokenizer),
    }
    (folder / "numbers.json").write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")
    if importlib.util.find_spec("pandas"):
        for table in TABLES:
            name = "keys.csv.gz" if table == "keys" else f"{table}.csv"
            frame(a, table).to_csv(folder / name, index=False, float_format="%.6g")
    with atomic_write(page) as draft:
        draft.write_text(text, "utf-8")
    return [page, folder]


def heavy_hitters(a: Analysis, tokenizer: Any, count: int = 20) -> dict[str, Any]:
    """The highest scores of each layer and of each of its key/value heads, with their texts."""
    texts = labels(pieces(tokenizer, a.ids))

    def best(layer: int, head: int | None) -> list[dict[str, Any]]:
        return [
            {
                "position": x.position,
                "text": texts[x.position],
                "score": round(x.score, 4),
                "held": x.held,
            }
            for x in a.tokens(tokenizer, layer, head)[:count]
        ]

    return {
        str(layer): {
            "all": best(layer, None),
            **{str(head): best(layer, head) for head in range(a.groups)},
        }
        for layer in a.layers
    }
