"""Helpers for pictures of text: the text of each token, HTML shaded by score, matplotlib axes.

The HTML needs no scripts, style sheets or network.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from h2o.packages import install_command

COLOR = "255 140 0"
"""The shade of the highest score. Black and struck-through text stays readable on it."""


class Html(str):
    """HTML that a notebook renders."""

    def _repr_html_(self) -> str:
        return str(self)


def shades(scores: Sequence[float] | np.ndarray) -> np.ndarray:
    """Shades [n]: 0 up to the median score, 1 for the highest score, logarithmic in between."""
    scores = np.asarray(scores, dtype=np.float64)
    middle, high = np.median(scores), scores.max()
    if not middle > 0:
        middle = high / len(scores)
    if not high > middle:
        return np.zeros(len(scores))
    return np.clip(np.log(np.maximum(scores, middle) / middle) / np.log(high / middle), 0, 1)


def shade_text(texts: Sequence[str], scores: Sequence[float], held: Sequence[float]) -> Html:
    """Tokens in order, shaded by score, and struck through if `held` is 0.

    Hovering over a token shows its position and score.
    """
    parts = []
    for position, (text, score, shade, kept) in enumerate(
        zip(texts, scores, shades(scores), held, strict=True)
    ):
        style = f"background:rgb({COLOR}/{shade:.2f})" if shade >= 0.005 else ""
        if not kept:
            style += ";color:#555;text-decoration:line-through"
        title = f"{position}: {score:.4g}" + ("" if kept else ", evicted")
        parts.append(
            f'<span style="{style.lstrip(";")}" title="{title}">{html.escape(text)}</span>'
        )
    style = "white-space:pre-wrap;line-height:1.6;color:#111;background:#fff;padding:.5em"
    return Html(f'<div style="{style}">{"".join(parts)}</div>')


# ---- the text of each token ----------------------------------------------------------------------

LOST = "\N{REPLACEMENT CHARACTER}"
LONGEST = 8
"""Maximum number of tokens per character. Byte tokens need at most four."""


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token, including spaces, so that the parts join to the whole text.

    If a character spans several tokens, the first one has the character and the others are "".
    """
    ids = [int(i) for i in ids]
    texts: list[str] = []
    while len(texts) < len(ids):
        start = len(texts)
        for stop in range(start + 1, min(start + LONGEST, len(ids)) + 1):
            text = _decode(tokenizer, ids[start:stop])
            if LOST not in text:
                break
        else:
            text, stop = _decode(tokenizer, ids[start : start + 1]), start + 1
        texts += [text, *[""] * (stop - start - 1)]
    return texts


def labels(texts: Sequence[str]) -> dict[int, str]:
    """Labels such as "x (2 of 3)", by index, of the further tokens of a character in `pieces`."""
    named: dict[int, str] = {}
    start = 0
    for stop in range(1, len(texts) + 1):
        if stop == len(texts) or texts[stop]:
            count = stop - start
            named |= {start + i: f"{texts[start]} ({i + 1} of {count})" for i in range(1, count)}
            start = stop
    return named


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if not text.startswith(" ") and hasattr(tokenizer, "convert_ids_to_tokens"):
        # SentencePiece drops the space before the first word.
        first = tokenizer.convert_ids_to_tokens(ids[:1])[0]
        if isinstance(first, str) and first.startswith("\N{LOWER ONE EIGHTH BLOCK}"):
            return " " + text
    return text


# ---- packages needed for pictures only -----------------------------------------------------------


def import_optional(name: str) -> Any:
    """Import a module, or raise an ImportError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(f"this needs {package}: {install_command('analysis')}") from error


def axes_or_new(ax: Any = None, **size: Any) -> Any:
    """The given axes, or new ones from pyplot. Raises ImportError if matplotlib is missing."""
    if ax is not None:
        return ax
    return import_optional("matplotlib.pyplot").subplots(layout="constrained", **size)[1]
