"""The command line `h2o`, also as `python -m h2o`: its commands are those of COMMANDS.

Each command is a module that is imported when the command is asked for. It has

    add_arguments(parser)           its options, of which none but the standard library is needed
    check(parser, options)          if there is one: ends by `parser.error`, OSError, TypeError or
                                    ValueError for options that do not go together, before a
                                    library is imported
    run(parser, options) -> int     the command, and its exit code; UserError or UnsupportedError
                                    (`h2o.errors`) for what the user can put right

Only the standard library is imported until a command runs, so that --help and
mistakes in the arguments are answered at once.

Exit codes: 0 done, 1 it could not be done, 2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn


class Command(NamedTuple):
    name: str
    module: str
    help: str
    loads_model: bool = True
    """Whether other libraries must be silenced first, which takes a second"""


COMMANDS = (
    Command("info", "h2o.cli.info_command", "print versions, backends and what fits", False),
    Command("generate", "h2o.cli.generate_command", "generate with an H2O cache"),
    Command("eval", "h2o.cli.eval_command", "measure what eviction costs in accuracy"),
    Command("analyze", "h2o.cli.analyze_command", "draw what a model attends to, as a page"),
    Command("calibrate", "h2o.cli.calibrate_command", "measure which heads need more of a cache"),
    Command("bench", "h2o.cli.bench_command", "time a model with the full cache and with h2o"),
)


SPIN_COUNT = "10000"
"""Rounds that an idle thread of torch waits for work before it sleeps. libgomp's default is thirty
times as many, milliseconds in which a busy machine runs nothing else on that core."""


class Parser(argparse.ArgumentParser):
    """argparse, with its errors on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` are those of the process by default."""
    if sys.stderr is None:  # closed: what would be said there is said nowhere
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        print("h2o: error: standard output is closed", file=sys.stderr)
        return 1
    parser = Parser(prog="h2o", description="Heavy-hitter (H2O) KV-cache eviction.")
    try:
        try:
            options = parse(parser, sys.argv[1:] if arguments is None else arguments)
            return run(options)
        finally:
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # what read our output, `head` for one, has ended
        drop_output()
        return 1
    except OSError as error:  # a full disk, for one
        drop_output()
        return report_error(parser, error)
    except ImportError as error:
        if str(error.name).partition(".")[0] == "h2o":
            raise
        extra = "eval" if "eval" in (arguments or sys.argv) else "hf"
        from h2o.packages import install_command

        return report_error(parser, f"{error}: run {install_command(extra)}")


def parse(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command that is asked for, with its `entry`, `module` and `parser`."""
    from h2o.packages import version

    shown = f"h2o-kv {version('h2o-kv')}"
    parser.add_argument(
        "--version", action="version", version=shown, help="print the version and exit"
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for entry in COMMANDS:
        subparser = commands.add_parser(entry.name, help=entry.help, description=entry.help)
        if entry.name == asked:  # the arguments of others may need packages that take long
            module = importlib.import_module(entry.module)
            module.add_arguments(subparser)
            subparser.set_defaults(entry=entry, module=module, parser=subparser)
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "eval":
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest  # of h2o eval: for lm-eval
    return options


def parser_of(entry: Command) -> Parser:
    """The parser of one command, for what lists options."""
    parser = Parser(prog=f"h2o {entry.name}", description=entry.help)
    importlib.import_module(entry.module).add_arguments(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Run a parsed command and return its exit code."""
    if check := getattr(options.module, "check", None):
        try:
            check(options.parser, options)
        except OSError as error:
            from h2o.utils.filesystem import explain_unreadable

            named = error.filename
            options.parser.error(explain_unreadable(named, error) if named else str(error))
        except (TypeError, ValueError) as error:
            options.parser.error(str(error))
    from h2o.errors import UnsupportedError, UserError
    from h2o.models import quiet_libraries

    try:
        if options.entry.loads_model:
            if "OMP_WAIT_POLICY" not in os.environ:
                os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
            quiet_libraries()
        return options.module.run(options.parser, options)
    except (UserError, UnsupportedError) as error:
        return report_error(options.parser, error)


def report_error(parser: Parser, error: Exception | str) -> int:
    """Print an error in one line, and return the exit code."""
    print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 1


def drop_output() -> None:
    """Discard the rest of the output, so that nothing tries to write it when the process ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
