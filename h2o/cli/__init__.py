"""The command line `h2o`, also as `python -m h2o`: its commands are those of COMMANDS.

Only the standard library is imported until a command runs, so that --help and
mistakes in the arguments are answered at once. Each command is an entry in
COMMANDS: a name, one line of help, a function that adds its arguments and one
that runs it and returns the exit code.

Exit codes: 0 done, 1 it could not be done, 2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple, NoReturn


class Parser(argparse.ArgumentParser):
    """argparse, with its errors on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class Command(NamedTuple):
    name: str
    help: str
    add_arguments: Callable[[Parser], None]
    run: Callable[[Parser, argparse.Namespace], int]


class Version(argparse.Action):
    """--version, which looks for it only when asked."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(nargs=0, help="the version, and no more", **kwargs)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"h2o-kv {version('h2o-kv')}")
        parser.exit()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` are those of the process by default."""
    if sys.stderr is None:  # closed: what would be said there is said to nobody
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        print("h2o: error: standard output is closed", file=sys.stderr)
        return 1
    parser = Parser(prog="h2o", description="Heavy-hitter (H2O) KV-cache eviction.")
    try:
        try:
            return run_command(parser, sys.argv[1:] if arguments is None else arguments)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # whoever read our output, `head` for one, has gone
        drop_output()
        return 1
    except OSError as error:  # a full disk, for one
        drop_output()
        return failed(parser, error)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "h2o":
            raise
        extra = "eval" if "eval" in (arguments or sys.argv) else "hf"
        return failed(parser, f"{error}: run pip install 'h2o-kv[{extra}]'")


