"""Perplexity measured in one forward pass, and with a real cache token by token."""

from __future__ import annotations

import math
import re

import pytest
import torch

from h2o import Profile, cli
from h2o.evaluation import windows
from h2o.evaluation.lm import H2OLM
from h2o.evaluation.setting import parse
from tests.cases import checkered
from tests.evaluation import conftest
from tests.evaluation.conftest import measured, table_of

pytestmark = [
    pytest.mark.usefixtures("lm_eval_apart"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # from lm-eval's files
]

TEXT = "\n".join(
    f"On day {day} the keeper counted {day * 7 % 13} boats, {day * 5 % 11} gulls and one cat."
    for day in range(8)
)


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    return file


def run(folder, text, tmp_path, *arguments):
    where = ["--model", str(folder), "-o", str(tmp_path / "out")]
    return cli.main(["eval", "--perplexity", str(text), *where, *map(str, arguments)])


def by_cache(model, *which):
    model.set_attn_implementation("h2o")
    try:
        return windows.by_cache(model, *which)
    finally:
        model.set_attn_implementation("sdpa")


class OnDevice(torch.Tensor):
    """A tensor of another device. torch.cat would not accept it together with a CPU tensor."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        assert function is not torch.cat
        made = super().__torch_function__(function, types, args, kwargs or {})
        return made.as_subclass(torch.Tensor) if function is torch.Tensor.cpu else made


def test_windows_may_be_on_a_device():
    model, setting = conftest.build("llama"), parse("h2o:0.1+0.1")
    ids = torch.arange(30)[None]
    want = by_cache(model, ids, setting, 20)
    assert torch.equal(by_cache(model, ids.as_subclass(OnDevice), setting, 20), want)


@pytest.mark.parametrize(
    ("model_type", "prompt_length"), checkered(["llama", "opt", "gpt_neox"], [1, 20])
)
def test_both_ways_agree(tokenizer, model_type, prompt_length):
    model = conftest.build(model_type)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :90]
    full = windows.by_simulation(model, ids, parse("full"))
    for setting in ["h2o:0.1+0.1", "local:8", "sink:4+0.1", "robust:0.2", "h2o:200+0", "full"]:
        one = windows.by_simulation(model, ids, parse(setting), prompt_length)
        other = by_cache(model, ids, parse(setting), prompt_length)
        torch.testing.assert_close(one[prompt_length - 1 :], other, atol=5e-4, rtol=0)
        if setting in ("h2o:200+0", "full"):
            torch.testing.assert_close(one, full, atol=5e-4, rtol=0)
        else:
            assert (one - full).abs().max() > 0.01


@pytest.mark.parametrize("setting", ["h2o:0.1+0.1", "echo-bytes:0.2"])
def test_a_budget_that_follows_the_text_does_so_in_both_ways(tokenizer, setting):
    model = conftest.build()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :90]
    growing = parse(f"{setting}/ratio_of=seen")
    one = windows.by_simulation(model, ids, growing, 20)[19:]
    torch.testing.assert_close(one, by_cache(model, ids, growing, 20), atol=5e-4, rtol=0)
    constant = windows.by_simulation(model, ids, parse(setting), 20)[19:]
    assert (one - constant).abs().max() > 0.01


def test_it_is_the_models_own_loss(tokenizer):
    model = conftest.build()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :60]
    with torch.no_grad():
        want = model(ids, labels=ids).loss
    torch.testing.assert_close(windows.by_simulation(model, ids, parse("full")).mean(), want)


@pytest.mark.parametrize(
    ("protocol", "measure"), [("simulate", windows.by_simulation), ("drop", windows.by_cache)]
)
def test_the_precision_that_lm_eval_was_told(tokenizer, protocol, measure):
    how = {"tokenizer": tokenizer, "mixed_precision_dtype": "bfloat16"}
    ours = H2OLM(conftest.build(), protocol=protocol, heavy=0.1, recent=0.1, **how)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :60]
    in_float32 = measure(ours.model, ids, ours.setting, 1).double().sum().item()
    with torch.autocast("cpu", torch.bfloat16):
        want = measure(ours.model, ids, ours.setting, 1).double().sum().item()
    assert abs(want - in_float32) > 1e-3
    assert windows.answer(ours, ids[0].tolist(), 1)[0] == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize("measure", [windows.by_simulation, by_cache])
@pytest.mark.parametrize(("prompt", "tokens"), [(1, 9), (20, 2)])
def test_fractions_are_of_the_prompt_if_there_is_one(tokenizer, measure, prompt, tokens):
    model, ids = conftest.build(), tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :90]
    expected = measure(model, ids, parse(f"h2o:{tokens}+{tokens}"), prompt)
    assert torch.equal(measure(model, ids, parse("h2o:0.1+0.1"), prompt), expected)


@pytest.mark.parametrize("protocol", ["simulate", "drop"])
def test_after_a_prompt_what_the_cut_can_change_counts(
    folder, text, tmp_path, capsys, tokenizer, protocol
):
    """In a window of 80 tokens with a prompt of 50, tokens 51 to 79 are scored. Tokens 50 to 78
    predict them."""
    options = ["--window", 80, "--limit", 2, "--prompt-length", 50, "--protocol", protocol]
    assert run(folder, text, tmp_path, "--compare", "full,h2o:4+4", *options) == 0
    rows = table_of(capsys.readouterr().out)
    assert [row["scored"] for row in rows.values()] == ["58", "58"]
    model, ids = conftest.build(), tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :160]
    losses = [
        [windows.by_simulation(model, part, parse(x), 50) for part in ids.split(80, dim=1)]
        for x in ("full", "h2o:4+4")
    ]
    for full, cut in zip(*losses, strict=True):
        torch.testing.assert_close(full[:50], cut[:50], atol=1e-5, rtol=0)
        assert windows.count_scored(80, 50) == len(cut[50:])
        assert windows.count_scored(80, 1) == len(cut)
    means = [torch.cat([x[50:] for x in each]).mean().item() for each in losses]
    shown = float(rows["h2o:4+4"]["nats lost"].split()[0])
    assert shown == pytest.approx(means[1] - means[0], abs=2e-3)
    ours = measured(tmp_path / "out")["full"]["results"]["h2o_perplexity"]["perplexity,none"]
    assert ours == pytest.approx(math.exp(means[0]), rel=1e-3)


@pytest.mark.parametrize("protocol", ["simulate", "drop"])
def test_without_a_prompt_there_is_no_echo(folder, text, tmp_path, capsys, protocol):
    """A setting that ranks by echo is then the same as `robust`, and the output must say so."""
    options = [
        "--window",
        80,
        "--limit",
        1,
        "--protocol",
        protocol,
        "--compare",
        "robust:20,echo:20",
    ]
    for more, is_noted in (([], True), (["--prompt-length", 40], False)):
        assert run(folder, text, tmp_path, *options, *more) == 0
        out = capsys.readouterr().out
        rows = table_of(out)
        assert (rows["robust:20"]["perplexity"] == rows["echo:20"]["perplexity"]) == is_noted
        assert ("echo:20: there is no prompt, and so no echo" in out) == is_noted


def test_the_title_says_what_fractions_are_of(folder, text, tmp_path, capsys):
    settings = "full,h2o:0.1+0.1,h2o:0.1+0.1/ratio_of=seen"
    arguments = ["--compare", settings, "--window", 100, "--prompt-length", 60]
    assert run(folder, text, tmp_path, *arguments) == 0
    title = capsys.readouterr().out.splitlines()[0]
    assert title.endswith("fractions of the prompt or the text so far")


def test_a_last_window_without_tokens_to_score_is_left_out(tokenizer):
    ids = tokenizer(TEXT)["input_ids"]
    rest = len(ids) - 300
    for prompt, number in ((rest - 2, 2), (rest - 1, 1)):
        assert len(windows.cut_windows(ids, 300, prompt)) == number


def test_compare(folder, text, tmp_path, capsys, tokenizer):
    settings = "full,h2o:0.1+0.1,local:0.2,mask-local:0.1+0.1,mask-global:0.1+0.1"
    arguments = ["--compare", settings, "--window", 100]
    assert run(folder, text, tmp_path, *arguments) == 0
    out, progress = capsys.readouterr()
    assert out.startswith(str(folder))  # progress goes to stderr
    assert "* sees the future: not comparable" in out.splitlines()
    rows = table_of(out)
    assert [name.removesuffix(" *") for name in rows] == settings.split(",")
    assert rows["full"]["kept"] == "100.0%"
    assert rows["full"]["nats lost"] == "0.000 ±0.000"
    tokens = len(tokenizer(TEXT)["input_ids"])
    assert tokens % 100 > 1
    number = math.ceil(tokens / 100)
    for name in settings.split(","):
        assert re.search(rf"{re.escape(name)}: 100%\|.*\| {number}/{number} \[", progress)
    assert {row["scored"] for row in rows.values()} == {f"{tokens - number}"}
    model, ids = conftest.build(), tokenizer(TEXT, return_tensors="pt")["input_ids"]
    each = {
        name: [windows.by_simulation(model, part, parse(name)) for part in ids.split(100, dim=1)]
        for name in ("full", "local:0.2")
    }
    want = torch.cat(each["full"]).mean().exp().item()
    assert rows["full"]["perplexity"].split()[0] == f"{want:.2f}"
    lost = [(b - a).mean() for a, b in zip(each["full"], each["local:0.2"], strict=True)]
    mean = torch.cat(each["local:0.2"]).mean() - torch.cat(each["full"]).mean()
    error = torch.stack(lost).std() / len(lost) ** 0.5
    shown = [float(x.strip("±")) for x in rows["local:0.2"]["nats lost"].split()]
    assert shown == pytest.approx([mean.item(), error.item()], abs=1e-3)
    contents = measured(tmp_path / "out")
    facts = contents["h2o:0.1+0.1"]["config"]["h2o"]
    assert facts["requests"] == number
    assert {"model", "weights", "versions", "core"} <= set(facts["provenance"])
    assert {"protocol", "ratio_of", "variant"} <= set(facts)


@pytest.mark.parametrize("protocol", ["simulate", "drop"])
def test_an_interrupted_run_goes_on(folder, text, tmp_path, monkeypatch, protocol):
    name = "by_simulation" if protocol == "simulate" else "by_cache"
    original, calls = getattr(windows, name), []

    def measure(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(windows, name, measure)
    arguments = ["--compare", "full,h2o:8+8", "--window", 60, "--limit", 3, "--protocol", protocol]
    assert run(folder, text, tmp_path, *arguments) == 130
    assert run(folder, text, tmp_path, *arguments) == 0
    assert len(calls) == 4 + 3
    assert run(folder, text, tmp_path, *arguments) == 0
    assert len(calls) == 7
    text.write_text("Another " + TEXT)  # cached answers do not fit other tokens
    assert run(folder, text, tmp_path, *arguments) == 0
    assert len(calls) == 13


def test_requests_of_one_file_are_not_those_of_another(folder, text, tmp_path, monkeypatch):
    """lm-eval would cache requests by the task's name alone, and mix up the files."""
    monkeypatch.setattr("lm_eval.api.task.save_to_cache", lambda **_: pytest.fail("kept"))
    arguments = ["--compare", "full", "--window", 60, "--limit", 2]
    assert run(folder, text, tmp_path, *arguments, "--cache_requests") == 0


def test_one_setting_by_options(folder, text, tmp_path, capsys):
    options = ["--heavy", 6, "--recent", 5, "--sinks", 2, "--score-by", "mean", "--value-weighted"]
    assert run(folder, text, tmp_path, *options, "--window", 80, "--limit", 1) == 0
    (content,) = measured(tmp_path / "out").values()
    want = {"heavy": 6, "recent": 5, "sinks": 2, "score_by": "mean", "value_weighted": True}
    assert want.items() <= content["config"]["h2o"].items()
    assert content["config"]["h2o"]["tokens_kept"] == 13


def test_a_profile_of_one_setting_or_of_those_that_are_calibrated(folder, text, tmp_path, capsys):
    shares = ((0.5, 1.5), (1.25, 0.75))
    Profile((0.5,), (shares,), 64).save(tmp_path / "profile.json")
    options = ["--profile", tmp_path / "profile.json", "--window", 80, "--limit", 1]
    assert run(folder, text, tmp_path, "--heavy", 20, "--recent", 20, *options) == 0
    assert run(folder, text, tmp_path, "--compare", "local:0.2,calibrated:0.2", *options) == 0
    contents = measured(tmp_path / "out")
    of = {name: x["config"]["h2o"].get("head_shares") for name, x in contents.items()}
    assert [of["h2o:20+20"], of["local:0.2"]] == [of["calibrated:0.2"], None]
    assert of["calibrated:0.2"]
    code = conftest.exit_code(run, folder, text, tmp_path, "--compare", "local:0.2", *options)
    assert code == 2
    assert "--profile requires a calibrated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--window", "1"], 1, "use at least --window 2"),
        (["--window", "330"], 1, "the model's 320 positions"),
        (["--limit", "0"], 2, "0 is neither a number of rows"),
        (["--prompt-length", "0"], 2, "--prompt-length: must be at least 1"),
        (
            ["--window", "50", "--prompt-length", "49"],
            1,
            "a window of 50 tokens has none whose prediction the cut can change. Use at most "
            "--prompt-length 48",
        ),
        (["--heavy", "0", "--recent", "0", "--window", "50"], 2, "budget of 0"),
        (["--compare", "mask-local:4+4", "--protocol", "drop"], 1, "a mask, not a cache"),
        (["--compare", "mask-local:4+4", "--prompt-length", "9"], 1, "no prompt"),
        (["--compare", "h2o:8+8/positions=cache_relative"], 1, "simulated cannot be combined"),
        (["--protocol", "read"], 2, "supports only simulate or drop"),
    ],
)
def test_arguments_that_do_not_fit(folder, text, tmp_path, capsys, arguments, code, words):
    assert conftest.exit_code(run, folder, text, tmp_path, *arguments) == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("content", [None, b"", b"a", b"\xff\xfe\xfa"])
def test_files_that_are_no_text(folder, tmp_path, capsys, content):
    file = tmp_path / "bad.txt"
    if content is not None:
        file.write_bytes(content)
    assert run(folder, file, tmp_path) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("h2o eval: error:")
    assert "bad.txt" in error
