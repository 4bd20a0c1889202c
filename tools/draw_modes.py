"""Write the table of modes that cannot be combined into docs/reference/models.md.

    python -m tools.draw_modes

The rows are those of h2o/hf/modes.py.
"""

from __future__ import annotations

from pathlib import Path

from h2o.hf.modes import REFUSED

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "models.md"
BEGIN, END = "<!-- modes: begin -->\n", "<!-- modes: end -->\n"


def table() -> str:
    """The table of refused pairs, in Markdown."""
    head = "| | cannot be combined with | because, and what to do instead |"
    rows = [head, "| --- | --- | --- |"]
    rows += [f"| {_name(a)} | {_name(b)} | {why} |" for a, b, why in REFUSED]
    return "\n".join(rows) + "\n"


def _name(mode: str) -> str:
    """A mode's name, as code unless it is a phrase."""
    return mode if " " in mode else f"`{mode}`"


def main() -> None:
    before, rest = PAGE.read_text("utf-8").split(BEGIN)
    after = rest.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}{table()}{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
