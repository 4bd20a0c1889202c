"""lm-eval tasks whose requests only the model "h2o" can answer: windows of a text, and facts to
find in a text.

Such a request has lm-eval's type "loglikelihood", so lm-eval distributes it, caches its answer and
logs it. The arguments are a text and, in place of a continuation, a dictionary.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.metrics import mean_stderr, weighted_mean, weighted_perplexity
from lm_eval.api.task import ConfigurableTask
from tqdm import tqdm

from h2o.evaluation import needles, windows
from h2o.evaluation.protocols import fractions_of

Samples = list[dict[str, Any]]
"""lm-eval's log of a task: the metrics of each row by name, and the row as "doc"."""


def is_text_request(request: Instance) -> bool:
    """Whether a request belongs to one of these tasks."""
    return isinstance(request.args[1], dict)


def answer_requests(lm: Any, requests: Iterable[Instance]) -> Iterator[Any]:
    """Answer requests of these tasks with an `h2o.evaluation.lm.H2OLM`. Each answer is cached at
    once."""
    hide = lm.is_counting or lm.rank > 0
    for request in tqdm(list(requests), disable=hide, desc=lm.setting.name):
        text, asked = request.args
        if "window" in asked:
            answer: Any = windows.answer(lm, **asked)
        else:
            answer = needles.answer(lm, text, **asked)
        lm.cache_hook.add_partial("loglikelihood", request.args, answer)
        yield answer


class FileTask(ConfigurableTask):
    """A task made from a file that --metadata names."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config={x: y for x, y in config.items() if x != "class"})

    def build_all_requests(self, *, cache_requests: bool = False, **kwargs: Any) -> None:
        """Build the requests, ignoring --cache_requests. It identifies tasks by name only, and
        would reuse the requests of another file."""
        super().build_all_requests(**kwargs)


class TextTask(FileTask):
    """A task whose rows have a "text", and in "asked" the arguments for questions about it."""

    @property
    def unit(self) -> str:
        """The text that fractional budgets refer to."""
        return "text"

    def construct_requests(self, doc: dict[str, Any], ctx: str, **kwargs: Any) -> Instance:
        """Construct one request per row, without few-shot examples and chat template."""
        arguments = doc["text"], doc["asked"]
        return Instance("loglikelihood", doc, arguments, 0, metadata=kwargs["metadata"])

    @staticmethod
    def columns(samples: Samples, full: Samples | None) -> dict[str, str]:
        """Cells of a table of settings, by title. `full` has the same rows with the full cache."""
        raise NotImplementedError


class Perplexity(TextTask):
    """Windows of a text (`h2o.evaluation.windows`). The answer to each is the total loss and the
    number of the scored tokens."""

    @property
    def unit(self) -> str:
        unit = fractions_of(self.dataset["test"][0]["asked"]["prompt_length"])
        return "window" if unit == "text" else unit

    @staticmethod
    def columns(samples: Samples, full: Samples | None) -> dict[str, str]:
        each = [tuple(sample["perplexity"]) for sample in samples]
        perplexity = weighted_perplexity(each)
        cells = {"perplexity": f"{perplexity:.2f}" + _format_error(each, 2, perplexity)}
        if full:
            pairs = zip(each, (sample["perplexity"] for sample in full), strict=True)
            lost = [(there[0] - here[0], here[1]) for here, there in pairs]
            cells["nats lost"] = f"{weighted_mean(lost):.3f}" + _format_error(lost, 3)
        return cells | {"scored": f"{sum(tokens for _, tokens in each)}"}


def _format_error(each: Sequence[tuple[float, int]], digits: int, factor: float = 1.0) -> str:
    """Format the standard error of the mean per token over windows, times `factor`. One window has
    none."""
    means = [total / tokens for total, tokens in each]
    return f" ±{factor * mean_stderr(means):.{digits}f}" if len(means) > 1 else ""


class Needles(TextTask):
    """Texts with facts (`h2o.evaluation.needles`). The answer to each is which facts are found."""

    @staticmethod
    def columns(samples: Samples, full: Samples | None) -> dict[str, str]:
        """Shares of facts found: of all facts, of those that the full cache finds, and by length,
        depth and kind. Facts that the model cannot find at all say nothing about a cache."""
        facts = [fact for sample in samples for fact in _facts(sample)]
        cells = {"found": _share([x["found"] for x in facts])}
        whole = [x["found"] for sample in full or () for x in _facts(sample)]
        if any(whole):
            known = [x["found"] for x, is_known in zip(facts, whole, strict=True) if is_known]
            cells[f"of full's {sum(whole)}"] = _share(known)
        for name, title in PARTS.items():
            values = list(dict.fromkeys(x[name] for x in facts))
            if name == "depth":
                values.sort()
            for value in values if name != "kind" or len(values) > 1 else ():
                part = [x["found"] for x in facts if x[name] == value]
                cells[title.format(value)] = f"{statistics.fmean(part):.2f}"
        return cells


PARTS = {"length": "{} tokens", "depth": "depth {:.2g}", "kind": "{}"}
"""Properties whose values are columns of a table, with the title of a column."""


def _facts(sample: dict[str, Any]) -> list[dict[str, Any]]:
    """For each fact of a text, whether it is found and its properties in `PARTS`."""
    doc = sample["doc"]
    each = zip(sample["found"], doc["depths"], doc["kinds"], strict=True)
    names = "found", "depth", "kind"
    return [dict(zip(names, x, strict=True)) | {"length": doc["length"]} for x in each]


def _share(found: Sequence[bool]) -> str:
    return "{:.2f} ±{:.2f}".format(*needles.mean_and_error(found))
