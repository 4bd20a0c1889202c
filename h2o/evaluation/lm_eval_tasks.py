"""`h2o eval --tasks`: lm-eval's own command line, and settings side by side on its tasks."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import jinja2
import jinja2.meta
import yaml
from lm_eval import simple_evaluate
from lm_eval.__main__ import cli_evaluate
from lm_eval._cli import HarnessCLI
from lm_eval.api.registry import model_registry
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.tasks import TaskManager

from h2o.errors import UserError
from h2o.evaluation import kept_bytes
from h2o.evaluation.fitting import check_fit
from h2o.evaluation.lm import H2OLM, POLICY
from h2o.evaluation.presentation import plot_curves, table, written
from h2o.evaluation.protocols import check, one_token_note
from h2o.evaluation.setting import Setting, footnote
from h2o.models import DEFAULT_MODEL, embedded_folder, is_gguf, tokenizer_folder
from h2o.processes import launched
from h2o.result_cells import Cells, fingerprint, provenance

__all__ = ["compare", "is_model_type", "run"]


def run(arguments: Sequence[str], output: Path, *, ours: bool = True) -> None:
    """lm-eval's `run` with these arguments; the model "h2o" is registered.

    Of several processes, all but the first work for it only: lm-eval would have the first one of
    each machine write its files. With a model that is not `ours` it goes its own ways.
    """
    if not ours or launched().first:
        with lm_eval_arguments([*arguments, "--output_path", str(output)]), readable_errors():
            cli_evaluate()
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        open(os.devnull, "w") as nowhere,
        redirect_stdout(nowhere),
        lm_eval_arguments([*arguments, "--output_path", folder]),
        readable_errors(),
    ):
        cli_evaluate()


def is_model_type(name: str) -> bool:
    """Whether lm-eval knows a kind of model by this name, as --model has it there."""
    return name in model_registry


def compare(
    arguments: Sequence[str],
    settings: Sequence[Setting],
    output: Path,
    *,
    protocol: str = "simulate",
    prompt_length: int = 1,
    ratio_of: str | None = None,
    as_json: bool = False,
) -> str:
    """Each setting on each task; the model is loaded once.

    Args:
        arguments: lm-eval's, without those that say what the cache does.
        settings: what to compare.
        output: folder for compare.json and compare.png. What compare.json already has, from a
            run of the same model, arguments, tasks, protocol and versions, is not measured again.
        as_json: return the results as the file has them, those of this call.

    Returns:
        the table, as text.
    """
    with lm_eval_arguments(arguments), readable_errors():
        config = EvaluatorConfig.from_cli(HarnessCLI().parse_args())
        manager = own_tasks(config) or config.process_tasks(metadata(config))
    how = {"protocol", "prompt_length", "prompt_len", "ratio_of"}
    of_cache = set(config.model_args) & {*POLICY, *how}
    if of_cache:
        raise UserError(
            f"--model_args {sorted(of_cache)[0]}: settings of the cache go into --compare"
        )
    common = {"batch_size": config.batch_size, "device": config.device}
    for setting in settings:  # before anything long is started
        check(setting, protocol, prompt_length, ratio_of)
    cells = Cells(output / "compare.json", "h2o eval --compare on lm-eval tasks", launched())
    with readable_errors():
        lm = H2OLM(**config.model_args, **{k: v for k, v in common.items() if v is not None})
    check_fit(settings, full_cache=protocol != "simulate")(lm.model)
    lm.use(settings[0], protocol, prompt_length=prompt_length, ratio_of=ratio_of)
    seeds = dict(zip(("random", "numpy", "torch", "fewshot"), config.seed or (), strict=False))
    name = config.model_args.get("pretrained") or DEFAULT_MODEL
    origin = provenance(lm.model, lm.tokenizer, name, seeds)
    results: dict[Setting, dict[str, dict[str, Any]]] = {}
    notes: set[str] = set()
    every: list[dict[str, Any]] = []
    for task in config.tasks:
        name = task if isinstance(task, str) else task.get("task", str(task))
        with readable_errors(name):
            content = [check_rows(loaded) for loaded in manager.load([task])["tasks"].values()]
        for setting in settings:
            facts = origin | {
                "task": name,
                "content": content,
                "model_args": config.model_args,
                "metadata": config.metadata,
                "num_fewshot": config.num_fewshot,
                "limit": config.limit,
                "samples": config.samples,
                "include_path": config.include_path and str(Path(config.include_path).resolve()),
                "apply_chat_template": config.apply_chat_template,
                "fewshot_as_multiturn": bool(config.fewshot_as_multiturn),
                "system_instruction": config.system_instruction,
                "gen_kwargs": config.gen_kwargs,
                "max_length": lm.max_length,
                "protocol": protocol,
                "ratio_of": lm.ratio_of,
                "prompt_len": prompt_length,
                **setting.describe(),
            }
            cells.processes.agree([facts])
            every.append(facts)
            result = cells.find(facts)
            if result is None:
                journal = output / f"answers-{fingerprint(facts)}.jsonl"
                lm.use(
                    setting,
                    protocol,
                    prompt_length=prompt_length,
                    ratio_of=ratio_of,
                    journal=journal,
                )
                with readable_errors(name):
                    measured = cells.processes.of_first(measure(lm, task, config, manager))
                result = cells.put(facts, measured)
                journal.unlink(missing_ok=True)
            if protocol == "drop" and result["one_token_answers"]:
                notes.add(
                    f"{name}: " + one_token_note(result["one_token_answers"], result["requests"])
                )
            results.setdefault(setting, {})[name] = result
    sizes = {
        setting: {name: size_kept(setting, lm.model, [result]) for name, result in tasks.items()}
        | {"": size_kept(setting, lm.model, list(tasks.values()))}
        for setting, tasks in results.items()
    }
    in_bytes = kept_bytes.by_bytes(settings)
    drawn = plot_curves(
        output / "compare.png",
        panels(results, sizes if in_bytes else None),
        "accuracy",
        kept_bytes.axis(in_bytes),
    )
    if as_json:
        return cells.as_json(every)
    first = f"{origin['model']}, protocol {protocol}, fractions of the {lm.ratio_of}"
    return "\n".join(
        [first, "", as_table(results, sizes), "", *sorted(notes), written(cells.path, drawn)]
    )


def metadata(config: EvaluatorConfig) -> dict[str, Any]:
    """What tasks that are made up for a tokenizer are told of it; they read folders only."""
    name = config.model_args.get("pretrained")
    folder = None
    if name is None:
        folder = embedded_folder()
    elif is_gguf(name):
        folder = tokenizer_folder(name)
    default = {} if folder is None else {"tokenizer": str(folder)}
    return default | (config.metadata or {})


def own_tasks(config: EvaluatorConfig) -> TaskManager | None:
    """The tasks of --include_path, if these are all: lm-eval looks for ten seconds at its own."""
    if not config.include_path:
        return None
    manager = TaskManager(
        include_path=config.include_path, include_defaults=False, metadata=metadata(config)
    )
    known = isinstance(config.tasks, list) and set(config.tasks) <= set(manager.all_tasks)
    return manager if known else None


def measure(lm: H2OLM, task: Any, config: EvaluatorConfig, manager: Any) -> dict[str, Any]:
    """One task with the setting in use: {"metrics": {(sub)task: {metric: value}}, ...}.

    Of several processes lm-eval lets the first one of each machine know; the others get {}.
    """
    start = time.perf_counter()
    seeds = config.seed or [None] * 4
    results = simple_evaluate(
        model=lm,
        tasks=[task],
        num_fewshot=config.num_fewshot,
        limit=config.limit,
        samples=config.samples,
        gen_kwargs=config.gen_kwargs,
        task_manager=manager,
        log_samples=False,
        system_instruction=config.system_instruction,
        apply_chat_template=config.apply_chat_template,
        fewshot_as_multiturn=bool(config.fewshot_as_multiturn),
        random_seed=seeds[0],
        numpy_random_seed=seeds[1],
        torch_random_seed=seeds[2],
        fewshot_random_seed=seeds[3],
        confirm_run_unsafe_code=config.confirm_run_unsafe_code,
        metadata=metadata(config),
    )
    if results is None:
        return {}
    metrics = {
        name: {
            key.removesuffix(",none"): value
            for key, value in entry.items()
            if isinstance(value, float | int) and key != "sample_len" and measured(key, value)
        }
        for name, entry in results["results"].items()
    }
    return {
        "metrics": metrics,
        "samples": results["n-samples"],
        "seconds": time.perf_counter() - start,
        **lm.describe(),
    }


def measured(metric: str, value: float) -> bool:
    """RULER's tasks have a metric for each length, -1 for one without texts."""
    return not (metric.partition(",")[0].isdecimal() and value == -1)


