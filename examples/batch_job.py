"""Answer a file of prompts, and resume after the process was killed.

    python examples/batch_job.py FOLDER --prompts 1000 --kill-after 300

The work is done by `h2o generate --prompts FILE --output FILE`, which writes each answer as soon as
it is complete and skips prompts that have an answer. This script makes up the prompts, starts the
command, kills it after N answers, and starts it again. Without `--kill-after` the command runs to
its end without a break. The answers are the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

THINGS = ("kettle", "bicycle", "radio", "umbrella", "lamp", "camera", "clock")
COMPLAINTS = ("arrived broken", "is the wrong color", "was never delivered", "makes a loud noise")


def write_prompts(path: Path, count: int) -> None:
    """Write letters to a shop as JSON Lines, each with an id and as the first message of a chat."""
    with path.open("w", encoding="utf-8") as file:
        for i in range(count):
            letter = f"My {THINGS[i % 7]}, order {1000 + 37 * i}, {COMPLAINTS[i % 4]}."
            prompt = f"{letter} Write one polite sentence that answers this customer."
            messages = [{"role": "user", "content": prompt}]
            file.write(json.dumps({"id": f"letter-{i}", "messages": messages}) + "\n")


def count_answers(path: Path) -> int:
    """Number of complete lines in a file that may not exist yet."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def answer(prompts: Path, answers: Path, options: list[str], kill_after: int | None) -> int:
    """Run the command, and kill it once there are `kill_after` answers. Returns their number."""
    command = [sys.executable, "-m", "h2o", "generate", "--prompts", str(prompts)]
    process = subprocess.Popen([*command, "--output", str(answers), *options])
    while process.poll() is None:
        if kill_after is not None and count_answers(answers) >= kill_after:
            process.kill()
            process.wait()
            return count_answers(answers)
        time.sleep(0.01)
    if process.returncode:
        sys.exit(f"the command ended with exit code {process.returncode}")
    return count_answers(answers)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], epilog="Other options are those of `h2o generate`."
    )
    parser.add_argument("folder", type=Path, help="folder for prompts and answers")
    parser.add_argument(
        "--prompts", type=int, default=1000, help="number of prompts (default: %(default)s)"
    )
    parser.add_argument(
        "--kill-after", type=int, metavar="N", help="kill the command after N answers"
    )
    options, more = parser.parse_known_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    prompts, answers = options.folder / "prompts.jsonl", options.folder / "answers.jsonl"
    write_prompts(prompts, options.prompts)
    more = ["--rows", "16", "--heavy", "64", "--recent", "64", "--max-new-tokens", "24", *more]
    start = time.perf_counter()
    if options.kill_after is not None:
        done = answer(prompts, answers, more, options.kill_after)
        print(f"killed with {done} of {options.prompts} answers", flush=True)
    done = answer(prompts, answers, more, None)
    print(f"{done} of {options.prompts} answers in {time.perf_counter() - start:.0f} s: {answers}")


if __name__ == "__main__":
    main()
