"""Text input of commands: files, standard input, arguments, and the shipped article."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from h2o.utils.filesystem import explain_unreadable, is_special, resolve

ARTICLE = "lighthouse.txt"
"""A file in h2o/data: 2100 tokens about an invented lighthouse, which no model has seen."""


def article() -> str:
    """Read the shipped article."""
    return resources.files("h2o").joinpath(f"data/{ARTICLE}").read_text("utf-8")


def read(parser: argparse.ArgumentParser, argument: str, name: str) -> str:
    """Read a file in UTF-8, or standard input if the name is "-". Ends with an error if there is no
    such text."""
    is_stdin = name == "-"
    if is_stdin and sys.stdin is None:
        parser.error(f"argument {argument}: standard input is closed")
    try:
        # "utf-8-sig" drops the byte order mark that some editors write.
        with open(0 if is_stdin else name, encoding="utf-8-sig", closefd=not is_stdin) as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"argument {argument}: {explain_unreadable(name, error)}")


def check_output(
    parser: argparse.ArgumentParser,
    argument: str,
    name: str | Path,
    inputs: Iterable[str | None] = (),
) -> None:
    """End with an error, before any work is done, if the output is no file (standard output, a
    folder, a device or a pipe) or is one of the input files."""
    path = Path(name)
    if str(name) == "-" or is_special(path):
        parser.error(f"argument {argument}: {name} is not a file: name one to write")
    if path.is_dir():
        parser.error(f"argument {argument}: {name or 'an empty name'} is a folder, not a file")
    try:
        target = resolve(path)
        is_input = any(x and target == resolve(x) for x in inputs)
    except OSError as error:
        parser.error(f"argument {argument}: cannot write {name}: {error.strerror}")
    if is_input:
        parser.error(f"argument {argument}: {name} is an input file: name another output")
