"""The command `h2o eval`: tasks, perplexity, summaries and needles, with one cache or several."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from h2o import model_identity
from h2o.cli.cache_options import (
    OPTIONS,
    add_cache_options,
    add_compare,
    add_device,
    add_dtype,
    get_given,
    has_budget,
    make_settings,
    parse_count,
    parse_name,
)
from h2o.errors import UserError
from h2o.evaluation.facts import KINDS
from h2o.evaluation.setting import CONSTANT, GRAMMAR, Setting, from_options
from h2o.models import need_transformers, torch_device
from h2o.result_file import fingerprint
from h2o.utils.filesystem import make_writable
from h2o.utils.processes import is_first, world_size

OUTPUT = Path("h2o-eval")

CACHE = ("variant", *OPTIONS)
"""Options that describe a single setting"""

PROTOCOL = ("protocol", "prompt_length")


class TaskOption(NamedTuple):
    """One of h2o's tasks that has its own option, whose value is a file."""

    name: str
    protocols: tuple[str, ...]
    """The protocols that the task supports, the default first"""
    metadata: tuple[str, ...] = ()
    """Options that are passed to the task by lm-eval's --metadata"""


TASK_OPTIONS = {
    "summarize": TaskOption("h2o_summaries", ("drop",)),
    "perplexity": TaskOption("h2o_perplexity", ("simulate", "drop"), ("window", "prompt_length")),
    "needle": TaskOption("h2o_needles", ("read", "drop"), ("lengths", "facts", "decoys")),
}

DESCRIPTION = """\
Measures what eviction costs: accuracy on lm-eval's tasks, ROUGE scores of summaries, perplexity, or
facts that are no longer found.

  h2o eval --tasks copa,openbookqa --num_fewshot 5 --heavy 0.1 --recent 0.1
  h2o eval --tasks copa --num_fewshot 5 --compare full,h2o,local --budgets 0.04,0.1,0.2,0.4,0.6
  h2o eval --summarize articles.jsonl --compare full,h2o:0.1+0.1,local:0.2
  h2o eval --perplexity book.txt --compare full,h2o:0.1+0.1,sink:4+0.2
  h2o eval --needle book.txt --compare full,authors,robust-bytes --budgets 0.1,0.2

This runs lm-eval's own `run` command. Its options that are not listed here (--num_fewshot,
--include_path, --batch_size, --log_samples, --gen_kwargs, ...) are passed to it unchanged.
--summarize, --perplexity and --needle stand for the tasks h2o_summaries, h2o_perplexity and
h2o_needles.
"""


def add_arguments(p: argparse.ArgumentParser) -> None:
    """Add h2o's own options. lm-eval parses the others."""
    p.description = DESCRIPTION
    p.epilog = "settings of --compare, separated by commas:\n" + GRAMMAR
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    p.allow_abbrev = False  # an abbreviation of one of our options may be an option of lm-eval
    p.add_argument("--json", action="store_true", help="print lm-eval's results for each setting "
                   "instead of a table")  # fmt: skip
    what = p.add_mutually_exclusive_group(required=True)
    what.add_argument("--tasks", "-t", nargs="+", metavar="TASK", help="lm-eval tasks")
    what.add_argument(
        "--summarize", type=Path, metavar="FILE", help="JSON Lines with article and summary"
    )
    what.add_argument("--perplexity", type=Path, metavar="FILE", help="a long plain text")
    what.add_argument("--needle", type=Path, metavar="FILE", help="a plain text to hide facts in")
    p.add_argument(
        "--model",
        "-M",
        type=parse_name,
        help="name or folder; default: smollm2, the embedded SmolLM2-135M-Instruct",
    )
    add_dtype(p.add_argument)
    add_device(p.add_argument)
    p.add_argument(
        "--output-path", "--output_path", "-o", type=Path, metavar="FOLDER",
        default=OUTPUT,
        help="folder for lm-eval's files, and for the answers from which an interrupted run "
        "continues (%(default)s)",
    )  # fmt: skip
    p.add_argument(
        "--use_cache", "-c", metavar="PATH",
        help="with one setting: prefix of the files for lm-eval's response cache, from which an "
        "interrupted run continues; each model and setting has its own file",
    )  # fmt: skip
    p.add_argument("--limit", "-L", type=parse_limit, help="number of rows or windows to use, "
                   "from the first, or a fraction of them; with --needle: number of texts for each "
                   "length, depth and kind of fact (default 4)")  # fmt: skip

    one = p.add_argument_group("the cache")
    one.add_argument("--protocol", choices=["simulate", "drop", "read"],
                     help="simulate: one forward pass with masks (default); drop: a real cache, "
                     "one token at a time; read: a real cache that evicts before it sees a task's "
                     "question; summaries and needles always use a real cache")  # fmt: skip
    one.add_argument("--variant", help="h2o (default), full, local, global, flexgen")
    add_cache_options(one, **CONSTANT)
    one.add_argument("--prompt-length", type=parse_count, metavar="N",
                     help="tokens before the first eviction (simulation, perplexity); perplexity "
                     "and nats lost then count only the tokens that eviction can "
                     "change")  # fmt: skip

    many = p.add_argument_group("several settings in one table")
    add_compare(many.add_argument, more="; --profile applies to the calibrated ones")
    many.add_argument(
        "--budgets",
        nargs="+",
        metavar="AMOUNTS",
        help="budgets for settings without one, such as 0.04,0.2",
    )

    text = p.add_argument_group("perplexity and needles")
    text.add_argument(
        "--window", type=int, metavar="N", help="tokens per window of --perplexity (default 1024)"
    )
    text.add_argument("--lengths", metavar="TOKENS",
                      help="lengths, in tokens, of the texts in which facts are hidden "
                      "(default 256,512,1024)")  # fmt: skip
    text.add_argument("--facts", metavar="KINDS",
                      help=f"kinds of hidden facts: all, or a list from {', '.join(KINDS)} "
                      "(default number)")  # fmt: skip
    text.add_argument("--decoys", type=int, metavar="N",
                      help="unless 0: hide N+1 facts of each of two kinds in each text, and ask "
                      "about each separately (default 0)")  # fmt: skip


