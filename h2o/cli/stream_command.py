"""The command line `h2o stream`: endless text, or a chat, through caches of fixed size."""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from h2o.cli import texts
from h2o.cli.cache_options import (
    OPTIONS,
    add_cache_options,
    add_compare,
    add_device,
    add_dtype,
    add_model,
    add_option,
    settings_from,
)
from h2o.errors import UserError
from h2o.filesystem import atomic_write, writable

if TYPE_CHECKING:
    from h2o.evaluate.setting import Setting
    from h2o.stream.reader import Reader

DESCRIPTION = """\
Text without end through caches of fixed size: perplexity over time, memory, time a token.

  h2o stream --tokens 20000
  h2o stream --text book.txt --compare h2o:256+256,sink:4+508,local:512
  tail -f log.txt | h2o stream --text - --heavy 128 --recent 128
  h2o stream --chat --heavy 256 --recent 256
"""
COMPARE = "h2o:256+256/sinks=4/rank_by=mean,sink:4+508,local:512"
"""In a text without end sums would keep what was heavy in parts long past."""
PLAIN = {"heavy": 256, "recent": 256, "sinks": 4, "rank_by": "mean", "min_tokens": 0}
"""What holds where an option of one cache is not given."""
PRESET_TOKENS = 512
"""Of a preset without a budget: as many as these have."""


