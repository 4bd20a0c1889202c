"""The command line `h2o eval`: tasks, perplexity, summaries, facts to find, with several caches."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from h2o import model_identity
from h2o.cli.cache_options import (
    OPTIONS,
    add_cache_options,
    add_compare,
    add_device,
    asked,
    has_budget,
    settings_from,
    spelled,
)
from h2o.cli.prompts_file import ROWS
from h2o.errors import UserError
from h2o.evaluation.facts import KINDS
from h2o.evaluation.setting import (
    GRAMMAR,
    Setting,
    from_options,
)
from h2o.filesystem import make_writable
from h2o.models import DTYPES, need_transformers, torch_device
from h2o.packages import install_command
from h2o.processes import is_first, world_size
from h2o.result_cells import fingerprint

__all__ = ["add_arguments", "run"]

OUTPUT = Path("h2o-eval")

CACHE = ("variant", *OPTIONS)
"""Options that describe one setting."""

DESCRIPTION = """\
What eviction costs: accuracy on lm-eval's tasks, ROUGE of summaries, perplexity, or facts that are
no longer found.

  h2o eval --tasks copa,openbookqa --num_fewshot 5 --heavy 0.1 --recent 0.1
  h2o eval --tasks copa --num_fewshot 5 --compare full,h2o,local --budgets 0.04,0.1,0.2,0.4,0.6
  h2o eval --summarize articles.jsonl --compare full,h2o:0.1+0.1,local:0.2
  h2o eval --perplexity book.txt --compare full,h2o:0.1+0.1,sink:4+0.2
  h2o eval --needle book.txt --compare full,authors,robust-bytes --budgets 0.1,0.2

This is lm-eval's own `run` command: every option of it that is not named here (--num_fewshot,
--include_path, --batch_size, --log_samples, --gen_kwargs, ...) goes there unchanged. --summarize,
--perplexity and --needle are short for its tasks h2o_summaries, h2o_perplexity and h2o_needles.
"""


class Misused(ValueError):
    """Options that do not go together, or have no such value."""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """What is h2o's own; lm-eval's options are left over."""
    p.description = DESCRIPTION
    p.epilog = "settings of --compare, separated by commas:\n" + GRAMMAR
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.allow_abbrev = False  # what looks like one of ours may be one of lm-eval's
    p.add_argument("--json", action="store_true", help="print lm-eval's results of each setting "
                   "instead of a table")  # fmt: skip
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--tasks", "-t", nargs="+", metavar="TASK", help="lm-eval tasks")
    what.add_argument("--summarize", type=Path, metavar="FILE", help="JSON lines of articles")
    what.add_argument("--perplexity", type=Path, metavar="FILE", help="a long plain text")
    what.add_argument("--needle", type=Path, metavar="FILE", help="a plain text to hide facts in")
    p.add_argument("--model", "-M", help="name or folder; default: the embedded SmolLM2-135M")
    p.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: as the model was saved")
    add_device(p.add_argument)
    p.add_argument(
        "--output-path", "--output_path", "-o", type=Path, metavar="FOLDER",
        help="for lm-eval's files, and answers with which an interrupted run goes on; default: "
        "h2o-eval",
    )  # fmt: skip
    p.add_argument(
        "--use_cache", "-c", metavar="PATH",
        help="of one setting: lm-eval's memory of answers, with which an interrupted run goes on; "
        "a file for each model and setting",
    )  # fmt: skip
    p.add_argument("--limit", "-L", type=float, help="only the first so many rows or "
                   "windows; texts of each length, depth and kind of fact (default 4)")  # fmt: skip

    one = p.add_argument_group("the cache")
    one.add_argument("--protocol", choices=["simulate", "drop", "read"],
                     help="one forward with masks (default), a real cache, token by token, or one "
                     "that is cut before a task's question; summaries and needles always use a "
                     "real cache")  # fmt: skip
    one.add_argument("--variant", help="h2o (default), full, local, global, flexgen")
    add_cache_options(one, min_tokens=0)
    one.add_argument("--prompt-length", type=int, metavar="N",
                     help="tokens before the first eviction (simulation, perplexity); perplexity "
                     "and nats lost are then of the tokens after it that the cut can change, not "
                     "of the prompt")  # fmt: skip
    one.add_argument("--ratio-of", choices=["text", "prompt"], help="what fractions refer to")

    many = p.add_argument_group("several settings in one table")
    add_compare(many.add_argument, more=", see below; --profile is of those that are calibrated")
    many.add_argument(
        "--budgets", metavar="AMOUNTS", help="for settings without one, e.g. 0.04,0.2"
    )

    text = p.add_argument_group("perplexity and needles")
    text.add_argument("--window", type=int, default=1024, help="of perplexity (default 1024)")
    text.add_argument("--lengths", default="256,512,1024", metavar="TOKENS",
                      help="of texts in which facts are hidden (default %(default)s)")  # fmt: skip
    text.add_argument("--facts", default="number", metavar="KINDS",
                      help=f"of facts that are hidden: all, or some of {', '.join(KINDS)} "
                      "(default %(default)s)")  # fmt: skip
    text.add_argument("--decoys", type=int, default=0, metavar="N",
                      help="hide N more facts of the kind that is asked for in each text, and as "
                      "many of another kind, and ask for each alone (default "
                      "%(default)s)")  # fmt: skip


def run(parser: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs the command; `args.rest` is for lm-eval. Raises: UserError."""
    rest = args.rest
    try:
        check_numbers(args)
        if args.budgets is not None and args.compare is None:
            raise Misused("--budgets goes with --compare")
        settings, one = compared(args)
        if args.json and args.tasks and not settings:
            raise Misused("--json with --tasks goes with --compare: lm-eval writes one setting's "
                          "results into --output-path")  # fmt: skip
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    need_transformers()
    torch_device(args.device)
    try:
        if args.tasks and not settings:
            # What --model_args says of a setting is checked where these are read.
            check_protocol(args, one * (args.protocol in ("drop", "read")))
            own_command_line(args, rest)
        elif args.tasks:
            check_protocol(args, settings)
            how = asked(args, ("protocol", "prompt_length", "ratio_of"))
            side_by_side(args, settings, ["--tasks", *args.tasks, *rest], **how)
        else:
            task, told, protocol = text_task(args, settings or one)
            arguments = ["--tasks", task, "--metadata", json.dumps(told), *rest]
            if args.summarize:
                arguments = ["--batch_size", f"{ROWS}", *arguments]
            side_by_side(args, settings or one, arguments, protocol=protocol)
    except Misused as error:
        parser.error(str(error))
    except ValueError as error:
        raise UserError(str(error)) from error
    return 0


