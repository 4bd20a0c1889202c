"""Rows of h2o's own tasks, which are made from a file."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

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
