"""`h2o bench` runs a model with the full cache and h2o's in turn. No time is asserted."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from h2o import cli, load_model  # noqa: E402
from h2o.evaluation import generation, setting, speed  # noqa: E402
from tests.test_cli import tiny  # noqa: E402, F401

SHORT = ("--rounds", "2", "--tokens", "3")


def measured(capsys, model, *arguments):
    """The object that --json prints."""
    assert cli.main(["bench", "--model", model, *SHORT, *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_every_cache_at_every_length(tiny, capsys):  # noqa: F811
    arguments = ["--prompts", "40", "90", "--budgets", "0.2", "8"]
    result = measured(capsys, tiny, *arguments)
    assert (result["model"], result["dtype"]) == (tiny, "float32")
    assert (result["rounds"], result["tokens"]) == (2, 3)
    assert result["machine"]["device"] == "cpu"
    assert result["machine"]["threads"] == torch.get_num_threads()
    assert result["machine"]["core"]["level"]
    assert result["versions"]["torch"] == torch.__version__
    lines = result["measurements"]
    assert [(line["prompt_tokens"], line["setting"]) for line in lines] == [
        (n, name) for n in (40, 90) for name in ("full", "authors:0.2", "authors:8")
    ]
    for line in lines:
        assert len(line["prefill_samples"]) == len(line["token_samples"]) == 2
        assert min(line["prefill_samples"] + line["token_samples"]) > 0
        assert line["tokens_per_second"] == pytest.approx(1 / line["token_seconds"])
        if line["setting"] == "full":
            assert line["prefill_speedup"] == line["token_speedup"] == line["bytes_ratio"] == 1
            # Keys and values of 2 layers, 2 heads of 8, 4 bytes each. The last token is never fed.
            assert line["bytes_held"] == 2 * 2 * 2 * 8 * 4 * (line["prompt_tokens"] + 3)
    commas = ["--prompts", "40,90", "--budgets", "0.2,8"]
    again = measured(capsys, tiny, *commas)["measurements"]
    assert [line["setting"] for line in again] == [line["setting"] for line in lines]
    small = {n: line["bytes_held"] for n, line in zip((40, 90), lines[2::3], strict=True)}
    assert small[40] == small[90]
    assert lines[4]["bytes_ratio"] < 0.5


def test_the_full_cache_does_not_wait_for_plans():
    """cuDNN builds a new plan for each token, so it is disabled while the full cache is timed. The
    user's setting must be restored afterwards."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with generation.without_cudnn(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    with generation.without_cudnn(torch.device("cpu")):
        assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_settings_of_eval_may_be_compared(tiny, capsys):  # noqa: F811
    compared = "full,local:0.2,robust-bytes/sinks=1"
    result = measured(capsys, tiny, "--prompts", "64", "--budgets", "0.5", "--compare", compared)
    names = [line["setting"] for line in result["measurements"]]
    assert names == ["full", "local:0.2", "robust-bytes:0.5/sinks=1"]


def test_the_table_for_readers(tiny, capsys):  # noqa: F811
    arguments = ["--model", tiny, *SHORT, "--prompts", "30", "60", "--budgets", "6"]
    assert cli.main(["bench", *arguments]) == 0
    captured = capsys.readouterr()
    assert "60 tokens: round 2 of 2" in captured.err
    head, _, names, _, *lines = captured.out.splitlines()
    assert f"{torch.get_num_threads()} thread" in head
    assert head.endswith("; medians of 2 rounds")
    assert names.split()[:2] == ["cache", "prompt"]
    rows = [line.split() for line in lines if "full" in line or "authors" in line]
    assert [row[:2] for row in rows[:-1]] == [
        ["full", "30"], ["authors:6", "30"], ["full", "60"], ["authors:6", "60"]
    ]  # fmt: skip
    assert rows[1][3].endswith("x")
    assert rows[1][-1].endswith("%")


def test_caches_take_turns(tiny, monkeypatch):  # noqa: F811
    log = []
    original = speed.run

    def run(setting, *arguments):
        log.append(setting.name)
        return original(setting, *arguments)

    monkeypatch.setattr(speed, "run", run)
    settings = [setting.parse(name) for name in ("full", "authors:8")]
    model, tokenizer = load_model(tiny)
    speed.measure(model, tokenizer, settings, [20], tokens=2, rounds=3, log=lambda text: None)
    warm, *rounds = [log[i : i + 2] for i in range(0, len(log), 2)]
    assert [warm, *rounds] == [
        ["full", "authors:8"], ["full", "authors:8"], ["authors:8", "full"], ["full", "authors:8"]
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--prompts", "1990"], 1, "exceed the 2000 positions"),
        (["--compare", "nonsense"], 2, "setting 'nonsense': unknown"),
        (["--compare", "mask-local:0.1+0.1"], 2, "mask-local:0.1+0.1: a mask, not a cache"),
    ],
)
def test_one_line_says_what_is_wrong(tiny, capsys, arguments, code, words):  # noqa: F811
    command = ["bench", "--model", tiny, *arguments]
    if code == 2:
        with pytest.raises(SystemExit) as exit_:
            cli.main(command)
        assert exit_.value.code == 2
    else:
        assert cli.main(command) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("h2o bench: error: ")
    assert words in last


def test_a_model_that_h2o_cannot_serve_is_named(tiny, capsys, monkeypatch):  # noqa: F811
    def refuse(*_, **__):
        raise ValueError("it cannot")

    monkeypatch.setattr("h2o.evaluation.generation.H2OCache", refuse)
    assert cli.main(["bench", "--model", tiny, *SHORT, "--prompts", "20"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == ("h2o bench: error: authors:0.1: it cannot")


def test_memory_that_is_not_enough(tiny, capsys, monkeypatch):  # noqa: F811
    def full(*_, **__):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("h2o.evaluation.generation.H2OCache", full)
    assert cli.main(["bench", "--model", tiny, *SHORT, "--prompts", "20"]) == 1
    assert "not enough memory for a prompt of 20 tokens" in capsys.readouterr().err.splitlines()[-1]
