"""`h2o eval --tasks`: lm-eval's command line with local tasks, and settings side by side."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import lm_eval
import pytest
import torch
from lm_eval.api.registry import Registry
from transformers import AutoModelForCausalLM

from h2o import cli, models
from h2o.cli import eval_command
from h2o.evaluation import protocols, side_by_side
from h2o.evaluation.lm import H2OLM
from h2o.evaluation.side_by_side import format_metrics
from tests.evaluation import conftest
from tests.evaluation.conftest import measured, table_of

ROOT = Path(__file__).resolve().parents[2]

# From datasets, with which lm-eval reads task files.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch, lm_eval_apart):
    """The examples' relative paths work, and results go to a folder of this test."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(eval_command, "OUTPUT", tmp_path / "unasked")


def run(folder, *arguments, task="examples_causes", tasks="examples/tasks"):
    """Run `h2o eval --tasks` and return the exit code."""
    where = ["--model", str(folder), "--include_path", str(tasks), "--batch_size", "4"]
    return cli.main(["eval", "--tasks", task, *where, *map(str, arguments)])


@pytest.fixture
def forwards(monkeypatch):
    """Counts the forward passes of log-likelihoods. `stop_at` is the pass that gets interrupted."""

    class Counter:
        count, stop_at = 0, None

    original = protocols.run_forward

    def run_forward(*args, **kwargs):
        if Counter.count == Counter.stop_at:
            raise KeyboardInterrupt
        Counter.count += 1
        return original(*args, **kwargs)

    monkeypatch.setattr(protocols, "run_forward", run_forward)
    return Counter


# ---- lm-eval's own command line ----------------------------------------------------------------


def test_pass_through(folder, tmp_path, capsys):
    code = run(
        folder, "--num_fewshot", 2, "--limit", 5, "--heavy", 0.2, "--recent", 0.1, "--sinks", 2,
        "--output_path", tmp_path / "out", "--log_samples", "--seed", 7,
    )  # fmt: skip
    assert code == 0
    out, err = capsys.readouterr()
    assert "examples_causes" in out
    assert "acc_norm" in out
    assert ": 0it" not in err  # an empty progress bar looks like a failed run
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


def test_task_files_name_what_lm_eval_would_warn_about():
    files = [*ROOT.glob("examples/tasks/*.yaml"), *ROOT.glob("h2o/evaluation/tasks/*.yaml")]
    assert len(files) > 4
    for file in files:
        metrics = file.read_text("utf-8").partition("metric_list:")[2].split("- metric:")[1:]
        assert metrics
        assert all("aggregation:" in x and "higher_is_better:" in x for x in metrics), file


def test_a_limit_of_seven_digits(folder, tmp_path):
    """lm-eval must get all digits, or it would use more or fewer rows than asked for."""
    assert run(folder, "--limit", 1234567, "--variant", "full", "-o", tmp_path / "out") == 0
    (file,) = (tmp_path / "out").rglob("results_*.json")
    assert json.loads(file.read_text())["config"]["limit"] == 1234567


def test_lm_eval_agrees_about_the_full_cache(folder, tmp_path):
    """`hf` is lm-eval's own model. `--variant full` must be equal to it, to the last digit."""
    results = {}
    task = ["--tasks", "examples_causes", "--log_samples", "--batch_size", "4", "--limit", "6"]
    task += ["--include_path", "examples/tasks", "--output_path"]
    own = ["--model", "hf", "--model_args", f"pretrained={folder}", "--device", "cpu"]
    side_by_side.run([*task, str(tmp_path / "hf"), *own])
    full = ["--model", str(folder), "--variant", "full"]
    assert cli.main(["eval", *task, str(tmp_path / "h2o"), *full]) == 0
    for name in ("hf", "h2o"):
        (file,) = (tmp_path / name).rglob("samples_*.jsonl")
        results[name] = [json.loads(line)["resps"] for line in file.read_text().splitlines()]
    assert results["hf"] == results["h2o"]
    assert len(results["hf"]) == 6


def test_answers_of_one_budget_are_not_those_of_another(folder, tmp_path, forwards):
    """lm-eval would find cached answers by the question alone, whatever the budget."""
    cache = ["--use_cache", tmp_path / "answers", "--limit", 3]
    assert run(folder, "--heavy", 4, "--recent", 4, *cache) == 0
    first = forwards.count
    assert first > 0
    assert run(folder, "--heavy", 4, "--recent", 4, *cache) == 0
    assert forwards.count == first
    assert run(folder, "--heavy", 8, "--recent", 4, *cache) == 0
    assert forwards.count == 2 * first


def test_lm_eval_finds_the_model_of_an_installed_package():
    """Versions of lm-eval after 0.4.13 find the model by an entry point."""
    project = (ROOT / "pyproject.toml").read_text()
    group = re.search(r'entry-points\."lm_eval\.models"\].*\nh2o = "(.+)"', project)
    registry = Registry("models")
    registry.register("h2o", target=group[1])
    assert registry.get("h2o") is H2OLM


