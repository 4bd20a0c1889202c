"""The command `h2o generate`: generates from a prompt with an H2O cache, or with several caches."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from h2o import models, packages
from h2o.cli import texts
from h2o.cli.cache_options import (
    PINS,
    add_cache_options,
    add_model,
    load_model,
    make_setting,
    parse_count,
)
from h2o.cli.comparison import Comparison
from h2o.config import H2OConfig
from h2o.errors import UserError
from h2o.evaluation.setting import parse_all
from h2o.utils.progress import print_line

QUESTION = "What was the name of the coal ship that was wrecked in 1911?"
"""Appended to the shipped article if the user gives no prompt."""
FACT = "Sabrina"
"""The answer to QUESTION. The article mentions it before its last fifth."""

USUAL = "usual"
"""Value of --compare without settings"""
SMALLER_BUDGET = 0.1
"""The smaller budget of `usual_caches`"""


class InOrder(argparse.Action):
    """Stores a value, and in `options.order` the options that have been given so far."""

    def __call__(self, parser: Any, namespace: Any, values: Any, name: Any = None) -> None:
        setattr(namespace, self.dest, values)
        namespace.order = [*getattr(namespace, "order", ()), self.dest]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to generate from").add_argument
    add_model(add)
    add("--prompt", action=InOrder, metavar="TEXT", help="the prompt, before or after the text of "
        "--prompt-file, in the order of the two options")  # fmt: skip
    add("--prompt-file", action=InOrder, metavar="FILE", help="a text file, - for standard input; "
        "without either option: a shipped article of 2100 tokens and a question about "
        "it")  # fmt: skip
    add("--chat", action=argparse.BooleanOptionalAction, help="wrap the prompt in the model's chat "
        "template. Done by default if there is one. With --no-chat the model continues the "
        "prompt")  # fmt: skip
    add("--system", metavar="TEXT", help="text of the chat's system message")
    add("--chat-template-kwargs", type=parse_template_kwargs, default={}, metavar="JSON",
        help="arguments of the chat template, such as '{\"enable_thinking\": false}', or tools and "
        "documents")  # fmt: skip
    add("--pin", type=PINS, metavar="WHAT", help="keys that are never evicted; they count "
        "toward the budget. system: the chat's system turn; prompt: the whole prompt; or spans of "
        "its tokens, such as 0:40,100:120")  # fmt: skip
    add_cache_options(parser.add_argument_group("what the cache keeps"))
    add = parser.add_argument_group("how to generate").add_argument
    add("--max-new-tokens", type=parse_count, default=120, metavar="N",
        help="maximum number of new tokens (%(default)s)")  # fmt: skip
    add("--compare", nargs="?", const=USUAL, metavar="SETTINGS", help="also answer with the "
        "full cache and with these settings (h2o eval --help lists them). Without SETTINGS: with "
        "budget=0.1 and `local`, a sliding window of the same number of bytes, or of keys if the "
        "budget is a number of keys")  # fmt: skip
    add("--compile", action="store_true", help="compile the decode step first (except the full "
        "cache's), which takes a minute or two and needs a C++ compiler. Fractions are then "
        "fractions of the prompt")  # fmt: skip
    add("--json", action="store_true", help="print one JSON object and nothing else")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Add the `setting`, the `settings` to compare and the `document` to the options."""
    if options.compile and options.ratio_of is None:
        options.ratio_of = "prompt"  # the slots of a graph do not grow
    options.setting = make_setting(options)
    named = options.compare not in (None, USUAL)
    options.settings = parse_all(options.compare, None) if named else []
    for setting in options.settings:
        if not setting.is_cache:
            parser.error(f"argument --compare: {setting.why_no_cache}")
    if options.system is not None:
        if options.chat is False:
            parser.error("argument --system: requires --chat")
        options.chat = True
    if options.chat_template_kwargs:
        if options.chat is False:
            parser.error("argument --chat-template-kwargs: cannot be combined with --no-chat")
        options.chat = True
    if options.pin == "system" and options.system is None:
        parser.error("argument --pin: system requires --system TEXT")
    options.document = None
    if options.prompt_file is not None:
        options.document = texts.read(parser, "--prompt-file", options.prompt_file)
    try:
        (options.prompt or "").encode()
    except UnicodeEncodeError:
        parser.error("argument --prompt: not a text in UTF-8")


def parse_template_kwargs(text: str) -> dict[str, Any]:
    """Parse a JSON object with arguments for a chat template."""
    from h2o.hf.chat.chat_template import check_template_arguments

    try:
        arguments: dict[str, Any] = json.loads(text)
        check_template_arguments(arguments)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(
            f"not JSON ({error.msg}): write an object such as '{{\"enable_thinking\": false}}'"
        ) from None
    except TypeError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return arguments


