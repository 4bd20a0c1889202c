"""Check that the rows of a task are what its file says, before lm-eval guesses about them."""

from __future__ import annotations

from typing import Any

import jinja2
import jinja2.meta

__all__ = ["check_rows"]


def check_rows(task: Any) -> None:
    """Raise ValueError for a row that lm-eval would guess about.

    A field that some rows lack is None in them, which a template renders as "None"; a right answer
    that is none of the choices counts as answered wrongly.
    """
    config = task.config
    for part in ("doc_to_text", "doc_to_choice", "doc_to_target"):
        template = getattr(config, part)
        if not isinstance(template, str) or not template:
            continue
        fields = {template}
        if template not in task.features:
            fields = jinja2.meta.find_undeclared_variables(jinja2.Environment().parse(template))
            if not fields and part != "doc_to_choice":
                raise ValueError(f"{part}: {template!r} is no field of its rows and no template")
        for number, row in enumerate(task.eval_docs):
            for field in fields:
                if row.get(field) is None:
                    raise ValueError(f"row {number} has no {field!r}, which {part} names")
    if config.output_type != "multiple_choice" or task.multiple_input:
        return
    for number, row in enumerate(task.eval_docs):
        choices, gold = task.doc_to_choice(row), task.doc_to_target(row)
        for answer in gold if isinstance(gold, list) else [gold]:
            if answer not in (range(len(choices)) if isinstance(answer, int) else choices):
                raise ValueError(f"row {number}: {answer!r} is none of its {len(choices)} choices")
