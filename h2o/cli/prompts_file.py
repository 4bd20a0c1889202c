"""`h2o generate --prompts FILE --output FILE`: answers the prompts of a JSON Lines file in batches.

A line of the input is a text, a list of messages (a chat), or an object with `prompt` or `messages`
and optionally `id`, `max_new_tokens`, `seed`, `pinned` (spans [[start, stop], ...], "prompt" or
"system") and `chat_template_kwargs` (arguments of the chat template, such as tools). A line of the
output is an object with `id` (by default the number of the input line, from 0), `text`,
`finish_reason` and numbers. Answers are written in the order in which they are completed. If a run
is killed, the next run continues: prompts whose id is in the output are skipped. Each line of the
output has digests of its prompt and of the settings. An answer to a prompt that has changed since
is an error.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from h2o import models
from h2o.arguments.plain_values import check_count, check_seed, is_integer
from h2o.cli import texts
from h2o.cli.cache_options import load_model, parse_count
from h2o.errors import UserError
from h2o.hf.chat.chat_template import arguments_of, check_template_arguments
from h2o.model_identity import files_fingerprint
from h2o.result_file import fingerprint
from h2o.utils.filesystem import atomic_write, lock, make_writable
from h2o.utils.progress import print_line

if TYPE_CHECKING:
    from h2o.hf.batching.request import Request, Result

FIELDS = {"id", "prompt", "messages", "max_new_tokens", "seed", "pinned", "chat_template_kwargs"}
ROWS = 16
"""Default of --rows"""
BEGINNING = b'{"id": '
"""The first characters of each line of the output"""
SETTINGS = ("model", "dtype", "max_new_tokens", "chat", "system", "pin", "chat_template_kwargs")
"""Options that answers depend on, in addition to those of the cache"""


class Line(NamedTuple):
    """A prompt of the file."""

    id: str | int
    prompt: Any
    max_new_tokens: int | None
    seed: int | None
    pinned: Any
    chat_template_kwargs: dict[str, Any] | None

    @property
    def digest(self) -> str:
        """Digest of everything in the line that the answer depends on."""
        return fingerprint(self._asdict() | {"id": None})


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("many prompts").add_argument
    add("--prompts", metavar="FILE", help="JSON Lines: texts, lists of messages, or objects with "
        "prompt or messages, id, max_new_tokens, seed, pinned, chat_template_kwargs")  # fmt: skip
    add("--output", metavar="FILE", help="answers as JSON Lines, in the order in which they "
        "are completed; prompts with an answer in FILE are skipped")  # fmt: skip
    add("--rows", type=parse_count, metavar="N", help=f"prompts to run at a time ({ROWS})")


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Add `lines`, the prompts of the file, to the options."""
    if options.prompts is None:
        for name in ("output", "rows"):
            if getattr(options, name) is not None:
                parser.error(f"argument --{name}: requires --prompts")
        return
    if options.output is None:
        parser.error("argument --prompts: requires --output FILE for the answers")
    for name in ("prompt", "prompt_file", "compare", "json"):
        if getattr(options, name):
            parser.error(f"argument --{name.replace('_', '-')}: cannot be combined with --prompts")
    texts.check_output(parser, "--output", options.output, [options.prompts])
    options.lines = list(_lines(options.prompts, texts.read(parser, "--prompts", options.prompts)))


def run(options: argparse.Namespace) -> int:
    """Answer the prompts. The exit code is 1 if a prompt failed. Raises: UserError."""
    output = Path(options.output)
    make_writable(output.parent)
    try:
        with lock(output, waits=False):
            return _answer_all(options, output)
    except (OSError, ValueError) as error:
        raise UserError(str(error)) from error