def compared(args: argparse.Namespace) -> tuple[list[Setting], list[Setting]]:
    """(those of a table, or the one that options describe: one of the two is empty)."""
    if args.compare is None and not has_budget(args):
        return [], [from_options(**asked(args, CACHE))]
    if args.variant is not None:
        raise Misused("--variant is for one setting; write it into --compare")
    return settings_from(args, budgets=args.budgets), []


def check_numbers(args: argparse.Namespace) -> None:
    """Misused for options that no kind of evaluation takes."""
    if args.limit is not None and not (0 < args.limit < 1 or args.limit % 1 == 0 < args.limit):
        raise Misused(
            f"--limit {args.limit:g}: a number of rows or windows, at least 1, or of a task a share"
        )
    if args.prompt_length is not None and args.prompt_length < 1:
        raise Misused(f"--prompt-length {args.prompt_length}: a number of tokens, at least 1")


def text_task(args: argparse.Namespace, settings: list[Setting]) -> tuple[str, dict[str, Any], str]:
    """(lm-eval's task, what --metadata tells it, protocol) of summaries, perplexity or needles."""
    if args.perplexity:
        return perplexity(args, settings)
    what = "needles" if args.needle else "summaries"
    refuse(args, what, "protocol", "prompt_length", "ratio_of", protocol="drop")
    need_caches([x for x in settings if not args.needle or not x.reads_twice], f"{what} need one")
    if args.needle:
        return needles(args)
    return "h2o_summaries", {"file": f"{args.summarize}"}, "drop"


def perplexity(
    args: argparse.Namespace, settings: list[Setting]
) -> tuple[str, dict[str, Any], str]:
    """Does as `text_task`. The prompt's length is the task's, for it decides which tokens count."""
    refuse(args, "perplexity", "ratio_of", ratio_of="text")
    if args.protocol == "read":
        raise Misused("--protocol read: a plain text has no question to cut before")
    if args.protocol == "drop":
        need_caches(settings, "use --protocol simulate")
    else:
        check_protocol(args, settings)
    told = {"file": f"{args.perplexity}", "window": args.window}
    told["prompt_length"] = args.prompt_length or 1
    return "h2o_perplexity", told, args.protocol or "simulate"


