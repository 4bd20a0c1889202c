"""`h2o eval --tasks`: lm-eval's command line with local tasks, and settings side by side."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
from pathlib import Path

import lm_eval.tasks
import pytest
import torch
from transformers import AutoModelForCausalLM

from h2o import cli, model_identity, models
from h2o.cli import eval_command
from h2o.evaluation import lm_eval_tasks
from h2o.evaluation.lm import H2OLM
from h2o.result_cells import Cells
from tests.evaluation import conftest

ROOT = Path(__file__).resolve().parents[2]

# Of datasets, which lm-eval reads task files with.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """Caches and results in a folder of this test, paths of the examples as they say."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(eval_command, "OUTPUT", tmp_path / "unasked")
    # lm-eval logs, once set up, to what standard error was in the first of these tests.
    monkeypatch.setattr("lm_eval.utils._LOGGING_CONFIGURED", True)
    # Ten seconds for the tasks that it could download, two for a list of the environment.
    only_own = functools.partial(lm_eval.tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", only_own)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


def run(folder, *arguments, task="examples_causes", tasks="examples/tasks"):
    """The exit code."""
    where = ["--model", str(folder), "--include_path", str(tasks), "--batch_size", "4"]
    return cli.main(["eval", "--tasks", task, *where, *map(str, arguments)])


@pytest.fixture
def forwards(monkeypatch):
    """Counts forward passes of log-likelihoods; .stop_at interrupts."""

    class Counter:
        count, stop_at = 0, None

    original = H2OLM._forward

    def forward(self, *args, **kwargs):
        if Counter.count == Counter.stop_at:
            raise KeyboardInterrupt
        Counter.count += 1
        return original(self, *args, **kwargs)

    monkeypatch.setattr(H2OLM, "_forward", forward)
    return Counter


# ---- lm-eval's own command line ----------------------------------------------------------------


def test_pass_through(folder, tmp_path, capsys):
    code = run(
        folder, "--num_fewshot", 2, "--limit", 5, "--heavy", 0.2, "--recent", 0.1, "--sinks", 2,
        "--output_path", tmp_path / "out", "--log_samples", "--seed", 7,
    )  # fmt: skip
    assert code == 0
    out = capsys.readouterr().out
    assert "examples_causes" in out
    assert "acc_norm" in out
    (file,) = (tmp_path / "out").rglob("results_*.json")
    result = json.loads(file.read_text())
    facts = result["config"]["h2o"]
    want = {
        "protocol": "simulate", "variant": "h2o", "heavy": 0.2, "recent": 0.1, "sinks": 2,
        "ratio_of": "text", "prompt_len": 1, "requests": 10,
    }  # fmt: skip
    assert want.items() <= facts.items()
    assert result["config"]["random_seed"] == 7
    assert result["n-samples"]["examples_causes"]["effective"] == 5
    assert list((tmp_path / "out").rglob("samples_*.jsonl"))


def test_lm_eval_agrees_about_the_full_cache(folder, tmp_path):
    """`--model hf` is lm-eval's own model; `--variant full` must be the same to the last digit."""
    results = {}
    for name, arguments in {
        "hf": ["--model", "hf", "--model_args", f"pretrained={folder}", "--limit", "6"],
        "h2o": ["--model", str(folder), "--variant", "full", "--limit", "6"],
    }.items():
        where = ["--include_path", "examples/tasks", "--output_path", str(tmp_path / name)]
        task = ["eval", "--tasks", "examples_causes", "--log_samples", "--batch_size", "4"]
        assert cli.main([*task, *where, *arguments]) == 0
        (file,) = (tmp_path / name).rglob("samples_*.jsonl")
        results[name] = [json.loads(line)["resps"] for line in file.read_text().splitlines()]
    assert results["hf"] == results["h2o"]
    assert len(results["hf"]) == 6


def test_answers_of_one_budget_are_not_those_of_another(folder, tmp_path, forwards):
    """lm-eval files cached answers under the question alone."""
    cache = ["--use_cache", tmp_path / "answers", "--limit", 3]
    assert run(folder, "--heavy", 4, "--recent", 4, *cache) == 0
    first = forwards.count
    assert first > 0
    assert run(folder, "--heavy", 4, "--recent", 4, *cache) == 0
    assert forwards.count == first
    assert run(folder, "--heavy", 8, "--recent", 4, *cache) == 0
    assert forwards.count == 2 * first


# ---- Side by side ------------------------------------------------------------------------------

COMPARE = "full,h2o:0.1+0.1,local:0.2,sink:4+0.2,h2o:0.2+0,mask-global:0.1+0.1"


def test_compare(folder, tmp_path, capsys, forwards, monkeypatch):
    drawn = {}
    original = lm_eval_tasks.plot_curves

    def plot_curves(path, panels, *labels):
        drawn.update(panels)
        return original(path, panels, *labels)

    monkeypatch.setattr(lm_eval_tasks, "plot_curves", plot_curves)
    arguments = ["--compare", COMPARE, "-o", tmp_path / "out", "--limit", 4, "--num_fewshot", 1]
    assert run(folder, *arguments) == 0
    table = capsys.readouterr().out.splitlines()
    names = COMPARE.split(",")
    rows = {
        line.split()[0]: line for line in table if line.split()[:1] and line.split()[0] in names
    }
    assert list(rows) == names
    assert "100.0%" in rows["full"]
    assert all("±" in row and row.endswith(" s") for row in rows.values())
    assert rows["mask-global:0.1+0.1"].split()[1] == "*"
    assert table.count("* sees the future: not comparable") == 1
    assert set(drawn["examples_causes"]) == {
        "full", "h2o", "local", "sink", "h2o 100% heavy", "mask-global *",
    }  # fmt: skip
    assert (tmp_path / "out" / "compare.png").read_bytes()[:4] == b"\x89PNG"
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert len(content["cells"]) == 6
    for cell in content["cells"]:
        assert {
            "model", "dtype", "versions", "seeds", "protocol", "ratio_of", "variant", "task",
            "num_fewshot", "limit", "core",
        } <= set(cell["facts"])  # fmt: skip
        assert cell["result"]["requests"] == 8
        assert 0 <= cell["result"]["metrics"]["examples_causes"]["acc"] <= 1
    assert not list((tmp_path / "out").glob("answers-*"))
    count = forwards.count
    assert run(folder, *arguments) == 0
    again = capsys.readouterr().out
    assert forwards.count == count, "measured again what the file had"
    assert [line for line in again.splitlines() if line.startswith("h2o:0.1")] == [
        rows["h2o:0.1+0.1"]
    ]
    assert run(folder, *arguments, "--json") == 0
    assert json.loads(capsys.readouterr().out)["cells"] == content["cells"]


def test_a_gguf_file(tmp_path, monkeypatch):
    """Tasks that are made up for a tokenizer, as RULER's, get that of the file too."""
    pytest.importorskip("gguf")
    from tests.gguf_file import write_gguf

    monkeypatch.setenv("H2O_CACHE", str(tmp_path / "cache"))
    model = write_gguf(tmp_path / "tiny.gguf", merges=["b u", "bu t"])
    made = tmp_path / "made"
    made.mkdir()
    (made / "made.py").write_text(
        """
from datasets import Dataset
from lm_eval.tasks.ruler.common_utils import get_tokenizer, resolve_tokenizer_name

def rows(**how):
    tokens = get_tokenizer(resolve_tokenizer_name(how))(" but so").input_ids
    row = {"premise": f"It is {len(tokens)}", "choices": ["but", "so"], "gold": 0}
    return {"test": Dataset.from_list([row])}
"""
    )
    yaml = task(made, "").read_text().split("test_split")[1]
    (made / "own.yaml").write_text(
        f"task: own\ncustom_dataset: !function made.rows\ntest_split{yaml}"
    )
    asked = []
    original = H2OLM.loglikelihood

    def loglikelihood(self, requests, *args, **kwargs):
        asked.extend(request.args[0] for request in requests)
        return original(self, requests, *args, **kwargs)

    monkeypatch.setattr(H2OLM, "loglikelihood", loglikelihood)
    arguments = ["--compare", "full,h2o:4+4", "-o", tmp_path / "out"]
    assert run(model, *arguments, task="own", tasks=made) == 0
    assert asked == ["It is 5, so"] * 4


def test_rows_that_changed_are_measured_again(folder, tmp_path, forwards):
    row = {"premise": "It rained", "choices": ["a b", "c d"], "gold": 0}
    task(tmp_path, f"test: {tmp_path}/rows.jsonl")
    counts = []
    for gold in (0, 0, 1):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row | {"gold": gold}))
        arguments = ["--compare", "h2o:4+4", "-o", tmp_path / "out"]
        assert run(folder, *arguments, task="own", tasks=tmp_path) == 0
        counts.append(forwards.count)
    assert counts == [1, 1, 2]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([], ["--model_args", "add_bos_token=True"]),
        ([], ["--metadata", '{"length": 8}']),
        (["--apply_chat_template"], ["--apply_chat_template", "--fewshot_as_multiturn", "false"]),
    ],
)
def test_other_arguments_are_measured_anew(folder, tmp_path, forwards, first, then):
    chatty = shutil.copytree(folder, tmp_path / "chatty")
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    (chatty / "chat_template.jinja").write_text(template)
    counts = []
    for arguments in (first, first, then, then):
        arguments = [*arguments, "-o", tmp_path / "out", "--limit", 1, "--num_fewshot", 1]
        assert run(chatty, "--compare", "h2o:4+4", *arguments) == 0
        counts.append(forwards.count)
    assert counts == [1, 1, 2, 2]


