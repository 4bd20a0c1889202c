"""`h2o eval --summarize`: summaries written with an evicting cache, judged by ROUGE.

The article is the prompt, the summary is generated greedily through a real `H2OCache` (or
transformers' own for "full"). ROUGE-1, ROUGE-2 and ROUGE-L are F-measures with stemming, from the
rouge-score package (Lin, "ROUGE: A Package for Automatic Evaluation of Summaries", 2004).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from h2o import models
from h2o.errors import UserError
from h2o.evaluation import kept_bytes
from h2o.evaluation.answers import answers
from h2o.evaluation.fitting import load
from h2o.evaluation.presentation import plot_curves, table, written
from h2o.evaluation.setting import Setting
from h2o.filesystem import read_text
from h2o.hf.rows.request import Request
from h2o.packages import install_command
from h2o.processes import launched
from h2o.result_cells import Cells, fingerprint, provenance

__all__ = ["Row", "compare", "read_rows"]

ROUGE = ("rouge1", "rouge2", "rougeL")
INSTRUCTION = "Summarize the above article"
TEMPLATE = "###\nArticle: {article}\n\n" + INSTRUCTION + " in {sentences}.\n"


@dataclasses.dataclass(frozen=True)
class Row:
    """One article."""

    name: str
    prompt: str
    reference: str
    stop: tuple[str, ...] = ("###",)


def read_rows(file: Path, limit: int | None = None) -> list[Row]:
    """The rows of a JSON-lines file.

    Two forms are known: requests as in HELM (`article`, `summary_gt` or `summary`, perhaps
    `stop`) and articles as in CNN/DailyMail (`article`, `highlights`, perhaps `id`). An article
    without an instruction gets one, for one sentence or, with `highlights`, three.

    Raises: UserError that names file, line and field.
    """
    rows = []
    # Not splitlines, which divides at what may stand within JSON, such as U+2028.
    for number, line in enumerate(read_text(file).split("\n"), 1):
        where = f"{file}, line {number}"
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where}: no JSON: {error}") from error
        if not isinstance(record, dict):
            raise UserError(f"{where}: expected an object with article and summary")
        known = [name for name in ("summary_gt", "summary", "highlights") if name in record]
        if not known:
            raise UserError(f"{where}: no summary_gt, summary or highlights")
        article = _text(record, "article", where)
        if INSTRUCTION not in article:
            sentences = "3 sentences" if known[0] == "highlights" else "1 sentence"
            article = TEMPLATE.format(article=article.strip(), sentences=sentences)
        stop = record.get("stop") or Row.stop
        if isinstance(stop, str) or not all(isinstance(text, str) and text for text in stop):
            raise UserError(f"{where}: stop is a list of texts, not {stop!r}")
        name = str(record.get("id", number))
        rows.append(Row(name, article, _text(record, known[0], where), tuple(stop)))
    if not rows:
        raise UserError(f"{file} has no rows")
    return rows[:limit]


def _text(record: dict[str, Any], field: str, where: str) -> str:
    text = record.get(field)
    if not isinstance(text, str) or not text.strip():
        raise UserError(f"{where}: {field} is missing, empty or no text")
    return text


def compare(
    file: Path,
    settings: Sequence[Setting],
    output: Path,
    *,
    model_name: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    chat: bool = False,
    max_new_tokens: int = 64,
    at_a_time: int,
    limit: int | None = None,
    as_json: bool = False,
) -> str:
    """ROUGE of each setting over a file of articles.

    Args:
        file: see `read_rows`.
        settings: what to compare; fractions are of the prompt.
        output: folder for summaries.json, which holds every summary and which a second run
            completes, and summaries.png.
        chat: give the prompt as a user's turn of the model's chat template.
        at_a_time: how many articles, in the rows of `h2o.generate_all`.
        as_json: return the results as the file has them, those of this call.

    Returns:
        the table, as text.
    """
    for setting in settings:
        if not setting.dropping:
            raise UserError(f"{setting.why_not_dropping}; it cannot generate")
    try:
        from rouge_score.rouge_scorer import RougeScorer
    except ImportError as error:
        raise UserError(f"{error}: run {install_command('eval')}") from error
    rows = read_rows(file, limit)
    cells = Cells(output / "summaries.json", "h2o eval --summarize", launched())
    model, tokenizer = load(model_name, settings, dtype=dtype, device=device)
    prompts = [models.encode(tokenizer, row.prompt, chat) for row in rows]
    check_lengths(rows, prompts, model.config, max_new_tokens)
    origin = provenance(model, tokenizer, model_name or models.DEFAULT_MODEL)
    scorer = RougeScorer(ROUGE, use_stemmer=True)

    def judged(setting: Setting, indices: Sequence[int]) -> Iterator[tuple[int, dict[str, Any]]]:
        wanted = [(rows[i], prompts[i][0]) for i in indices]
        for i, result in summarize(model, tokenizer, setting, wanted, max_new_tokens, at_a_time):
            reference = wanted[i][0].reference
            score = scorer.score(reference, result["summary"])
            rouge = {name: score[name].fmeasure for name in ROUGE}
            yield i, result | rouge | {"reference": reference}

    by_row = [
        origin
        | {
            "file": file.name,
            "row": row.name,
            "content": fingerprint(dataclasses.asdict(row)),
            "chat": chat,
            "max_new_tokens": max_new_tokens,
            "decoding": "greedy",
            "protocol": "drop",
            "ratio_of": "prompt",
        }
        for row in rows
    ]
    every = {x.name: [facts | x.describe() for facts in by_row] for x in settings}
    results = {
        x.name: cells.complete_together(every[x.name], partial(judged, x), x.name) for x in settings
    }
    sizes = {x.name: kept_bytes.of_rows(x, model, results[x.name]) for x in settings}
    in_bytes = kept_bytes.by_bytes(settings)
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for setting in settings:
        each = results[setting.name]
        share = (in_bytes and sizes[setting.name]) or share_kept(each)
        curves.setdefault(setting.curve, []).append((share, *mean_and_error(each, "rougeL")))
    drawn = plot_curves(
        output / "summaries.png", [(file.name, curves)], "ROUGE-L", kept_bytes.axis(in_bytes)
    )
    if as_json:
        return cells.as_json(itertools.chain(*every.values()))
    first = f"{origin['model']}, {len(rows)} rows of {file.name}, fractions of the prompt"
    return "\n".join([first, "", as_table(results, sizes), "", written(cells.path, drawn)])


def summarize(
    model: Any,
    tokenizer: Any,
    setting: Setting,
    wanted: Sequence[tuple[Row, torch.Tensor]],
    max_new_tokens: int,
    at_a_time: int,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(index, summary) of rows and their prompts [n], as they finish: the text up to the first
    stop text, and what it took. The seconds are those since the one before."""
    requests = [
        Request(
            ids,
            generation_config=GenerationConfig(
                max_new_tokens=max_new_tokens, do_sample=False, stop_strings=list(row.stop)
            ),
        )
        for row, ids in wanted
    ]
    config = setting.config.for_model(model)
    start = time.perf_counter()
    for index, new in answers(model, setting, requests, at_a_time, tokenizer):
        row, ids = wanted[index]
        text = tokenizer.decode(new, skip_special_tokens=True)
        for end in row.stop:
            text = text.partition(end)[0]
        seconds = time.perf_counter() - start
        yield (
            index,
            {
                "summary": text.strip(),
                "prompt_tokens": len(ids),
                "new_tokens": len(new),
                "kept": config.held(len(ids)),
                "seconds": seconds,
            },
        )
        start = time.perf_counter()


