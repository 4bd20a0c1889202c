"""Text shaded by numbers, as HTML for notebooks: no script, no style sheet, no network."""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np

__all__ = ["Html", "shaded", "shades"]

COLOUR = "255 140 0"
"""Of the highest score; black and struck text stay readable on it."""


class Html(str):
    """HTML that a notebook shows as what it describes."""

    def _repr_html_(self) -> str:
        return str(self)


def shades(scores: Sequence[float] | np.ndarray) -> np.ndarray:
    """[n] in 0 to 1: 0 up to the median score, 1 for the highest, logarithmic between them."""
    scores = np.asarray(scores, dtype=np.float64)
    middle, high = np.median(scores), scores.max()
    if not middle > 0:
        middle = high / len(scores)
    if not high > middle:
        return np.zeros(len(scores))
    return np.clip(np.log(np.maximum(scores, middle) / middle) / np.log(high / middle), 0, 1)


def shaded(texts: Sequence[str], scores: Sequence[float], held: Sequence[float]) -> Html:
    """Tokens in order, shaded by score; those with `held` 0 are struck through.

    A token's position and score are told where the pointer rests on it.
    """
    parts = []
    for position, (text, score, shade, kept) in enumerate(
        zip(texts, scores, shades(scores), held, strict=True)
    ):
        style = f"background:rgb({COLOUR}/{shade:.2f})" if shade >= 0.005 else ""
        if not kept:
            style += ";color:#555;text-decoration:line-through"
        title = f"{position}: {score:.4g}" + ("" if kept else ", evicted")
        parts.append(
            f'<span style="{style.lstrip(";")}" title="{title}">{html.escape(text)}</span>'
        )
    style = "white-space:pre-wrap;line-height:1.6;color:#111;background:#fff;padding:.5em"
    return Html(f'<div style="{style}">{"".join(parts)}</div>')