ROLLING = "loglikelihood_rolling"
"""Of whole texts: nothing stands before them."""


def check_rows(task: Any) -> str:
    """A fingerprint of rows and templates; ValueError for rows that lm-eval would guess about.

    A field that some rows lack is None in them, which a template renders as "None"; a right answer
    that is none of the choices counts as answered wrongly.
    """
    config = task.config
    content: list[Any] = [dict(row) for row in task.eval_docs]
    for part in ("doc_to_text", "doc_to_choice", "doc_to_target"):
        template = getattr(config, part)
        if not isinstance(template, str) or (config.output_type == ROLLING and not template):
            continue
        content.append(template)
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
        return fingerprint({"content": content})
    for number, row in enumerate(task.eval_docs):
        choices, gold = task.doc_to_choice(row), task.doc_to_target(row)
        for answer in gold if isinstance(gold, list) else [gold]:
            if answer not in (range(len(choices)) if isinstance(answer, int) else choices):
                raise ValueError(f"row {number}: {answer!r} is none of its {len(choices)} choices")
    return fingerprint({"content": content})


def main_metric(metrics: dict[str, float]) -> tuple[str, float, float]:
    """(name, value, standard error): accuracy where there is one."""
    for name in ("acc", "exact_match", "f1", *metrics):
        if name in metrics:
            error = metrics.get(f"{name}_stderr", 0.0)
            return name, metrics[name], error
    return "nothing measured", float("nan"), 0.0


