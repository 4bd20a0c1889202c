"""An analysis as one HTML file that needs nothing else: no network, no other file."""

from __future__ import annotations

import base64
import html
import json
import math
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from h2o.analysis.tables import rows
from h2o.draw import labels, pieces

if TYPE_CHECKING:
    from h2o.analysis.measured_text import MeasuredText

__all__ = ["Picture", "observations", "render"]

LONGEST = 65535
"""Tokens of a page: positions go into it as 16 bits."""


class Picture(NamedTuple):
    """One figure of a page."""

    name: str
    png: bytes
    says: str
    """What it shows, for those who do not see it"""


def render(
    a: MeasuredText,
    tokenizer: Any,
    *,
    title: str,
    subtitle: str = "",
    footer: str = "",
    pictures: Sequence[Picture] = (),
) -> str:
    """The page. Its size is about 2 (H + G) bytes and a third for each layer and token.

    Raises: ValueError for a text of more than LONGEST tokens.
    """
    if len(a) > LONGEST:
        raise ValueError(f"a page shows at most {LONGEST} tokens, not {len(a)}")
    folder = resources.files("h2o.analysis") / "web"

    def asset(name: str) -> str:
        return (folder / name).read_text("utf-8")

    return Template(asset("page.html")).substitute(
        title=html.escape(title),
        subtitle=html.escape(subtitle),
        footer=html.escape(footer),
        budget=html.escape(budget(a)),
        css=asset("page.css"),
        js=asset("page.js"),
        data=data(a, tokenizer),
        observations="\n".join(map(_row, observations(a))),
        pictures="\n".join(figure(picture) for picture in pictures),
        layers=table(rows(a, "layers")),
    )


def data(a: MeasuredText, tokenizer: Any) -> str:
    """What the page's script reads: JSON, safe inside a <script>."""
    scores = np.stack([a.scores(layer, "query") for layer in a.layers])
    evicted_at = np.stack([a.evicted_at(layer) for layer in a.layers])
    texts = pieces(tokenizer, a.ids)
    content = {
        "layers": a.layers,
        "heads": a.heads,
        "groups": a.groups,
        "tokens": texts,
        "labels": {
            j: label
            for j, (text, label) in enumerate(zip(texts, labels(texts), strict=True))
            if text != label
        },
        "scores": _base64(scores.clip(0, np.finfo(np.float16).max).astype("<f2")),
        "evicted_at": _base64(evicted_at.astype("<u2")),
    }
    return json.dumps(content, ensure_ascii=False).replace("<", "\\u003c")


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(array.tobytes()).decode()


def _row(cells: Sequence[str]) -> str:
    first, *rest = map(html.escape, cells)
    return f'<tr><th scope="row">{first}</th>{"".join(f"<td>{x}</td>" for x in rest)}</tr>'


def figure(picture: Picture) -> str:
    says = html.escape(picture.says)
    source = base64.b64encode(picture.png).decode()
    return (
        f'<figure id="{html.escape(picture.name)}"><img alt="{says}" '
        f'src="data:image/png;base64,{source}"><figcaption>{says}</figcaption></figure>'
    )


def table(columns: dict[str, np.ndarray]) -> str:
    """The rows of a table of numbers."""
    head = "".join(f'<th scope="col">{name.replace("_", " ")}</th>' for name in columns)
    body = [
        _row([_number(value, ".4g") for value in row])
        for row in zip(*columns.values(), strict=True)
    ]
    return f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody>"


def _number(value: float, form: str) -> str:
    """A number, or that there is none: a text may be too short to have it."""
    return format(value, form) if math.isfinite(value) else "none"


def budget(a: MeasuredText) -> str:
    """A config in few words."""
    config = a.config
    parts = [
        f"{name} {value:.0%}" if isinstance(value, float) else f"{name} {value}"
        for name, value in (("heavy", config.heavy), ("recent", config.recent))
        if not callable(value) and not isinstance(value, tuple)
    ]
    parts = parts or ["its own budget for each layer"]
    if config.sinks:
        parts.append(f"{config.sinks} sinks")
    return " + ".join(parts)


