"""`h2o eval`: runs lm-eval's own command, or compares several settings on lm-eval's tasks."""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import jinja2
import yaml
from lm_eval import simple_evaluate
from lm_eval.__main__ import cli_evaluate
from lm_eval._cli import HarnessCLI
from lm_eval.config.evaluate_config import EvaluatorConfig
from lm_eval.loggers import EvaluationTracker
from lm_eval.tasks import TaskManager
from lm_eval.utils import sanitize_model_name

from h2o.errors import UserError
from h2o.evaluation.cache_bytes import bytes_share
from h2o.evaluation.lm import H2OLM, POLICY
from h2o.evaluation.model_fit import check_fit
from h2o.evaluation.protocols import (
    CONTEXT_REMEDY,
    WINDOW_REMEDY,
    Tally,
    check,
    one_token_notes,
    why_no_text,
    without_prompt_notes,
)
from h2o.evaluation.setting import Setting
from h2o.evaluation.text_table import table
from h2o.evaluation.text_tasks import Samples, TextTask
from h2o.models import DEFAULT_MODEL, embedded_folder, full_name, is_gguf, tokenizer_folder
from h2o.result_file import fingerprint, provenance
from h2o.utils.filesystem import make_writable
from h2o.utils.processes import world_size

TASKS = Path(__file__).parent / "tasks"
"""The folder of h2o's own task files."""

UNITS = {"seen": "text so far"}
"""What the title of a table calls a `ratio_of` that is not a noun"""

PASSED_UNCHANGED = (
    "tasks", "num_fewshot", "limit", "samples", "gen_kwargs", "write_out", "system_instruction",
    "apply_chat_template", "confirm_run_unsafe_code",
)  # fmt: skip
"""lm-eval's options that are passed to `simple_evaluate` unchanged"""

SEEDS = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")

FOR_ONE_SETTING = ("predict_only", "show_config", "check_integrity", "wandb_args", "trackio_args")
"""lm-eval's options that cannot be used with several settings"""

Measured = dict[str, Any]
"""lm-eval's results for one setting, including the model's tally."""


def run(arguments: Sequence[str]) -> None:
    """Run lm-eval's command `run` with these arguments. The model "h2o" is registered."""
    with lm_eval_arguments(arguments), readable_errors():
        cli_evaluate()


def compare(
    arguments: Sequence[str],
    settings: Sequence[Setting],
    output: Path,
    *,
    protocol: str = "simulate",
    prompt_length: int = 1,
    as_json: bool = False,
) -> str:
    """Measure each setting on each task. The model is loaded once.

    Args:
        arguments: lm-eval's arguments, without those for the cache.
        settings: the settings to compare.
        output: folder for lm-eval's files, with a folder for each setting, and for answers. A later
            run with the same model, setting, protocol and versions reuses the answers.
        as_json: return lm-eval's results for each setting as JSON.

    Returns:
        The table as text, or "" in all but the first of several processes.
    """
    arguments = [*arguments, "--output_path", str(output)]
    with lm_eval_arguments(arguments), readable_errors():
        config = EvaluatorConfig.from_cli(HarnessCLI().parse_args())
        pretrained = full_name(config.model_args.get("pretrained") or None)
        config.metadata = (
            name_tokenizer(pretrained) | {"prompt_length": prompt_length} | config.metadata
        )
        manager = task_manager(config)
    for name in FOR_ONE_SETTING:
        if getattr(config, name):
            raise UserError(
                f"--{name} is for one setting, given by --heavy and --recent: leave out --compare, "
                "--preset and --budget"
            )
    of_cache = set(config.model_args) & {*POLICY, "protocol", "prompt_length"}
    if of_cache:
        raise UserError(
            f"--model_args {sorted(of_cache)[0]}: settings of the cache go into --compare"
        )
    for setting in settings:  # before anything slow is started
        check(setting, protocol, prompt_length)
    make_writable(output)
    common = {x: getattr(config, x) for x in ("batch_size", "max_batch_size", "device")}
    with readable_errors():
        lm = H2OLM.create_from_arg_obj(config.model_args | {"variant": "full"}, common)
    check_fit(settings, lm.model, full_cache=protocol != "simulate", simulates=True)
    with readable_errors():
        tasks = manager.load(config.tasks)["tasks"]
    for name, task in tasks.items():
        for setting in settings:
            if task.OUTPUT_TYPE == "generate_until" and (why := why_no_text(setting, protocol)):
                raise UserError(f"task {name} {why}")
    origin = provenance(lm.model, lm.tokenizer, pretrained)
    origin |= {"model_args": config.model_args, "max_length": lm.max_length}
    measured: dict[Setting, Measured] = {}
    for setting in settings:
        lm.use(setting, protocol, prompt_length=prompt_length)
        with readable_errors(), redirect_stdout(sys.stderr):  # lm-eval prints to stdout
            results = measure(lm, tasks, config, manager, output, origin)
        if results is not None:
            measured[setting] = results
    if not measured:
        return ""
    if as_json:
        listed = [x["config"]["h2o"] | {"results": x["results"]} for x in measured.values()]
        return json.dumps({"folder": str(output), "settings": listed}, indent=1)
    notes = [f"written: {output}"]
    of_any = next(iter(measured.values()))
    if protocol == "drop":
        notes[:0] = one_token_notes(of_any["tally"], settings)
    each = (x["config"]["h2o"]["fractions_of"].values() for x in measured.values())
    units = dict.fromkeys(itertools.chain(*each))
    if "window" in units:
        notes[:0] = without_prompt_notes(settings, WINDOW_REMEDY)
    elif protocol == "simulate" and prompt_length == 1:
        notes[:0] = without_prompt_notes(settings, CONTEXT_REMEDY)
    of = " or the ".join(UNITS.get(unit, unit) for unit in units)
    first = f"{origin['model']}, protocol {protocol}, fractions of the {of}"
    return "\n".join([first, "", as_table(measured, tasks, lm.model), "", *notes])


