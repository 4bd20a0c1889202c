"""The command line `h2o generate`: one prompt, one model, one cache or four."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from h2o.cli import prompts_file, texts
from h2o.cli.cache_options import (
    add_cache_options,
    add_device,
    add_dtype,
    add_model,
    add_pin,
    config_from,
)
from h2o.cli.comparison import Result
from h2o.config import H2OConfig
from h2o.errors import UserError
from h2o.evaluation.setting import from_config, parse_all
from h2o.profile import Profile

if TYPE_CHECKING:
    from h2o.generation import Run

__all__ = ["add_arguments", "caches", "check", "run"]

QUESTION = "What is Marrow Point?"
"""Follows the shipped article, when the user gives no prompt: its first sentence has the answer."""

USUAL = "usual"
"""--compare without settings."""
TENTH = 0.1
"""Of a full cache's bytes: what the preset of a comparison may take."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what to generate from").add_argument
    add_model(add)
    add("--prompt", metavar="TEXT", help="the prompt; the text of --prompt-file follows it")
    add("--prompt-file", metavar="FILE", help="a text file, - for standard input; without either "
        "option a shipped article of 2100 tokens with a question about it")  # fmt: skip
    add("--reread", action="store_true", help="read --prompt-file twice before anything of it is "
        "evicted (KVzip); --prompt, a question about it, comes after it")  # fmt: skip
    add("--chat", action="store_true", help="wrap the prompt in the model's chat template")
    add_pin(add)
    add_cache_options(parser.add_argument_group("what the cache keeps"))
    add = parser.add_argument_group("how").add_argument
    add_dtype(add)
    add_device(add)
    add("--max-new-tokens", type=int, default=120, metavar="N", help="(%(default)s)")
    add("--compare", nargs="?", const=USUAL, metavar="SETTINGS", help="show it beside the full "
        "cache and these, as h2o eval --help lists them; without SETTINGS beside a preset in a "
        "tenth of the bytes, and `local`, the same budget without heavy hitters")  # fmt: skip
    add("--compile", action="store_true", help="compile the decode step first (not the full "
        "cache's), which takes a minute or two and a C++ compiler")  # fmt: skip
    add("--json", action="store_true", help="for machines: one object, nothing else")
    prompts_file.add_arguments(parser)


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Adds to the options the `config` and the `document`, the text of --prompt-file."""
    if options.max_new_tokens < 1:
        parser.error("argument --max-new-tokens: must be at least 1")
    try:
        options.config = config_from(options)
        named = options.compare not in (None, USUAL)
        options.settings = parse_all(options.compare) if named else []
    except (OSError, TypeError, ValueError) as error:
        parser.error(str(error))
    for setting in options.settings:
        if not setting.dropping:
            parser.error(f"argument --compare: {setting.why_not_dropping}")
    if options.system is not None and not options.chat:
        parser.error("argument --system: goes with --chat")
    if options.pin == "system" and options.system is None and options.prompts is None:
        parser.error("argument --pin: system wants --chat and --system TEXT")
    options.document = None
    prompts_file.check(parser, options)
    if options.prompt_file is not None:
        options.document = texts.read(parser, "--prompt-file", options.prompt_file)
    texts.checked(parser, "--prompt", options.prompt)
    if options.reread and (options.prompt is None) != (options.document is None):
        parser.error("--reread wants a --prompt-file and a --prompt, or neither")
    for option in ("compile", "prompts"):
        if options.reread and getattr(options, option):
            parser.error(f"argument --{option}: not allowed with --reread")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """The exit code. Raises: UserError."""
    from h2o.cli import comparison

    if options.prompts is not None:
        return prompts_file.run(options)
    result = generate(options)
    if options.json:
        print(json.dumps(asdict(result), indent=2))
    elif options.compare and is_shipped(options):
        print("\n".join(comparison.answers(result, QUESTION)))
    else:
        print("\n".join(comparison.columns(result)) if options.compare else "\n")
        print("\n".join(comparison.table(result)))
    return 0


def generate(options: argparse.Namespace) -> Result:
    """Generates greedily with an H2OCache, or with each of `caches`."""
    from h2o import generation, models
    from h2o.evaluation.fitting import check_fit
    from h2o.hf.rows.system_turn import system_span
    from h2o.progress import Progress

    shipped, progress = is_shipped(options), Progress(quiet=options.json)
    parts = [texts.article(), QUESTION] if shipped else [options.prompt, options.document]
    if options.reread and not shipped:
        parts.reverse()
    parts = [part.strip() for part in parts if part and part.strip()]
    text = "\n\n".join(parts)
    if len(parts) < (2 if options.reread else 1):
        raise UserError("the prompt is empty")
    fit = check_fit([from_config(options.config), *options.settings])
    how = {"dtype": options.dtype, "device": options.device}
    model, tokenizer = models.load_model(
        options.model, **how, attn_implementation=None, say=progress.say, check=fit
    )
    chat = options.chat or (shipped and tokenizer.chat_template is not None)
    ids = models.encode(tokenizer, text, chat, options.system).to(model.device)
    tokens = ids.shape[1]
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and tokens + options.max_new_tokens > limit:
        raise UserError(
            f"the prompt's {tokens} tokens and {options.max_new_tokens} new ones are more than the "
            f"{limit} positions of the model: shorten the prompt or lower --max-new-tokens"
        )
    progress.say(f"reading a prompt of {tokens} tokens")
    document = None
    if options.reread:
        start = models.encode(tokenizer, parts[0], chat, options.system)
        document = generation.leading_agreement(start[0].tolist(), ids[0].tolist())
    pinned = options.pin
    if pinned == "system":
        chat_messages = models.messages(text, options.system)
        try:
            pinned = [system_span(tokenizer, chat_messages, ids[0].tolist())]
        except ValueError as error:
            raise UserError(f"--pin: {error}") from error
    generation.warm_up(model, ids)
    config = options.config
    runs: list[Run] = []
    full: list[int] | None = None
    compared: dict[str, H2OConfig | None]
    compared = {"h2o": config}
    if options.compare == USUAL:
        compared = caches(config, model, tokens)
    elif options.compare is not None:
        more = {x.name: x.config for x in options.settings if x.variant != "full"}
        compared = {"full": None, **compared, **more}
    for mode, cache in compared.items():
        one, new = generation.generate(
            mode, cache, model, tokenizer, ids,
            max_new_tokens=options.max_new_tokens,
            progress=progress,
            document=document,
            pinned=pinned,
            compile=options.compile,
            stream=None if options.json or options.compare else write,
        )  # fmt: skip
        if cache is None:
            full = new
        if full is not None:
            one = replace(one, tokens_agree=generation.leading_agreement(new, full))
        runs.append(one)
    return Result(
        model=options.model or models.DEFAULT_MODEL,
        dtype=str(model.dtype).removeprefix("torch."),
        prompt_tokens=tokens,
        budget=asdict(config),
        versions=generation.versions(),
        runs=runs,
    )


def is_shipped(options: argparse.Namespace) -> bool:
    """Whether the user gives no text, and the shipped article is read."""
    return options.prompt is None and options.document is None


def caches(config: H2OConfig, model: Any, prompt_tokens: int) -> dict[str, H2OConfig | None]:
    """What a comparison runs, by the names that it shows; None is transformers' own cache.

    "full" comes first, as the others are held against it; then "h2o", which is `config`; the best
    preset for the model in a tenth of the bytes, "calibrated" where there is a profile and "robust"
    where there is none; and "local", as many keys as h2o, but the newest.
    """
    fitted = config.for_model(model)
    heavy, recent = fitted.tokens(prompt_tokens)
    local = replace(
        fitted, heavy=0, recent=heavy + recent, budget_unit="keys", head_shares=None, kv_dtype=None
    )
    profile = (
        config.head_shares if isinstance(config.head_shares, Profile) else Profile.shipped(model)
    )
    if profile is None:
        name, preset = "robust", H2OConfig.robust(TENTH, budget_unit="bytes")
    else:
        name, preset = "calibrated", H2OConfig.calibrated(TENTH, profile, budget_unit="bytes")
    preset = replace(preset, positions=config.positions, min_tokens=config.min_tokens)
    return {"full": None, "h2o": config, name: preset, "local": local}


def write(text: str) -> None:
    print(text, end="", flush=True)