def run(options: argparse.Namespace) -> int:
    """Run the command and return its exit code. Raises: UserError."""
    from h2o.cli import comparison

    result = generate(options)
    asked = (QUESTION, FACT) if is_shipped(options) else ()
    if options.json:
        print(json.dumps(asdict(result), indent=2))
        return 0
    lines = [] if options.compare is None else comparison.format_answers(result, *asked)
    if options.compare is None or not is_shipped(options):
        lines += ["", *comparison.format_figures(result)]
    print("\n".join(lines))
    return 0


def generate(options: argparse.Namespace) -> Comparison:
    """Generate greedily with an H2OCache, or with each of the caches to compare."""
    import torch

    from h2o.evaluation import generation
    from h2o.hf.batching.request import tokenize
    from h2o.hf.chat.system_turn import system_span
    from h2o.hf.model_traits.wrappers import input_device

    log = partial(print_line, quiet=options.json)
    prompt: Any = prompt_text(options)
    model, tokenizer = load_model(options, [options.setting, *options.settings], log)
    if options.chat is None:
        options.chat = tokenizer.chat_template is not None
    if options.chat and tokenizer.chat_template is None:
        raise UserError("--chat: this model's tokenizer has no chat template")
    if options.chat:
        prompt = models.messages(prompt, options.system)
    how = options.chat_template_kwargs
    try:
        tokens = tokenize(prompt, tokenizer, how)
    except ValueError as error:
        raise UserError(str(error)) from error
    ids = torch.tensor([tokens], dtype=torch.long, device=input_device(model))
    tokens = ids.shape[1]
    models.check_length(model, tokens, options.max_new_tokens)
    log(f"reading a prompt of {tokens} tokens")
    pinned = options.pin
    if pinned == "system":
        try:
            pinned = [system_span(tokenizer, prompt, ids, **how)]
        except ValueError as error:
            raise UserError(f"--pin: {error}") from error
    generation.warm_up(model, ids)
    runs = [
        generation.generate(
            mode, cache, model, tokenizer, ids,
            max_new_tokens=options.max_new_tokens,
            log=log,
            pinned=pinned,
            compile=options.compile,
            prints=not (options.json or options.compare),
            quiet=options.json,
        )
        for mode, cache in choose_caches(options, model, tokens).items()
    ]  # fmt: skip
    return Comparison(
        model=models.full_name(options.model),
        dtype=str(model.dtype).removeprefix("torch."),
        prompt_tokens=tokens,
        budget=asdict(options.setting.config),
        versions=packages.versions("h2o-kv", "torch", "transformers"),
        runs=runs,
    )


def prompt_text(options: argparse.Namespace) -> str:
    """The whole prompt. Raises: UserError if it is empty."""
    shipped = is_shipped(options)
    parts = [texts.article(), QUESTION] if shipped else [options.prompt, options.document]
    if getattr(options, "order", [""])[-1] == "prompt":
        parts.reverse()
    parts = [part.strip() for part in parts if part and part.strip()]
    if not parts:
        raise UserError("the prompt is empty")
    return "\n\n".join(parts)


def choose_caches(
    options: argparse.Namespace, model: Any, prompt_tokens: int
) -> dict[str, H2OConfig | None]:
    """The caches to generate with, by their displayed names. None is the cache of transformers."""
    if options.compare is None:
        return {"h2o": options.setting.config}
    if options.compare == USUAL:
        return usual_caches(options.setting.config, model, prompt_tokens)
    more = {x.name: x.config for x in options.settings if x.variant != "full"}
    return {"full": None, "h2o": options.setting.config, **more}


def is_shipped(options: argparse.Namespace) -> bool:
    """Whether the user gives no prompt, so that the shipped article is used."""
    return options.prompt is None and options.document is None


def usual_caches(config: H2OConfig, model: Any, prompt_tokens: int) -> dict[str, H2OConfig | None]:
    """The caches of --compare without settings, by their displayed names.

    "full" comes first, since the others are compared with it. Then follow `config`, named by its
    budget or "h2o"; `budget=0.1`, unless `config` is the same; and "local", the newest keys in the
    model's dtype. If the budget of `config` is a fraction of the bytes, "local" has the same number
    of bytes, otherwise the same number of keys.
    """
    fitted = config.for_model(model)
    newest = sum(fitted.tokens(prompt_tokens)) if config.budget is None else config.budget
    how = {"positions": config.positions, "min_tokens": config.min_tokens}
    tenth = H2OConfig(budget=SMALLER_BUDGET, **how)
    local = replace(H2OConfig.streaming(newest, fitted.sinks), **how)
    is_named = config.budget not in (None, SMALLER_BUDGET) or config == tenth
    name = f"budget={config.budget}" if is_named else "h2o"
    return {"full": None, name: config, f"budget={SMALLER_BUDGET}": tenth, "local": local}
