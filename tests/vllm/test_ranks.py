"""A model on tensor parallel ranks, on one node or two. Each rank has its heads of every page."""

from __future__ import annotations

import json
import re
import time
import urllib.request

import pytest

from h2o import H2OConfig
from h2o.vllm.metrics import SECONDS
from tests.launch import ROOT, launch
from tests.vllm.engines import alone, prompts, tiny
from tests.vllm.servers import SERVE, SMALL, free_port, serving, started, together, with_tokenizer


@pytest.mark.parametrize("entry", [{}, {"head_shares": [[1, 2, 3, 4], [3, 1, 1, 2]]}])
def test_two_ranks_answer_as_one(entry, tmp_path):
    entry = {"heavy": 12, "recent": 12, **entry}
    model = tiny("llama", tmp_path, num_key_value_heads=4)
    out, _ = launch([ROOT / "tests/vllm/ranks.py", tmp_path, 2, json.dumps(entry)], launcher=[])
    answers = [line for line in out.splitlines() if line.startswith("[[")]
    wanted = alone(model, prompts(), H2OConfig(**entry))
    assert [json.loads(line) for line in answers] == [wanted, wanted]


def test_the_script_for_gpus_goes_as_far_as_it_does_without_them(tmp_path):
    """The script runs on two ranks of the CPU build. Ray's executor is rejected before a model is
    loaded."""
    with_tokenizer(tmp_path, num_key_value_heads=4, max_position_embeddings=2048)
    script, few = ROOT / "examples/serve_on_gpus.py", ["--requests", 5, "--kept", 32]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    options = [*few, "--model", tmp_path, "--dtype", "float32", "--eager", "--ranks", 2]
    out, _ = launch([script, *options], launcher=[], **environment)
    (report,) = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert report["as_alone"] == "5 of 5"
    assert report["others_part_at"] == []
    assert (report["platform"], report["ranks"]) == ("cpu", 2)
    _, error = launch([script, "--executor", "ray"], launcher=[], code=2)
    assert "vLLM's Ray executor does not support cpu: use --executor mp" in error


def test_two_nodes_answer_as_one(tmp_path):
    """One node has the server, the other runs `--headless`."""
    folder = tmp_path / "model"
    model = with_tokenizer(folder, num_key_value_heads=4)
    # vLLM would compile a rank's part of the embedding.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
    nodes = {
        "tensor-parallel-size": 2, "distributed-executor-backend": "mp", "nnodes": 2,
        "master-addr": "127.0.0.1", "master-port": free_port(),
    }  # fmt: skip
    command = [*SERVE, "--headless"]
    other = started(command, folder, tmp_path / "1.log", environment, nodes | {"node-rank": 1})
    try:
        with serving(folder, tmp_path / "0.log", environment, **nodes | {"node-rank": 0}) as server:
            requests = prompts()
            answers = together(server.address, requests)
        assert answers == alone(model, requests, H2OConfig(**SMALL))
    finally:
        other.terminate()
        other.wait(60)


def test_replicas_answer_as_one(tmp_path):
    """Data parallelism: two engines behind one server, each with its own pages and numbers."""
    folder = tmp_path / "model"
    model = with_tokenizer(folder)
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    options = {"data-parallel-size": 2, "max-num-seqs": 4}
    with serving(folder, tmp_path / "log", environment, **options) as server:
        requests = prompts() + prompts(seed=1)
        answers = together(server.address, requests)
        assert answers == alone(model, requests, H2OConfig(**SMALL))
        time.sleep(SECONDS + 3)
        text = urllib.request.urlopen(f"{server.address}/metrics", timeout=30).read().decode()
    evicted = re.findall(r'^h2o:evicted_keys_total{engine="(.)".*} ([\d.e+]+)$', text, re.M)
    assert sorted(engine for engine, _ in evicted) == ["0", "1"]
    assert all(float(keys) > 0 for _, keys in evicted)
