"""Perplexity by one forward and by the real cache, token by token."""

from __future__ import annotations

import json
import math

import pytest
import torch

from h2o import Profile, cli
from h2o.evaluation import perplexity
from h2o.evaluation.setting import parse
from h2o.hf.store import retained
from tests.cases import checkered
from tests.evaluation import conftest

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


def cells(tmp_path):
    return json.loads((tmp_path / "out" / "perplexity.json").read_text())["cells"]


@pytest.mark.parametrize(
    ("model_type", "prompt_length"), checkered(["llama", "opt", "gpt_neox"], [1, 20])
)
def test_both_ways_agree(tokenizer, model_type, prompt_length):
    model = conftest.build(model_type)
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :90]
    full, _ = perplexity.by_simulation(model, ids, parse("full"))
    for setting in ["h2o:0.1+0.1", "local:8", "sink:4+0.1", "robust:0.2", "h2o:200+0", "full"]:
        one, mass = perplexity.by_simulation(model, ids, parse(setting), prompt_length)
        other, held = perplexity.by_cache(model, ids, parse(setting), prompt_length)
        torch.testing.assert_close(one, other, atol=5e-4, rtol=0)
        assert list(held) == [0, 1]
        if setting in ("h2o:200+0", "full"):
            torch.testing.assert_close(one, full, atol=5e-4, rtol=0)
            assert all(share == 1 for share in held.values())
            assert all(share == pytest.approx(1) for share in mass.values())
        else:
            assert (one - full).abs().max() > 0.01
            assert all(0 < share < 0.99 for share in (*held.values(), *mass.values()))
    assert model.config._attn_implementation == "sdpa"


def test_random_keys_lose_the_same_both_ways(tokenizer):
    """Of attention paid to keys that are gone the cache knows nothing, and reports nothing."""
    model = conftest.build()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :90]
    for setting in map(parse, ["random:0.2", "random-bytes:0.2"]):
        one, mass = perplexity.by_simulation(model, ids, setting, 20)
        other, held = perplexity.by_cache(model, ids, setting, 20)
        torch.testing.assert_close(one, other, atol=5e-3, rtol=0)
        assert list(mass) == [0, 1]
        assert held == {}


@pytest.mark.parametrize("protocol", ["simulate", "drop"])
def test_after_a_prompt_what_the_cut_can_change_counts(
    folder, text, tmp_path, capsys, tokenizer, protocol
):
    """Of a window of 80 tokens with a prompt of 50: 51 to 79, predicted by tokens 50 to 78."""
    options = ["--window", 80, "--limit", 2, "--prompt-length", 50, "--protocol", protocol]
    assert run(folder, text, tmp_path, "--compare", "full,h2o:4+4", *options) == 0
    out = capsys.readouterr().out
    assert "scored: the 58 tokens that a cut after 50 can change; the prompt," in out
    assert [cell["result"]["predicted"] for cell in cells(tmp_path)] == [29] * 4
    model, ids = conftest.build(), tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :80]
    losses = [perplexity.by_simulation(model, ids, parse(x), 50)[0] for x in ("full", "h2o:4+4")]
    torch.testing.assert_close(losses[0][:50], losses[1][:50], atol=1e-5, rtol=0)
    for loss in losses:
        assert torch.equal(perplexity.scored(loss, 50), loss[50:])
        assert torch.equal(perplexity.scored(loss, 1), loss)
    first = [c for c in cells(tmp_path) if c["facts"]["window"] == 0]
    lost = first[1]["result"]["loss"] - first[0]["result"]["loss"]
    assert lost == pytest.approx((losses[1] - losses[0]).sum().item(), abs=1e-2)
    assert {c["facts"]["scored"] for c in cells(tmp_path)} == {"after the cut"}


def test_a_last_window_without_tokens_to_score_is_left_out(folder, text, tmp_path, tokenizer):
    window = 300
    rest = len(tokenizer(TEXT)["input_ids"]) - window
    options = ["--window", window, "--compare", "full", "--prompt-length"]
    for prompt, windows in ((rest - 2, 2), (rest - 1, 1)):
        (tmp_path / "out" / "perplexity.json").unlink(missing_ok=True)
        assert run(folder, text, tmp_path, *options, prompt) == 0
        assert len(cells(tmp_path)) == windows


