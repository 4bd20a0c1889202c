"""examples/serve_with_ray.py: Ray Serve LLM in front of two engines."""

from __future__ import annotations

import json
import sys

import pytest
from transformers import AutoTokenizer

from h2o import H2OConfig
from tests.launch import ROOT
from tests.vllm.engines import after_prefix, alone
from tests.vllm.servers import (
    SMALL,
    answering,
    free_port,
    launched,
    openai,
    together,
    with_tokenizer,
)

pytest.importorskip("ray.serve", reason="Ray is not installed: pip install 'ray[serve]==2.60.0'")

PREFIX = 40
ENGINE = {
    "dtype": "float32", "max_model_len": 256, "max_num_seqs": 32, "enforce_eager": True,
    "kv_cache_memory_bytes": 2_000_000,
}  # fmt: skip
ENVIRONMENT = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "RAY_worker_niceness": "0"}


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_two_engines_answer_as_one(tmp_path):
    """Answers must equal an H2OCache's, with and without a common prefix, and errors must give the
    reason. Prompts are texts, because Ray's router divides by zero for token ids."""
    folder, log, port = tmp_path / "model", tmp_path / "log", free_port()
    model, config = with_tokenizer(folder), H2OConfig(**SMALL)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [f"{'lighthouse ' * PREFIX} {i} {'and ' * n}" for i in range(2) for n in (9, 30, 60)]
    requests = tokenizer(texts)["input_ids"]
    command = [sys.executable, ROOT / "examples/serve_with_ray.py", "--port", port]
    command += ["--model", folder, "--name", "tiny"]
    command += ["--h2o", json.dumps(SMALL), "--engine", json.dumps(ENGINE)]
    process = launched([*map(str, command)], log, ENVIRONMENT)
    with answering(process, port, log, "/v1/models") as router:
        wanted = after_prefix(model, requests, PREFIX, config)
        assert together(router.address, texts, vllm_xargs={"h2o_prefix": PREFIX}) == wanted
        assert together(router.address, texts) == alone(model, requests, config)
        with pytest.raises(openai.BadRequestError, match="h2o_heavy is -3; expected"):
            together(router.address, texts[:1], stream=False, vllm_xargs={"h2o_heavy": -3})
