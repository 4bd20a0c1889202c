"""The benchmark of h2o and other packages at equal bytes, with a peer that answers at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from h2o.evaluation import windows
from tests.evaluation.conftest import build

pytest.importorskip("benchmarks.equal_bytes", reason="the benchmarks are not here")

from benchmarks import equal_bytes, needle_peers

PEER = Path(equal_bytes.__file__).with_name("peers") / "quality_peer.py"


@pytest.fixture
def script():
    return equal_bytes


def test_a_press_gets_the_budget_at_the_cut_or_at_the_end(script):
    kept = {name: request.get("kept") for name, request in script.rows(1000, 50)}
    for method in script.PRESSES:
        assert kept[f"{method}:0.1 cut"] == 100
        assert kept[f"{method}:0.1 end"] == 50
        assert f"{method}:0.04 end" not in kept
    assert kept["ObservedAttention, 4 bits:0.1 cut"] == int(100 * 16 / 4.5)
    source = PEER.read_text("utf-8")
    assert all(f'"{method}": ' in source for method in (*script.PRESSES, *needle_peers.PRESSES))


def test_a_press_on_needles_gets_the_budget_at_the_cut_or_at_the_end():
    document, rest = list(range(100)), [7] * 13
    for count, part, kept in (("cut", 0.2, 20), ("end", 0.2, 8), ("cut", 0.1, 10)):
        request = needle_peers.asked_of("KVzip", count, part, document, rest, 3)
        assert (request["kept"], request["answer"]) == (kept, 3)
        assert request["ids"] == document + rest
    assert needle_peers.asked_of("KVzip", "end", 0.1, document, rest, 3) is None


@pytest.mark.parametrize(("decoys", "facts"), [(0, 5), (1, 20)])
def test_the_table_of_needles(decoys, facts, tokenizer, tmp_path, monkeypatch, capsys):
    model = build()
    asked = []

    class Answers:
        def __init__(self, *arguments):
            assert arguments[0] == "quality"
            assert arguments[-1] == "float32"

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def ask(self, ids, prompt, answer, method, kept):
            asked.append(method)
            read = len(ids) - 1 - prompt
            found = method == "full" or kept > prompt // 6
            held = {"cut": kept, "end": kept + read}
            return {"found": found, "bytes": held, "loss": [1.0]}

    monkeypatch.setattr(needle_peers, "Peer", Answers)
    monkeypatch.setattr(needle_peers.models, "load_model", lambda *a, **k: (model, tokenizer))
    monkeypatch.setattr(needle_peers.models, "embedded_folder", lambda: tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"Boat {i} came home with {i * i % 89} fish. " for i in range(40)))
    chosen = ["--facts", "place", "--lengths", "60", "--limit", "1", "--dtype", "float32"]
    chosen += ["--decoys", str(decoys)]
    where = ["needle_peers.py", str(text), "--output-path", str(tmp_path / "out"), *chosen]
    monkeypatch.setattr(sys, "argv", where)
    needle_peers.main()
    lines = capsys.readouterr().out.splitlines()
    rows = {line[: line.find("  ")]: line.split()[-6:] for line in lines[3:]}
    assert lines[0] == f"{facts} facts"
    assert f"of full's {facts}" in lines[1]
    assert rows["full"][2:] == ["1.00", "±0.00"] * 2
    assert rows["SnapKV:0.1 cut"][2:] == ["0.00", "±0.00"] * 2
    assert rows["KVzip:0.2 cut"][2:] == ["1.00", "±0.00"] * 2
    assert 19 < float(rows["KVzip:0.2 cut"][0][:-1]) <= 20
    assert "KVzip:0.04 end" not in rows  # no key would be left
    count = len(asked)
    needle_peers.main()  # earlier results are not measured again
    assert len(asked) == count


def test_the_table(script, tokenizer, tmp_path, monkeypatch, capsys):
    model = build().to(torch.bfloat16)
    model.config.dtype = torch.bfloat16  # like a model that was loaded in this dtype
    full = 2 * 2 * 2 * 8 * 2 * 100  # keys and values, layers, heads, D, two bytes, window

    class Answers:
        def __init__(self, *arguments):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *exception):
            pass

        def ask(self, ids, prompt, method, **request):
            assert (len(ids), prompt) == (100, 80)
            held = request.get("kept", 50) * full // 100
            return {"loss": [2.0] * 19, "bytes": {"cut": held, "end": held + full // 5}}

    monkeypatch.setattr(script, "Peer", Answers)
    monkeypatch.setattr(script.models, "load_model", lambda *a, **k: (model, tokenizer))
    monkeypatch.setattr(script.models, "embedded_folder", lambda: tmp_path)
    ours = ["authors", "robust-bytes"]  # a tiny model has no shipped profile
    wanted = script.rows(100, 20, ours)
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i * i} fish, " for i in range(80)))
    arguments = ["--window", "100", "--rest", "20", "--skip", "1", "--limit", "2", "--ours", *ours]
    where = [str(text), "--output-path", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["equal_bytes.py", *where, *arguments])
    script.main()
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert [row[0] for row in wanted] == list(rows)
    assert rows["SnapKV:0.1 cut"][2:5] == ["10.0%", "30.0%", "7.39"]
    # 10 keys and a free slot, with 8 * 2 * 2 + 8 bytes each. A full cache has 32 bytes per token.
    for share in rows["authors:0.1"][1:3]:
        assert 11 * 40 < 32 * float(share[:-1]) < 11 * 40 + 32
    for share in rows["robust-bytes:0.1"][1:3]:
        assert 9 < float(share[:-1]) <= 10
    assert rows["full"][1:3] == ["80.0%", "100.0%"]
    assert rows["full"][-2:] == ["0.000", "±0.000"]
    monkeypatch.setattr(Answers, "ask", None)  # earlier results are not measured again
    monkeypatch.setattr(windows, "by_simulation", None)
    script.main()
