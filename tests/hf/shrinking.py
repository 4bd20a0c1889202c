"""Shrinks a program that fails to the shortest one that still fails, and prints it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from tests.hf.programs import Program, run

Fails = Callable[[Program], bool]
MOST = 200
"""Programs to try"""


def shrink(program: Program, fails: Fails) -> Program:
    """Leave out calls, settings, rows and tokens, one at a time, as long as `fails` is true."""
    tried, is_shorter = 0, True
    while is_shorter:
        is_shorter = False
        for shorter in _shorter(program):
            tried += 1
            if tried > MOST:
                return program
            if fails(shorter):
                program, is_shorter = shorter, True
                break
    return program


def _shorter(program: Program) -> Iterator[Program]:
    """Programs with one thing less, those with the most missing first."""
    calls, change = program.calls, dataclasses.replace
    for index in range(len(calls) - 1, 0, -1):
        yield change(program, calls=[*calls[:index], *calls[index + 1 :]])
    for flag in ("in_patched", "autocast", "by_torch", "trace", "compileable", "used", "exact"):
        if getattr(program, flag):
            yield change(program, **{flag: False})
    if program.pinned is not None:
        yield change(program, pinned=None)
    for field in program.settings:
        rest = {name: x for name, x in program.settings.items() if name != field}
        if {"heavy", "recent"} <= {*rest} or "budget" in rest:
            yield change(program, settings=rest)
    if program.rows > 1:
        yield change(program, rows=program.rows - 1)
    for index, (name, given) in enumerate(calls):
        for less in _less(given):
            yield change(program, calls=[*calls[:index], (name, less), *calls[index + 1 :]])
    if program.family != "llama":
        yield change(program, family="llama")


def _less(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Arguments with one smaller number, or without padding."""
    for name, value in given.items():
        if name in ("left", "right", "holes") and any(value):
            yield {**given, name: ()}
        if name in ("columns", "tokens", "back") and value > 1:
            for smaller in {1, value // 2, value - 1} - {0}:
                yield {**given, name: smaller}


def fails_alike(error: BaseException) -> Fails:
    """Whether a program fails with an error of the same type."""

    def fails(program: Program) -> bool:
        try:
            run(program)
        except type(error) as again:
            return _kind(again) == _kind(error)
        except Exception:  # another fault, or a program that makes no sense
            return False
        return False

    return fails


def _kind(error: BaseException) -> str:
    """An error's message without its numbers."""
    return "".join(x for x in str(error)[:60] if not x.isdigit())


def as_text(program: Program) -> str:
    """A program as lines that a reader can paste."""
    defaults = {x.name: x.default for x in dataclasses.fields(Program)}
    lines = [f"    {program.family!r},", f"    {program.settings!r},", "    ["]
    lines += [f"        {call!r}," for call in program.calls]
    lines += ["    ],"]
    for name, default in defaults.items():
        value = getattr(program, name)
        if name not in ("family", "settings", "calls") and value != default:
            lines.append(f"    {name}={value!r},")
    return "\n".join(
        ["from tests.hf.programs import Program, run", "", "run(Program(", *lines, "))"]
    )


def run_or_explain(program: Program) -> None:
    """Run a program. If it fails, raise AssertionError with the shortest one that does."""
    try:
        run(program)
    except Exception as error:
        shortest = shrink(program, fails_alike(error))
        raise AssertionError(f"{error}\n\n{as_text(shortest)}") from error