def test_inputs_go_where_the_model_is(monkeypatch):
    devices = []

    def by_simulation(model, ids, *_):
        devices.append(ids.device.type)
        return torch.zeros(2), {}

    monkeypatch.setattr(perplexity, "by_simulation", by_simulation)
    perplexity.measured(conftest.build().to("meta"), [1, 2, 3], parse("full"), "simulate", 1)
    assert devices == ["meta"]


def test_a_device_of_the_same_kind_has_the_same_results(folder, text, tmp_path, capsys):
    for device in ("cpu", "cpu:0"):
        options = ["--compare", "full", "--window", "300", "--device", device]
        assert run(folder, text, tmp_path, *options) == 0
    measured = cells(tmp_path)
    tokens = {cell["facts"]["tokens"] for cell in measured}
    assert len(measured) == len(tokens), "the second run takes what the first has measured"


def test_it_is_the_models_own_loss(tokenizer):
    model = conftest.build()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :60]
    loss, _ = perplexity.by_simulation(model, ids, parse("full"))
    with torch.no_grad():
        want = model(ids, labels=ids).loss
    torch.testing.assert_close(loss.mean(), want)


def test_compare(folder, text, tmp_path, capsys, tokenizer):
    settings = "full,h2o:0.1+0.1,local:0.2,mask-local:0.1+0.1,mask-global:0.1+0.1"
    assert run(folder, text, tmp_path, "--compare", settings, "--window", 100) == 0
    out = capsys.readouterr().out
    assert out.startswith(str(folder))  # what is done meanwhile is said elsewhere
    tokens = len(tokenizer(TEXT)["input_ids"])
    windows = math.ceil(tokens / 100)
    assert tokens % 100 > 1
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.strip()}
    assert [name in rows for name in settings.split(",")] == [True] * 5
    assert rows["full"][1] == "100.0%"
    assert rows["mask-global:0.1+0.1"][1] == "*"
    assert "* sees the future: not comparable" in out.splitlines()
    assert f"in {windows} windows" in out
    measured = cells(tmp_path)
    assert len(measured) == 5 * windows
    assert sum(c["result"]["predicted"] for c in measured if c["facts"]["setting"] == "full") == (
        tokens - windows
    )
    for cell in measured:
        assert {
            "model", "weights", "versions", "seeds", "protocol", "ratio_of", "variant", "file",
            "window", "prompt_len", "dtype",
        } <= set(cell["facts"])  # fmt: skip
        if cell["facts"]["variant"] != "full":
            assert set(cell["result"]["retained_mass"]) == {"0", "1"}
    full = [c["result"] for c in measured if c["facts"]["setting"] == "full"]
    want = math.exp(sum(r["loss"] for r in full) / sum(r["predicted"] for r in full))
    assert rows["full"][4] == f"{want:.2f}"
    assert (tmp_path / "out" / "perplexity.png").stat().st_size > 0
    name = next(name for name in settings.split(",") if name.startswith("local"))
    results = [c["result"] for c in measured if c["facts"]["setting"] == name]
    loss = math.log(float(rows[name][4]) / float(rows["full"][4]))
    assert rows["full"][6:8] == ["0.000", "±0.000"]
    assert float(rows[name][6]) == pytest.approx(loss, abs=2e-3)
    each = torch.tensor(
        [(a["loss"] - b["loss"]) / a["predicted"] for a, b in zip(results, full, strict=True)]
    )
    assert rows[name][7] == f"±{each.std().item() / len(each) ** 0.5:.3f}"
    assert run(folder, text, tmp_path, "--compare", name, "--window", 100, "--json") == 0
    printed = json.loads(capsys.readouterr().out)  # of this call, as the file has it
    assert printed["kind"] == "h2o eval --perplexity"
    assert printed["cells"] == [c for c in measured if c["facts"]["setting"] == name]