# ---- Side by side ------------------------------------------------------------------------------

COMPARE = "full,h2o:0.1+0.1,local:0.2,sink:4+0.2,h2o:0.2+0,mask-global:0.1+0.1"


def scores(content, task="examples_causes"):
    return {x: y for x, y in content["results"][task].items() if isinstance(y, float)}


def test_compare(folder, tmp_path, capsys, forwards):
    arguments = ["--compare", COMPARE, "-o", tmp_path / "out", "--limit", 4, "--num_fewshot", 1]
    assert run(folder, *arguments) == 0
    out = capsys.readouterr().out
    rows = table_of(out)
    assert [name.removesuffix(" *") for name in rows] == COMPARE.split(",")
    assert rows["full"]["kept"] == "100.0%"
    assert all("±" in row["examples_causes acc_norm"] for row in rows.values())
    assert out.splitlines().count("* sees the future: not comparable") == 1
    contents = measured(tmp_path / "out")
    assert list(contents) == COMPARE.split(",")
    for content in contents.values():
        facts = content["config"]["h2o"]
        assert {"protocol", "ratio_of", "variant", "provenance"} <= set(facts)
        assert {"model", "dtype", "versions", "core"} <= set(facts["provenance"])
        assert facts["requests"] == 8
        assert 0 <= content["results"]["examples_causes"]["acc,none"] <= 1
    count = forwards.count
    assert run(folder, *arguments) == 0
    assert forwards.count == count, "measured again what was remembered"
    assert capsys.readouterr().out == out
    assert run(folder, *arguments, "--json") == 0
    for one in json.loads(capsys.readouterr().out)["settings"]:
        assert one["results"] == contents[one["setting"]]["results"]
        assert one["requests"] == 8


def test_the_models_options_reach_it(folder, tmp_path, monkeypatch):
    given, original = {}, H2OLM.__init__

    def init(self, *args, **kwargs):
        given.update(kwargs)
        original(self, *args, **kwargs)

    monkeypatch.setattr(H2OLM, "__init__", init)
    arguments = ["--compare", "full", "-o", tmp_path / "out", "--limit", 1, "--max_batch_size", 3]
    assert run(folder, *arguments) == 0
    assert (given["device"], given["batch_size"], given["max_batch_size"]) == ("cpu", "4", 3)