def needles(args: argparse.Namespace) -> tuple[str, dict[str, Any], str]:
    """Does as `text_task`. --limit is of texts of each length, depth and kind, not of all."""
    if args.decoys < 0:
        raise Misused(f"--decoys {args.decoys}: at least 0")
    if args.limit is not None and args.limit % 1:
        raise Misused(f"--limit {args.limit:g}: a number of texts, at least 1")
    each = {} if args.limit is None else {"each": int(args.limit)}
    args.limit = None
    told = {
        "file": f"{args.needle}",
        "lengths": whole_numbers("--lengths", args.lengths),
        "facts": args.facts,
        "decoys": args.decoys,
    }
    return "h2o_needles", told | each, "read"


def need_caches(settings: list[Setting], hint: str) -> None:
    """Misused for settings that no real cache can do."""
    for setting in settings:
        if not setting.dropping:
            raise Misused(f"{setting.why_not_dropping}; {hint}")


def check_protocol(args: argparse.Namespace, settings: list[Setting]) -> None:
    """Misused for settings that do not go with the protocol."""
    from h2o.evaluation.protocols import check

    for setting in settings:
        try:
            check(setting, args.protocol or "simulate", args.prompt_length or 1, args.ratio_of)
        except ValueError as error:
            raise Misused(f"{setting.name}: {error}") from error


def whole_numbers(option: str, text: str) -> list[int]:
    """Of a comma-separated list; Misused for anything but numbers from 1 on."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise Misused(f"{option} {text}: numbers of tokens, such as 256,512")
    return [int(part) for part in parts]


def refuse(args: argparse.Namespace, what: str, *names: str, **harmless: Any) -> None:
    """Misused for options that `what` does not have, unless they say what holds anyway."""
    for name, value in asked(args, names).items():
        if harmless.get(name) != value:
            hint = f" but {harmless[name]}" if name in harmless else ""
            raise Misused(f"{spelled(name)} {value}: {what} have no such choice{hint}")


def for_lm_eval(args: argparse.Namespace, rest: list[str]) -> tuple[list[str], dict[str, Any]]:
    """(arguments, --model_args) that options of ours are for lm-eval."""
    arguments = ["--device", args.device, *rest]
    if args.limit is not None:
        arguments += ["--limit", f"{args.limit:g}"]
    model_args = {"pretrained": args.model} if args.model else {}
    if args.dtype != "auto":
        model_args["dtype"] = args.dtype
    return arguments, model_args


def side_by_side(
    args: argparse.Namespace, settings: list[Setting], rest: list[str], **how: Any
) -> None:
    """A table of settings on lm-eval's tasks."""
    comparison = lm_eval_side()
    if args.use_cache:
        raise Misused("--compare remembers answers by itself: drop --use_cache")
    arguments, model_args = for_lm_eval(args, rest)
    arguments += as_model_args(model_args)
    output = args.output_path or OUTPUT
    text = comparison.compare(arguments, settings, output, as_json=args.json, **how)
    if is_first():
        print(text)


def own_command_line(args: argparse.Namespace, rest: list[str]) -> None:
    """lm-eval with its own command line, for one setting."""
    comparison = lm_eval_side()
    arguments, model_args = for_lm_eval(args, ["--tasks", *args.tasks, *rest])
    how = asked(args, ("protocol", "prompt_length", "ratio_of", *CACHE))
    model_type = "h2o"
    if args.model and comparison.is_model_type(args.model):
        model_type = model_args.pop("pretrained")
        if model_type != "h2o" and how:
            raise Misused(f"--model {model_type} is lm-eval's own and has no cache of h2o")
    model_args |= how
    arguments += ["--model", model_type, *as_model_args(model_args)]
    if "--include_path" not in rest:
        arguments += ["--include_path", str(comparison.TASKS)]
    output = args.output_path or OUTPUT
    make_writable(output)
    if args.use_cache and world_size() > 1 and any("tp_plan" in x for x in rest):
        raise Misused("--use_cache does not go with a model that is cut over processes: drop it")
    if args.use_cache:
        # lm-eval files answers under the question alone. Those of another budget or model must
        # not be taken for this one's, nor those of another model that lay at the same place.
        lying = model_identity.files_fingerprint([*map(str, model_args.values()), *rest])
        name = fingerprint({"model": model_type, **model_args, "arguments": rest, "files": lying})
        arguments += ["--use_cache", f"{args.use_cache}-{name}"]
    comparison.run([*arguments, "--output_path", str(output)])


def lm_eval_side() -> Any:
    """The module that knows lm-eval. Raises: UserError where that is not installed."""
    try:
        from h2o.evaluation import side_by_side
    except ImportError as error:
        raise UserError(f"{error}: run {install_command('eval')}") from error
    return side_by_side


def as_model_args(values: dict[str, Any]) -> list[str]:
    return ["--model_args", json.dumps(values)] if values else []