@pytest.mark.parametrize("protocol", ["simulate", "drop"])
def test_an_interrupted_run_goes_on(folder, text, tmp_path, capsys, monkeypatch, protocol):
    name = "by_simulation" if protocol == "simulate" else "by_cache"
    original, calls = getattr(perplexity, name), []

    def measure(*args):
        calls.append(args)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(perplexity, name, measure)
    arguments = ["--compare", "full,h2o:8+8", "--window", 60, "--limit", 3, "--protocol", protocol]
    assert run(folder, text, tmp_path, *arguments) == 130
    assert len(cells(tmp_path)) == 3
    assert run(folder, text, tmp_path, *arguments) == 0
    assert len(calls) == 4 + 3
    assert "the first of" in capsys.readouterr().out
    assert len(cells(tmp_path)) == 6
    assert run(folder, text, tmp_path, *arguments) == 0
    assert len(calls) == 7
    text.write_text("Another " + TEXT)  # what is in the file no longer fits this text
    assert run(folder, text, tmp_path, *arguments) == 0
    assert len(calls) == 13


def test_one_setting_by_options(folder, text, tmp_path, capsys):
    options = ["--heavy", 6, "--recent", 5, "--sinks", 2, "--score-by", "mean", "--value-weighted"]
    assert run(folder, text, tmp_path, *options, "--window", 80, "--limit", 1) == 0
    (cell,) = cells(tmp_path)
    want = {"heavy": 6, "recent": 5, "sinks": 2, "score_by": "mean", "value_weighted": True}
    assert want.items() <= cell["facts"].items()
    assert cell["result"]["kept"] == 13


def test_a_profile_of_one_setting_or_of_those_that_are_calibrated(folder, text, tmp_path, capsys):
    shares = ((0.5, 1.5), (1.25, 0.75))
    Profile((0.5,), (shares,), 64).save(tmp_path / "profile.json")
    options = ["--profile", tmp_path / "profile.json", "--window", 80, "--limit", 1]
    assert run(folder, text, tmp_path, "--heavy", 20, "--recent", 20, *options) == 0
    assert run(folder, text, tmp_path, "--compare", "local:0.2,calibrated:0.2", *options) == 0
    one, local, calibrated = (cell["facts"].get("shares") for cell in cells(tmp_path))
    assert one
    assert [calibrated, local] == [one, None]
    code = conftest.exit_code(run, folder, text, tmp_path, "--compare", "local:0.2", *options)
    assert code == 2
    assert "--profile goes with calibrated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--window", "1"], 1, "--window 1: from 2 to"),
        (["--window", "9999"], 1, "the model's 320 positions"),
        (["--limit", "0"], 2, "--limit 0"),
        (["--prompt-length", "0"], 2, "--prompt-length 0: a number of tokens, at least 1"),
        (
            ["--window", "50", "--prompt-length", "49"],
            1,
            "a window of 50 tokens has none whose prediction the cut can change. Use at most "
            "--prompt-length 48",
        ),
        (["--limit", "0.5"], 2, "--limit 0.5"),
        (["--ratio-of", "prompt"], 2, "no such choice but text"),
        (["--heavy", "0", "--recent", "0", "--window", "50"], 2, "budget of 0"),
        (["--compare", "mask-local:4+4", "--protocol", "drop"], 2, "a mask, no cache"),
        (["--num_fewshot", "5"], 2, "lm-eval's options go with --tasks"),
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


def test_retained_mass_is_the_variants(tokenizer):
    """The numbers of the table are those of h2o.attention_blocks, by layer and head."""
    from h2o import simulated

    model = conftest.build()
    ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :70]
    seen = {}
    original = retained.retained_mass

    def spy(query, keys, evicted_at, **kwargs):
        seen[len(seen)] = original(query, keys, evicted_at, **kwargs)
        return seen[len(seen) - 1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(retained, "retained_mass", spy)
        with simulated(model, heavy=5, recent=5, mass=True) as simulation, torch.no_grad():
            model(ids, use_cache=False)
    _, mass = perplexity.by_simulation(model, ids, parse("h2o:5+5"))
    for layer in simulation.layers():
        assert torch.equal(simulation.retained_mass(layer, per_token=True)[0], seen[layer])
        assert mass[layer] == pytest.approx(seen[layer].mean().item())