def drop_output() -> None:
    """Of what could not be written nothing more is tried when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_command(parser: Parser, arguments: Sequence[str]) -> int:
    parser.add_argument("--version", action=Version)
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    named = next((argument for argument in arguments if not argument.startswith("-")), None)
    for command in COMMANDS:
        own = commands.add_parser(command.name, help=command.help, description=command.help)
        if command.name == named:  # the arguments of others may need packages that take long
            command.add_arguments(own)
        own.set_defaults(run=command.run, parser=own)
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "eval":
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest  # of h2o eval: for lm-eval
    return options.run(options.parser, options)


def failed(parser: Parser, error: Exception | str) -> int:
    """Say in one line what the user can put right."""
    print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 1


# ---- h2o info ------------------------------------------------------------------------------------


def info_arguments(parser: Parser) -> None:
    from h2o.cli import info

    info.add_arguments(parser)


def run_info(parser: Parser, options: argparse.Namespace) -> int:
    from h2o import errors
    from h2o.cli import info

    try:
        return info.run(options)
    except errors.UserError as error:
        return failed(parser, error)


# ---- h2o generate --------------------------------------------------------------------------------


def amount(text: str) -> int | float:
    """A budget: 256 is a number of tokens, 0.1 or 1.0 a fraction of the prompt."""
    try:
        return int(text)
    except ValueError:
        return float(text)


def generate_arguments(parser: Parser) -> None:
    add = parser.add_argument_group("what to generate from").add_argument
    add("--model", metavar="NAME", help="hub name, folder or .gguf file (SmolLM2-135M-Instruct)")
    add("--prompt", metavar="TEXT", help="the prompt; the text of --prompt-file follows it")
    add("--prompt-file", metavar="FILE", help="a text file, - for standard input; without either "
        "option a shipped article of 2100 tokens with a question about it")  # fmt: skip
    add("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    add = parser.add_argument_group("what the cache keeps").add_argument
    add("--heavy", type=amount, default=0.1, metavar="K", help="heavy hitters: an integer counts "
        "tokens, a number with a point is a fraction of the prompt (%(default)s)")  # fmt: skip
    add("--recent", type=amount, default=0.1, metavar="K", help="newest tokens (%(default)s)")
    add("--sinks", type=int, default=0, metavar="N", help="first tokens (%(default)s)")
    add("--rank-by", choices=("sum", "mean"), default="sum", help="accumulated attention, or the "
        "same per query that has seen the key (%(default)s)")  # fmt: skip
    add("--decay", type=float, default=1.0, metavar="D", help="what remains of a score after one "
        "more token, 0 to 1 (%(default)s)")  # fmt: skip
    add("--value-weighted", action="store_true", help="rank times the norm of the value")
    add("--merge", type=float, metavar="C", help="a key that leaves goes into one whose cosine "
        "with it is above C (0.85 is a good start) instead of being dropped")  # fmt: skip
    add("--positions", choices=("original", "rolled"), default="original", help="of keys: where "
        "they stood in the text, or their rank in the cache (%(default)s)")  # fmt: skip
    add("--kv-dtype", choices=("auto", "int8", "int8-int4"), help="store keys in eight bits, and "
        "values in eight or four; auto: in four where they go with the model")  # fmt: skip
    add("--profile", metavar="FILE", help="share the budget among heads as `h2o calibrate` found "
        "it; shipped: the profile that comes with h2o for the model")  # fmt: skip
    add = parser.add_argument_group("how").add_argument
    add("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto",
        help="auto: as the model was saved")  # fmt: skip
    add("--max-new-tokens", type=int, default=120, metavar="N", help="(%(default)s)")
    add("--compare", action="store_true", help="show it beside the full cache, a preset in a "
        "tenth of its bytes, and `local`, the same budget without heavy hitters")  # fmt: skip
    add("--compile", action="store_true", help="compile the decode step first (not the full "
        "cache's), which takes a minute or two and a C++ compiler")  # fmt: skip
    add("--json", action="store_true", help="for machines: one object, nothing else")


def run_generate(parser: Parser, options: argparse.Namespace) -> int:
    from h2o.cli import comparison, texts
    from h2o.config import H2OConfig
    from h2o.profile import Profile

    if options.max_new_tokens < 1:
        parser.error("argument --max-new-tokens: must be at least 1")
    names = (
        "heavy", "recent", "sinks", "rank_by", "decay", "value_weighted", "merge", "positions",
        "kv_dtype",
    )  # fmt: skip
    try:
        shares = options.profile
        if shares not in (None, "shipped"):
            shares = Profile.load(shares)
        config = H2OConfig(**{name: getattr(options, name) for name in names}, shares=shares)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    document = None
    if options.prompt_file is not None:
        document = texts.read(parser, "--prompt-file", options.prompt_file)
    prompt = texts.checked(parser, "--prompt", options.prompt)

    from h2o import models

    try:
        models.quiet_libraries()
        from h2o import generate

        result = generate.generate(
            generate.Request(
                config=config,
                model=options.model,
                prompt=prompt,
                document=document,
                chat=options.chat,
                dtype=options.dtype,
                max_new_tokens=options.max_new_tokens,
                compare=options.compare,
                compile=options.compile,
            ),
            generate.Progress(quiet=options.json),
            None if options.json or options.compare else write,
        )
    except models.UserError as error:
        return failed(parser, error)
    if options.json:
        print(json.dumps(asdict(result), indent=2))
    else:
        print("\n".join(comparison.comparison(result)) if options.compare else "\n")
        print("\n".join(comparison.table(result)))
    return 0


def write(text: str) -> None:
    print(text, end="", flush=True)


# ---- h2o eval ------------------------------------------------------------------------------------


def eval_arguments(parser: Parser) -> None:
    from h2o.evaluate import command

    command.add_arguments(parser)


def run_eval(parser: Parser, options: argparse.Namespace) -> int:
    from h2o import models
    from h2o.evaluate import command

    models.quiet_libraries()
    try:
        command.run(options, options.rest)
    except models.UserError as error:
        return failed(parser, error)
    return 0


# ---- h2o analyze ---------------------------------------------------------------------------------


def analyze_arguments(parser: Parser) -> None:
    from h2o.cli import analyze

    analyze.add_arguments(parser)


def run_analyze(parser: Parser, options: argparse.Namespace) -> int:
    from h2o import models
    from h2o.cli import analyze
    from h2o.processes import refuse_several

    models.quiet_libraries()
    try:
        refuse_several("h2o analyze")
        analyze.run(parser, options)
    except models.UserError as error:
        return failed(parser, error)
    return 0


# ---- h2o calibrate -------------------------------------------------------------------------------


def calibrate_arguments(parser: Parser) -> None:
    from h2o.cli import calibrate

    calibrate.add_arguments(parser)


def run_calibrate(parser: Parser, options: argparse.Namespace) -> int:
    from h2o import models
    from h2o.cli import calibrate
    from h2o.processes import refuse_several

    models.quiet_libraries()
    try:
        refuse_several("h2o calibrate")
        calibrate.run(parser, options)
    except models.UserError as error:
        return failed(parser, error)
    return 0


# ---- h2o stream ----------------------------------------------------------------------------------


def stream_arguments(parser: Parser) -> None:
    from h2o.cli import stream

    stream.add_arguments(parser)


def run_stream(parser: Parser, options: argparse.Namespace) -> int:
    from h2o import models
    from h2o.cli import stream

    models.quiet_libraries()
    try:
        stream.run(parser, options)
    except models.UserError as error:
        return failed(parser, error)
    return 0


# ---- h2o bench -----------------------------------------------------------------------------------


def bench_arguments(parser: Parser) -> None:
    from h2o.bench.options import add_arguments

    add_arguments(parser)


def run_bench(parser: Parser, options: argparse.Namespace) -> int:
    from h2o import models
    from h2o.bench.options import check

    wanted = check(parser, options)
    try:
        models.need_transformers()
        from h2o.bench.run import main as bench

        models.quiet_libraries()
        return bench(options, wanted)
    except models.UserError as error:
        return failed(parser, error)


COMMANDS = (
    Command("info", "what the core runs on, for bug reports", info_arguments, run_info),
    Command("generate", "generate with an H2O cache", generate_arguments, run_generate),
    Command("eval", "what eviction costs in accuracy", eval_arguments, run_eval),
    Command("analyze", "see heavy hitters: a page of one text", analyze_arguments, run_analyze),
    Command("calibrate", "which heads need more of a cache", calibrate_arguments, run_calibrate),
    Command("stream", "text without end, a chat without end", stream_arguments, run_stream),
    Command("bench", "time h2o beside its peers", bench_arguments, run_bench),
)


if __name__ == "__main__":
    sys.exit(main())
