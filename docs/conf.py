"""Sphinx' settings: the documentation as a site, built by make docs.

A line `{{ README.md#Models }}` of a page becomes what stands below that heading of that file, so
that each thing is written once; `{{ README.md# }}` what stands before the first heading of the
second level, without the title; `{{ CHANGELOG.md }}` the whole file. Relative links are made fit.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import h2o

ROOT = Path(__file__).resolve().parent.parent
PLACES = {"docs/": "", "benchmarks/README.md": "benchmarks.md"}
"""Where links of the repository lead on the site."""

project = "h2o-kv"
version = release = h2o.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "h2o-kv"
html_show_copyright = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True}
highlight_language = "text"
add_module_names = False
python_maximum_signature_line_length = 80


def section(name: str) -> str:
    """The text that `{{ name }}` stands for; name: a path and, behind #, a heading."""
    path, wants_section, heading = name.partition("#")
    text = (ROOT / path).read_text("utf-8")
    parts = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE))
    parts[""] = re.sub(r"\A# .*\n", "", text.partition("\n## ")[0] + "\n")
    if wants_section and heading not in parts:
        raise ValueError(f"{path} has no heading {heading!r}, only {', '.join(parts)}")
    shown = parts[heading] if wants_section else text
    return shown.strip("\n")


def include_sections(app: Any, name: str, source: list[str]) -> None:
    whole = re.sub(r"^\{\{ (.+) \}\}$", lambda m: section(m[1]), source[0], flags=re.M)
    for folder, place in PLACES.items():
        whole = re.sub(rf"\]\((?:\.\./)?{re.escape(folder)}", f"]({place}", whole)
    source[0] = whole


def as_rest(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written in Markdown: fences become blocks, and code keeps its look."""
    fenced, out = False, []
    for line in lines:
        if line.strip().startswith("```"):
            fenced = not fenced
            out += ["", ".. code-block:: python", ""] if fenced else [""]
        else:
            out.append(f"    {line}" if fenced else re.sub(r"(?<!`)(`[^`]+`)(?!`)", r"`\1`", line))
    if what in ("attribute", "property"):
        out[:1] = [out[0].replace(": ", " - ", 1)]  # napoleon takes a colon for a type's end
    lines[:] = out


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_rest, priority=100)  # before napoleon
    app.connect("source-read", include_sections)
