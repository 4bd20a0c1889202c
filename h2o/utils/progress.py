"""Messages of a command on standard error, since results go to standard output."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable


def print_line(text: str, quiet: bool = False) -> None:
    """Print a line, unless `quiet`."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def stopwatch() -> Callable[[str], None]:
    """Return a function that prints the seconds since this call, followed by a text."""
    start = time.perf_counter()
    return lambda text: print_line(f"{time.perf_counter() - start:6.1f} s  {text}")
