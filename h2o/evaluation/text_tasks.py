"""The base classes of h2o's own lm-eval tasks, whose rows are made from a file.

`summaries.py` has a task that any model can answer. The requests of the tasks in `windows.py` and
`needles.py`, windows of a text and facts to find in a text, can be answered only by the model
"h2o".
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean_stderr
from lm_eval.api.task import ConfigurableTask
from transformers import AutoTokenizer

from h2o.errors import UserError
from h2o.utils.filesystem import read_text

Samples = list[dict[str, Any]]
"""lm-eval's log of a task: the metrics of each row by name, and the row as "doc"."""


class FileTask(ConfigurableTask):
    """A task made from a file that --metadata names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={x: y for x, y in config.items() if x != "class"})

    def download(self, *_: Any, **__: Any) -> None:
        """Make the rows. Raises: UserError for metadata without a file, or that do not fit."""
        if (file := self.config.metadata.get("file")) is None:
            raise UserError(f"task {self.config.task} needs a file: pass --metadata file=PATH")
        rows = self.make_rows(read_text(Path(file)), **self.row_options())
        self.dataset = {"test": Dataset.from_list(rows)}

    def row_options(self) -> dict[str, Any]:
        """The metadata, including those of other tasks."""
        return dict(self.config.metadata)

    @staticmethod
    def make_rows(text: str, **options: Any) -> list[dict[str, Any]]:
        """Make rows of the file's text. `options` are those of `row_options`."""
        raise NotImplementedError

    def build_all_requests(self, *, cache_requests: bool = False, **kwargs: Any) -> None:
        """Build the requests, ignoring --cache_requests. It identifies tasks by name only, and
        would reuse the requests of another file."""
        super().build_all_requests(**kwargs)


class TextTask(FileTask):
    """A task whose rows have a "text", and in "asked" the arguments for questions about it.

    A request has lm-eval's type "loglikelihood", so lm-eval distributes it, caches its answer and
    logs it. The arguments are the text and, in place of a continuation, the dictionary "asked".
    """

    @property
    def unit(self) -> str:
        """The text that fractional budgets refer to."""
        return "text"

    def row_options(self) -> dict[str, Any]:
        """The metadata, and the tokenizer that they name. Raises: UserError if they name none."""
        options = super().row_options()
        if not (name := options.get("tokenizer") or options.get("pretrained")):
            raise UserError("the task needs a tokenizer: pass --metadata tokenizer=FOLDER")
        return options | {"tokenizer": load_tokenizer(name)}

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> Instance:
        """Construct one request per row, without few-shot examples and chat template."""
        arguments = doc["text"], doc["asked"]
        return Instance("loglikelihood", doc, arguments, 0, metadata=kwargs["metadata"])

    @staticmethod
    def columns(samples: Samples, full: Samples | None) -> dict[str, str]:
        """Cells of a table of settings, by title. `full` has the same rows with the full cache."""
        raise NotImplementedError


def is_text_request(request: Instance) -> bool:
    """Whether a request belongs to a `TextTask`."""
    return isinstance(request.args[1], dict)


load_tokenizer = functools.cache(AutoTokenizer.from_pretrained)


def format_error(values: Sequence[float], digits: int, factor: float = 1.0) -> str:
    """Format the standard error of the mean, times `factor`. A single value has none."""
    return f" ±{factor * mean_stderr(values):.{digits}f}" if len(values) > 1 else ""