def check_lengths(
    rows: Sequence[Row], prompts: Sequence[torch.Tensor], config: Any, max_new_tokens: int
) -> None:
    """UserError if an article does not fit into the model, before hours are spent on others."""
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    for row, ids in zip(rows, prompts, strict=True):
        if positions and ids.shape[1] + max_new_tokens > positions:
            raise UserError(
                f"row {row.name}: {ids.shape[1]} tokens and {max_new_tokens} new ones are more "
                f"than the model's {positions} positions: shorten the article or leave the row out"
            )


def share_kept(rows: Sequence[dict[str, Any]]) -> float:
    return 100 * sum(row["kept"] for row in rows) / sum(row["prompt_tokens"] for row in rows)


def mean_and_error(rows: Sequence[dict[str, Any]], name: str) -> tuple[float, float]:
    values = [row[name] for row in rows]
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.fmean(values), error


def as_table(results: dict[str, list[dict[str, Any]]], sizes: dict[str, float | None]) -> str:
    lines = []
    for setting, rows in results.items():
        scores = [mean_and_error(rows, name) for name in ROUGE]
        lines.append(
            [
                setting,
                f"{share_kept(rows):.1f}%",
                kept_bytes.shown(sizes[setting]),
                f"{statistics.fmean(row['kept'] for row in rows):.0f}",
                *(f"{mean:.3f} ±{error:.3f}" for mean, error in scores),
                f"{statistics.fmean(row['new_tokens'] for row in rows):.0f}",
                f"{sum(row['seconds'] for row in rows):.0f} s",
            ]
        )
    header = ["setting", "kept", "bytes", "tokens", "ROUGE-1", "ROUGE-2", "ROUGE-L", "new tokens"]
    header.append("time")
    return table(header, lines)
