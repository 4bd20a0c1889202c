"""Windows of a long plain text, for the scripts that measure quality."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from h2o.evaluation.windows import cut_windows


def add_arguments(parser: argparse.ArgumentParser, limit: int) -> None:
    """Add arguments for the text and its windows. `limit` is the default number of windows."""
    parser.add_argument("text", type=Path, help="a long plain text")
    parser.add_argument("--skip", type=int, default=0, help="windows to skip at the start")
    parser.add_argument("--limit", type=int, default=limit, help="number of windows (%(default)s)")
    parser.add_argument("--window", type=int, default=1024, help="tokens per window (%(default)s)")


def read(options: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Token ids of the windows that the arguments select."""
    ids = tokenizer(options.text.read_text("utf-8"), verbose=False)["input_ids"]
    return cut_windows(ids, options.window)[options.skip : options.skip + options.limit]
