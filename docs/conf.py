"""Settings of Sphinx: the documentation as a site, built by `make docs`.

Each thing is written once, so a line of a page can stand for a text elsewhere:

- `{{ README.md#Models }}`: the section below that heading of that file.
- `{{ README.md# }}`: the text before the first heading of the second level, without the title.
- `{{ CHANGELOG.md }}`: the whole file. A notebook comes with the outputs that are stored in it.
- `{{ h2o --help }}`: all commands with all their options.

Links are written as GitHub needs them, relative to the file they stand in, and are translated here.
"""

from __future__ import annotations

import argparse
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h2o
from h2o import cli

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "reference/benchmarks.md",
}
"""Pages of the site that show a file outside of docs."""

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
    """A part of a page; name: its path and, behind #, a heading."""
    path, wants_section, heading = name.partition("#")
    text = (ROOT / path).read_text("utf-8")
    parts = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE))
    parts[""] = re.sub(r"\A# .*\n", "", text.partition("\n## ")[0] + "\n")
    if wants_section and heading not in parts:
        raise ValueError(f"{path} has no heading {heading!r}, only {', '.join(parts)}")
    shown = parts[heading] if wants_section else text
    return shown.strip("\n")


def notebook(path: Path) -> str:
    """A notebook as Markdown, its outputs as they lie in the file: nothing is run."""
    parts = []
    for cell in json.loads(path.read_text("utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts += [fenced("python", source), *map(output, cell["outputs"])]
    return "\n\n".join(parts)


def output(shown: dict[str, Any]) -> str:
    """What one cell has shown, in the best of its forms that a page can take."""
    forms = {name: "".join(text) for name, text in shown.get("data", {}).items()}
    if picture := forms.get("image/png"):
        source = f"data:image/png;base64,{picture.strip()}"
        return fenced("{raw} html", f'<img alt="drawn by the code above" src="{source}"/>')
    if "text/html" in forms:
        return fenced("{raw} html", forms["text/html"])
    return fenced("text", forms.get("text/plain") or "".join(shown["text"]))


def fenced(language: str, text: str) -> str:
    return f"````{language}\n{text}\n````"


def commands() -> str:
    """All commands as they are now, with what their --help says."""
    return "\n\n".join(part for entry in cli.COMMANDS for part in command(entry))


def command(entry: cli.Command) -> Iterator[str]:
    """Its heading, what it is for, and a table of each group of its options."""
    parser = cli.parser_of(entry)
    yield f"## h2o {entry.name}"
    yield fenced("text", (parser.description or entry.help).strip())
    for group in parser._action_groups:
        rows = [row(parser, action) for action in group._group_actions if action.dest != "help"]
        if rows:
            titled = group.title not in ("options", "positional arguments")
            head = [f"| {group.title if titled else 'option'} | meaning |", "| --- | --- |"]
            yield "\n".join(head + rows)
    if parser.epilog:
        yield fenced("text", parser.epilog.strip())


BAR = r"\|"
"""In a cell of a table."""


def row(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    """Of the table: how an option is written, also formerly, and its help."""
    formatter = argparse.HelpFormatter(parser.prog)
    value = "" if action.nargs == 0 else f" {formatter._format_args(action, action.dest)}"
    spelled = [f"{name}{value}" for name in action.option_strings] or [value.strip()]
    written = ", ".join(f"`{name}`" for name in spelled)
    text = formatter._expand_help(action) if action.help else ""
    cells = (written, " ".join(text.split()))
    return f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |"


def included(name: str) -> str:
    """The text that `{{ name }}` stands for."""
    if name == "h2o --help":
        return commands()
    return notebook(ROOT / name) if name.endswith(".ipynb") else section(name)


def include_sections(app: Any, name: str, source: list[str]) -> None:
    page = f"docs/{name}.md"

    def replacement(match: re.Match[str]) -> str:
        return relinked(included(match[1]), match[1].partition("#")[0], page)

    own = relinked(source[0], page, page)
    source[0] = re.sub(r"^\{\{ (.+) \}\}$", replacement, own, flags=re.MULTILINE)


def relinked(text: str, written_in: str, page: str) -> str:
    """The text with the links of the file it was written in as the page of the site needs them.

    A link to a file that is no page of the site becomes its label.
    """

    def replacement(match: re.Match[str]) -> str:
        label, link = match.groups()
        path, hash_sign, anchor = link.partition("#")
        if "://" in path or not path:
            return match[0]
        target = posixpath.normpath(posixpath.join(posixpath.dirname(written_in), path))
        if target.endswith(".ipynb"):
            target = f"docs/{target.removesuffix('.ipynb')}.md"
        elif target in PAGES:
            target = f"docs/{PAGES[target]}"
        elif not target.startswith("docs/"):
            return label
        place = posixpath.relpath(target, posixpath.dirname(page))
        return f"[{label}]({place}{hash_sign}{anchor})"

    return re.sub(r"\[([^\[\]]*)\]\(([^)\s]+)\)", replacement, text)


COLON = "\0"
"""Stands for a colon of an attribute. napoleon would take what precedes the colon for a type."""


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
        out = [line.replace(":", COLON) for line in out]
    lines[:] = out


def with_colons(app: Any, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    """The docstring with its colons again."""
    lines[:] = [line.replace(COLON, ":") for line in lines]


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", as_rest, priority=100)  # before napoleon
    app.connect("autodoc-process-docstring", with_colons, priority=900)  # after it
    app.connect("source-read", include_sections)
