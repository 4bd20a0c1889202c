"""Draw docs/pictures/walk.svg: one head of one layer with a budget of four keys.

    python -m tools.draw_walk

`h2o.ops` computes all numbers in it. Every query is 1 and a key is a single number, so a reader can
check each softmax by hand.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from h2o import ops
from h2o.slots import Slots, new_slots
from tools import pictures

LOGITS = {
    "The": 0.2, "lamp": 1.6, "burned": 0.3, "oil": 1.2, "and": -0.8, "the": -0.5,
    "keeper": 3.2, "wound": 1.4, "it": -0.2,
}  # fmt: skip
"""Each token and the dot product of its key with any query."""
PROMPT = 6
"""Tokens of the prompt. Each later token is a decode step."""
HEAVY, RECENT = 2, 2


class Row(NamedTuple):
    """The keys after one operation.

    Attributes:
        title: the operation.
        scores: position -> attention received so far, for each key held.
        evicted: positions of the keys that the operation has evicted.
    """

    title: str
    scores: dict[int, float]
    evicted: list[int]


def walk() -> list[Row]:
    """The prompt's attention, its eviction, and each decode step."""
    keys = np.array(list(LOGITS.values()), np.float32).reshape(1, 1, -1, 1)
    query = np.ones_like(keys)
    slots = new_slots(keys, HEAVY + RECENT + 1, HEAVY, RECENT)
    prompt = np.s_[:, :, :PROMPT]
    _, scores = ops.attend(query[prompt], keys[prompt], keys[prompt], slots, scale=1.0)
    rows = [Row("attend", dict(enumerate(scores[0, 0].tolist())), [])]
    ops.evict(keys[prompt], keys[prompt], scores, slots)
    rows.append(after("evict", rows[-1], slots))
    for token in range(PROMPT, len(LOGITS)):
        one = np.s_[:, :, token : token + 1]
        ops.step(query[one], keys[one], keys[one], slots, scale=1.0)
        rows.append(after(f'step "{list(LOGITS)[token]}"', rows[-1], slots, new=[token]))
    return [
        Row(row.title, {at: round(score, 2) for at, score in row.scores.items()}, row.evicted)
        for row in rows
    ]


def after(title: str, before: Row, slots: Slots, new: list[int] | None = None) -> Row:
    """The row after an operation, given the row before it."""
    pairs = zip(slots.positions[0, 0].tolist(), slots.scores[0, 0].tolist(), strict=True)
    held = {position: score for position, score in sorted(pairs) if position >= 0}
    there = [*before.scores, *(new or [])]
    return Row(title, held, [position for position in there if position not in held])


def draw(rows: list[Row]) -> Any:
    """The picture, a `matplotlib.figure.Figure`, with a line for each operation and a column for
    each token."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch, Rectangle

    figure = Figure(figsize=(10, 0.55 * len(rows) + 1.3), layout="constrained")
    axes = figure.subplots()
    for line, row in enumerate(rows):
        newest = sorted(row.scores)[-RECENT:] if line else []
        for token in [*row.scores, *row.evicted]:
            evicted = token in row.evicted
            color = "C0" if token in newest else "C1"
            axes.add_patch(
                Rectangle(
                    (token + 0.05, -line + 0.08), 0.9, 0.84,
                    facecolor="none" if evicted or not line else color,
                    edgecolor="grey", alpha=0.55, linestyle="--" if evicted else "-",
                )
            )  # fmt: skip
            text = "evicted" if evicted else f"{row.scores[token]:.2f}"
            axes.text(token + 0.5, -line + 0.5, text, ha="center", va="center")
    axes.set(xlim=(0, len(LOGITS)), ylim=(1 - len(rows), 1))
    axes.set_xticks([x + 0.5 for x in range(len(LOGITS))], LOGITS)
    axes.set_yticks([0.5 - y for y in range(len(rows))], [row.title for row in rows])
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    axes.axvline(PROMPT, color="grey", linewidth=0.8)
    axes.spines[:].set_visible(False)
    heavy = Patch(facecolor="C1", alpha=0.55, label=f"heavy: the {HEAVY} highest scores")
    recent = Patch(facecolor="C0", alpha=0.55, label=f"recent: the {RECENT} newest")
    figure.legend(handles=[heavy, recent], loc="outside lower center", ncols=2, frameon=False)
    return figure


def main() -> None:
    rows = walk()
    for row in rows:
        print(row)
    pictures.save(draw(rows), "walk", rows)


if __name__ == "__main__":
    main()