def add_arguments(p: argparse.ArgumentParser) -> None:
    p.description = DESCRIPTION
    p.formatter_class = argparse.RawDescriptionHelpFormatter
    add = p.add_argument
    add("--text", metavar="FILE", help="plain text, - for stdin; default: the shipped article")
    add("--repeat", action="store_true", help="begin the file anew whenever it ends; as is done "
        "with the shipped article")  # fmt: skip
    add("--tokens", type=int, metavar="N", help="stop after so many; default: at the text's end, "
        "20000 of the shipped article")  # fmt: skip
    add_compare(add, COMPARE, "; budgets in tokens; full runs out of positions", "--caches")
    fields = [name for name in OPTIONS if name != "positions"]
    add_cache_options(p.add_argument_group("or one cache"), fields, PRESET_TOKENS, **PLAIN)
    add_option(p, "positions", "rolled")  # the others end where the model's do
    p.set_defaults(positions="rolled")
    add("--chunk", type=int, default=1, metavar="N", help="tokens of a forward pass: more are "
        "faster, and evicted together (%(default)s)")  # fmt: skip
    add("--every", type=int, default=500, metavar="N", help="a point for so many (%(default)s)")
    add_model(add)
    add_dtype(add)
    add_device(add)
    add("--output", type=Path, default=Path("h2o-stream.json"), metavar="FILE.json",
        help="the numbers, and FILE.png beside it (%(default)s)")  # fmt: skip
    add("--json", action="store_true", help="print the numbers as well")
    add("--chat", action="store_true", help="talk with the model instead, a line a turn; the first "
        "cache is its memory")  # fmt: skip
    add("--max-new-tokens", type=int, default=200, metavar="N", help="of a reply (%(default)s)")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Adds to the options the `settings`, with the configs that they have here."""
    from h2o.stream.endless import endless

    try:
        options.settings = [
            dataclasses.replace(setting, config=endless(setting, options.positions))
            for setting in settings_from(options, COMPARE)
        ]
    except (OSError, TypeError, ValueError, UserError) as error:
        parser.error(str(error))
    for name in ("tokens", "chunk", "every", "max_new_tokens"):
        value = getattr(options, name)
        if value is not None and value < 1:
            parser.error(f"argument --{name.replace('_', '-')}: must be at least 1, not {value}")
    if options.output.suffix != ".json":
        parser.error(f"argument --output: wanted a name such as stream.json, not {options.output}")
    if options.text == "-" or options.chat:
        if sys.stdin is None:
            parser.error("standard input is closed")
        if options.repeat and not options.chat and not sys.stdin.seekable():
            parser.error("argument --repeat: standard input cannot be begun anew")


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """The exit code. Raises: UserError."""
    try:
        if options.chat:
            chat(options)
        else:
            check_output(options.output)
            with writable(options.output.parent):
                stream(options)
    except (OSError, UnicodeDecodeError, TypeError, ValueError) as error:
        raise UserError(str(error)) from error
    return 0


def check_output(file: Path) -> None:
    """OSError for a file that cannot be replaced, or a picture beside it."""
    for each in (file, file.with_suffix(".png")):
        if each.is_dir():
            raise OSError(f"--output {file}: {each} is a folder")


def chat(options: argparse.Namespace) -> None:
    from h2o.stream.chat import Chat

    memory = options.settings[0]
    model, tokenizer = load(options, [memory])
    talk = Chat(model, tokenizer, memory.config)
    try:
        while True:
            print("> ", end="", flush=True)
            line = sys.stdin.readline()
            if not line:
                break
            if line.strip():
                for text in talk.reply(line.strip(), options.max_new_tokens):
                    print(text, end="", flush=True)
                print()
    finally:
        seen, total = talk.cache.get_seq_length(), talk.cache.report().total
        print(
            f"\n{seen} tokens said, KV cache {total.bytes_held / 1e6:.1f} MB; a full cache would "
            f"hold {total.bytes_full / 1e6:.1f} MB",
            file=sys.stderr,
        )


def load(options: argparse.Namespace, settings: list[Setting]) -> tuple[Any, Any]:
    """(model, tokenizer) that go with all the settings. Raises: UserError."""
    from h2o import models
    from h2o.evaluate.fitting import check_fit

    return models.load(
        options.model,
        dtype=options.dtype,
        device=options.device,
        attn_implementation="h2o",
        say=models.say,
        check=check_fit(settings),
    )


def stream(options: argparse.Namespace) -> None:
    from h2o import models
    from h2o.generation import versions
    from h2o.progress import Progress
    from h2o.stream import token_stream
    from h2o.stream.reader import Reader, read

    shipped = options.text is None
    limit = options.tokens or (20000 if shipped else None)
    with opened(options.text) as file:
        model, tokenizer = load(options, options.settings)
        readers = [Reader(model, setting, options.positions) for setting in options.settings]
        words = token_stream.pieces(file, repeat=shipped or options.repeat)
        chunks = token_stream.chunks(token_stream.tokens(words, tokenizer, limit), options.chunk)
        progress = Progress()
        try:
            for _ in read(chunks, readers, every=options.every, tell=lambda x: tell(progress, x)):
                progress.say(line(readers))
        except KeyboardInterrupt:  # the text has no end of its own: what was read is the result
            progress.say("interrupted")
            if not any(reader.points for reader in readers):
                raise  # an earlier result is worth more
    result = {
        "model": options.model or models.DEFAULT_MODEL,
        "dtype": str(model.dtype).removeprefix("torch."),
        "text": f"{texts.ARTICLE}, repeated" if shipped else Path(options.text).name,
        "positions": options.positions,
        "chunk": options.chunk,
        "every": options.every,
        "versions": versions(),
        "caches": {
            reader.name: {
                "config": None if reader.config is None else dataclasses.asdict(reader.config),
                "ended": reader.ended,
                "points": [dataclasses.asdict(point) for point in reader.points],
            }
            for reader in readers
        },
    }
    write(result, options)
    print("\n".join(table(readers)))


def opened(name: str | None) -> TextIO:
    if name is None:
        return io.StringIO(texts.article())
    if name == "-":
        return open(sys.stdin.fileno(), encoding="utf-8-sig", closefd=False)
    return open(name, encoding="utf-8-sig")


def tell(progress: Any, readers: list[Reader]) -> None:
    """The line that a terminal shows while a stretch is read."""
    progress.update(f"{readers[0].seen} tokens  {line(readers)}" if readers[0].points else "")


def line(readers: list[Reader]) -> str:
    parts = [f"{max(reader.seen for reader in readers):>8}"]
    for reader in readers:
        if reader.points:
            last = reader.points[-1]
            ended = " (out of positions)" if reader.ended else ""
            parts.append(f"{reader.name} {last.perplexity:.2f}{ended}")
    return "  ".join(parts)


def table(readers: list[Reader]) -> list[str]:
    """A line for each cache."""
    rows = [("cache", "tokens", "perplexity", "last", "KV MB", "highest position", "ms/token")]
    for reader in readers:
        points = reader.points
        if points:
            last = points[-1]
            ppl = mean([point.perplexity for point in points])
            ms = sorted(point.ms_per_token for point in points)[len(points) // 2]
            rows.append(
                (reader.name + ("*" if reader.ended else ""), str(last.tokens), f"{ppl:.2f}",
                 f"{last.perplexity:.2f}", f"{last.kv_bytes / 1e6:.2f}",
                 str(max(point.highest_position for point in points)), f"{ms:.1f}")
            )  # fmt: skip
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(f"{cell:>{w}}" for cell, w in zip(row, widths, strict=True)) for row in rows]
    return [*lines, *(["* until it ran out of positions"] if any(r.ended for r in readers) else [])]


def mean(perplexities: list[float]) -> float:
    """Of stretches of the same length, as one text."""
    import math

    return math.exp(sum(map(math.log, perplexities)) / len(perplexities))


def write(result: dict[str, Any], options: argparse.Namespace) -> None:
    from h2o.stream.figure import draw

    with atomic_write(options.output) as draft:
        draft.write_text(json.dumps(result, indent=1) + "\n")
    files, picture = [options.output], options.output.with_suffix(".png")
    try:
        with atomic_write(picture) as draft:
            draw(result, draft)
        files.append(picture)
    except ImportError as error:
        print(f"no picture: {error}", file=sys.stderr)
    print(f"written: {', '.join(map(str, files))}", file=sys.stderr)
    if options.json:
        print(json.dumps(result))
