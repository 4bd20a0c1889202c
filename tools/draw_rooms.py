"""Draw docs/pictures/rooms.svg and rooms_of_hf.svg: which part of the package imports which.

    python -m tools.draw_rooms

The imports are those that tests/test_layering.py checks. An arrow is left out if a longer path
implies it.
"""

from __future__ import annotations

from typing import Any

from tests.test_layering import IMPORTS, ROOMS, floors
from tools import pictures

Arrows = dict[str, set[str]]


def rooms() -> Arrows:
    """Each folder and file of the package with those that it imports."""
    return {name: below for name, below in ROOMS.items() if not name.startswith("__")}


def rooms_of_hf() -> Arrows:
    """Each folder of h2o/hf with those that it imports."""
    files = {file: file.split("/")[2] for file in IMPORTS if file.startswith("h2o/hf/")}
    folders = {file: part for file, part in files.items() if not part.endswith(".py")}
    arrows: Arrows = {part: set() for part in folders.values()}
    for file, part in folders.items():
        arrows[part] |= {folders[x] for x in IMPORTS[file] if x in folders} - {part}
    return arrows


def figures(arrows: Arrows) -> dict[str, list[str]]:
    """The arrows in a fixed order, for the hash of a picture."""
    return {name: sorted(arrows[name]) for name in sorted(arrows)}


def direct(arrows: Arrows) -> Arrows:
    """The arrows without those that a longer path implies."""

    def reached(name: str) -> set[str]:
        return arrows[name].union(*map(reached, arrows[name]))

    return {name: others - set().union(*map(reached, others)) for name, others in arrows.items()}


def draw(arrows: Arrows) -> Any:
    """The picture, a `matplotlib.figure.Figure`, with a line for each floor and arrows down to
    imports."""
    from matplotlib.figure import Figure

    floor = floors(arrows)
    lines = [[x for x in sorted(floor) if floor[x] == y] for y in range(1, max(floor.values()) + 1)]
    widest = max(map(len, lines))
    figure = Figure(figsize=(max(8, 1.25 * widest), 0.85 * len(lines) + 0.3), layout="constrained")
    axes = figure.subplots()
    place = {
        name: ((i + 0.5) * widest / len(line), y)
        for y, line in enumerate(lines)
        for i, name in enumerate(line)
    }
    for name, others in sorted(direct(arrows).items()):
        for other in sorted(others):
            (x0, y0), (x1, y1) = place[name], place[other]
            axes.annotate(
                "", (x1, y1 + 0.15), (x0, y0 - 0.15),
                arrowprops={"arrowstyle": "->", "color": "C0", "alpha": 0.5, "linewidth": 0.8},
            )  # fmt: skip
    for name, (x, y) in place.items():
        axes.text(
            x, y, name, ha="center", va="center",
            bbox={"boxstyle": "round", "facecolor": "white", "edgecolor": "grey"},
        )  # fmt: skip
    axes.set(xlim=(0, widest), ylim=(-0.5, len(lines) - 0.5))
    axes.axis("off")
    return figure


def main() -> None:
    for name, arrows in (("rooms", rooms()), ("rooms_of_hf", rooms_of_hf())):
        pictures.save(draw(arrows), name, figures(arrows))


if __name__ == "__main__":
    main()