def test_an_interrupted_comparison_goes_on(folder, tmp_path, capsys, forwards):
    settings = ["--compare", "h2o:4+4,local:8", "--limit", 6, "--protocol", "drop"]
    assert run(folder, *settings, "-o", tmp_path / "whole") == 0
    want = json.loads((tmp_path / "whole" / "compare.json").read_text())["cells"]
    passes, forwards.count = forwards.count, 0
    forwards.stop_at = int(0.9 * passes)
    assert run(folder, *settings, "-o", tmp_path / "parts") == 130
    assert len(json.loads((tmp_path / "parts" / "compare.json").read_text())["cells"]) == 1
    assert len(list((tmp_path / "parts").glob("answers-*"))) == 1
    before, forwards.stop_at = forwards.count, None
    assert run(folder, *settings, "-o", tmp_path / "parts") == 0
    assert forwards.count - before < 0.4 * passes
    got = json.loads((tmp_path / "parts" / "compare.json").read_text())["cells"]
    for a, b in zip(want, got, strict=True):
        assert a["facts"] == b["facts"]
        assert a["result"]["metrics"] == b["result"]["metrics"]
        assert a["result"]["tokens_kept"] == b["result"]["tokens_kept"]


def test_one_token_answers_are_announced(folder, tmp_path, capsys):
    (tmp_path / "letters.jsonl").write_text(
        "\n".join(json.dumps({"q": f"Letter {x}:", "gold": i % 2}) for i, x in enumerate("abcdef"))
    )
    task(tmp_path, f"test: {tmp_path}/letters.jsonl", text='"{{q}}"', choice='["a", "b"]', space="")
    arguments = ["--compare", "full,h2o:2+2", "-o", tmp_path / "out", "--protocol", "drop"]
    assert run(folder, *arguments, task="own", tasks=tmp_path) == 0
    out = capsys.readouterr().out
    assert "12 of 12 requests have answers of one token" in out


