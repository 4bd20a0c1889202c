"""`h2o eval` in several processes gives the numbers and the files of one process."""

from __future__ import annotations

import json
import socket

import pytest

from tests.evaluation.conftest import measured, table_of
from tests.launch import TORCHRUN, launch, start

pytestmark = pytest.mark.slow

TORCHRUN_H2O = [*TORCHRUN, "-m"]
ACCELERATE = ["accelerate.commands.launch", "--cpu", "--num_processes", "2", "--num_machines", "1",
              "--mixed_precision", "no", "--dynamo_backend", "no", "-m"]  # fmt: skip
TEXT = "The bridge was closed in winter. Whoever came late slept at the inn. Nobody minded; "

TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": '["a road", "b", "no way at all"]',
        "doc_to_target": "{{gold}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{text}}",
        "generation_kwargs": {"until": ["."], "max_gen_toks": 40},
        "metric_list": [{"metric": "chrf"}, {"metric": "exact_match"}],
    },
    "cache_relative": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
}


@pytest.fixture
def tasks(tmp_path):
    """A folder of tasks with eleven rows."""
    rows = [{"text": TEXT[: 20 + 9 * i % 50] * (1 + i % 4), "gold": i % 3} for i in range(11)]
    where = tmp_path / "tasks"
    where.mkdir()
    (where / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for name, task in TASKS.items():
        data = {"dataset_path": "json", "test_split": "test"}
        data["dataset_kwargs"] = {"data_files": {"test": str(where / "rows.jsonl")}}
        (where / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **task}))
    return where


def rounded(results):
    """Results without parts that depend on the order of rows: last digits, and bootstrap errors."""
    return {
        task: {
            x: f"{y:.9g}" if isinstance(y, float) else y
            for x, y in metrics.items()
            if not x.startswith("chrf_stderr")
        }
        for task, metrics in results.items()
    }


def compared(folder, tmp_path, arguments, **launchers):
    """Run each launcher. Returns the results of each setting and the table, by launcher."""
    found = []
    for name, launcher in {"one": ["h2o"], **launchers}.items():
        module = [] if name == "one" else ["h2o"]
        where = ["--model", folder, "-o", tmp_path / name]
        cache = str(tmp_path / f"datasets-{name}")
        out, _ = launch([*module, "eval", *where, *arguments], launcher, HF_DATASETS_CACHE=cache)
        contents = measured(tmp_path / name)
        results = {x: (rounded(y["results"]), y["config"]["h2o"]) for x, y in contents.items()}
        table = table_of(out)
        for row in table.values():
            row.pop("written chrf", None)
        found.append((results, table))
    return found


@pytest.mark.parametrize("protocol", ["simulate", "drop"])
def test_tasks(folder, tmp_path, tasks, protocol):
    names = ["choices", "cache_relative"] if protocol == "simulate" else ["choices", "written"]
    one, two = compared(
        folder, tmp_path, ["--tasks", ",".join(names), "--include_path", tasks, "--batch_size", "4",
        "--num_fewshot", "0", "--protocol", protocol, "--compare", "full,h2o:0.1+0.1"],
        two=TORCHRUN_H2O,
    )  # fmt: skip
    assert one == two
    for results, facts in one[0].values():
        assert facts["requests"] == 33 + 11
        assert set(results) == set(names)
    if protocol == "drop":
        full, cut = (results["written"]["chrf,none"] for results, _ in one[0].values())
        assert full != cut, "texts that do not matter"


def test_accelerate_launch(folder, tmp_path, tasks):
    one, two = compared(
        folder, tmp_path, ["--tasks", "choices", "--include_path", tasks, "--batch_size", "4",
        "--limit", "5", "--compare", "h2o:0.1+0.1"], two=ACCELERATE,
    )  # fmt: skip
    assert one == two


def test_a_model_cut_over_processes(folder, tmp_path, tasks):
    """All processes work on each request together. A sharded model is equal except for the last
    digit, which may change the outcome of one row in eleven."""
    results = []
    arguments = ["eval", "--model", folder, "--tasks", "choices", "--include_path", tasks,
                 "--batch_size", 4, "--protocol", "drop", "--compare", "full,h2o:0.2"]  # fmt: skip
    for name, launcher, more in (
        ("one", ["h2o"], []),
        ("two", [*TORCHRUN_H2O, "h2o"], ["--model_args", "tp_plan=auto"]),
    ):
        cache = str(tmp_path / f"datasets-{name}")
        launch([*arguments, *more, "-o", tmp_path / name], launcher, HF_DATASETS_CACHE=cache)
        (tmp_path / name / "answers").mkdir(exist_ok=True)
        results.append(measured(tmp_path / name))
    assert not any((tmp_path / "two" / "answers").iterdir())
    for one, two in zip(*(x.values() for x in results), strict=True):
        facts = [x["config"]["h2o"] for x in (one, two)]
        assert facts[0]["requests"] == facts[1]["requests"] == 33
        assert facts[0]["provenance"]["weights"] == facts[1]["provenance"]["weights"]
        accuracy = [x["results"]["choices"]["acc,none"] for x in (one, two)]
        assert accuracy[0] == pytest.approx(accuracy[1], abs=0.1)


