"""Make the table of families and modes in docs/reference/models.md by running the tests.

    python -m tests.hf.table                 prints it
    python -m tests.hf.table docs/reference/models.md  puts it between the two marks in that file

Each cell runs the test of its column for its family. The table takes about two minutes.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers.utils import logging

from tests.hf import test_families
from tests.hf.modes import MODES, POLICIES
from tests.hf.tiny import FAMILIES

BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


def passes(test, *arguments) -> bool:
    try:
        test(*arguments)
    except AssertionError:
        return False
    return True


def cell(results: dict[str, bool]) -> str:
    """The number of results if all are right, otherwise the names of those that are wrong."""
    wrong = [name for name, right in results.items() if not right]
    return f"all {len(results)}" if not wrong else "not " + ", ".join(wrong)


def lines():
    yield "| families | layers by h2o | modes as the full cache | policies, each row as alone |"
    yield "| --- | --- | --- | --- |"
    alike: dict[str, list[str]] = {}  # results -> families
    for name, family in FAMILIES.items():
        if not test_families.modes_of(name):
            continue
        modes = {
            mode: passes(test_families.test_full_budget_is_the_full_cache, name, mode)
            for mode in test_families.modes_of(name)
        }
        policies = {
            policy: all(
                passes(test_families.test_each_row_is_the_row_alone, name, policy, side)
                for side in ("left", "right")
            )
            for policy in (POLICIES if name in test_families.PADDED else ())
        }
        served = family.layers.count("h2o")
        of = (
            "all"
            if served == len(family.layers)
            else f"{served} of {len(family.layers)}, others kept"
        )
        rows = cell(policies) if policies else "nothing to evict"
        print(f"{name}: {cell(modes)}; {rows}", file=sys.stderr)
        alike.setdefault(f"{of} | {cell(modes)} | {rows}", []).append(name)
    for results, names in alike.items():
        yield f"| {'; '.join(names)} | {results} |"
    yield ""
    yield f"The {len(MODES)} modes and {len(POLICIES)} policies are those of tests/hf/modes.py."


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    table = "\n".join(lines())
    if len(sys.argv) == 1:
        print(table)
        return
    page = Path(sys.argv[1])
    before, _, rest = page.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        sys.exit(f"{page} has no lines {BEGIN} and {END}")
    page.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}")


if __name__ == "__main__":
    main()
