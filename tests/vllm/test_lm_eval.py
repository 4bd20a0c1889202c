"""lm-eval through the server gives the numbers of `h2o eval --protocol drop`."""

from __future__ import annotations

import json

import pytest

from h2o import models
from h2o.evaluation.setting import parse
from tests.vllm.engines import MiB
from tests.vllm.servers import serving

pytest.importorskip("lm_eval", reason="make test-vllm brings it")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

from h2o.evaluation.lm import H2OLM

TEXT = (
    "The bridge was closed in winter, so Anna of Harbour Street slept at the inn. In spring the "
    "ferryman, whose name was Tobias, took her over the river for a silver coin. "
)
ASKED = ["Anna lived in", "The ferryman's name was", "He was paid with a", "The bridge was"]
KEPT = "24+24"


@pytest.fixture
def tasks(tmp_path):
    """A folder with a task of eight texts to continue."""
    rows = [{"text": TEXT * (1 + i % 3) + ASKED[i % 4], "gold": TEXT[:9]} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task = {
        "task": "continued",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{gold}}",
        "generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "bleu"}, {"metric": "chrf"}],
    }
    (tmp_path / "continued.yaml").write_text(json.dumps(task))
    return tmp_path


def results(tasks, lm, **arguments):
    """(numbers of the task, the generated texts)"""
    found = simple_evaluate(
        lm,
        tasks=["continued"],
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
        bootstrap_iters=0,
        **arguments,
    )
    texts = [sample["resps"] for sample in found["samples"]["continued"]]
    numbers = found["results"]["continued"]
    return {name: x for name, x in numbers.items() if isinstance(x, float)}, texts


def test_numbers_are_those_of_a_real_cache(tasks, tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    folder = models.embedded_folder()
    lm = H2OLM(str(folder), dtype="float32", batch_size=1)
    lm.use(parse(f"h2o:{KEPT}"), "drop")
    wanted = results(tasks, lm)
    lm.use(parse("full"))
    assert results(tasks, lm)[1] != wanted[1]
    heavy, recent = map(int, KEPT.split("+"))
    options = {
        "max-model-len": 512, "kv-cache-memory-bytes": 64 * MiB,
        "additional-config": json.dumps({"h2o": {"heavy": heavy, "recent": recent}}),
    }  # fmt: skip
    with serving(folder, tmp_path / "log", **options) as server:
        address = f"{server.address}/v1/completions"
        found = results(
            tasks,
            "local-completions",
            model_args=f"model=tiny,base_url={address},tokenizer={folder},num_concurrent=8,"
            "max_length=512,tokenized_requests=False",
        )
    assert found == wanted
    assert len({json.dumps(text) for text in found[1]}) > 4
