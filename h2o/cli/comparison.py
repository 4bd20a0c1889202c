"""What `h2o generate` prints after its text."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from typing import Any

from h2o.generate import TENTH, Result

__all__ = ["comparison", "table"]


def comparison(result: Result) -> list[str]:
    """The texts of the runs in columns."""
    columns = max(60, shutil.get_terminal_size((100, 24)).columns)
    width = (columns - 3 * (len(result.runs) - 1)) // len(result.runs)
    texts = []
    for run in result.runs:
        lines = [run.mode, "-" * width]
        for paragraph in run.text.strip().splitlines():
            lines += textwrap.wrap(paragraph, width) or [""]
        texts.append(lines)
    height = max(map(len, texts))
    rows = zip(*(lines + [""] * (height - len(lines)) for lines in texts), strict=True)
    return [*(" | ".join(cell.ljust(width) for cell in row).rstrip() for row in rows), ""]


def table(result: Result) -> list[str]:
    """What the runs took, a column for each."""
    share = {run.mode: run.tokens_held / run.tokens_seen for run in result.runs}
    rows: list[tuple[str, Callable[[Any], str]]] = [
        ("", lambda run: run.mode),
        ("prefill, tokens/s", lambda run: f"{run.prefill_tokens_per_second:.0f}"),
        ("decode, tokens/s", lambda run: f"{run.decode_tokens_per_second:.1f}"),
        ("KV cache held, MB", lambda run: f"{run.kv_bytes_held / 1e6:.1f}"),
        ("KV cache of a full cache, MB", lambda run: f"{run.kv_bytes_full / 1e6:.1f}"),
        ("tokens held", lambda run: f"{run.tokens_held} ({share[run.mode]:.0%})"),
        ("tokens evicted", lambda run: f"{run.tokens_evicted}"),
        ("attention mass evicted", lambda run: f"{run.mass_evicted:.1%}"),
    ]
    if result.runs[0].tokens_agree is not None:
        rows.append(("leading tokens as with full", lambda run: f"{run.tokens_agree}"))
    head = f"{result.model}, {result.dtype}, prompt of {result.prompt_tokens} tokens"
    lines = [f"{name:<30}" + "".join(f"{of(run):>14}" for run in result.runs) for name, of in rows]
    presets = [
        f'{run.mode}: H2OConfig.{run.mode}({TENTH}, of="bytes"), a tenth of the bytes'
        for run in result.runs
        if run.mode in ("robust", "calibrated")
    ]
    return [head, *lines, *presets]