def task(path, files, text='"{{premise}}, so"', choice="choices", target="gold", space=" "):
    (path / "own.yaml").write_text(
        f"""
task: own
dataset_path: json
dataset_kwargs:
  data_files:
    {files}
test_split: test
output_type: multiple_choice
doc_to_text: {text}
doc_to_choice: {choice}
doc_to_target: {target}
target_delimiter: "{space}"
metric_list:
  - metric: acc
"""
    )
    return path / "own.yaml"


# ---- What goes wrong ---------------------------------------------------------------------------


def fails(capsys, code, wanted=1):
    assert code == wanted
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("h2o eval: error: ")
    assert "Traceback" not in error
    return error


@pytest.mark.parametrize("mode", [[], ["--compare", "full,h2o:4+4"]])
def test_bad_tasks(folder, tmp_path, capsys, mode):
    rows = ROOT / "examples" / "tasks" / "causes.jsonl"
    mode = [*mode, "-o", tmp_path / "out"]
    assert "no_such_task" in fails(capsys, run(folder, *mode, task="no_such_task"))

    def failure():
        return fails(capsys, run(folder, *mode, task="own", tasks=tmp_path))

    task(tmp_path, f"test: {rows}", text='"{{premiss}}, so"')
    assert "premiss" in failure()
    task(tmp_path, f"test: {rows}", choice="answers")
    assert "doc_to_choice" in failure()
    task(tmp_path, f"test: {tmp_path}/nowhere.jsonl")
    assert "nowhere.jsonl" in failure()
    (tmp_path / "torn.jsonl").write_text('{"premise": "It rained", "choices": ["a", "b"], "gold": ')
    task(tmp_path, f"test: {tmp_path}/torn.jsonl")
    assert failure()
    (tmp_path / "own.yaml").write_text("task: own\n  output_type: [multiple_choice\n")
    assert failure()


