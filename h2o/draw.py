"""Helpers for pictures of text: tokens as pieces of text, HTML shaded by score, matplotlib axes.

The HTML needs no script, no style sheet and no network.
"""

from __future__ import annotations

import html
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from h2o.packages import install_command

__all__ = ["COLOUR", "Html", "axes_or_new", "labels", "need", "pieces", "shaded", "shades"]

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


# ---- tokens as pieces of their text ------------------------------------------------------------

LOST = "\N{REPLACEMENT CHARACTER}"
LONGEST = 8
"""Tokens that one character may be spread over; byte tokens need four at most."""


def pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text of each token, blanks kept, so that joined together they are the text again.

    Where a character is spread over several tokens, the first has it and the others are "".
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


def labels(texts: Sequence[str]) -> list[str]:
    """What `pieces` gives, for lists: a token that is a part of a character says of which one."""
    named: list[str] = []
    while len(named) < len(texts):
        start = stop = len(named)
        while stop + 1 < len(texts) and not texts[stop + 1]:
            stop += 1
        count = stop - start + 1
        parts = [f"{texts[start]} ({i} of {count})" for i in range(2, count + 1)]
        named += [texts[start], *parts]
    return named


def _decode(tokenizer: Any, ids: list[int]) -> str:
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    if not text.startswith(" ") and hasattr(tokenizer, "convert_ids_to_tokens"):
        # SentencePiece drops the blank that a word begins with where nothing stands before it.
        first = tokenizer.convert_ids_to_tokens(ids[:1])[0]
        if isinstance(first, str) and first.startswith("\N{LOWER ONE EIGHTH BLOCK}"):
            return " " + text
    return text


# ---- packages that only pictures and tables need -----------------------------------------------


def need(name: str) -> Any:
    """The module, or an ImportError that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(f"this needs {package}: {install_command('analysis')}") from error


def axes_or_new(ax: Any = None, **size: Any) -> Any:
    """The given axes, or those of a new pyplot figure. ImportError without matplotlib."""
    if ax is not None:
        return ax
    return need("matplotlib.pyplot").subplots(layout="constrained", **size)[1]
