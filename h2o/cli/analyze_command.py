"""The command `h2o analyze`: a page with pictures and numbers about one text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from h2o import models
from h2o.cli import texts
from h2o.cli.cache_options import (
    OPTIONS,
    add_cache_options,
    add_compare,
    add_model,
    load_model,
    make_setting,
    parse_count,
)
from h2o.errors import UserError
from h2o.evaluation.setting import parse_all
from h2o.utils.draw import import_optional
from h2o.utils.filesystem import make_writable
from h2o.utils.processes import check_single_process
from h2o.utils.progress import stopwatch

DESCRIPTION = """\
Shows what a model attends to in a text, and which tokens an H2O cache would keep. Writes a page for
a browser with the H2O paper's observations and the text shaded by score.

  h2o analyze --heavy 0.1 --recent 0.1
  h2o analyze --model Qwen/Qwen3-0.6B --text chapter.txt --output chapter.html
"""
CACHE_FIELDS = tuple(name for name in OPTIONS if name != "positions")
"""Options of a simulated cache. There is no --positions, since a simulation is one forward pass, in
which a key cannot change its position."""

COMPARE = "h2o:0.05,h2o:0.1,h2o:0.2,h2o:0.4,robust:0.2,sink:4+0.2,local:0.2"


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.description = DESCRIPTION
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    add = p.add_argument
    add_model(add)
    add("--text", metavar="FILE", help="plain text, - for stdin; default: the shipped article")
    add("--output", type=Path, default=Path("h2o-analysis.html"), metavar="PAGE.html",
        help="the page to write (%(default)s)")  # fmt: skip
    add("--tokens", type=parse_count, metavar="N", help="use at most this many tokens of the "
        "text; default: as many as the model has positions")  # fmt: skip
    add_cache_options(p, CACHE_FIELDS)
    add("--prompt-length", type=parse_count, default=1, metavar="N",
        help="tokens before the first eviction (%(default)s)")  # fmt: skip
    add_compare(add, COMPARE, ", whose retained attention is plotted too; none: no other settings")
    add("--removal-tokens", type=int, default=1024, metavar="N", help="measure the effect of "
        "removing keys on the first N tokens; 0: skip this (%(default)s)")  # fmt: skip


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Add the `setting`, the `settings` to compare and the `content` of --text to the options."""
    if options.removal_tokens < 0 or options.removal_tokens in (1, 2):
        parser.error("argument --removal-tokens: must be 0 or at least 3")
    texts.check_output(parser, "--output", options.output, [options.text])
    options.setting = make_setting(options)
    if options.setting.config.heavy == 0:
        parser.error("argument --heavy: must be above 0: the page shows the heavy hitters")
    compare = COMPARE if options.compare is None else options.compare
    options.settings = [] if compare == "none" else parse_all(compare, None)
    for setting in options.settings:
        if setting.variant != "h2o":
            parser.error(f"argument --compare: {setting.name} is not a cache; {COMPARE} are")
    is_shipped = options.text is None
    options.content = texts.article() if is_shipped else texts.read(parser, "--text", options.text)


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code. Raises UserError."""
    check_single_process("h2o analyze")
    try:
        import_optional("matplotlib")
        import_optional("jinja2")
        make_writable(options.output.absolute().parent)
        measure(options)
    except (ImportError, TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    return 0


def measure(options: argparse.Namespace) -> None:
    """Load the model, measure, and write the page. Progress goes to stderr."""
    from h2o.analysis.analyze import analyze
    from h2o.analysis.figures import OWN
    from h2o.analysis.given_config import explain_floor
    from h2o.analysis.page import LONGEST, write

    log = stopwatch()
    config, settings = options.setting.config, options.settings
    model, tokenizer = load_model(options, [options.setting, *settings], log)
    ids = tokenizer(options.content, return_tensors="pt", verbose=False)["input_ids"]
    positions = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    total = ids.shape[1]
    ids = ids[:, : min(filter(None, (options.tokens, positions, total)))]
    if ids.shape[1] > LONGEST:
        raise ValueError(
            f"a page shows at most {LONGEST} tokens, not {ids.shape[1]}: pass --tokens {LONGEST}"
        )
    log(f"running {ids.shape[1]} of {total} tokens, with full attention and with the cache")
    floor = explain_floor(model, config.for_model(model), ids.shape[1])
    if floor and options.min_tokens is None:
        log(floor)
    a = analyze(model, ids, h2o_config=config, prompt_length=options.prompt_length)
    for setting in settings:
        log(f"cache {setting.name}")
        a.simulate_cache(setting.config)
    removal: dict[str, Any] | None = None
    if options.removal_tokens:
        log(f"removing keys from the first {min(len(a), options.removal_tokens)} tokens")
        removal = {"limit": options.removal_tokens}
        a.removal(**removal)
    log("drawing")
    write(
        a,
        tokenizer,
        options.output,
        model=models.full_name(options.model),
        source=options.text or texts.ARTICLE,
        budget=options.setting.name,
        configs={setting.name: setting.config for setting in settings} or OWN,
        removal=removal,
    )
    log(f"written: {options.output}")
