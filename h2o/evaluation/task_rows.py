"""Rows of lm-eval's tasks: those of h2o's own tasks are made from a file, and all are checked."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta

from h2o.errors import UserError
from h2o.utils.filesystem import read_text


def text_of(file: str | None, task: str) -> str:
    """The text that --metadata names. Raises: UserError without one."""
    if file is None:
        raise UserError(f"task {task} needs a file: --metadata file=PATH")
    return read_text(Path(file))


@functools.cache
def tokenizer_of(tokenizer: str | None, pretrained: str | None) -> Any:
    """Load the tokenizer that lm-eval names to tasks. Raises: UserError if there is none."""
    from transformers import AutoTokenizer

    if not (name := tokenizer or pretrained):
        raise UserError("the task cuts a text by tokens: --metadata tokenizer=FOLDER")
    return AutoTokenizer.from_pretrained(name)


def rows(listed: list[dict[str, Any]]) -> dict[str, Any]:
    """Rows for a task's `custom_dataset`, in a split called test."""
    from datasets import Dataset

    return {"test": Dataset.from_list(listed)}


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