def share_kept(results: Sequence[dict[str, Any]]) -> float:
    seen = sum(result["tokens_seen"] for result in results)
    return 100 * sum(result["tokens_kept"] for result in results) / seen if seen else 100.0


def size_kept(setting: Setting, model: Any, results: Sequence[dict[str, Any]]) -> float | None:
    kept, seen, texts = (
        sum(result[name] for result in results)
        for name in ("tokens_kept", "tokens_seen", "requests")
    )
    return kept_bytes.bytes_share(setting, model, kept, seen, texts)


Sizes = dict[Setting, dict[str, float | None]]
"""Bytes kept by each task, in per cent of a full cache's, and under "" by all."""


def shown_metrics(metrics: dict[str, float]) -> list[tuple[str, float, float]]:
    """The main one, and where there is one accuracy by length-normalised likelihood."""
    main = main_metric(metrics)
    if main[0] == "acc_norm" or "acc_norm" not in metrics:
        return [main]
    return [main, ("acc_norm", metrics["acc_norm"], metrics.get("acc_norm_stderr", 0.0))]


def as_table(results: dict[Setting, dict[str, dict[str, Any]]], sizes: Sizes) -> str:
    """Settings down, tasks across: {setting: {task: what `measure` gave}}."""
    columns: dict[str, None] = {}
    for tasks in results.values():
        for result in tasks.values():
            for name, metrics in result["metrics"].items():
                columns |= dict.fromkeys(f"{name} {x}" for x, *_ in shown_metrics(metrics))
    rows = []
    for setting, tasks in results.items():
        cells = dict.fromkeys(columns, "")
        for result in tasks.values():
            for name, metrics in result["metrics"].items():
                for metric, value, error in shown_metrics(metrics):
                    cells[f"{name} {metric}"] = f"{value:.3f} ±{error:.3f}"
        measured = list(tasks.values())
        tokens = sum(result["tokens_kept"] for result in measured)
        requests = sum(result["requests"] for result in measured)
        rows.append(
            [
                setting.name + setting.star,
                f"{share_kept(measured):.1f}%",
                kept_bytes.shown(sizes[setting][""]),
                f"{tokens / requests:.0f}" if requests else "",
                *cells.values(),
                f"{sum(result['seconds'] for result in measured):.0f} s",
            ]
        )
    lines = table(["setting", "kept", "bytes", "tokens", *columns, "time"], rows)
    return "\n".join([lines, *footnote(results)])


def panels(
    results: dict[Setting, dict[str, dict[str, Any]]], sizes: Sizes | None = None
) -> list[tuple[str, dict[str, list[tuple[float, float, float]]]]]:
    """For `plot_curves`: one panel per (sub)task, one curve for settings that differ by budget.

    sizes: where bytes are on the axis, and not keys.
    """
    by_task: dict[str, dict[str, list[tuple[float, float, float]]]] = {}
    for setting, tasks in results.items():
        for task, result in tasks.items():
            share = (sizes and sizes[setting][task]) or share_kept([result])
            for name, metrics in result["metrics"].items():
                point = (share, *main_metric(metrics)[1:])
                by_task.setdefault(name, {}).setdefault(setting.curve, []).append(point)
    return list(by_task.items())


@contextmanager
def lm_eval_arguments(arguments: Sequence[str]) -> Iterator[None]:
    """lm-eval reads the command line itself, so for its sake this is it."""
    before = sys.argv
    sys.argv = ["h2o eval", "run", *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def readable_errors(task: str = "") -> Iterator[None]:
    """What a wrong task file does to lm-eval, in one line."""
    from datasets.exceptions import DatasetsError

    where = f"task {task}: " if task else ""
    try:
        yield
    except jinja2.UndefinedError as error:
        raise UserError(f"{where}a field that its task file names is missing: {error}") from error
    except jinja2.TemplateError as error:
        raise UserError(f"{where}a template of its task file is wrong: {error}") from error
    except yaml.YAMLError as error:
        raise UserError(f"{where}its task file is no YAML: {error}") from error
    except AssertionError as error:  # HFLM's and tasks' own checks
        raise UserError(f"{where}{error or 'an assertion of lm-eval failed'}") from error
    except (DatasetsError, OSError, KeyError, ValueError) as error:
        reason = f"{error}" if isinstance(error, ValueError | OSError) else repr(error)
        if reason.startswith("malformed node"):  # lm-eval takes what it cannot place for Python
            reason = "doc_to_choice is no field of its rows, no template and no list"
        raise UserError(f"{where}{reason}") from error
