"""Examples that are whole programs, with a tiny model: a pinned chat, a library, a batch job."""

from __future__ import annotations

import json
import re
import runpy
import shutil

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoTokenizer

from h2o import cli
from tests.examples import EXAMPLES, run
from tests.test_cli import tiny  # noqa: F401

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

if not EXAMPLES.is_dir():
    pytest.skip("the examples are not here", allow_module_level=True)
pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def chatting(tiny, tmp_path):  # noqa: F811
    """Folder of the tiny model with a chat template."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template, tokenizer.eos_token = TEMPLATE, "a"
    tokenizer.save_pretrained(folder)
    return folder


def test_pinned_instructions_stay(chatting):
    out = run(
        "pinned_chat.py", "--model", chatting, "--turns", "8", "--every", "4", "--keys", "360",
        "--max-new-tokens", "2", "--full",
    )  # fmt: skip
    line = r"turns, +(\d+) tokens, ([\d.]+) MB, (pinned|left to the budget|every key) +(\d+)%"
    printed = re.findall(line, out)
    sizes = {name: [size for _, size, other, _ in printed if other == name] for name in
             ("pinned", "left to the budget", "every key")}  # fmt: skip
    grows = {name: len(set(of_turns)) > 1 for name, of_turns in sizes.items()}
    assert grows == {"pinned": False, "left to the budget": False, "every key": True}
    held = [(tokens, name, share) for tokens, _, name, share in printed if name != "every key"]
    assert [(name, share == "100") for _, name, share in held] == [
        ("pinned", True), ("left to the budget", False),
    ] * 2  # fmt: skip
    assert int(held[-1][0]) > 400, "more than the budget"
    assert int(held[3][2]) < int(held[1][2]) < 100, "and ever less of what is not pinned"


def test_a_library_finds_its_documents(tiny, tmp_path, monkeypatch):  # noqa: F811
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in ("lighthouse", "railway", "garden"):
        (texts / f"{name}.txt").write_text(f"The {name} of the town. " * 20, "utf-8")
    library = tmp_path / "library"
    more = ("--model", tiny)
    out = run("document_library.py", *more, "build", library, "--documents", texts)
    files, full = map(float, re.findall(r"([\d.]+) MB", out))
    assert out.startswith("3 documents in ")
    assert files < 0.7 * full
    assert {path.stem for path in library.glob("*.safetensors")} == {
        "lighthouse",
        "railway",
        "garden",
    }
    questions = ("Who built the railway?", "How high is the lighthouse?")
    out = run("document_library.py", *more, "ask", library, *questions)
    assert re.findall(r"^(\w+): \d+ kB loaded in [\d.]+ s, answered in", out, re.MULTILINE) == [
        "railway",
        "lighthouse",
    ]

    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = __import__("document_library")
    made = module.chronicles()
    index = {name: {"words": sorted(module.words(text))} for name, text in made.items()}
    assert len(made) == 20
    for place in module.PLACES:
        assert module.pick(index, f"Who founded it, in {place}, and when?") == place.lower()


def read_answers(path):
    """Answers in a file, one per line."""
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]]


def answer_letters(folder, prompts, *options):
    """Answers to the letters of the batch job, from one run of the command."""
    module = runpy.run_path(str(EXAMPLES / "batch_job.py"))
    module["write_prompts"](folder / "letters.jsonl", prompts)
    files = ["--prompts", str(folder / "letters.jsonl"), "--output", str(folder / "whole.jsonl")]
    assert cli.main(["generate", *files, "--heavy", "64", "--recent", "64", *options]) == 0
    return read_answers(folder / "whole.jsonl")


def test_the_default_model_answers_letters(tmp_path):
    """Without the chat template an instruct model may have nothing to add to a prompt, and the
    answer would be empty."""
    from h2o import models

    try:
        models.find_weights()
    except models.UserError as error:
        pytest.skip(str(error))
    answers = answer_letters(tmp_path, 2, "--max-new-tokens", "3")
    assert [bool(answer["text"]) for answer in answers] == [True, True]


def test_a_batch_job_goes_on_after_a_kill(chatting, tmp_path):
    """Every prompt must have exactly one answer, the same as without the kill."""
    options = ("--model", str(chatting), "--rows", "4", "--max-new-tokens", "24")
    out = run("batch_job.py", tmp_path, "--prompts", "24", "--kill-after", "6", *options)
    killed = int(re.search(r"killed with (\d+) of 24 answers", out)[1])
    assert 6 <= killed < 24
    answers, wanted = (
        sorted(found, key=lambda answer: answer["id"])
        for found in (
            read_answers(tmp_path / "answers.jsonl"),
            answer_letters(tmp_path, 24, *options),
        )
    )
    assert len(answers) == 24
    assert answers == wanted
