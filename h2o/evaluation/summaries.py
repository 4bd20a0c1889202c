"""The lm-eval task h2o_summaries: summaries of articles in a file, scored with ROUGE.

ROUGE-1, ROUGE-2 and ROUGE-L are F-measures with stemming, from the rouge-score package (Lin,
"ROUGE: A Package for Automatic Evaluation of Summaries", 2004).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rouge_score.rouge_scorer import RougeScorer

from h2o.errors import UserError
from h2o.evaluation.text_tasks import FileTask

SCORER = RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=True)
INSTRUCTION = "Summarize the above article"
TEMPLATE = "###\nArticle: {article}\n\n" + INSTRUCTION + " in {sentences}.\n"


class Summaries(FileTask):
    """The task."""

    @staticmethod
    def make_rows(text: str, file: str, **_: Any) -> list[dict[str, Any]]:
        """Make a prompt and a reference for each article in JSON Lines.

        Two formats are supported: requests as in HELM (`article`, `summary_gt` or `summary`) and
        articles as in CNN/DailyMail (`article`, `highlights`). If an article has no
        instruction, one is added that asks for one sentence (HELM) or three (CNN/DailyMail).

        Raises: UserError that names file, line and field.
        """
        # Not splitlines, which also splits at characters that JSON strings may contain, as U+2028.
        lines = enumerate(text.split("\n"), 1)
        rows = [row_of(line, f"{file}, line {i}") for i, line in lines if line.strip()]
        if not rows:
            raise UserError(f"{file} has no rows")
        return rows


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
    for name in ("article", known[0]):
        if not isinstance(record.get(name), str) or not record[name].strip():
            raise UserError(f"{where}: {name} is missing, empty or not a text")
    article = record["article"]
    if INSTRUCTION not in article:
        sentences = "3 sentences" if known[0] == "highlights" else "1 sentence"
        article = TEMPLATE.format(article=article.strip(), sentences=sentences)
    return {"prompt": article, "reference": record[known[0]]}


def results(doc: dict[str, str], answers: Sequence[str]) -> dict[str, float]:
    """The ROUGE scores of a summary."""
    scores = SCORER.score(doc["reference"], answers[0].strip())
    return {name: score.fmeasure for name, score in scores.items()}
