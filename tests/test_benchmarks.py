"""The benchmarks run, check the results they time, and write what they promise. No time is
asserted."""

from __future__ import annotations

import argparse
import collections
import functools
import importlib.util
import json
import re

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytest.importorskip("benchmarks.runner", reason="the benchmarks are not here")

from benchmarks import (  # noqa: E402
    callgrind,
    catalog,
    correctness,
    disk_table,
    echo_table,
    inputs,
    long_text,
    machine,
    model_tables,
    options,
    reporting,
    runner,
    throughput_tables,
    timing,
)
from benchmarks.peers import attention_peers  # noqa: E402
from benchmarks.peers.environments import PeerMissing  # noqa: E402
from benchmarks.timing import Contender, Row, Times, race  # noqa: E402
from h2o import models  # noqa: E402
from tests.default_model import random_default_model  # noqa: E402


@pytest.fixture(autouse=True)
def _samples_of_one_call(monkeypatch):
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 1e-9)


def quick(tmp_path, *arguments: str) -> dict:
    """The result file of a quick run."""
    assert runner.main([*arguments, "--quick", "--output", str(tmp_path)]) == 0
    return json.loads((tmp_path / "latest.json").read_text())


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        ("prefill", ["P1", "P2", "P1", "P2", "P1"]),
        ("decode", ["P3", "P4", "P5"] * 3),
        ("lengths", ["P19"] * 4),
        ("evict", ["P6", "P6"]),
        ("simulate", ["P7"] * 8),
        ("bits", ["P14"] * 4),
        ("uneven", ["P16"] * 2),
        ("latents", ["P23"] * 2),
        ("echo --dtypes float32", ["P24"] * 2),
        ("overhead", ["P9"] * 3),
        ("portable", ["P20"] * 4),
        ("busy", ["busy"] * 8),
    ],
)
def test_each_table_runs_and_checks_itself(tmp_path, table, rows, monkeypatch):
    monkeypatch.setattr(echo_table, "load", load_narrow)
    table, *arguments = table.split()
    result = quick(tmp_path, table, *arguments)
    if machine.roofline() is None:
        rows = [row for row in rows if row != "P4"]
    assert [row["row"] for row in result["rows"]] == rows
    for row in result["rows"]:
        assert row["command"] == f"python -m benchmarks {table}"
        assert len(row["ours"]["samples_s"]) == 2
        assert row["ours"]["median_s"] > 0
        if row["what"] != "one layer's cache.update and attention function":  # this row has no peer
            assert row["ratio"] > 0
        assert table in ("overhead", "busy") or row["error"]
    assert (tmp_path / "latest.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("table", "rows"),
    [
        ("prefill", {"G1": 6 * 3}),
        ("decode", {"G2": 4 * 2, "G3": 4 * 2}),
        ("long", {"G4": 4}),
        ("graph", {"G5": 2}),
        ("flexgen", {"G6": 1}),
    ],
)
@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_tables_of_a_gpu_have_a_dry_run(tmp_path, table, rows):
    """Contenders that a CPU cannot run are left out, and each row lists them."""
    assert runner.main(["--device", "dry-run", table, "--output", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "dry-run.json").read_text())
    assert result["quick"]
    assert collections.Counter(row["row"] for row in result["rows"]) == rows
    for row in result["rows"]:
        assert row["command"] == f"python -m benchmarks {table} --device dry-run"
        assert row["ours"]["median_s"] > 0
        if table in ("prefill", "decode", "long"):
            missing = row["facts"]["left out"]
            assert [name for name in missing if name.startswith("SDPA cuDNN")]
            assert row["roofline_fraction"] > 0
    if table == "decode" and importlib.util.find_spec("flashinfer") is None:
        assert "pip install flashinfer-python" in missing["FlashInfer, the same keys"]


def test_a_gpu_that_is_not_there_is_not_timed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    command = ["--device", "cuda", "--output", str(tmp_path)]
    assert runner.main(command) == 1
    assert "torch finds no CUDA device" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "empty", lambda *_, **__: torch.zeros(0))
    assert runner.main(command) == 1
    assert "h2o's kernels do not run here: torch (" in capsys.readouterr().err