def check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Add `is_table`, `settings`, `how` (the protocol), and `rest` (lm-eval's arguments)."""
    args.is_table = args.compare is not None or has_budget(args) or not args.tasks
    args.settings = choose_settings(args)
    if args.json and not args.is_table:
        parser.error("--json with --tasks requires --compare: for one setting lm-eval writes the "
                     "results into --output-path")  # fmt: skip
    if args.is_table and args.use_cache:
        parser.error(
            "--compare, --preset and --budget store answers by themselves: drop --use_cache"
        )
    if args.rest and not args.rest[0].startswith("-"):  # lm-eval would ignore it
        parser.error(
            f"{args.rest[0]} belongs to no option: separate the values of a list by commas"
        )
    args.how = get_given(args, PROTOCOL)
    tasks = ["--tasks", *args.tasks] if args.tasks else choose_text_task(args, args.how)
    args.rest = [*tasks, *args.rest]


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit code. Raises: UserError."""
    need_transformers()
    torch_device(args.device)
    from h2o.evaluation import side_by_side

    arguments = ["--device", args.device, *args.rest]
    if args.limit is not None:
        arguments += ["--limit", f"{int(args.limit) if args.limit >= 1 else args.limit}"]
    model_args = {"pretrained": args.model} if args.model else {}
    if args.dtype != "auto":
        model_args["dtype"] = args.dtype
    try:
        if not args.is_table:
            model_args |= args.how | get_given(args, CACHE)
            run_lm_eval(args, arguments, model_args)
            return 0
        text = side_by_side.compare(
            [*arguments, *as_model_args(model_args)], args.settings, args.output_path,
            as_json=args.json, **args.how,
        )  # fmt: skip
        if is_first():
            print(text)
    except ValueError as error:
        raise UserError(str(error)) from error
    return 0


def parse_limit(text: str) -> float:
    """Parse a number of rows that is at least 1, or a fraction of them."""
    limit = float(text)
    if not (0 < limit < 1 or limit % 1 == 0 < limit):
        raise argparse.ArgumentTypeError(
            f"{text} is neither a number of rows or windows, at least 1, nor a fraction below 1"
        )
    return limit


def choose_settings(args: argparse.Namespace) -> list[Setting]:
    """The settings of --compare, or the one that the other options describe."""
    if args.budgets is not None and args.compare is None:
        raise ValueError("--budgets requires --compare")
    if args.compare is None and not has_budget(args):
        return [from_options(**get_given(args, CACHE))]
    if args.variant is not None:
        raise ValueError("--variant is for one setting; write it into --compare")
    return make_settings(args, budgets=",".join(args.budgets or ()))


def choose_text_task(args: argparse.Namespace, how: dict[str, Any]) -> list[str]:
    """lm-eval's arguments for --summarize, --perplexity or --needle. Fills in the protocol in
    `how`."""
    (option,) = get_given(args, tuple(TASK_OPTIONS))
    task = TASK_OPTIONS[option]
    protocol = how.setdefault("protocol", task.protocols[0])
    if protocol not in task.protocols:
        known = " or ".join(task.protocols)
        raise ValueError(f"--protocol {protocol}: --{option} supports only {known}")
    metadata = {"file": f"{getattr(args, option)}"} | get_given(args, task.metadata)
    if "prompt_length" in metadata and protocol == "drop":
        how.pop("prompt_length")  # the task applies it to its windows, not the protocol
    arguments = ["--batch_size", "16"] if args.summarize else []
    if args.needle and args.limit is not None:  # counts texts of each length, depth and kind
        metadata["each"], args.limit = args.limit, None
    return ["--tasks", task.name, *arguments, "--metadata", json.dumps(metadata)]


def run_lm_eval(
    args: argparse.Namespace,
    arguments: list[str],
    model_args: dict[str, Any],
) -> None:
    """Run lm-eval's own command for the one setting that `model_args` describe."""
    from h2o.evaluation import side_by_side

    rest = args.rest
    arguments += ["--model", "h2o", *as_model_args(model_args)]
    if "--include_path" not in rest:
        arguments += ["--include_path", str(side_by_side.TASKS)]
    make_writable(args.output_path)
    if args.use_cache and world_size() > 1 and any("tp_plan" in x for x in rest):
        args.parser.error("--use_cache does not work with tensor parallelism (tp_plan): drop it")
    if args.use_cache:
        # lm-eval's cache is keyed by the question alone. The file name therefore depends on the
        # budget and on the model's files, since another model may have been at the same path.
        files = model_identity.files_fingerprint([*map(str, model_args.values()), *rest])
        name = fingerprint({"model": "h2o", **model_args, "arguments": rest, "files": files})
        arguments += ["--use_cache", f"{args.use_cache}-{name}"]
    side_by_side.run([*arguments, "--output_path", str(args.output_path)])


def as_model_args(values: dict[str, Any]) -> list[str]:
    return ["--model_args", json.dumps(values)] if values else []