@pytest.mark.parametrize("what", ["perplexity", "summarize", "needle"])
def test_texts(folder, tmp_path, what):
    text = tmp_path / "text"
    text.write_text(TEXT * 6)
    more = {
        "perplexity": ["--window", 90],
        "summarize": ["--gen_kwargs", "max_gen_toks=5"],
        "needle": ["--lengths", 90, "--limit", 1],
    }
    if what == "summarize":
        rows = [{"article": TEXT * (1 + i % 2), "summary": TEXT[i:40]} for i in range(5)]
        text.write_text("\n".join(map(json.dumps, rows)))
    arguments = [f"--{what}", text, "--compare", "full,h2o:0.1+0.1,sink:4+0.1", *more[what]]
    one, two = compared(folder, tmp_path, arguments, two=TORCHRUN_H2O)
    assert one == two
    assert {x["requests"] for _, x in one[0].values()} == {6 if what == "perplexity" else 5}


def test_lm_evals_own_command_line(folder, tmp_path, tasks):
    """There is one file of results and one of samples, with nothing that would differ between
    processes."""
    results = []
    arguments = ["eval", "--model", folder, "--tasks", "choices", "--include_path", tasks,
                 "--batch_size", "4", "--heavy", "0.1", "--log_samples"]  # fmt: skip
    for name, launcher, module in (("one", ["h2o"], []), ("two", TORCHRUN_H2O, ["h2o"])):
        cache = str(tmp_path / f"datasets-{name}")
        here = [*module, *arguments, "-o", tmp_path / name]
        out, _ = launch(here, launcher, HF_DATASETS_CACHE=cache)
        assert out.count("acc_norm") == 1
        (file,) = (tmp_path / name).rglob("results_*.json")
        (samples,) = (tmp_path / name).rglob("samples_*.jsonl")
        lines = [json.loads(line) for line in samples.read_text().splitlines()]
        lines.sort(key=lambda line: line["doc_id"])
        responses = [float(answer[0][0]) for line in lines for answer in line["resps"]]
        written = json.loads(file.read_text())
        results.append((rounded(written["results"]), responses))
    assert results[0][0] == results[1][0]
    assert results[0][1] == pytest.approx(results[1][1], abs=1e-3)  # the batches contain other rows


def test_two_machines(folder, tmp_path, tasks):
    """Two launchers have separate folders. Only the first machine's folder gets files."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    machines = []
    for rank in range(2):
        launcher = ["torch.distributed.run", "--nnodes", "2", "--node_rank", str(rank),
                    "--nproc_per_node", "1", "--master_addr", "127.0.0.1", "--master_port",
                    str(port), "-m"]  # fmt: skip
        arguments = ["h2o", "eval", "--model", folder, "--tasks", "choices", "--include_path",
                     tasks, "--heavy", "0.1", "-o", tmp_path / str(rank)]  # fmt: skip
        cache = str(tmp_path / f"datasets-{rank}")
        machines.append(start(arguments, launcher, HF_DATASETS_CACHE=cache))
    printed = [machine.communicate(timeout=420) for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], printed
    assert [out.count("acc_norm") for out, _ in printed] == [1, 0]
    assert [len(list((tmp_path / f"{x}").rglob("*.json"))) for x in range(2)] == [1, 0]


def test_an_interrupted_run_goes_on(folder, tmp_path, tasks):
    """The run continues with the answers that each process has cached."""
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    arguments = ["--tasks", "choices", "--include_path", tasks, "--batch_size", "2",
                 "--compare", "h2o:0.1+0.1"]  # fmt: skip
    cache = str(tmp_path / "datasets")
    where = ["eval", "--model", folder, *arguments, "-o", tmp_path / "two"]
    launch([tmp_path / "interrupted.py", *where], TORCHRUN, 1, HF_DATASETS_CACHE=cache)
    assert len(list((tmp_path / "two" / "answers").glob("*.db"))) == 2
    one, two = compared(folder, tmp_path, arguments, two=TORCHRUN_H2O)
    assert one == two


INTERRUPTED = """
import sys
from h2o import cli
from h2o.evaluation import protocols
forward, count = protocols.run_forward, 0
def stopping(*args, **kwargs):
    global count
    count += 1
    if count > 4:
        raise KeyboardInterrupt
    return forward(*args, **kwargs)
protocols.run_forward = stopping
sys.exit(cli.main())
"""