def test_pages_hold_what_they_are_made_of():
    keys = torch.randn(2, 3, 37, 8)
    paged = attention_peers.pages(keys)
    assert paged.shape == (2 * 3, 3, attention_peers.PAGE, 8)
    for b, t in ((0, 0), (0, 36), (1, 16)):
        page = paged[b * 3 + t // attention_peers.PAGE, :, t % attention_peers.PAGE]
        assert torch.equal(page, keys[b, :, t])
    assert not paged[2, :, 5:].any()


@pytest.mark.slow
def test_memory_of_a_prefill_is_measured_in_its_own_process(tmp_path):
    result = quick(tmp_path, "memory", "--dtypes", "float32")
    assert [row["peer"]["name"] for row in result["rows"]] == ["eager + sums"] * 2


def test_quick_is_quick_for_whole_models_too():
    """--quick shortens whole-model runs, explicit numbers override it, and without it the tables'
    defaults apply."""
    parser = argparse.ArgumentParser()
    options.add_arguments(parser, "")

    def asked(*arguments):
        return options.check(parser, parser.parse_args(arguments), lambda device: [])

    short = asked("--quick")
    assert (short.rounds, max(short.prompts), short.tokens) == (2, 40, 2)
    assert asked("--quick", "--prompts", "50", "--rounds", "3").prompts == (50,)
    assert asked() == options.Options()


@pytest.mark.slow
def test_whole_model(tmp_path):
    try:
        models.find_weights()
    except models.UserError as error:
        pytest.skip(str(error))
    result = quick(tmp_path, "model", "--dtypes", "float32")
    held = result["rows"][0]["facts"]["bytes held"]
    rows = 3 if model_tables.QUANTIZED in held else 2  # with optimum-quanto there is one more peer
    phases = ["prefill"] * rows + ["decode"] * rows
    assert [row["facts"]["phase"] for row in result["rows"]] == phases
    held.pop(model_tables.QUANTIZED, None)
    few, usual, full = sorted(held.items(), key=lambda x: x[1])
    assert [few[0], usual[0], full[0]] == [model_tables.FEWEST, "H2OCache", "DynamicCache"]


def load_narrow(dtype, **more):
    """A model with as many cache bytes per token as the default model but a hundredth of its
    weights, in float32. A table does the same work and counts the same things with it."""
    return random_default_model(hidden_size=64, intermediate_size=64, dtype=torch.float32, **more)


def test_throughput_without_the_engines(tmp_path, monkeypatch, capsys):
    """The remaining peers answer every request with the tokens of generate() or of the full
    cache."""

    def missing(*_):
        raise PeerMissing("no such package")

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # it takes minutes
    monkeypatch.setattr(throughput_tables, "Peer", missing)
    narrow = functools.partial(load_narrow, num_hidden_layers=2)
    monkeypatch.setattr(throughput_tables, "load", narrow)
    result = quick(tmp_path, "throughput", "--threads", "1")
    peers = [throughput_tables.COMPILED, throughput_tables.STATIC, throughput_tables.CONTINUOUS]
    assert [(row["row"], row["peer"]["name"]) for row in result["rows"]] == [
        (name, peer) for name in ("R2", "R3", "R1") for peer in peers
    ]
    for row in result["rows"]:
        assert row["facts"]["of the peer"] > 0
        assert row["error"] == "100% of the tokens of generate()"
    assert capsys.readouterr().err.count("left out: no such package") == 5 + 6 + 6


def test_serving_without_the_engine(tmp_path, monkeypatch, capsys):
    """Without vLLM the table has no rows, and stderr names each engine that was left out."""

    def missing(*_):
        raise PeerMissing("no such package")

    monkeypatch.setattr(throughput_tables, "Peer", missing)
    assert quick(tmp_path, "serving")["rows"] == []
    assert capsys.readouterr().err.count("left out: no such package") == 4 * 3


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # accelerate keeps files open
@pytest.mark.filterwarnings("ignore:You are calling .generate")  # the model is on no device
def test_weights_on_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(disk_table, "load", load_narrow)
    (row,) = quick(tmp_path, "disk")["rows"]
    assert row["row"] == "R4"
    rows = row["facts"]["rows of H2OCache"], row["facts"]["rows of DynamicCache"]
    assert rows == (3, 6)  # a shorter prompt is enough for a row to reach its full size


def test_a_result_says_where_it_comes_from(tmp_path):
    result = quick(tmp_path, "overhead")
    assert result["quick"]
    assert result["machine"]["packages"]["torch"]
    assert result["machine"]["torch_threads"] == torch.get_num_threads()
    assert result["machine"]["h2o"]["level"]
    assert set(result["load"]["overhead"]) == {"before", "after"}


def test_a_peer_that_cannot_be_had_is_named(tmp_path, monkeypatch):
    def table(options):
        """P0: a peer that is not there."""
        raise PeerMissing("no such package")
        yield

    absent = catalog.Table("absent", table, cpu="P0")
    monkeypatch.setattr(catalog, "TABLES", (absent, *catalog.TABLES))
    result = quick(tmp_path, "absent", "overhead")
    assert result["missing"] == {"absent": "no such package"}
    assert {row["row"] for row in result["rows"]} == {"P9"}


@pytest.mark.parametrize("command", [["--rounds", "4"], ["no-such-table"]])
def test_what_is_no_figure_is_refused(command, capsys):
    with pytest.raises(SystemExit):
        runner.main(command)
    assert "meaningful figure" in capsys.readouterr().err or "no-such-table" in command


def test_each_table_that_help_names_is_there(capsys):
    names = [table.name for table in catalog.TABLES]
    assert len(names) == len(set(names))
    on_gpu = ["prefill", "decode", "long", "graph", "flexgen", "kvpress"]
    assert list(catalog.tables("cuda")) == list(catalog.tables("dry-run")) == on_gpu
    assert set(names) == {*catalog.tables("cpu"), *on_gpu}
    with pytest.raises(SystemExit):
        runner.main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"{name}: " in shown or f"{name}:\n" in shown for name in names)