def test_whole_texts(folder, tmp_path, capsys):
    """Such tasks, wikitext for one, say with an empty text that nothing stands before them."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"page": "It rained. " * 40}))
    task(tmp_path, f"test: {tmp_path}/rows.jsonl", text='""', target='"{{page}}"')
    file = tmp_path / "own.yaml"
    rolling = file.read_text().replace("multiple_choice", "loglikelihood_rolling")
    rolling = rolling.replace("doc_to_choice: choices\n", "")
    file.write_text(rolling.replace("metric: acc", "metric: word_perplexity"))
    arguments = ["--compare", "full,h2o:4+4", "-o", tmp_path / "out"]
    assert run(folder, *arguments, task="own", tasks=tmp_path) == 0
    cells = json.loads((tmp_path / "out" / "compare.json").read_text())["cells"]
    full, small = (cell["result"]["metrics"]["own"]["word_perplexity"] for cell in cells)
    assert full != small
    assert [cell["result"]["requests"] for cell in cells] == [2, 2]  # windows of 320 tokens


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"premise": None}, "row 2 has no 'premise'"),
        ({"gold": 2}, "row 2: 2 is none of its 2 choices"),
        ({"gold": None}, "row 2 has no 'gold'"),
        ({"choices": []}, "row 2: 0 is none of its 0 choices"),
        ({}, ""),
    ],
)
def test_bad_rows(folder, tmp_path, capsys, row, words):
    """lm-eval would fill in "None", or count the row as answered wrongly."""
    rows = [{"premise": f"It rained {i}", "choices": ["a b", "c d"], "gold": 0} for i in range(4)]
    rows[2] = {key: value for key, value in (rows[2] | row).items() if value is not None}
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    task(tmp_path, f"test: {tmp_path}/rows.jsonl")
    code = run(folder, "--compare", "full", "-o", tmp_path / "out", task="own", tasks=tmp_path)
    if words:
        assert words in fails(capsys, code)
    else:
        assert code == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare", "best:0.2"], "setting 'best:0.2'"),
        (["--compare", "h2o"], "add --budgets"),
        (["--budgets", "0.1"], "--budgets goes with --compare"),
        (["--compare", "full", "--heavy", "4"], "--heavy is for one setting"),
        (["--compare", "full", "--use_cache", "x"], "drop --use_cache"),
        (["--compare", "full", "--model_args", "heavy=4"], "go into --compare"),
        (["--compare", "mask-local:4+4", "--protocol", "drop"], "a mask, no cache"),
        (["--variant", "local", "--protocol", "drop"], "a mask, no cache"),
        (["--compare", "mask-local:4+4", "--prompt-length", "9"], "'local' has no prompt"),
        (["--variant", "full", "--heavy", "4"], "heavy has no meaning"),
        (["--heavy", "0", "--recent", "0"], "budget of 0"),
        (["--json"], "--json with --tasks goes with --compare"),
        (["--prompt-length", "0"], "--prompt-length 0: a number of tokens, at least 1"),
        (["--compare", "full", "--prompt-length", "-2"], "--prompt-length -2: a number of tokens"),
        (
            ["--variant", "full", "--model_args", "prompt_length=0"],
            "prompt_length must be .*, at least 1",
        ),
    ],
)
def test_arguments_that_do_not_fit(folder, tmp_path, capsys, arguments, words):
    import re

    code = conftest.exit_code(run, folder, "-o", tmp_path / "out", *arguments)
    error = fails(capsys, code, wanted=1 if "--model_args" in arguments else 2)
    assert re.search(words, error)


def test_no_model(tmp_path, capsys):
    error = fails(capsys, run(tmp_path / "nowhere", "-o", tmp_path / "out", "--compare", "full"))
    assert "nowhere" in error


def test_results_of_something_else_are_not_overwritten(folder, tmp_path, capsys):
    (tmp_path / "compare.json").write_text('{"mine": true}')
    error = fails(capsys, run(folder, "-o", tmp_path, "--compare", "full", "--limit", 2))
    assert "compare.json" in error
    assert (tmp_path / "compare.json").read_text() == '{"mine": true}'


def test_threads_of_torch_do_not_matter(folder, tmp_path):
    threads = torch.get_num_threads()
    metrics = []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            out = tmp_path / str(count)
            assert run(folder, "--compare", "h2o:4+4", "--limit", 3, "-o", out) == 0
            (cell,) = json.loads((out / "compare.json").read_text())["cells"]
            metrics.append(cell["result"]["metrics"])
    finally:
        torch.set_num_threads(threads)
    assert metrics[0] == metrics[1]


# ---- What a result depends on, and where it goes -------------------------------------------------


def test_another_model_at_the_same_place_is_measured_anew(folder, tmp_path, forwards):
    """By its weights, its config, its tokenizer: not by its path."""
    place = shutil.copytree(folder, tmp_path / "model")
    arguments = ["--compare", "h2o:4+4", "-o", tmp_path / "out", "--limit", 2]
    cached = ["--heavy", 4, "--use_cache", tmp_path / "answers", "--limit", 2]
    counts = []
    for change in (None, "again", "weights", "config", "tokenizer"):
        if change == "weights":
            model = AutoModelForCausalLM.from_pretrained(place)
            with torch.no_grad():
                model.lm_head.weight.mul_(1.5)
            model.save_pretrained(place)
        elif change == "config":
            file = place / "config.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.01}))
        elif change == "tokenizer":
            (place / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
        before = forwards.count
        assert run(place, *arguments) == 0
        middle = forwards.count
        assert run(place, *cached, "-o", tmp_path / "single") == 0
        counts.append((middle - before > 0, forwards.count - middle > 0))
    measured, known = (True, True), (False, False)
    assert counts == [measured, known, measured, measured, measured]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's
def test_fingerprints_of_models():
    """Adapters and quantised weights count; the name and how the weights are stored do not."""
    peft = pytest.importorskip("peft")
    model = conftest.build()
    plain = model_identity.of_model(model)
    twin = conftest.build()
    twin.config._name_or_path = "elsewhere"
    assert model_identity.of_model(twin) == plain == model_identity.of_model(model)
    with torch.no_grad():
        twin.model.layers[1].mlp.up_proj.weight[3] += 1
    identities = {
        plain,
        model_identity.of_model(twin),
        model_identity.of_model(conftest.build("opt")),
    }
    identities.add(model_identity.of_model(conftest.build().to(torch.bfloat16)))
    for seed in (0, 1):
        base = conftest.build()
        torch.manual_seed(seed)
        lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        identities.add(model_identity.of_model(peft.get_peft_model(base, lora)))
    assert len(identities) == 6


def test_two_runs_into_one_folder_lose_nothing(tmp_path):
    one, two = (Cells(tmp_path / "cells.json", "test") for _ in range(2))
    one.put({"setting": "a"}, {"value": 1})
    two.put({"setting": "b"}, {"value": 2})
    one.put({"setting": "c"}, {"value": 3})
    again = Cells(tmp_path / "cells.json", "test")
    assert [again.find({"setting": name}) for name in "abc"] == [{"value": i} for i in (1, 2, 3)]
    assert one.find({"setting": "b"}) == {"value": 2}


def work(count, done, value=0):
    """Rows of one piece of work each, which say in `done` that they were measured."""

    def measure(i):
        done.append(i)
        return {"value": value, "i": i}

    return [[({"setting": i}, functools.partial(measure, i))] for i in range(count)]


def test_a_large_file_is_not_written_for_each_cell(tmp_path, monkeypatch):
    """That takes as long as all cells together: half an hour for a whole text with many settings.
    Little time goes there, and nothing of what was measured is lost by an error or Ctrl-C."""
    path, now, writes, done = tmp_path / "cells.json", [0.0], [], []
    monkeypatch.setattr("h2o.result_cells.time.monotonic", lambda: now[0])
    cells = Cells(path, "test")
    write = cells._write

    def slow():
        stamp = cells._stamp
        with monkeypatch.context() as patch:
            patch.setattr(cells, "_stamp", lambda: (now.__setitem__(0, now[0] + 1), stamp())[1])
            write()
        writes.append(now[0])

    monkeypatch.setattr(cells, "_write", slow)
    rows = work(200, done)
    for i, [(facts, measure)] in enumerate(rows):

        def second(measure=measure, i=i):
            now[0] += 1  # a second for each cell, two for each writing
            if i == 150:
                raise KeyboardInterrupt
            return measure()

        rows[i] = [(facts, second)]
    with pytest.raises(KeyboardInterrupt):
        cells.complete(rows, "rows")
    assert 3 <= len(writes) <= 6
    assert len(json.loads(path.read_text())["cells"]) == 150
    again = Cells(path, "test")
    results = again.complete(work(200, done), "rows")
    assert done == list(range(200))
    assert [row[0]["i"] for row in results] == list(range(200))


def test_two_runs_that_share_a_file_keep_each_others_cells(tmp_path):
    path, done = tmp_path / "cells.json", []
    one = Cells(path, "test")
    rows = work(6, done)
    other = [({"setting": 3}, lambda: pytest.fail("measured by the other run"))]

    def meanwhile(measure=rows[2][0][1]):
        Cells(path, "test").put({"setting": "other"}, {"value": 1})
        return measure()

    rows[2] = [({"setting": 2}, meanwhile)]
    one.complete(rows, "rows")
    cells = Cells(path, "test")
    assert cells.find({"setting": "other"}) == {"value": 1}
    assert cells.complete([other], "rows") == [[{"value": 0, "i": 3}]]
    assert len(cells.cells) == 7


def test_many_processes_write_at_once(tmp_path):
    """Whoever reads, adds a cell and writes holds the lock for all of that."""
    program = (
        "import sys; from pathlib import Path; from h2o.result_cells import Cells\n"
        "cells = Cells(Path(sys.argv[1]), 'test')\n"
        "for i in range(20): cells.put({'by': sys.argv[2], 'i': i}, {'value': i})"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "cells.json")]
    running = [subprocess.Popen([*arguments, name]) for name in "ab"]
    assert [process.wait(60) for process in running] == [0, 0]
    assert len(Cells(tmp_path / "cells.json", "test").cells) == 40


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tasks", "examples_causes", "--include_path", "examples/tasks"],
        ["--tasks", "examples_causes", "--include_path", "examples/tasks", "--compare", "full"],
        ["--perplexity", "README.md"],
    ],
)
def test_a_folder_that_cannot_be_written_is_known_first(tmp_path, capsys, monkeypatch, arguments):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setattr(models, "load_model", None)  # would have been the next thing
    monkeypatch.setattr(lm_eval_tasks, "H2OLM", None)
    code = cli.main(["eval", *arguments, "-o", str(tmp_path / "file" / "out")])
    assert "name another output folder" in fails(capsys, code)


def test_results_are_written_without_being_asked(folder, tmp_path, monkeypatch):
    """As the first command of docs/evaluation.md: no --output_path."""
    assert run(folder, "--limit", 1) == 0
    assert len(list((tmp_path / "unasked").rglob("results_*.json"))) == 1
    monkeypatch.undo()
    assert str(eval_command.OUTPUT) == "h2o-eval"