def name_tokenizer(pretrained: str) -> dict[str, str]:
    """Metadata for tasks that need the tokenizer of a model whose name lm-eval does not know."""
    if pretrained == DEFAULT_MODEL:
        return {"tokenizer": str(embedded_folder())}
    return {"tokenizer": str(tokenizer_folder(pretrained))} if is_gguf(pretrained) else {}


def task_manager(config: EvaluatorConfig) -> TaskManager:
    """A manager of the tasks in `config.tasks`. The tasks of h2o and of --include_path are tried
    first, since lm-eval needs ten seconds to list its own."""
    folders = [str(TASKS), *([config.include_path] if config.include_path else [])]
    manager = TaskManager(include_path=folders, include_defaults=False, metadata=config.metadata)
    if isinstance(config.tasks, list) and set(config.tasks) <= set(manager.all_tasks):
        return manager
    config.include_path = folders
    return config.process_tasks()


def measure(
    lm: H2OLM,
    tasks: dict[str, Any],
    config: EvaluatorConfig,
    manager: TaskManager,
    output: Path,
    origin: dict[str, Any],
) -> Measured | None:
    """Measure all tasks with the setting in use, and write lm-eval's files.

    Args:
        origin: everything that answers depend on besides the setting.

    Returns:
        lm-eval's results, or None in all but the first of several processes.
    """
    how = {x: y for x, y in lm.describe().items() if x not in vars(lm.tally)}
    where = {"output_path": str(output / re.sub(r"[^\w.+=,-]", "_", lm.setting.name))}
    answers = output / "answers" / fingerprint(origin | how)
    tracker = EvaluationTracker(**config.hf_hub_log_args | where)
    # If processes share each request, one would wait for others that have its answer stored.
    is_cut = world_size() > 1 and config.model_args.get("tp_plan") is not None
    results = simple_evaluate(
        model=lm,
        task_manager=manager,
        use_cache=None if is_cut else str(answers),
        log_samples=True,
        evaluation_tracker=tracker,
        fewshot_as_multiturn=bool(config.fewshot_as_multiturn),
        **{name: getattr(config, name) for name in PASSED_UNCHANGED},
        **config.cache_requests,
        **dict(zip(SEEDS, config.seed or [None] * 4, strict=True)),
    )
    if results is None:
        return None
    samples = results.pop("samples")
    for logged in samples.values():
        logged.sort(key=lambda sample: sample["doc_id"])  # several processes take turns
    tally = sum((count_requests(lm, tasks[task], x) for task, x in samples.items()), Tally())
    units = {name: getattr(task, "unit", lm.ratio_of) for name, task in tasks.items()}
    units = {name: lm.setting.ratio_of if x == "prompt" else x for name, x in units.items()}
    results["config"]["model_args"] = config.model_args
    results["config"]["h2o"] = how | vars(tally) | {"fractions_of": units, "provenance": origin}
    tracked = tracker.general_config_tracker  # which has no name for a loaded model
    tracked.model_name = origin["model"]
    tracked.model_name_sanitized = sanitize_model_name(origin["model"])
    tracker.save_results_aggregated(results=results, samples=samples)
    date = getattr(tracker, "date_id", None)  # lm-eval only logs that it could not write
    if date is None or not any(output.rglob(f"*_{date}.json")):
        raise UserError(
            f"lm-eval could not write its results to {where['output_path']}. When the disk has "
            "room and the folder is writable, run the command again: it keeps the answers"
        )
    if config.log_samples:
        for task, logged in samples.items():
            tracker.save_results_samples(task_name=task, samples=logged)
    return {**results, "samples": samples, "tally": tally}