def test_a_task_of_texts_beside_another(folder, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("It rained. The well ran dry, and nobody came. " * 8)
    metadata = json.dumps({"file": str(text), "window": 90})
    arguments = ["--compare", "full,h2o:0.1+0.1", "-o", tmp_path / "out", "--limit", 2]
    names = "examples_causes,h2o_perplexity"
    assert run(folder, *arguments, "--metadata", metadata, task=names) == 0
    together = table_of(capsys.readouterr().out)["h2o:0.1+0.1"]
    assert run(folder, *arguments) == 0
    alone = table_of(capsys.readouterr().out)["h2o:0.1+0.1"]
    assert together["examples_causes acc"] == alone["examples_causes acc"]
    where = ["--model", str(folder), "-o", str(tmp_path / "other")]
    options = ["--compare", "full,h2o:0.1+0.1", "--window", "90", "--limit", "2"]
    assert cli.main(["eval", "--perplexity", str(text), *where, *options]) == 0
    of_text = table_of(capsys.readouterr().out)["h2o:0.1+0.1"]
    assert together["nats lost"] == of_text["nats lost"]
    options = [*arguments, "--metadata", metadata, "--prompt-length", 50]
    assert run(folder, *options, task="h2o_perplexity") == 0
    assert table_of(capsys.readouterr().out)["full"]["scored"] == f"{2 * (90 - 51)}"


def test_metrics_have_the_errors_of_their_filter():
    metrics = {
        "name": "a", "sample_len": 3, "4096,none": -1, "4096_stderr,none": "N/A",
        "exact_match,strict": 0.5, "exact_match_stderr,strict": 0.1,
    }  # fmt: skip
    assert list(format_metrics(metrics)) == [("exact_match,strict", "0.500 ±0.100")]
    accuracy = {"acc,none": 0.25, "acc_norm,none": 0.5, "acc_norm_stderr,none": 0.25}
    assert list(format_metrics(accuracy)) == [("acc", "0.250"), ("acc_norm", "0.500 ±0.250")]


def test_lm_eval_runs_tasks_of_texts_itself(folder, tmp_path):
    """The tasks work as with `lm_eval --model h2o --include_path ...`."""
    text = tmp_path / "text"
    text.write_text("It rained. The well ran dry, and nobody came. " * 8)
    metadata = json.dumps({"file": str(text), "window": 90})
    where = ["--model", str(folder), "-o", str(tmp_path / "out"), "--metadata", metadata]
    budget = ["--heavy", "0.1", "--recent", "0.1"]
    assert cli.main(["eval", "--tasks", "h2o_perplexity", *where, *budget]) == 0
    (content,) = measured(tmp_path / "out").values()
    options = ["--compare", "h2o:0.1+0.1", "--window", "90", "-o", str(tmp_path / "other")]
    assert cli.main(["eval", "--perplexity", str(text), *where[:2], *options]) == 0
    (other,) = measured(tmp_path / "other").values()
    assert scores(content, "h2o_perplexity") == scores(other, "h2o_perplexity")


def test_a_gguf_file(tmp_path, monkeypatch):
    """Tasks that are generated for a tokenizer, like RULER's, must get the tokenizer of a GGUF file
    too."""
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
    assert set(asked) == {"It is 5, so"}


def test_rows_that_changed_are_measured_again(folder, tmp_path, forwards):
    """If only the right answer changes, cached answers are scored again without another forward
    pass."""
    row = {"premise": "It rained", "choices": ["a b", "c d"], "gold": 0}
    task(tmp_path, f"test: {tmp_path}/rows.jsonl")
    counts, accuracy = [], []
    for change in ({}, {}, {"gold": 1}, {"premise": "It snowed"}):
        (tmp_path / "rows.jsonl").write_text(json.dumps(row | change))
        arguments = ["--compare", "h2o:4+4", "-o", tmp_path / "out"]
        assert run(folder, *arguments, task="own", tasks=tmp_path) == 0
        counts.append(forwards.count)
        accuracy.append(measured(tmp_path / "out")["h2o:4+4"]["results"]["own"]["acc,none"])
    assert counts == [1, 1, 1, 2]
    assert accuracy[1] == accuracy[0] == 1 - accuracy[2]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        ([], ["--model_args", "add_bos_token=True"]),
        (["--apply_chat_template"], ["--apply_chat_template", "--fewshot_as_multiturn", "false"]),
        (
            ["--apply_chat_template"],
            ["--apply_chat_template", "--model_args", "enable_thinking=False"],
        ),
    ],
)
def test_other_arguments_are_measured_anew(folder, tmp_path, forwards, first, then):
    chatty = shutil.copytree(folder, tmp_path / "chatty")
    template = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    template += "{% if enable_thinking is false %}.{% endif %}"
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
    want = capsys.readouterr().out.replace("whole", "parts")
    passes, forwards.count = forwards.count, 0
    forwards.stop_at = int(0.9 * passes)
    assert run(folder, *settings, "-o", tmp_path / "parts") == 130
    assert list(measured(tmp_path / "parts")) == ["h2o:4+4"]
    before, forwards.stop_at = forwards.count, None
    assert run(folder, *settings, "-o", tmp_path / "parts") == 0
    assert forwards.count - before < 0.4 * passes
    assert capsys.readouterr().out == want


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


