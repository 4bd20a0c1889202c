"""Answer the prompts of a file. Run again, it answers only those that have no answer yet.

    python examples/batch_job.py prompts.jsonl answers.jsonl --rows 16 --budget 512

If the name of the first file ends in .jsonl, each of its lines is a text in quotes or a chat (a
list of messages). In any other file each line is a text. The second file gets each answer as soon
as it is complete, as an object with `prompt` and `text`. A run that is killed loses only what it
was writing. A prompt is recognized by its text. Use another file for the answers of another model
or budget.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import h2o


def read_prompts(file: Path) -> list[Any]:
    """The texts and chats of a file, one per line."""
    lines = lines_of(file.read_text("utf-8"))
    return [json.loads(line) for line in lines] if file.suffix == ".jsonl" else lines


def read_answered(file: Path) -> set[str]:
    """The prompts that have an answer, as JSON. Removes a last line that a killed run left
    unfinished."""
    text = file.read_text("utf-8") if file.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        file.write_text(whole, "utf-8")
    return {json.dumps(json.loads(line)["prompt"]) for line in lines_of(whole)}


def lines_of(text: str) -> list[str]:
    """The lines of a text. splitlines would also split at characters that JSON may contain, such as
    U+2028."""
    return [line for line in text.split("\n") if line.strip()]


def as_chat(prompt: Any, tokenizer: Any) -> Any:
    """A text as the message of a user, if the model has a chat template. Without one the model
    continues the text."""
    is_message = isinstance(prompt, str) and tokenizer.chat_template is not None
    return [{"role": "user", "content": prompt}] if is_message else prompt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("prompts", type=Path)
    parser.add_argument("answers", type=Path)
    parser.add_argument("--model", help="default: the embedded SmolLM2-135M")
    parser.add_argument("--rows", type=int, default=16, help="prompts at a time (%(default)s)")
    parser.add_argument(
        "--budget", type=int, default=256, help="keys to keep per head (%(default)s)"
    )
    parser.add_argument(
        "--tokens", type=int, default=64, help="new tokens per prompt, at most (%(default)s)"
    )
    options = parser.parse_args()

    prompts, answered = read_prompts(options.prompts), read_answered(options.answers)
    missing = [prompt for prompt in prompts if json.dumps(prompt) not in answered]
    print(f"{len(prompts) - len(missing)} of {len(prompts)} prompts have an answer already")
    if not missing:
        return
    model, tokenizer = h2o.load_model(options.model)
    results = h2o.generate_all(
        model, [as_chat(prompt, tokenizer) for prompt in missing], budget=options.budget,
        rows=options.rows, max_new_tokens=options.tokens, tokenizer=tokenizer, as_completed=True,
    )  # fmt: skip
    failed = 0
    with options.answers.open("a", encoding="utf-8") as file:
        for result in results:
            prompt = missing[result.index]
            if result.error is not None:
                print(f"{prompt!r:.60}: {result.error}", file=sys.stderr)
                failed += 1
                continue
            file.write(json.dumps({"prompt": prompt, "text": result.text}) + "\n")
            file.flush()
    if failed:
        sys.exit(f"{failed} prompts failed. They have no answer, so the next run tries them again.")


if __name__ == "__main__":
    main()
