"""Print the runs of `h2o generate`: a table, texts in columns, answers to a question."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from h2o.generation import Run

__all__ = ["Result", "answers", "columns", "table"]

READ_TWICE = "read twice"
"""The run that is added when `budget=0.1` has lost the fact that was asked for."""


@dataclass(frozen=True)
class Result:
    """What was generated. `asdict` of it is the output of --json."""

    model: str
    dtype: str
    prompt_tokens: int
    budget: dict[str, Any]
    versions: dict[str, str]
    runs: list[Run]


def columns(result: Result) -> list[str]:
    """Lines with the texts of the runs in columns."""
    terminal = max(60, shutil.get_terminal_size((100, 24)).columns)
    width = (terminal - 3 * (len(result.runs) - 1)) // len(result.runs)
    texts = []
    for run in result.runs:
        lines = [run.mode, "-" * width]
        for paragraph in run.text.strip().splitlines():
            lines += textwrap.wrap(paragraph, width) or [""]
        texts.append(lines)
    height = max(map(len, texts))
    rows = zip(*(lines + [""] * (height - len(lines)) for lines in texts), strict=True)
    return [*(" | ".join(cell.ljust(width) for cell in row).rstrip() for row in rows), ""]


def has_lost(fact: str, full: Run, other: Run) -> bool:
    """Whether a fact is in the answer with the full cache and not in another answer."""
    return fact in full.text and fact not in other.text


def answers(result: Result, question: str, fact: str) -> list[str]:
    """Lines with the answers to a question about the shipped article, one below the other."""
    width = max(60, min(100, shutil.get_terminal_size((100, 24)).columns))
    tokens = f"an article of {result.prompt_tokens} tokens"
    lines = [f"{result.model}, {result.dtype}, has read {tokens}. {question}", ""]
    for run in result.runs:
        outcome = "found" if fact in run.text else "lost"
        lines.append(
            f"{run.mode:<12}{run.kv_bytes_held / 1e6:5.1f} MB held, "
            f"read in {run.prefill_seconds:.1f} s, then {milliseconds(run)}: {outcome}"
        )
        for paragraph in run.text.strip().splitlines():
            lines += textwrap.wrap(
                paragraph, width, initial_indent=" " * 12, subsequent_indent=" " * 12
            ) or [""]
        lines.append("")
    return [*lines, *textwrap.wrap(conclusion(result.runs, fact), width)]


def conclusion(runs: list[Run], fact: str) -> str:
    """What was found, and the call that finds what a budget has lost."""
    full = runs[0]
    lost = [run.mode for run in runs if has_lost(fact, full, run)]
    found = [run.mode for run in runs if fact in run.text]
    said = f'"{fact}" was found by {listed(found)}, and lost by {listed(lost)}.'
    if READ_TWICE in found:
        said += (
            " What a budget loses is kept by reading the article twice before anything is evicted: "
            "h2o.compress_document(model, document_ids, budget=0.1, readings=2, "
            "tokenizer=tokenizer)."
        )
    return said


def listed(names: list[str]) -> str:
    return ", ".join(names) or "none"


def milliseconds(run: Run) -> str:
    steps = run.new_tokens - 1
    return f"{1000 * run.decode_seconds / steps:.0f} ms a token" if steps else "no more tokens"


def table(result: Result) -> list[str]:
    """The figures of the runs, a column for each."""
    from h2o.evaluation import text_table

    figures: dict[str, Callable[[Run], str]] = {
        "prefill, tokens/s": lambda run: f"{run.prefill_tokens_per_second:.0f}",
        "decode, tokens/s": lambda run: f"{run.decode_tokens_per_second:.1f}",
        "KV cache held, MB": lambda run: f"{run.kv_bytes_held / 1e6:.1f}",
        "KV cache of a full cache, MB": lambda run: f"{run.kv_bytes_full / 1e6:.1f}",
        "tokens held": lambda run: f"{run.tokens_held} ({run.tokens_held / run.tokens_seen:.0%})",
        "tokens evicted": lambda run: f"{run.tokens_evicted}",
        "attention mass evicted": lambda run: f"{run.mass_evicted:.1%}",
    }
    if result.runs[0].tokens_agree is not None:
        figures["leading tokens as with full"] = lambda run: f"{run.tokens_agree}"
    rows = [[name, *map(of_run, result.runs)] for name, of_run in figures.items()]
    return [
        f"{result.model}, {result.dtype}, prompt of {result.prompt_tokens} tokens",
        text_table.table(("", *(run.mode for run in result.runs)), rows),
    ]