def count_requests(lm: H2OLM, task: Any, samples: Samples) -> Any:
    """Tally the logged requests of a task, including those answered in an earlier run."""
    kind = "loglikelihood" if task.OUTPUT_TYPE == "multiple_choice" else task.OUTPUT_TYPE
    once = [x for x in samples if x["filter"] == samples[0]["filter"]]  # each filter logs them all
    return lm.count(kind, [tuple(x) for sample in once for x in sample["arguments"]])


def as_table(measured: dict[Setting, Measured], tasks: dict[str, Any], model: Any) -> str:
    """Format the results as a table with a row for each setting and columns for the tasks."""
    full = next((x["samples"] for setting, x in measured.items() if setting.name == "full"), {})
    rows = []
    for setting, results in measured.items():
        tally = results["tally"]
        size = bytes_share(setting, model, tally.tokens_kept, tally.tokens_seen, tally.requests)
        cells = {
            "setting": setting.name + " *" * setting.sees_future,
            "kept": f"{100 * tally.tokens_kept / tally.tokens_seen:.1f}%",
            "bytes": "" if size is None else f"{size:.1f}%",
            "tokens": f"{tally.tokens_kept / tally.requests:.0f}",
        }
        for name, metrics in results["results"].items():
            if isinstance(task := tasks.get(name), TextTask):
                cells |= task.columns(results["samples"][name], full.get(name))
            else:
                cells |= {f"{name} {x}": text for x, text in format_metrics(metrics)}
        rows.append(cells)
    titles = list(dict.fromkeys(title for cells in rows for title in cells))
    lines = table(titles, [[cells.get(title, "") for title in titles] for cells in rows])
    if any(setting.sees_future for setting in measured):
        lines += "\n* sees the future: not comparable"
    return lines


def format_metrics(metrics: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, value and standard error) of the main metric. ROUGE has all of its three metrics, and
    accuracy is followed by the accuracy with length-normalized likelihoods."""
    values: dict[str, str] = {}
    for key, value in metrics.items():
        name, _, filtered = key.partition(",")
        # RULER's tasks have a metric for each length, which is -1 if there are no texts of it.
        is_missing = name.isdecimal() and value == -1
        if not filtered or name.endswith("_stderr") or is_missing or isinstance(value, str):
            continue
        error = metrics.get(f"{name}_stderr,{filtered}")
        shown = f" ±{error:.3f}" if isinstance(error, float) else ""
        values[name if filtered == "none" else key] = f"{value:.3f}{shown}"
    main = next((x for x in ("acc", "exact_match", "f1", "rouge1", *values) if x in values), "")
    more = {"acc": ["acc_norm"], "rouge1": ["rouge2", "rougeL"]}.get(main, [])
    return ((name, values[name]) for name in (main, *more) if name in values)


@contextmanager
def lm_eval_arguments(arguments: Sequence[str]) -> Iterator[None]:
    """Set the command line of the process, which lm-eval parses itself."""
    before = sys.argv
    sys.argv = ["h2o eval", "run", *arguments]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turn the exceptions that lm-eval raises for a wrong task file into a UserError."""
    from datasets.exceptions import DatasetsError

    try:
        yield
    except (
        jinja2.TemplateError, yaml.YAMLError, DatasetsError, AssertionError, OSError, LookupError,
        ValueError,
    ) as error:  # fmt: skip
        reason = f"{error}"
        if reason.startswith("malformed node"):  # lm-eval parses unknown values as Python
            reason = "doc_to_choice is neither a field of the rows nor a template nor a list"
        elif not isinstance(error, OSError | ValueError):
            reason = f"{type(error).__name__}: {reason}"
        raise UserError(reason) from error