def chance(k: int, n: int) -> float:
    """About the Jaccard of two sets of k out of n that have nothing to do with each other."""
    return k * k / n / (2 * k - k * k / n)


def observations(a: MeasuredText) -> list[tuple[str, str, str]]:
    """(question, what the paper says, what was measured) for each observation.

    Removal and caches of other configs are told as far as they have been measured.
    """
    n, L = len(a), len(a.layers)
    small = 100 * a.sparsity().mean(1)
    law = a.power_law()
    share = {x: 100 * count.mean() / n for x, count in law.keys.items()}
    table = [
        (
            "Is attention sparse? Entries below 1% of their row's maximum",
            "over 95% in almost all layers of OPT",
            f"{small.mean():.1f}% (layers {small.min():.1f}% to {small.max():.1f}%; "
            f"{(small > 95).sum()} of {L} above 95%)",
        ),
        (
            "Do few keys receive most of it?",
            "accumulated scores follow a power law",
            f"half of it goes to {share[0.5]:.1f}% of the keys, 95% to {share[0.95]:.1f}%; slope "
            f"{law.slope.mean():.2f}; R² {law.r2.mean():.2f} as a power law, "
            f"{law.exponential_r2.mean():.2f} as an exponential one (mean of layers)",
        ),
    ]
    between = [("query heads", a.overlap("head", "query"))]
    if L > 1:
        between.insert(0, ("layers", a.overlap("layer")[None]))
    common = [
        f"{name} {x[..., ~np.eye(x.shape[-1], dtype=bool)].mean():.2f}"
        for name, x in between
        if x.shape[-1] > 1
    ]
    k = a.heavy(a.layers[0])
    common = [f"{', '.join(common)} (chance {chance(k, n):.2f})"] if common else []
    early = min(k, max(n // 4, 1)), n // 2
    common.append(
        f"early and late queries {a.overlap('half').mean():.2f} (chance {chance(*early):.2f})"
    )
    table.append(
        (
            "Are they the same keys? Common heavy hitters of two (Jaccard)",
            "each head has its own; earlier scores tell the later ones",
            "; ".join(common),
        )
    )
    known = {name: x[np.isfinite(x)] for name, x in a.frequency().items()}
    frequency = {
        name: _number(x.mean() if len(x) else math.nan, "+.2f") for name, x in known.items()
    }
    table.append(
        (
            "Are they frequent words? Rank correlation over kinds of token",
            "scores go with the co-occurrence of words",
            f"attention in all with count {frequency['sum_count']}, with neighbours "
            f"{frequency['sum_neighbours']}; for each occurrence "
            f"{frequency['mean_count']} and {frequency['mean_neighbours']}",
        )
    )
    losses = [(kind, x, loss) for (kind, x, *_), loss in a.removals.items()]
    if losses:
        kinds = {kind: [] for kind, *_ in losses}
        for kind, x, loss in losses:
            kinds[kind].append(f"{loss:.1f}" if kind == "full" else f"{loss:.1f} ({x:.0%})")
        parts = [f"{kind} {', '.join(of)}" for kind, of in kinds.items() if kind != "full"]
        table.append(
            (
                "Does it hurt to take them away? Perplexity without a share of the keys",
                "removing heavy hitters breaks the model, random keys do not",
                f"{'; '.join(parts)}; nothing removed {kinds['full'][0]}",
            )
        )
    mass = np.stack([a.retained_mass(layer) for layer in a.layers]).mean(1)
    table.append(
        (
            f"What does a cache of {budget(a)} retain of the attention?",
            "a fifth of the keys is enough",
            f"{100 * mass.mean():.1f}% (layers {100 * mass.min():.1f}% to {100 * mass.max():.1f}%)",
        )
    )
    return table
