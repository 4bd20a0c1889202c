"""Make the rows of h2o's own tasks from a file."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

from h2o.errors import UserError
from h2o.utils.filesystem import read_text


def text_of(file: str | None, task: str) -> str:
    """Read the text file that --metadata names. Raises: UserError if it names none."""
    if file is None:
        raise UserError(f"task {task} needs a file: pass --metadata file=PATH")
    return read_text(Path(file))


@functools.cache
def tokenizer_of(tokenizer: str | None, pretrained: str | None) -> Any:
    """Load the tokenizer that the metadata names. Raises: UserError if it names none."""
    from transformers import AutoTokenizer

    if not (name := tokenizer or pretrained):
        raise UserError("the task needs a tokenizer: pass --metadata tokenizer=FOLDER")
    return AutoTokenizer.from_pretrained(name)


def rows(listed: list[dict[str, Any]]) -> dict[str, Any]:
    """Make a split named "test" of these rows, for a task's `custom_dataset`."""
    from datasets import Dataset

    return {"test": Dataset.from_list(listed)}
