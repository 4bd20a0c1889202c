"""`h2o generate --prompts`: no prompt is lost or answered twice, even across interruptions."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from h2o import cli

pytest.importorskip("torch")

from safetensors.torch import load_file, save_file

from h2o.cli import prompts_file
from h2o.hf.batching import request
from tests.hf.tiny import needs_compiler
from tests.test_cli import DEADLINE, tiny  # noqa: F401

SIZES = ["--heavy", "8", "--recent", "8", "--max-new-tokens", "6"]


@pytest.fixture
def files(tmp_path, tiny):  # noqa: F811
    lines = [
        "a text",
        {"id": "b", "prompt": "Another one, longer than the first.", "max_new_tokens": 3},
        {"prompt": "ünïcode \u2028 in a line"},
        {"id": 7, "prompt": "the last", "seed": 1},
    ]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    output = tmp_path / "new" / "answers.jsonl"
    command = ["generate", "--model", tiny, "--prompts", prompts, "--output", output, *SIZES]
    return list(map(str, command)), prompts, output


def answers(output):
    return [json.loads(line) for line in output.read_text("utf-8").splitlines()]


def test_every_prompt_has_its_answer(files, capsys):
    command, _, output = files
    assert cli.main([*command, "--rows", "2"]) == 0
    by_id = {answer["id"]: answer for answer in answers(output)}
    assert set(by_id) == {0, "b", 2, 7}
    assert by_id["b"]["new_tokens"] == 3
    assert by_id[7]["finish_reason"] == "length"
    alone = [*command[:3], *SIZES, "--prompt", "the last", "--json"]
    capsys.readouterr()
    assert cli.main(alone) == 0
    assert json.loads(capsys.readouterr().out)["runs"][0]["text"] == by_id[7]["text"]


def test_a_file_without_prompts(files, capsys):
    command, prompts, output = files
    prompts.write_text("\n", "utf-8")
    assert cli.main(command) == 0
    assert f"{prompts} has no prompts" in capsys.readouterr().err
    assert not output.exists()


def test_an_id_that_is_no_unicode(files):
    """A lone surrogate in an id is written as a JSON escape, and is recognized when the run is
    repeated."""
    command, prompts, output = files
    prompts.write_text(
        '{"id": "\\ud800", "prompt": "a text"}\n{"id": "ü", "prompt": "b"}\n', "utf-8"
    )
    assert cli.main(command) == 0
    assert [answer["id"] for answer in answers(output)] == ["\ud800", "ü"]
    before = output.read_bytes()
    assert b"\\ud800" in before
    assert "ü" in before.decode()
    assert cli.main(command) == 0
    assert output.read_bytes() == before


def test_prompts_are_tokenized_once(files, monkeypatch):
    command, _, output = files
    texts = []
    whole = request.tokenize

    def counting(prompt, *how):
        texts.extend([prompt] * isinstance(prompt, str))
        return whole(prompt, *how)

    monkeypatch.setattr(request, "tokenize", counting)
    assert cli.main(command) == 0
    assert len(answers(output)) == len(texts) == 4


def test_a_second_run_goes_on(files):
    """A second run answers the prompt whose line a kill cut off and the one that had an error, and
    nothing else."""
    command, _, output = files
    assert cli.main([*command, "--rows", "2"]) == 0
    lines = output.read_text("utf-8").splitlines(keepends=True)
    failed = {**json.loads(lines[1]), "finish_reason": "error", "text": None}
    output.write_text(lines[0] + json.dumps(failed) + "\n" + lines[2] + lines[3][:20], "utf-8")
    assert cli.main([*command, "--rows", "2"]) == 0
    assert sorted(output.read_text("utf-8").splitlines(keepends=True)) == sorted(lines)
    before = output.read_bytes()
    assert cli.main(command) == 0
    assert output.read_bytes() == before
    assert cli.main([*command, "--sinks", "2"]) == 1  # otherwise one file would mix two settings
    assert output.read_bytes() == before


def test_prompts_that_have_changed(files, tmp_path, capsys):
    """Old answers must not be taken for answers to changed prompts, or to another model at the same
    path."""
    command, prompts, output = files
    assert cli.main(command) == 0
    before, lines = output.read_bytes(), prompts.read_text("utf-8")
    for old, new in (
        ('"a text"', '"a test"'),
        ('"max_new_tokens": 3', '"max_new_tokens": 4'),
        ('"seed": 1', '"seed": 2'),
    ):
        prompts.write_text(lines.replace(old, new), "utf-8")
        assert cli.main(command) == 1
        assert "answers to other prompts under the ids" in capsys.readouterr().err
        assert output.read_bytes() == before
    prompts.write_text(lines + '{"id": "new", "prompt": "One more"}\n', "utf-8")
    assert cli.main(command) == 0  # a line was added
    prompts.write_text('{"id": "b", "max_new_tokens": 3, "prompt": "Another one, longer than the '
                       'first."}\n', "utf-8")  # fmt: skip
    assert cli.main(command) == 0  # lines were removed
    assert len(answers(output)) == 5
    other = tmp_path / "model"
    shutil.copytree(command[2], other)
    command[2] = str(other)
    command[6] = str(tmp_path / "again.jsonl")
    assert cli.main(command) == 0
    weights = load_file(other / "model.safetensors")
    save_file({name: -x for name, x in weights.items()}, other / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    assert cli.main(command) == 1
    assert "another model" in capsys.readouterr().err


@needs_compiler
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # the compiler's own
@pytest.mark.slow
def test_compiled_steps_give_the_same_texts(files):
    """An output file begun with --compile can be continued without it."""
    command, _, output = files
    assert cli.main([*command, "--compile", "--rows", "2"]) == 0
    compiled = output.read_bytes()
    assert cli.main(command) == 0
    assert output.read_bytes() == compiled
    output.unlink()
    assert cli.main([*command, "--rows", "2"]) == 0
    assert output.read_bytes() == compiled


def test_killed_amid_many(files, tiny):  # noqa: F811
    command, prompts, output = files
    lines = [json.dumps(f"prompt number {i}") for i in range(16)]
    prompts.write_text("\n".join(lines), "utf-8")
    asked = [*command, "--max-new-tokens", "30", "--rows", "3"]
    process = subprocess.Popen([sys.executable, "-m", "h2o", *asked], stderr=subprocess.DEVNULL)
    end = time.monotonic() + DEADLINE
    while not (output.exists() and output.read_bytes().count(b"\n") > 1):
        assert time.monotonic() < end
        assert process.poll() is None
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = output.read_bytes().count(b"\n")
    assert before < 16
    assert cli.main(asked) == 0
    assert sorted(answer["id"] for answer in answers(output)) == list(range(16))


def test_two_runs_do_not_share_an_output(files, tmp_path, capsys):
    """The second run would answer the same prompts again, and could replace the first run's
    file."""
    command, _, output = files
    output.parent.mkdir()
    code = (
        "import pathlib, sys; from h2o.utils.filesystem import lock\n"
        "with lock(pathlib.Path(sys.argv[1])): print(flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code, output], stdin=pipe, stdout=pipe) as other:
        other.stdout.readline()
        assert cli.main(command) == 1
        assert "another process is writing to" in capsys.readouterr().err
        assert not output.exists()
        other.communicate(timeout=DEADLINE)
    assert cli.main(command) == 0
    assert len(answers(output)) == 4


def test_prompts_beyond_the_positions_of_the_model(files, capsys):
    """A prompt beyond the model's positions gets an error of its own, as in `h2o generate`. The
    model would write gibberish."""
    command, prompts, output = files
    prompts.write_text(json.dumps("x" * 1995) + '\n"short"\n', "utf-8")
    assert cli.main(command) == 1
    by_id = {answer["id"]: answer for answer in answers(output)}
    assert "the 2000 positions of the model" in by_id[0]["error"]
    assert by_id[1]["finish_reason"] == "length"
    assert cli.main([*command, "--max-new-tokens", "5"]) == 1  # another length is another setting
    command[6] = str(output.with_name("shorter.jsonl"))
    assert cli.main([*command, "--max-new-tokens", "5"]) == 0


def test_a_prompt_that_cannot_be_tokenized(files, monkeypatch):
    """The error of such a prompt must be its answer. It must not be dropped in the hope that a
    second attempt raises it again."""
    command, _, output = files
    tried = []
    whole = request.tokenize

    def failing(prompt, *how):
        if prompt == "a text":
            tried.append(prompt)
            raise KeyError("no such template")
        return whole(prompt, *how)

    monkeypatch.setattr(request, "tokenize", failing)
    assert cli.main(command) == 1
    by_id = {answer["id"]: answer for answer in answers(output)}
    assert "no such template" in by_id[0]["error"]
    assert by_id[7]["finish_reason"] == "length"
    assert tried == ["a text"]


def test_arguments_of_the_chat_template(files, tmp_path):
    """A chat must have the arguments of its line, or else those of the command. A text that has
    arguments must get an error."""
    command, prompts, output = files
    folder = shutil.copytree(command[2], tmp_path / "model")
    template = "{{ messages[0].content }}{{ mood }}{{ messages[-1].content }}"
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    chat = {"messages": [{"role": r, "content": "Hi."} for r in ("system", "user")]}
    own = {"chat_template_kwargs": {"mood": "!" * 20}, "pinned": "system"}
    lines = [chat, chat | own, {"prompt": "Hi.", "chat_template_kwargs": {"mood": ""}}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    command[2] = str(folder)
    assert cli.main([*command, "--chat-template-kwargs", '{"mood": "!!!!!"}']) == 1
    by_id = {answer["id"]: answer for answer in answers(output)}
    assert by_id[0]["prompt_tokens"] + 15 == by_id[1]["prompt_tokens"]
    assert "chat_template_kwargs needs a chat" in by_id[2]["error"]


def test_a_full_disk(files, capsys):
    command, _, output = files
    limits = "import resource, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); "
    limits += "resource.setrlimit(resource.RLIMIT_FSIZE, (300, 300)); from h2o import cli; "
    full = [sys.executable, "-c", limits + "sys.exit(cli.main(sys.argv[1:]))", *command]
    ended = subprocess.run(full, capture_output=True, text=True, timeout=DEADLINE)
    assert ended.returncode == 1
    assert f"cannot write {output}: File too large" in ended.stderr
    assert cli.main(command) == 0
    assert len(answers(output)) == 4


def test_fewer_prompts_than_answers(files, capsys):
    command, prompts, _ = files
    assert cli.main(command) == 0
    prompts.write_text('"a text"\n', "utf-8")
    assert cli.main(command) == 0
    assert "1 of 1 prompts have an answer already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('"a"\n{"prompt": "b", "max_tokens": 3}', "line 2: max_tokens"),
        (
            '{"id": 1, "prompt": "a"}\n\n{"id": 1, "prompt": "b"}',
            "line 3: the id 1 is already that of line 1: give each line its own id",
        ),
        ('{"id": 1, "prompt": "a"}\n"b"', "line 2: the id 1 is already that of line 1"),
        ('"a"\n{"id": 0, "prompt": "b"}', "line 2: the id 0 is already that of line 1"),
        ('"a"\n{"id": "0", "prompt": "b"}', "line 2: the id '0' is already that of line 1"),
        ('{"prompt": ""}', "line 1"),
        ('{"prompt": "a", "max_new_tokens": 0}', "at least 1"),
        ("[]", "line 1"),
        ("no json", "line 1: not JSON (Expecting value): write a text in quotes"),
        ('{"messages": [5, 6]}', "messages must be objects"),
        ("3", "line 1"),
        ('{"prompt": "a", "chat_template_kwargs": 5}', "template are a dict such as"),
        ('{"prompt": "a", "chat_template_kwargs": {"padding": 1}}', "padding: not for the chat"),
        ('{"prompt": "a", "max_new_tokens": true}', "max_new_tokens is True; expected an integer"),
        ('{"prompt": "a", "seed": 1.5}', "line 1: seed is 1.5; expected an integer"),
        ('{"prompt": "a", "id": true}', "id must be a text or an integer, not True"),
        ("[" * 100_000, "line 1: lists are nested too deeply"),
        ('{"prompt": "a", "seed": 1, "seed": 2}', "line 1: the key 'seed' occurs twice"),
        (
            '"a"\n{"messages": [{"role": "user", "role": "system", "content": "a"}]}',
            "line 2: the key 'role' occurs twice in one object: remove one of the two",
        ),
    ],
)
def test_files_that_are_refused(files, content, words, capsys):
    command, prompts, output = files
    prompts.write_text(content)
    with pytest.raises(SystemExit) as end:
        cli.main(command)
    assert end.value.code == 2
    assert words in capsys.readouterr().err
    assert not output.exists()


@pytest.mark.parametrize(
    "more",
    [
        ["--prompt", "x"],
        ["--rows", "0"],
        ["--compare"],
    ],
)
def test_options_that_are_refused(files, more):
    with pytest.raises(SystemExit) as end:
        cli.main([*files[0], *more])
    assert end.value.code == 2


@pytest.mark.parametrize(
    "content",
    [
        "notes\n",
        "notes",
        '{"prompt": "a"}',
        '{"id": 3, "prompt": "a"}',
        '{"id": "b", "messages": []}\n{"id": "c", "mess',
        '{"identity": 3}',
        "{}",
        "[" * 100_000 + "\n",
    ],
)
def test_an_output_of_another_kind_is_left_alone(files, content):
    """A file that is no output of ours is not overwritten, even if its last line is unfinished but
    not the beginning of an answer."""
    command, _, output = files
    output.parent.mkdir()
    output.write_text(content)
    assert cli.main(command) == 1
    assert output.read_text() == content


def test_an_answer_may_be_cut_anywhere(files):
    command, _, output = files
    assert cli.main(command) == 0
    line = output.read_bytes().splitlines()[-1]
    for end in range(len(line)):
        assert prompts_file._is_cut(line[:end])


def test_an_output_that_is_no_file_of_answers(files, tmp_path, capsys):
    """A bad output name is reported before anything is loaded or written."""
    command, prompts, _ = files
    before = prompts.read_bytes()
    (tmp_path / "folder").mkdir()
    (tmp_path / "link.jsonl").symlink_to(prompts)
    for name, words in (
        (prompts, "is an input file: name another output"),
        (tmp_path / "link.jsonl", "is an input file: name another output"),
        (tmp_path / "folder", "folder is a folder, not a file"),
        ("", "an empty name is a folder"),
        ("-", "- is not a file"),
        ("/dev/null", "/dev/null is not a file"),  # reading a pipe would wait forever
    ):
        command[6] = str(name)
        with pytest.raises(SystemExit) as end:
            cli.main(command)
        assert end.value.code == 2
        assert words in capsys.readouterr().err
    assert prompts.read_bytes() == before
