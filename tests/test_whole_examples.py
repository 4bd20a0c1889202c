"""Examples that are whole programs, with a tiny model: a pinned chat, a library, a batch job."""

from __future__ import annotations

import json
import re
import shutil

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoTokenizer

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


@pytest.fixture
def with_ends(chatting):
    """The same, with a template that writes an end after each turn."""
    tokenizer = AutoTokenizer.from_pretrained(chatting)
    tokenizer.chat_template = TEMPLATE.replace("}}\n", "}}</turn>\n")
    tokenizer.save_pretrained(chatting)
    return chatting


def test_an_agent_forgets_old_results(with_ends):
    out = run("agent.py", "--model", with_ends, "--calls", "12", "--items", "9")
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d+ ", line)]
    assert [row[0] for row in rows] == ["10", "12"]
    values = [[float(row[i]) for i in (1, 3, 6, 7)] for row in rows]
    (read, anew, left, full), (later, anew_later, left_later, full_later) = values
    assert abs(read - later) < 20, "a turn reads only what is new"
    assert anew > 3 * read
    assert anew_later > anew
    assert full_later - full > 1.5 * (left_later - left)
    assert len(re.findall(r"^(?:forgets|\(a\)|\(b\)) +(?:not )?found ", out, re.M)) == 9
    assert "evict() has removed" in out


def test_a_chat_forgets_its_thoughts(with_ends):
    out = run("thinking_chat.py", "--model", with_ends, "--turns", "6")
    rows = [line.split() for line in out.splitlines() if re.match(r" +\d+ ", line)]
    assert [row[0] for row in rows] == ["5", "6"]
    assert "evict() has removed" in out


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


def test_a_batch_job_answers_what_is_missing(chatting, tmp_path, capsys):
    """Every prompt must have exactly one answer: that of a run without a break. A prompt that fails
    has none, and the others are answered."""
    prompts, answers = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    chat = [{"role": "user", "content": "A chat, with\u2028another line."}]
    asked = ["A text.", chat, "Another one.", "The last text."]

    def answer(*more):
        lines = [json.dumps(prompt, ensure_ascii=False) for prompt in (*asked, *more)]
        prompts.write_text("\n".join(lines), "utf-8")
        options = ("--model", str(chatting), "--rows", "2", "--tokens", "9", "--budget", "24")
        return run("batch_job.py", prompts, answers, *options)

    assert answer().startswith("0 of 4 prompts")
    whole = answers.read_text("utf-8").splitlines(keepends=True)
    found = [json.loads(line) for line in whole]
    assert all(line["text"] for line in found)
    assert sorted(str(line["prompt"]) for line in found) == sorted(map(str, asked))

    killed = "".join(whole[:2]) + whole[2][:20]
    answers.write_text(killed, "utf-8")
    assert answer().startswith("2 of 4 prompts")
    again = answers.read_text("utf-8").splitlines(keepends=True)
    assert again[:2] == whole[:2]
    assert sorted(again) == sorted(whole)

    for _ in range(2):
        with pytest.raises(SystemExit, match="1 prompts failed"):
            answer([], "One more.")
    assert "[]: " in capsys.readouterr().err
    assert len(answers.read_text("utf-8").splitlines()) == 5
    assert answer("One more.").startswith("5 of 5 prompts")


def test_a_batch_job_reads_texts(tiny, tmp_path):  # noqa: F811
    """In a file that is no JSON each line is a text, which a model without a chat template
    continues."""
    prompts, answers = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    prompts.write_text('A lighthouse\n\n"A quote"\n', "utf-8")
    run("batch_job.py", prompts, answers, "--model", str(tiny), "--tokens", "3")
    found = [json.loads(line)["prompt"] for line in answers.read_text("utf-8").split("\n")[:-1]]
    assert sorted(found) == sorted(["A lighthouse", '"A quote"'])
