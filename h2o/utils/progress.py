"""Progress of a command on standard error, since results go to standard output."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable


class Progress:
    """Progress on standard error. On a terminal each update replaces the one before."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.terminal = sys.stderr.isatty()
        self.shown = False  # whether the terminal's last line is an update

    def print_line(self, text: str) -> None:
        """Print a line."""
        if not self.quiet:
            self.update("")
            print(text, file=sys.stderr, flush=True)

    def update(self, text: str) -> None:
        """Replace the last update, on a terminal only. An empty text removes the update."""
        if self.terminal and not self.quiet and (text or self.shown):
            columns = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:columns]}", end="", file=sys.stderr, flush=True)
            self.shown = bool(text)


def stopwatch() -> Callable[[str], None]:
    """Return a function that prints the seconds since this call, followed by a text."""
    start = time.perf_counter()

    def log(text: str) -> None:
        print(f"{time.perf_counter() - start:6.1f} s  {text}", file=sys.stderr, flush=True)

    return log
