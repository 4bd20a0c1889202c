"""The command `h2o calibrate`: measures on sample texts how heads should share a model's budget."""

from __future__ import annotations

import argparse
from pathlib import Path

from h2o.cli import texts
from h2o.cli.cache_options import add_model, load_model, parse_count
from h2o.config import H2OConfig
from h2o.errors import UserError
from h2o.evaluation.setting import from_config
from h2o.utils.filesystem import make_writable
from h2o.utils.processes import check_single_process
from h2o.utils.progress import stopwatch

DESCRIPTION = """\
Measures on texts of your choice which heads of a model need a larger share of the budget, and
writes a profile for H2OConfig(head_shares=...), a small JSON file.

  h2o calibrate --text news.txt code.py --output profile.json
  h2o calibrate --model Qwen/Qwen3-0.6B --text chapter.txt --output profile.json
"""
EPILOG = """\
About 30000 tokens are enough. Use texts like those that the model will process, preferably of
several kinds. An interrupted run leaves a file next to the profile: start it again to resume it.
"""


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.description, p.epilog = DESCRIPTION, EPILOG
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    add = p.add_argument
    add_model(add, "; bfloat16 is faster on new processors")
    add("--text", required=True, nargs="+", metavar="FILE", help="plain texts, - for stdin")
    add("--output", required=True, type=Path, metavar="PROFILE.json")
    add("--window", type=int, default=1024, metavar="N",
        help="length of a window of text, in tokens (%(default)s)")  # fmt: skip
    add("--limit", type=parse_count, metavar="N",
        help="number of windows, spread over the texts (default: all)")  # fmt: skip
    add("--seed", type=int, default=0, metavar="N", help="random seed (%(default)s)")


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code. Raises: UserError."""
    parser = options.parser
    check_single_process("h2o calibrate")
    if options.output.suffix != ".json":
        parser.error(f"argument --output: {options.output} must end in .json, as profile.json does")
    texts.check_output(parser, "--output", options.output, options.text)
    names = [name if name == "-" else Path(name).name for name in options.text]
    if len(set(names)) < len(names):
        parser.error("argument --text: two files have the same name; rename one")
    contents = [texts.read(parser, "--text", name) for name in options.text]
    try:
        make_writable(options.output.parent)
        measure(options, dict(zip(names, contents, strict=True)))
    except (ImportError, TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    return 0


def measure(options: argparse.Namespace, contents: dict[str, str]) -> None:
    """Load the model, calibrate, and write the profile. Progress goes to stderr."""
    from h2o.calibration.calibrate import calibrate

    log = stopwatch()
    model, tokenizer = load_model(options, [from_config(H2OConfig())], log)
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions and options.window > positions:
        raise ValueError(
            f"--window {options.window} exceeds the {positions} positions of the model, beyond "
            f"which its predictions are worthless: pass --window {positions} or less"
        )
    ids = {
        name: tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
        for name, text in contents.items()
    }
    unfinished = options.output.with_suffix(".unfinished.jsonl")
    profile = calibrate(
        model,
        ids,
        window=options.window,
        windows=options.limit,
        seed=options.seed,
        resume=unfinished,
        progress=lambda done, total: log(f"{done} of {total} passes over a window"),
    )
    profile.save(options.output)
    unfinished.unlink(missing_ok=True)
    log(f"written: {options.output}")
    print(profile)