def test_the_counting_program_is_built_without_what_needs_python():
    makefile = (callgrind.ROOT / "Makefile").read_text("utf-8")
    (listed,) = re.findall(r"^PYTHON_SOURCES := \$\(addprefix csrc/,(.*)\)", makefile, re.MULTILINE)
    assert sorted(listed.split()) == sorted(callgrind.NEEDS_PYTHON)


def test_contenders_take_turns():
    log = []
    contenders = [
        Contender("a", lambda: log.append("a"), before=lambda: log.append("before a")),
        Contender("b", lambda: log.append("b") or 2.5, own_clock=True),
    ]
    times = race(contenders, rounds=3)
    a, b = ["before a", "a"], ["b"]
    assert log[-9:] == [*a, *b, *b, *a, *a, *b]
    assert times["b"].samples == [2.5] * 3


def test_ratios_are_of_the_same_round():
    row = Row(
        "P0", "", "", ours=Times("h2o", [1.0, 2.0, 4.0], 8.0), peer=Times("x", [3.0, 6.0, 9.0])
    )
    row.peak = Times("read", [1.0], 16.0)
    result = row.to_dict()
    assert result["ratio"] == 3.0
    assert result["ratio_quartiles"] == (2.625, 3.0)
    assert result["roofline_fraction"] == 0.25
    assert "| 2 s | 6 s | 3 |" in reporting.markdown({"rows": [result]})


def test_a_wrong_result_is_noticed():
    truth = torch.zeros(4, dtype=torch.float64)
    torch_error = truth + 1e-3
    assert "1.0e-03" in correctness.compare("out", torch_error, torch_error, truth)
    with pytest.raises(correctness.WrongResult):
        correctness.compare("out", truth + 3e-3, torch_error, truth)
    with pytest.raises(correctness.WrongResult):
        correctness.compare("out", truth * float("nan"), torch_error, truth)


def test_the_heavy_set_of_the_inputs_moves():
    query, keys, _ = inputs.text(1, 2, 1, 256, 32, torch.float32)
    causal = torch.ones(256, 256, dtype=torch.bool).tril()
    logits = (query @ keys.transpose(-1, -2) * 32**-0.5).masked_fill(~causal, -torch.inf)
    p = logits.softmax(-1).sum(1)[0, :, :90]
    early, late = p[90:110].sum(0), p[133:153].sum(0)  # half a turn of the subject later
    both = set(early.topk(20).indices.tolist()) & set(late.topk(20).indices.tolist())
    assert len(both) < 10


def test_the_plain_loops_do_their_work():
    loops = machine.roofline()
    if loops is None:
        pytest.skip("no C compiler")
    tensors = [torch.ones(1000), torch.ones(1000)]
    read, size = loops.reads(tensors)
    read()
    assert 0 < size <= sum(x.nbytes for x in tensors)
    for dtype in (torch.float32, torch.bfloat16):
        multiply, flops = loops.multiply_adds(dtype)
        multiply()
        assert flops > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nope"], "no table 'nope'"),
        (["long"], "no table 'long'"),  # a table for GPUs
        (["--quick", "--rounds", "0"], "--rounds: must be at least 1"),
        (["--tokens", "0"], "--tokens: must be at least 1"),
        (["--prompts", "512", "0"], "--prompts: must be at least 1"),
        (["--threads", "0"], "--threads: must be at least 1"),
    ],
)
def test_one_line_says_what_is_wrong(arguments, words, capsys):
    with pytest.raises(SystemExit) as exit_:
        runner.main(arguments)
    assert exit_.value.code == 2
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_that_it_cannot_write_is_known_first(tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    assert runner.main(["prefill", "--quick", "--output", str(tmp_path / "file")]) == 1
    printed = capsys.readouterr()
    assert "name another output folder" in printed.err.splitlines()[-1]
    assert not printed.out


def test_a_long_text_has_at_least_one_block(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["long_text", "notes.txt", "--tokens", "40"])
    with pytest.raises(SystemExit):
        long_text.main()
    assert "--tokens is 40; expected at least 250" in capsys.readouterr().err