def _answer_all(options: argparse.Namespace, output: Path) -> int:
    from tqdm import tqdm

    from h2o.hf.batching.generate_all import generate_all

    settings = _digest(options)
    done = _answered_ids(output, settings, {line.id: line.digest for line in options.lines})
    numbered = enumerate(options.lines)
    lines = {number: line for number, line in numbered if line.id not in done}
    if not options.lines:
        print_line(f"{options.prompts} has no prompts, so {output} gets no answers")
    if done:
        answered = len(options.lines) - len(lines)
        print_line(f"{answered} of {len(options.lines)} prompts have an answer already")
    if not lines:
        return 0
    model, tokenizer = load_model(options, [options.setting], print_line)
    requests, unanswerable = _tokenize_all(lines, options, model, tokenizer)
    numbers = list(requests)
    results = generate_all(
        model,
        list(requests.values()),
        options.setting.config,
        rows=options.rows or ROWS,
        max_new_tokens=options.max_new_tokens,
        tokenizer=tokenizer,
        pinned=options.pin,
        chat_template_kwargs=options.chat_template_kwargs,
        as_completed=True,
        compileable=options.compile,
    )
    by_number = ((numbers[result.index], result) for result in results)
    everything = chain(unanswerable.items(), by_number)
    # disable=None: a bar is shown on a terminal only.
    bar = tqdm(everything, "prompts", len(lines), leave=False, disable=None)
    failed = 0
    try:
        with output.open("a", encoding="utf-8") as file:
            for number, result in bar:
                file.write(_as_line(_answer(lines[number], result, settings)))
                file.flush()
                failed += result.error is not None
    except OSError as error:  # such as a full disk
        raise UserError(
            f"cannot write {output}: {error.strerror}. When this is solved, run the command again: "
            "it keeps the answers in the file and continues"
        ) from error
    if failed:
        print_line(f"{failed} prompts failed: see the errors in {output}")
    return 1 if failed else 0


def _tokenize_all(
    lines: dict[int, Line], options: argparse.Namespace, model: Any, tokenizer: Any
) -> tuple[dict[int, Request], dict[int, Result]]:
    """Make the requests, by number, and the results of prompts that cannot be answered: they cannot
    be tokenized, or are longer than the model's positions."""
    from h2o.hf.batching.request import Request, Result, tokenize

    requests: dict[int, Request] = {}
    failed: dict[int, Result] = {}
    for number, line in lines.items():
        is_turn = options.chat and isinstance(line.prompt, str)
        prompt = models.messages(line.prompt, options.system) if is_turn else line.prompt
        limit, ids = line.max_new_tokens, []
        own = line.chat_template_kwargs
        try:
            how = arguments_of(prompt, own, options.chat_template_kwargs)
            ids = list(tokenize(prompt, tokenizer, how))
            models.check_length(model, len(ids), limit or options.max_new_tokens)
        except Exception as error:  # such as any error of a chat template; the others continue
            failed[number] = Result(number, [], None, len(ids), "error", {}, error)
            continue
        needs_chat = "system" in (line.pinned, options.pin)  # to find the system turn
        seed = number if line.seed is None else line.seed
        requests[number] = Request(
            prompt if needs_chat else ids, limit, seed, pinned=line.pinned,
            chat_template_kwargs=own if needs_chat else None,
        )  # fmt: skip
    return requests, failed


def _lines(name: str, content: str) -> Iterator[Line]:
    """Yield the prompts of a file.

    Raises: ValueError for a line that is not a prompt, and for an id that occurs twice. The ids 1
        and "1" count as the same, since most programs that read the answers do not distinguish
        them.
    """
    numbers: dict[str, int] = {}
    for number, text in enumerate(content.split("\n")):
        if not text.strip():
            continue
        try:
            line = _line(number, text)
            first = numbers.setdefault(str(line.id), number)
            if first != number:
                raise ValueError(
                    f"the id {line.id!r} is already that of line {first + 1}: give each line its "
                    "own id. A line without one has its number, counted from 0"
                )
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name}, line {number + 1}: {error}") from None
        yield line


