"""Windows of a long plain text, as the scripts that measure quality on one take them."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from h2o.evaluation.windows import cut_windows


def add_arguments(parser: argparse.ArgumentParser, limit: int) -> None:
    """Add the text and its windows; `limit`: how many by default."""
    parser.add_argument("text", type=Path, help="a long plain text")
    parser.add_argument("--skip", type=int, default=0, help="windows from the start")
    parser.add_argument(
        "--limit", type=int, default=limit, help="windows after these (%(default)s)"
    )
    parser.add_argument("--window", type=int, default=1024, help="tokens (%(default)s)")


def read(options: argparse.Namespace, tokenizer: Any) -> list[list[int]]:
    """Token ids of each window that the arguments ask for."""
    ids = tokenizer(options.text.read_text("utf-8"), verbose=False)["input_ids"]
    return cut_windows(ids, options.window)[options.skip : options.skip + options.limit]
