"""Texts that a command reads: files, standard input, arguments, and the shipped article."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from h2o.utils.filesystem import explain_unreadable

ARTICLE = "lighthouse.txt"
"""A file of h2o/data: 2100 tokens about an invented lighthouse, so that no model has seen it."""


def article() -> str:
    """The shipped article."""
    return resources.files("h2o").joinpath(f"data/{ARTICLE}").read_text("utf-8")


def read(parser: argparse.ArgumentParser, argument: str, name: str) -> str:
    """The text of a file in UTF-8, "-" for standard input; ends with an error without one."""
    try:
        if name != "-":
            content = Path(name).read_bytes()
        elif sys.stdin is None:
            parser.error(f"argument {argument}: standard input is closed")
        else:
            content = sys.stdin.buffer.read()
        text = content.decode("utf-8-sig")  # without the mark that some editors put first
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"argument {argument}: {explain_unreadable(name, error)}")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_output(
    parser: argparse.ArgumentParser,
    argument: str,
    name: str | Path,
    inputs: Iterable[str | None] = (),
) -> None:
    """End with an error for an output that is a folder, or one of the files that are read, before
    the work for it."""
    path = Path(name)
    if path.is_dir():
        parser.error(f"argument {argument}: {name or 'an empty name'} is a folder, wanted a file")
    if any(x and path.resolve() == Path(x).resolve() for x in inputs):
        parser.error(f"argument {argument}: {name} is a file that is read: name another one")


def check_encoding(parser: argparse.ArgumentParser, argument: str, text: str | None) -> None:
    """End with an error for an argument with bytes that are no UTF-8."""
    try:
        (text or "").encode()
    except UnicodeEncodeError:
        parser.error(f"argument {argument}: not a text in UTF-8")