def _line(number: int, text: str) -> Line:
    try:
        content = json.loads(text, object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"not JSON ({error.msg}): write a text in quotes, a list of messages, or an object "
            "with prompt or messages"
        ) from None
    except RecursionError:
        raise ValueError("lists are nested too deeply") from None
    if not isinstance(content, dict):
        content = {"prompt" if isinstance(content, str) else "messages": content}
    if unknown := set(content) - FIELDS:
        raise ValueError(f"{', '.join(sorted(unknown))}: unknown; use {', '.join(sorted(FIELDS))}")
    if ("prompt" in content) == ("messages" in content):
        raise ValueError("expected a text, or an object with either prompt or messages")
    prompt = content.get("prompt", content.get("messages"))
    if not isinstance(prompt, str if "prompt" in content else list) or not prompt:
        raise ValueError("prompt must be a text and messages a list, and not empty")
    if "messages" in content and not all(isinstance(message, dict) for message in prompt):
        raise ValueError('messages must be objects such as {"role": "user", "content": "..."}')
    name, limit, seed = (content.get(key) for key in ("id", "max_new_tokens", "seed"))
    if not (name is None or isinstance(name, str) or is_integer(name)):
        raise ValueError(f"id must be a text or an integer, not {name!r}")
    if limit is not None:
        check_count("max_new_tokens", limit)
    if seed is not None:
        check_seed(seed)
    pinned, arguments = content.get("pinned"), content.get("chat_template_kwargs")
    if arguments is not None:
        check_template_arguments(arguments)
    return Line(number if name is None else name, prompt, limit, seed, pinned, arguments)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a line. Raises: ValueError for a key that occurs twice, since the JSON module
    would use the last value."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"the key {twice!r} occurs twice in one object: remove one of the two")
    return content


def _digest(options: argparse.Namespace) -> str:
    """Digest of the settings that answers depend on. It includes the model's files, since another
    model may be stored at the same path later."""
    files = files_fingerprint([options.model]) if options.model else ""
    facts = {x: getattr(options, x) for x in SETTINGS}
    return fingerprint({**facts, "config": asdict(options.setting.config), "files": files})


def _answer(line: Line, result: Result, settings: str) -> dict[str, Any]:
    answer = {
        "id": line.id,
        "text": result.text,
        "finish_reason": result.finish_reason,
        "prompt_tokens": result.prompt_tokens,
        "new_tokens": len(result.ids),
        **result.report,
        "settings": settings,
        "prompt": line.digest,
    }
    return answer if result.error is None else {**answer, "error": str(result.error)}


def _as_line(answer: dict[str, Any]) -> str:
    text = json.dumps(answer, ensure_ascii=False)
    # Write lone surrogates as JSON escapes.
    return text.encode("utf-8", "backslashreplace").decode() + "\n"


def _is_cut(line: bytes) -> bool:
    """Whether a line may be the part of an answer that a killed run has written."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return BEGINNING.startswith(line[: len(BEGINNING)])
    return False


def _answered_ids(output: Path, settings: str, prompts: dict[str | int, str]) -> set[str | int]:
    """The ids that have an answer in the output file.

    Removes from the file an unfinished last line, which a killed run may leave, and the lines of
    prompts that failed, so that they are tried again.

    Args:
        prompts: the digest of each prompt, by id.

    Raises: UserError if the file has answers with other settings or to other prompts, or is no
        output of this command.
    """
    if not output.exists():
        return set()
    *lines, last = output.read_bytes().split(b"\n")
    if not _is_cut(last):
        lines.append(last)
    try:
        answers = [json.loads(line) for line in lines if line]
        others = {answer["settings"] for answer in answers} - {settings}
        good = [answer for answer in answers if answer["finish_reason"] != "error"]
        done = {answer["id"]: answer["prompt"] for answer in good}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise UserError(f"{output} is not an output of `h2o generate --prompts`") from error
    if others:
        raise UserError(
            f"{output} has answers of another model, config or length: name another --output, or "
            "remove the file"
        )
    if changed := [name for name in done if prompts.get(name, done[name]) != done[name]]:
        ids = ", ".join(map(repr, changed[:5])) + ", ..." * (len(changed) > 5)
        raise UserError(
            f"{output} has answers to other prompts under the ids {ids}: name another --output, or "
            "give the changed prompts new ids"
        )
    if last or len(good) < len(answers):
        with atomic_write(output) as draft:
            draft.write_text("".join(map(_as_line, good)), "utf-8")
    return set(done)
