"""The lm-eval task h2o_summaries: summaries of articles in a file, scored with ROUGE.

ROUGE-1, ROUGE-2 and ROUGE-L are F-measures with stemming, from the rouge-score package (Lin,
"ROUGE: A Package for Automatic Evaluation of Summaries", 2004).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from typing import Any

from h2o.errors import UserError
from h2o.evaluation.task_rows import rows, text_of

ROUGE = ("rouge1", "rouge2", "rougeL")
INSTRUCTION = "Summarize the above article"
TEMPLATE = "###\nArticle: {article}\n\n" + INSTRUCTION + " in {sentences}.\n"


def dataset(file: str | None = None, **_: Any) -> dict[str, Any]:
    """Build the dataset: a prompt and a reference for each article in a JSON Lines file.

    Two formats are supported: requests as in HELM (`article`, `summary_gt` or `summary`) and
    articles as in CNN/DailyMail (`article`, `highlights`). If an article has no
    instruction, one is added that asks for one sentence (HELM) or three (CNN/DailyMail).

    Raises: UserError that names file, line and field.
    """
    listed = []
    # Not splitlines, which also splits at characters that JSON strings may contain, as U+2028.
    for number, line in enumerate(text_of(file, "h2o_summaries").split("\n"), 1):
        if line.strip():
            listed.append(row_of(line, f"{file}, line {number}"))
    if not listed:
        raise UserError(f"{file} has no rows")
    return rows(listed)


def row_of(line: str, where: str) -> dict[str, str]:
    """The row of one line. Error messages begin with `where`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected an object with article and summary")
    known = [name for name in ("summary_gt", "summary", "highlights") if name in record]
    if not known:
        raise UserError(f"{where}: no summary_gt, summary or highlights")
    article = _text(record, "article", where)
    if INSTRUCTION not in article:
        sentences = "3 sentences" if known[0] == "highlights" else "1 sentence"
        article = TEMPLATE.format(article=article.strip(), sentences=sentences)
    return {"prompt": article, "reference": _text(record, known[0], where)}


def _text(record: dict[str, Any], field: str, where: str) -> str:
    text = record.get(field)
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: {field} is missing, empty or not a text")
    return text


def results(doc: dict[str, str], answers: Sequence[str]) -> dict[str, float]:
    """The ROUGE scores of a summary."""
    scores = _scorer().score(doc["reference"], answers[0].strip())
    return {name: scores[name].fmeasure for name in ROUGE}


@functools.cache
def _scorer() -> Any:
    from rouge_score.rouge_scorer import RougeScorer

    return RougeScorer(ROUGE, use_stemmer=True)
