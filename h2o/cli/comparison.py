"""Format the runs of `h2o generate`: their answers one below the other, and a table of figures."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from h2o.evaluation.text_table import table

if TYPE_CHECKING:
    from h2o.evaluation.generation import Run


@dataclass(frozen=True)
class Comparison:
    """All runs of a command. --json prints its `asdict`."""

    model: str
    dtype: str
    prompt_tokens: int
    budget: dict[str, Any]
    versions: dict[str, str | None]
    runs: list[Run]


def format_answers(result: Comparison, question: str = "", fact: str = "") -> list[str]:
    """Format the texts of all runs as lines, and say which contain `fact`, the expected answer."""
    width = max(60, min(100, shutil.get_terminal_size((100, 24)).columns))
    heading = f"{result.model}, {result.dtype}, prompt of {result.prompt_tokens} tokens. {question}"
    lines, indent = [heading.strip(), ""], " " * 12
    for run in result.runs:
        outcome = (": found" if fact in run.text else ": lost") if fact else ""
        lines.append(
            f"{run.mode:<12}{run.kv_bytes_held / 1e6:5.1f} MB held, "
            f"prefill {run.prefill_seconds:.1f} s, then {format_step_time(run)}{outcome}"
        )
        for paragraph in run.text.strip().splitlines():
            how = {"initial_indent": indent, "subsequent_indent": indent}
            lines += textwrap.wrap(paragraph, width, **how) or [""]
        lines.append("")
    return lines


def format_step_time(run: Run) -> str:
    steps = run.new_tokens - 1
    return f"{1000 * run.decode_seconds / steps:.0f} ms per token" if steps else "no more tokens"


def format_figures(result: Comparison) -> list[str]:
    """Format the figures of the runs as a table with one column for each run."""
    values: dict[str, Callable[[Run], str]] = {
        "prefill, tokens/s": lambda run: f"{run.prefill_tokens_per_second:.0f}",
        "decode, tokens/s": lambda run: f"{run.decode_tokens_per_second:.1f}",
        "KV cache held, MB": lambda run: f"{run.kv_bytes_held / 1e6:.1f}",
        "KV cache of a full cache, MB": lambda run: f"{run.kv_bytes_full / 1e6:.1f}",
        "tokens held": lambda run: f"{run.tokens_held} ({run.tokens_held / run.tokens_seen:.0%})",
        "tokens evicted": lambda run: f"{run.tokens_evicted}",
        "attention mass evicted": lambda run: f"{run.mass_evicted:.1%}",
    }
    rows = [[name, *map(of_run, result.runs)] for name, of_run in values.items()]
    return [
        f"{result.model}, {result.dtype}, prompt of {result.prompt_tokens} tokens",
        table(("", *(run.mode for run in result.runs)), rows),
    ]