def without_choices(file, output_type, metric):
    """Change the file of a `task` to another type of output."""
    text = file.read_text().replace("multiple_choice", output_type)
    text = text.replace("doc_to_choice: choices\n", "")
    file.write_text(text.replace("metric: acc", f"metric: {metric}"))


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
    """Tasks of whole texts, such as wikitext, have an empty context for each text."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"page": "It rained. " * 40}))
    file = task(tmp_path, f"test: {tmp_path}/rows.jsonl", text='""', target='"{{page}}"')
    without_choices(file, "loglikelihood_rolling", "word_perplexity")
    arguments = ["--compare", "full,h2o:4+4", "-o", tmp_path / "out"]
    assert run(folder, *arguments, task="own", tasks=tmp_path) == 0
    contents = measured(tmp_path / "out").values()
    full, small = (scores(x, "own")["word_perplexity,none"] for x in contents)
    assert full != small
    assert [x["config"]["h2o"]["requests"] for x in contents] == [2, 2]  # windows of 320 tokens
    assert "contexts of one token" not in capsys.readouterr().out
    for budgets, is_noted in (("full,h2o:4+4", False), ("full,h2o:0.1+0.1", True)):
        arguments = ["--compare", budgets, "-o", tmp_path / "out", "--protocol", "drop"]
        assert run(folder, *arguments, task="own", tasks=tmp_path) == 0
        note = "1 of 2 requests have contexts of one token"
        assert (note in capsys.readouterr().out) == is_noted


def test_a_task_that_generates_is_known_before_anything_is_measured(
    folder, tmp_path, capsys, monkeypatch
):
    """The full cache could be simulated, and would take hours before the next setting fails."""
    monkeypatch.setattr(side_by_side, "measure", lambda *_: 1 / 0)
    (tmp_path / "rows.jsonl").write_text(json.dumps({"q": "It rained, so", "a": "x"}))
    file = task(tmp_path, f"test: {tmp_path}/rows.jsonl", text='"{{q}}"', target='"{{a}}"')
    without_choices(file, "generate_until", "exact_match")
    arguments = ["--compare", "full,h2o:4+4", "-o", tmp_path / "out"]
    error = fails(capsys, run(folder, *arguments, task="own", tasks=tmp_path))
    assert "task own generates text, which cannot be simulated" in error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--compare", "best:0.2"], "setting 'best:0.2'"),
        (["--compare", "h2o"], "add --budgets"),
        (["--budgets", "0.1"], "--budgets requires --compare"),
        (["--budgets", "0.1", "0.2"], "--budgets requires --compare"),
        (["--compare", "full", "--heavy", "4"], "--heavy is for one setting"),
        (["--compare", "full", "--use_cache", "x"], "drop --use_cache"),
        (["--compare", "full", "--model_args", "a=1", "--predict_only"], "is for one setting"),
        (["--budget", "0.2", "--use_cache", "x"], "--budget store answers .*: drop --use_cache"),
        (["--budget", "0.2", "--model_args", "a=1", "--predict_only"], "leave out .* --budget"),
        (["--compare", "full", "--model_args", "heavy=4"], "go into --compare"),
        (["--compare", "mask-local:4+4", "--protocol", "drop"], "a mask, not a cache"),
        (["--variant", "local", "--heavy", "4", "--protocol", "drop"], "a mask, not a cache"),
        (["--compare", "mask-local:4+4", "--prompt-length", "9"], "'local' have no prompt"),
        (["--variant", "full", "--heavy", "4"], "heavy has no meaning"),
        (["--heavy", "0", "--recent", "0"], "budget of 0"),
        (["--json"], "--json with --tasks requires --compare"),
        (["--prompt-length", "0"], "--prompt-length: must be at least 1"),
        (["--compare", "full", "--prompt-length", "-2"], "--prompt-length: must be at least 1"),
        (
            ["--variant", "full", "--model_args", "prompt_length=0"],
            "prompt_length is .*; expected .* of at least 1",
        ),
    ],
)
def test_arguments_that_do_not_fit(folder, tmp_path, capsys, arguments, words):
    by_task = {"--model_args", "mask-local:4+4", "local"} & set(arguments)
    code = conftest.exit_code(run, folder, "-o", tmp_path / "out", *arguments)
    error = fails(capsys, code, wanted=1 if by_task else 2)
    assert re.search(words, error)


def test_no_model(tmp_path, capsys):
    error = fails(capsys, run(tmp_path / "nowhere", "-o", tmp_path / "out", "--compare", "full"))
    assert "nowhere" in error


# ---- What a result depends on, and where it goes -------------------------------------------------


def test_another_model_at_the_same_place_is_measured_anew(folder, tmp_path, forwards):
    """Cached results belong to a model's weights, config and tokenizer, not to its path."""
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
    monkeypatch.setattr(models, "load_model", None)  # loading would come next
    monkeypatch.setattr(side_by_side, "H2OLM", None)
    code = cli.main(["eval", *arguments, "-o", str(tmp_path / "file" / "out")])
    assert "name another output folder" in fails(capsys, code)


def test_results_that_cannot_be_written(folder, tmp_path, capsys):
    """lm-eval only logs this, so the command would say that the results are written."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "full").write_text("in the way")
    code = run(folder, "--compare", "full", "--limit", 1, "-o", tmp_path / "out")
    assert "could not write its results" in fails(capsys, code)


def test_results_are_written_without_being_asked(folder, tmp_path, monkeypatch):
    """The first command of docs/how_to/evaluate.md has no --output_path and must write results."""
    assert run(folder, "--limit", 1) == 0
    assert len(list((tmp_path / "unasked").rglob("results_*.json"))) == 1
    monkeypatch.undo()
    assert str(eval_command.OUTPUT) == "h2o-eval"


def test_the_papers_tasks_are_among_lm_evals():
    """The tasks that docs/how_to/reproduce_the_paper.md lists exist, and are multiple-choice."""
    page = (ROOT / "docs" / "how_to" / "reproduce_the_paper.md").read_text("utf-8")
    section = page.partition("## The six tasks")[2].partition("\n## ")[0]
    names = re.findall(r"^\| [\w ]+ \| `(\w+)` \|", section, re.MULTILINE)
    assert len(names) == 6
    assert f"--tasks {','.join(names)} " in page
    tasks = Path(lm_eval.__file__).parent / "tasks"
    for name in names:
        texts = [path.read_text("utf-8") for path in tasks.glob(f"**/*{name}*/**/*.yaml")]
        (text,) = [x for x in texts if re.search(rf"^task: {name}$", x, re.MULTILINE)]
        assert "output_type: multiple_choice" in text
