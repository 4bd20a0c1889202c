"""The command line `h2o`, also run as `python -m h2o`. COMMANDS lists its commands.

Each command is a module that is imported only when that command is called. It defines

    add_arguments(parser)           add the command's options; needs only the standard library
    check(parser, options)          optional: reject options that do not go together, by
                                    `parser.error`, OSError, TypeError or ValueError, before any
                                    library is imported
    run(options) -> int             run the command and return its exit code; raise UserError or
                                    UnsupportedError (`h2o.errors`) for problems that the user can
                                    fix

Only the standard library is imported until a command runs, so --help and wrong
arguments are answered at once.

Exit codes: 0 success, 1 failure, 2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn


class Command(NamedTuple):
    name: str
    """The command's module is `h2o.cli.<name>_command`."""
    help: str
    loads_model: bool = True
    """Whether the command loads a model. If so, other libraries are silenced first, which takes a
    second."""


COMMANDS = (
    Command("info", "print versions and backends, check a model", False),
    Command("generate", "generate text with an H2O cache"),
    Command("eval", "measure what eviction costs in accuracy"),
    Command("analyze", "write a page of what a model attends to"),
    Command("calibrate", "measure which heads need a larger budget"),
    Command("recommend", "measure which budget to use for a model and a text"),
)


SPIN_COUNT = "10000"
"""Rounds that an idle torch thread spins before it sleeps. libgomp's default is thirty times as
many: milliseconds during which a busy machine runs nothing else on that core."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that prints errors on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. `arguments` defaults to the arguments of the process."""
    if sys.stderr is None:  # closed: discard messages
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        print("h2o: error: standard output is closed", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        # An answer may have characters that the encoding of the output lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
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
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited
        drop_output()
        return 1
    except OSError as error:  # such as a full disk
        drop_output()
        return report_error(parser, error)
    except ImportError as error:
        if str(error.name).partition(".")[0] == "h2o":
            raise
        extra = "eval" if "eval" in (arguments or sys.argv) else "hf"
        from h2o.packages import install_command

        return report_error(parser, f"{error}: run {install_command(extra)}")


def parse(parser: Parser, arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments. The options include the command's `entry`, `module` and `parser`."""
    from h2o.packages import version

    shown = f"h2o-kv {version('h2o-kv')}"
    parser.add_argument(
        "--version", action="version", version=shown, help="print the version and exit"
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    asked = next((argument for argument in arguments if not argument.startswith("-")), None)
    for entry in COMMANDS:
        subparser = commands.add_parser(entry.name, help=entry.help, description=entry.help)
        if entry.name == asked:  # importing the other commands' modules would take time
            module = importlib.import_module(f"h2o.cli.{entry.name}_command")
            module.add_arguments(subparser)
            subparser.set_defaults(entry=entry, module=module, parser=subparser)
    options, rest = parser.parse_known_args(arguments)
    if rest and options.command != "eval":
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    options.rest = rest  # h2o eval passes these on to lm-eval
    return options


def parser_of(entry: Command) -> Parser:
    """Build the parser of one command. Tools that list options call it."""
    parser = Parser(prog=f"h2o {entry.name}", description=entry.help)
    importlib.import_module(f"h2o.cli.{entry.name}_command").add_arguments(parser)
    return parser


def run(options: argparse.Namespace) -> int:
    """Run a parsed command and return its exit code."""
    if check := getattr(options.module, "check", None):
        try:
            with one_line_warnings(options.parser):
                check(options.parser, options)
        except OSError as error:
            from h2o.utils.filesystem import explain_unreadable

            named = error.filename
            options.parser.error(explain_unreadable(named, error) if named else str(error))
        except (TypeError, ValueError) as error:
            options.parser.error(str(error))
    from h2o.errors import UnsupportedError, UserError
    from h2o.models import quiet_libraries
    from h2o.utils.processes import leave_group

    try:
        if options.entry.loads_model:
            if "OMP_WAIT_POLICY" not in os.environ:
                os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
            quiet_libraries()
        code: int = options.module.run(options)
        leave_group()
        return code
    except (UserError, UnsupportedError) as error:
        return report_error(options.parser, error)


@contextmanager
def one_line_warnings(parser: Parser) -> Iterator[None]:
    """Print the warnings of the block on one line each, as errors are."""
    with warnings.catch_warnings(record=True) as caught:
        yield
    for warning in caught:
        print(f"{parser.prog}: warning: {warning.message}", file=sys.stderr)


def report_error(parser: Parser, error: Exception | str) -> int:
    """Print an error on one line and return the exit code."""
    print(f"{parser.prog}: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 1


def drop_output() -> None:
    """Discard the rest of the output, so that Python does not try to write it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
