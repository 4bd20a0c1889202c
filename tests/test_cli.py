"""The command line: as processes where the process matters, otherwise as function calls."""

import argparse
import dataclasses
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from h2o import H2OConfig, Profile, cli
from h2o.budgets import count_text
from h2o.cli import cache_options
from h2o.config import PARAMETERS, PRESETS
from h2o.evaluation import setting
from h2o.packages import install_command
from h2o.policy import FIELDS

ROOT = Path(cli.__file__).parent
DEADLINE = 120  # seconds after which a process counts as hanging


def h2o(*arguments, **kwargs):
    """Run the command in a process of its own and return the finished process."""
    return subprocess.run(
        [sys.executable, "-m", "h2o", *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
        **kwargs,
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """Folder of a Llama with random weights and a byte tokenizer. It has no end-of-sequence
    token."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2000,
        initializer_range=0.5,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("tiny")
    LlamaForCausalLM(config).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return str(folder)


def generated(capsys, *arguments):
    """The --json output of a `generate` run in this process."""
    assert cli.main(["generate", *arguments, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


PROMPT = "".join(chr(97 + i * i % 26) for i in range(200))


def test_nothing_heavy_is_imported_for_help():
    """`h2o.cli`, loaded without its package, imports only the standard library."""
    program = (
        "import importlib.util, sys\n"
        "spec = importlib.util.spec_from_file_location('cli', sys.argv[1])\n"
        "cli = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(cli)\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - set(sys.stdlib_module_names))"
    )
    arguments = [sys.executable, "-I", "-S", "-c", program, cli.__file__]
    out = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=DEADLINE)
    assert set(out.stdout.split()) <= {"cli", "__main__", "__mp_main__"}


@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["generate", "--x"]])
def test_help_and_mistakes_load_no_torch(arguments):
    program = (
        "import sys\n"
        "from h2o import cli\n"
        "try:\n"
        "    cli.main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    sys.exit(sorted({'torch', 'transformers'} & set(sys.modules)) != [])\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True,
                          check=False, timeout=DEADLINE)  # fmt: skip
    assert done.returncode == 0


def test_info_for_machines(capfd):
    from h2o import ops

    assert cli.main(["info", "--json"]) == 0
    captured = capfd.readouterr()
    assert captured.err == ""
    facts = json.loads(captured.out)
    assert facts["versions"]["h2o"] == ops.info()["version"]
    assert facts["core"].keys() == ops.info().keys() - {"version"}
    assert facts["core"]["level"] == ops.info()["level"]
    assert facts["versions"]["python"] == sys.version.split()[0]


def test_info_for_readers(capsys):
    from h2o import ops

    assert cli.main(["info"]) == 0
    lines = dict(
        re.split(r"  +", line, maxsplit=1) for line in capsys.readouterr().out.splitlines()
    )
    assert lines["level"] == ops.info()["level"]
    assert {"thread source", "features", "h2o", "python", "numpy", "torch"} <= lines.keys()


def test_info_about_a_model(tiny, tmp_path, capsys):
    assert cli.main(["info", "--model", tiny]) == 0
    said = "llama: supported, 2 of 2 layers by h2o; with budget=...: equal budgets"
    assert capsys.readouterr().out.startswith(said)
    (tmp_path / "config.json").write_text('{"model_type": "bloom"}')
    assert cli.main(["info", "--model", str(tmp_path), "--json"]) == 1
    support = json.loads(capsys.readouterr().out)
    assert not support["supported"]
    assert "attention code of its own" in support["reason"]
    assert cli.main(["info", "--model", str(tmp_path / "nowhere")]) == 1
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["generate", "--model", "no/such/folder", "--json"], "no/such/folder"),
        (["generate", "--prompt", "", "--json"], "empty"),
        (["generate", "--prompt", "x" * 1990, "--json"], "2000"),
        (["generate", "--prompt", "x", "--chat", "--json"], "chat template"),
        (
            ["generate", "--compile", "--positions", "cache_relative", "--prompt", "x", "--json"],
            "--compile",
        ),
        (["eval", "--tasks", "copa", "--device", "nope"], "--device nope"),
    ],
)
def test_what_cannot_be_done_is_one_line(tiny, arguments, word, capsys):
    if "--model" not in arguments:
        arguments = [*arguments, "--model", tiny]
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert len(captured.err.splitlines()) == 1
    assert word in captured.err
    assert len(captured.err) < 300


def test_comparison_in_numbers(tiny, capsys):
    new, heavy, recent = 30, 20, 25
    result = generated(
        capsys, "--model", tiny, "--prompt", PROMPT, "--max-new-tokens", str(new), "--compare",
        "--heavy", str(heavy), "--recent", str(recent), "--sinks", "2", "--min-tokens", "0",
    )  # fmt: skip
    assert result["prompt_tokens"] == len(PROMPT)
    assert result["dtype"] == "float32"
    assert result["budget"]["heavy"] == heavy
    full, ours, tenth, local = result["runs"]
    assert [run["mode"] for run in result["runs"]] == ["full", "h2o", "budget=0.1", "local"]
    seen = len(PROMPT) + new - 1  # the last token has not been fed
    held = heavy + recent + 2
    per_token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, head dimension, float32
    assert full["tokens_held"] == full["tokens_seen"] == seen
    assert full["kv_bytes_held"] == full["kv_bytes_full"] == seen * per_token
    assert (full["tokens_evicted"], full["mass_evicted"]) == (0, 0.0)
    for run in (ours, local):
        assert run["tokens_seen"] == seen
        assert run["tokens_held"] == held
        assert run["tokens_evicted"] == seen - held
        assert run["kv_bytes_full"] == seen * per_token
        assert held * per_token <= run["kv_bytes_held"] <= (held + 1) * per_token
        assert 0 < run["mass_evicted"] < 1
    assert ours["mass_evicted"] < local["mass_evicted"]
    # The head dimension is 8. Keys and values take 8 + 2 bytes each, a slot's metadata 12 more, and
    # a head's metadata 32, its offset 16.
    text = count_text(len(PROMPT), seen)
    budget = (0.1 * text * 64 - 32 - 16) // (2 * 10 + 12) - 1
    assert tenth["tokens_held"] == budget
    assert tenth["kv_bytes_held"] == (budget + 1) * 2 * 2 * 2 * 10
    for run in result["runs"]:
        assert run["new_tokens"] == new
        assert run["prefill_tokens_per_second"] == pytest.approx(
            len(PROMPT) / run["prefill_seconds"]
        )
        assert run["decode_tokens_per_second"] == pytest.approx((new - 1) / run["decode_seconds"])


def test_compiled_steps_give_the_same_text(tiny, capsys, monkeypatch):
    """The steps are really compiled. Only the compiler's last stage, which takes a minute, is
    replaced."""
    from torch._dynamo.utils import counters

    from h2o.evaluation import generation

    how = generation.compile_arguments()
    assert how["compile_config"].backend == "inductor"
    how["compile_config"].backend = "eager"
    monkeypatch.setattr(generation, "compile_arguments", lambda: how)
    arguments = ["--model", tiny, "--prompt", PROMPT, "--max-new-tokens", "20", "--heavy", "0.2"]
    eager = generated(capsys, *arguments, "--ratio-of", "prompt")["runs"][0]
    counters.clear()
    compiled = generated(capsys, *arguments, "--compile")["runs"][0]
    assert counters["stats"]["unique_graphs"] == 1
    assert compiled["text"] == eager["text"]
    assert compiled["kv_bytes_held"] == eager["kv_bytes_held"]


def test_full_run_is_the_models_own_generate(tiny, capsys):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    full = generated(
        capsys, "--model", tiny, "--prompt", PROMPT, "--max-new-tokens", "20", "--compare"
    )["runs"][0]
    tokenizer, model = (
        AutoTokenizer.from_pretrained(tiny),
        AutoModelForCausalLM.from_pretrained(tiny),
    )
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    wanted = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False
    )
    assert full["text"] == tokenizer.decode(wanted[0, ids.shape[1] :], skip_special_tokens=True)


def test_policy_options_reach_the_cache(tiny, capsys):
    """An option that does not reach the cache changes neither the text nor what was evicted."""
    base = ["--model", tiny, "--prompt", PROMPT, "--max-new-tokens", "40",
            "--heavy", "6", "--recent", "2"]  # fmt: skip
    plain = generated(capsys, *base)["runs"][0]
    for options in (["--score-by", "mean"], ["--decay", "0.5"], ["--value-weighted"],
                    ["--sinks", "3"], ["--heavy", "0.2"], ["--dtype", "bfloat16"]):  # fmt: skip
        other = generated(capsys, *base, *options)["runs"][0]
        names = ("text", "mass_evicted", "kv_bytes_held")
        assert any(other[name] != plain[name] for name in names), options


@pytest.mark.parametrize("name", ["authors", "robust"])
def test_presets_reach_the_cache(tiny, capsys, name):
    text = ["--model", tiny, "--max-new-tokens", "4", "--prompt", PROMPT]
    budget = generated(capsys, *text, "--preset", name, "--budget", "0.5", "--budget-unit", "bytes")
    wanted = H2OConfig.preset(name, 0.5, budget_unit="bytes")
    assert budget["budget"] == dataclasses.asdict(wanted)
    (run,) = budget["runs"]
    assert run["kv_bytes_held"] <= 0.5 * run["kv_bytes_full"]
    with pytest.raises(SystemExit) as exit_:
        cli.main(["generate", *text, "--preset", name, "--budget", "0.5", "--heavy", "2"])
    assert exit_.value.code == 2


def options_of(command, capsys):
    """Names of a command's options, as its help lists them."""
    with pytest.raises(SystemExit) as exit_:
        cli.main([command, "--help"])
    assert exit_.value.code == 0
    return set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.MULTILINE))


@pytest.mark.parametrize(
    "command", [command.name for command in cli.COMMANDS if command.loads_model]
)
def test_commands_have_the_same_options(command, capsys):
    """Every command that loads a model has the same options. Fields that `for_model` fills in have
    no option, `analyze` has no --positions because its positions never roll. `calibrate` has no
    cache options because it calibrates all caches, and `recommend` measures several."""
    options = options_of(command, capsys)
    assert {"--model", "--dtype", "--device"} <= options
    fields = {*PARAMETERS} - {"budget"}
    assert fields == set(cache_options.OPTIONS)
    assert set(FIELDS) <= fields
    wanted = {"--preset", "--budget", *map(cache_options.option_name, fields)}
    if command != "calibrate":
        assert "--compare" in options
    if command not in ("calibrate", "recommend"):
        assert wanted - options == ({"--positions"} if command == "analyze" else set())


def test_a_config_is_what_the_options_say():
    parser = argparse.ArgumentParser()
    cache_options.add_cache_options(parser)
    assert cache_options.make_setting(parser.parse_args([])).config == H2OConfig()
    for name, text, value in (
        ("heavy", "7", 7), ("recent", "0.3", 0.3), ("sinks", "4", 4), ("score_by", "mean", "mean"),
        ("decay", "0.5", 0.5), ("positions", "cache_relative", "cache_relative"),
        ("kv_dtype", "int8", "int8"), ("head_shares", "shipped", "shipped"),
        ("score_by", "mean-echo", "mean-echo"),
    ):  # fmt: skip
        options = parser.parse_args([cache_options.option_name(name), text])
        assert cache_options.make_setting(options).config == H2OConfig(**{name: value})
    options = parser.parse_args(["--value-weighted"])
    assert cache_options.make_setting(options).config == H2OConfig(value_weighted=True)
    assert cache_options.get_given(parser.parse_args(["--sinks", "0"])) == {"sinks": 0}


def test_a_preset_is_what_the_options_say(tmp_path):
    parser, settings = argparse.ArgumentParser(), argparse.ArgumentParser()
    cache_options.add_cache_options(parser)
    cache_options.add_cache_options(settings, **setting.CONSTANT)

    def said(text):
        return cache_options.make_setting(parser.parse_args(text.split())).config

    for name in PRESETS:
        assert said(f"--preset {name}") == H2OConfig.preset(name, 0.2)
        assert said(f"--preset {name} --budget 64") == H2OConfig.preset(name, 64)
        in_bytes = H2OConfig.preset(name, 0.1, budget_unit="bytes")
        assert said(f"--preset {name} --budget 0.1 --budget-unit bytes") == in_bytes
        one = cache_options.make_setting(
            settings.parse_args(
                f"--preset {name} --budget 0.1 --budget-unit bytes --sinks 2".split()
            )
        )
        assert one == setting.parse(one.name)
        assert one.config == dataclasses.replace(in_bytes, sinks=2, **setting.CONSTANT)
        words = f"--preset {name} --budget 0.1 --budget-unit bytes --positions cache_relative"
        assert said(words) == dataclasses.replace(in_bytes, positions="cache_relative")
    for name in sorted((ROOT.parent / "data").glob("*.profile.json")):
        profile = Profile.load(name)
        calibrated = said(f"--preset calibrated --profile {name}")
        assert calibrated == H2OConfig.calibrated(0.2, profile)
    assert said("--preset robust --score-by mean-echo --profile echo") == H2OConfig.echo(0.2)
    authors = H2OConfig.authors(0.1, budget_unit="bytes")
    words = "--heavy 0.05 --recent 0.05 --budget-unit bytes --ratio-of prompt --min-tokens 0"
    assert said(words) == authors
    assert said("--budget 0.1") == H2OConfig(budget=0.1)
    assert said("--budget 64 --sinks 2") == H2OConfig(budget=64, sinks=2)
    one = cache_options.make_setting(settings.parse_args(["--budget", "0.1"]))
    assert one == setting.parse(one.name) == setting.parse("budget:0.1")
    for wrong in (
        "--budget 0.1 --recent 4", "--budget 0.1 --budget-unit keys", "--preset robust --heavy 0.1",
        "--preset authors --profile shipped",
        "--preset calibrated --profile echo",
        "--preset robust --budget 64 --budget-unit bytes", "--preset robust --budget 2.0",
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"^[^\n]+$"):
            said(wrong)


def test_document_and_prompt_are_one_text(tiny, tmp_path, capsys):
    (tmp_path / "document").write_text(PROMPT, "utf-8")
    options = ["--model", tiny, "--max-new-tokens", "5"]
    both = generated(
        capsys, *options, "--prompt", "Now: ", "--prompt-file", str(tmp_path / "document")
    )
    one = generated(capsys, *options, "--prompt", f"Now:\n\n{PROMPT}")
    assert both["prompt_tokens"] == one["prompt_tokens"] == len(PROMPT) + 6
    assert both["runs"][0]["text"] == one["runs"][0]["text"]
    question = ["--prompt-file", str(tmp_path / "document"), "--prompt", "Now?"]
    last = generated(capsys, *options, *question)
    one = generated(capsys, *options, "--prompt", f"{PROMPT.strip()}\n\nNow?")
    assert last["prompt_tokens"] == one["prompt_tokens"]
    assert last["runs"][0]["text"] == one["runs"][0]["text"]


def test_a_chat_template_is_used_if_there_is_one(tiny, tmp_path, capsys):
    """Without its markers an instruct model often ends its answer at once."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "chat_template.jinja").write_text("Q: {{ messages[-1].content }} A:", "utf-8")
    command = ["--max-new-tokens", "2", "--prompt", "What?", "--model"]
    plain = generated(capsys, *command, tiny)["prompt_tokens"]
    chat = generated(capsys, *command, str(folder))["prompt_tokens"]
    assert chat > plain
    for more, tokens in (("--chat", chat), ("--no-chat", plain), ("--system=X", chat)):
        assert generated(capsys, *command, str(folder), more)["prompt_tokens"] == tokens


def test_arguments_of_the_chat_template(tiny, tmp_path, capsys):
    """The prompt and the pinned system turn must be those that the template makes with them."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    (folder / "chat_template.jinja").write_text(
        "{% if tools %}Tools: {{ tools }}\n{% endif %}{% for m in messages %}{{ m.role }}: "
        "{{ m.content }}\n{% endfor %}",
        "utf-8",
    )
    command = ["--max-new-tokens", "2", "--prompt", "What?", "--model", str(folder)]
    command += ["--system", "Be brief.", "--pin", "system", "--heavy", "100", "--recent", "60"]
    plain = generated(capsys, *command)["prompt_tokens"]
    tools = ["--chat-template-kwargs", json.dumps({"tools": [{"name": "get_weather"}]})]
    assert generated(capsys, *command, *tools)["prompt_tokens"] > plain
    for wrong, words in [
        ("tools", "not JSON"),
        ("[5]", "expected the arguments of the chat template by name"),
        ('{"tokenize": false}', "tokenize: not for the chat template"),
    ]:
        with pytest.raises(SystemExit):
            cli.main(["generate", "--chat-template-kwargs", wrong])
        assert words in " ".join(capsys.readouterr().err.split())
    with pytest.raises(SystemExit):
        cli.main(["generate", "--prompt", "x", "--no-chat", *tools])
    assert "cannot be combined with --no-chat" in capsys.readouterr().err


def test_text_goes_to_stdout_and_the_rest_to_stderr(tiny, capsys):
    options = ["generate", "--model", tiny, "--max-new-tokens", "12"]
    done = h2o(*options, "--prompt-file", "-", input=PROMPT)
    assert done.returncode == 0
    assert cli.main([*options, "--prompt", PROMPT, "--json"]) == 0
    wanted = json.loads(capsys.readouterr().out)["runs"][0]["text"]
    assert done.stdout.startswith(wanted.replace("\r", "\n"))  # text-mode pipes turn \r into \n
    assert "decode, tokens/s" in done.stdout
    # Messages of other packages (torchao's, for example) must not appear.
    lines = [f"loading {tiny}", f"reading a prompt of {len(PROMPT)} tokens"]
    assert done.stderr.splitlines() == lines
    assert "\x1b" not in done.stdout + done.stderr  # no terminal, no control codes
    assert "Traceback" not in done.stderr


def test_comparison_for_readers(tiny, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "90")
    arguments = ["generate", "--model", tiny, "--prompt", PROMPT, "--max-new-tokens", "60"]
    assert cli.main([*arguments, "--compare"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    names = ["full", "budget=0.2", "budget=0.1", "local"]
    assert [line.split()[0] for line in lines if " held, prefill " in line] == names
    table = text[text.rindex("prompt of") :].splitlines()[1:]
    assert table[0].split() == names
    rows = {name: cells for name, *cells in (re.split(r"  +", x) for x in table[2:])}
    assert rows["attention mass evicted"][0] == "0.0%"
    assert all(len(line) <= 90 for line in lines)


def test_settings_beside_which_a_run_is_shown(tiny, capsys):
    options = ["--model", tiny, "--prompt", PROMPT, "--max-new-tokens", "4", "--heavy", "9"]
    settings = "robust-bytes:0.5/sinks=2,full,sink:4+30"
    runs = generated(capsys, *options, "--compare", settings)["runs"]
    assert [run["mode"] for run in runs] == [
        "full", "h2o", "robust-bytes:0.5/sinks=2", "sink:4+30"
    ]  # fmt: skip
    assert [run["tokens_held"] for run in runs[::3]] == [len(PROMPT) + 3, 34]
    assert runs[2]["kv_bytes_held"] <= 0.5 * runs[2]["kv_bytes_full"]
    assert cli.main(["generate", *options, "--compare", settings]) == 0
    lines = map(str.split, capsys.readouterr().out.splitlines())
    assert [run["mode"] for run in runs] in lines
    with pytest.raises(SystemExit, match="2"):
        cli.main(["generate", *options, "--compare", "mask-local:4+4"])
    assert "a mask, not a cache" in capsys.readouterr().err


def test_answers_about_the_article_for_readers(monkeypatch):
    pytest.importorskip("torch")
    from h2o.cli.comparison import format_answers
    from h2o.cli.generate_command import Comparison
    from h2o.evaluation.generation import Run

    monkeypatch.setenv("COLUMNS", "80")
    texts = {"full": "The fact.", "budget=0.2": "The fact.", "budget=0.1": "No.", "local": "No."}
    runs = [
        Run(mode, f"{text} " + "word " * 30, 11, 2.0, 100.0, 0.5, 20.0, 40_000, 200_000, 200, 40,
            160, 0.1)
        for mode, text in texts.items()
    ]  # fmt: skip
    lines = format_answers(Comparison("m", "float32", 190, {}, {}, runs), "Who?", "fact")
    assert lines[0] == "m, float32, prompt of 190 tokens. Who?"
    assert [line.split()[0] for line in lines if " held, " in line] == list(texts)
    at = lines.index("budget=0.1    0.0 MB held, prefill 2.0 s, then 50 ms per token: lost")
    assert lines[at + 1].startswith("            No. word")
    assert all(len(line) <= 80 for line in lines)


def test_half_characters_are_not_streamed(tiny, capsys):
    from transformers import AutoTokenizer, TextStreamer

    from h2o.evaluation.generation import Stopwatch

    torch = pytest.importorskip("torch")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "aé €😀 b"
    printer = TextStreamer(tokenizer)
    stopwatch = Stopwatch("cpu", printer.put)
    stopwatch.put(torch.zeros(1, 5, dtype=torch.int64))  # the prompt
    pieces = []
    for token in tokenizer(text).input_ids:
        stopwatch.put(torch.tensor([token]))
        pieces.append(capsys.readouterr().out)
    printer.end()
    pieces.append(capsys.readouterr().out)
    assert "".join(pieces) == f"{text}\n"
    assert "\ufffd" not in "".join(pieces)
    assert len(stopwatch.seconds) - 1 == len(stopwatch.tokens) == len(text.encode())


def test_interruption_is_quiet(tiny, capsys, monkeypatch):
    """Ctrl-C during generation gives exit code 130 and one word, no traceback."""
    write = sys.stdout.write

    def interrupted(text):
        monkeypatch.undo()
        write(text)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(sys.stdout, "write", interrupted)
    # Python started in the background of a shell ignores Ctrl-C.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        code = cli.main(
            ["generate", "--model", tiny, "--prompt", PROMPT, "--max-new-tokens", "1700"]
        )
    finally:
        signal.signal(signal.SIGINT, before)
    assert code == 130
    captured = capsys.readouterr()
    assert "decode, tokens/s" not in captured.out
    assert captured.err.splitlines()[-1] == "interrupted"
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("more", [[], ["--compare", "local:0.5"]])
def test_characters_that_the_output_cannot_encode_are_escaped(tiny, more, monkeypatch):
    """The random model's bytes are decoded to characters outside of ASCII."""
    output = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(output, "ascii"))
    ours = ["generate", "--model", tiny, "--prompt", "a prompt", "--max-new-tokens", "40"]
    assert cli.main([*ours, *more]) == 0
    assert b"\\u" in output.getvalue()


@pytest.mark.parametrize("amid", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_reader_that_goes_away(tiny, amid, without_torch):
    """A closed pipe ends the command without a traceback, before its output (`h2o info | true`) or
    in the middle of a text (`h2o generate | head -c 1`, or Ctrl-C in the reading process)."""
    text = ["generate", "--model", tiny, "--prompt", PROMPT, "--max-new-tokens", "1700"]
    arguments = text if amid else ["info"]
    reads, writes = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-m", "h2o", *arguments], stdout=writes, stderr=subprocess.PIPE,
        env=None if amid else without_torch,
    )  # fmt: skip
    os.close(writes)
    try:
        if amid:
            assert os.read(reads, 1)
        os.close(reads)
        errors = process.stderr.read()
        assert process.wait(timeout=DEADLINE) == 1
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert b"Traceback" not in errors
    assert b"BrokenPipe" not in errors


@pytest.fixture
def default_model():
    from h2o import models

    try:
        models.find_weights()
    except models.UserError as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_what_the_demonstration_shows(default_model, capsys):
    """The fact is found with a fifth and a tenth of the bytes, and a window of a fifth loses it."""
    from h2o.cli.generate_command import FACT

    result = generated(capsys, "--budget", "0.2", "--compare", "--max-new-tokens", "40")
    _, fifth, tenth, local = result["runs"]
    assert result["prompt_tokens"] > 2000
    for run, share in ((fifth, 0.2), (tenth, 0.1), (local, 0.21)):
        assert run["kv_bytes_held"] < share * run["kv_bytes_full"]
    for run in result["runs"]:
        assert (FACT in run["text"]) is (run is not local), run["text"]
    readme = (ROOT.parents[1] / "README.md").read_text("utf-8")
    shown = readme.partition("<!-- demo -->")[2].partition("<!-- demo: end -->")[0]
    for run in result["runs"]:
        assert f"{run['mode']:<12}{run['kv_bytes_held'] / 1e6:5.1f} MB held" in shown
        assert run["text"].strip() in " ".join(shown.split())


# ---- Broken streams, texts and numbers -----------------------------------------------------------


def first_on_path(folder):
    """Environment of a process, with `folder` first on Python's path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}


@pytest.fixture
def without_torch(tmp_path):
    """Environment of a process in which torch, transformers and lm_eval are not installed."""
    for name in ("torch", "transformers", "lm_eval"):
        (tmp_path / f"{name}.py").write_text(
            f"raise ModuleNotFoundError('No {name}', name='torch')"
        )
    return first_on_path(tmp_path)


def shell(line, **kwargs):
    """Run a shell line that contains an h2o command."""
    line = line.replace("h2o ", f"{sys.executable} -W ignore -m h2o ", 1)
    return subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=DEADLINE, **kwargs
    )


@pytest.mark.parametrize(
    ("line", "code", "words"),
    [
        ("h2o info >&-", 1, "standard output is closed"),
        ("h2o info >/dev/full", 1, "No space left"),
        ("h2o --nonsense 2>&-", 2, ""),
        ("h2o generate --prompt-file - <&-", 2, "standard input is closed"),
        ("h2o generate --prompt $'\\xff\\xfe'", 2, "argument --prompt: not a text in UTF-8"),
        ("printf '\\xff' | h2o generate --prompt-file -", 2, "not a text in UTF-8"),
        ("h2o recommend nope", 2, "unrecognized arguments: nope"),
    ],
)
def test_one_line_says_what_is_wrong(line, code, words, without_torch):
    done = shell(line, env=without_torch)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == bool(words)
    assert len(done.stderr) < 300


COMMANDS = (
    "info", "generate", "analyze", "recommend", "calibrate --text FILE --output x.json",
)  # fmt: skip


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "command"),
        ("no-such-command", "no-such-command"),
        ("info --loud", "--loud"),
        ("info --compare full", "--compare: requires --memory, such as --memory 40GB"),
        ("info --model x --budget 0.2", "--budget: requires --memory"),
        ("info --prompt 9", "--prompt: requires --memory"),
        ("info --heavy 9", "--heavy: requires --memory"),
        ("generate --heavy many", "--heavy"),
        ("generate --heavy 1.5", "heavy"),
        ("generate --heavy -1", "heavy"),
        ("generate --heavy nan", "heavy"),
        ("generate --heavy 0 --recent 0", "budget"),
        ("generate --sinks -4", "sinks"),
        ("generate --decay 2", "decay"),
        ("generate --score-by age", "--score-by"),
        ("generate --max-new-tokens 0", "--max-new-tokens"),
        ("generate --dtype int8", "--dtype"),
        ("generate --prompt-file no/such/file", "no/such/file"),
        ("eval --tasks copa --heavy 0 --recent 0", "budget"),
        ("eval --tasks copa --decay 2", "decay"),
        ("eval --tasks copa --dtype float31", "choose from 'auto', 'float32'"),
        ("eval --tasks copa --profile no/such/file --compare calibrated:0.2", "no/such/file"),
        ("eval --perplexity FILE --compare full,h2o:8+many", "h2o:8+many"),
        ("eval --needle FILE --compare full,h2o:8+8 --lengths 64 128", "128 belongs to no option"),
        ("recommend --texts 0", "--texts: must be at least 1"),
        ("recommend --length 0", "--length: must be at least 1"),
        ("recommend --minutes -1", "argument --minutes: -1.0 is no time"),
        ("eval --tasks copa --limit 0", "0 is neither a number of rows"),
        ("eval --tasks copa --limit=-3", "-3 is neither a number of rows"),
        ("eval --tasks copa --limit nan", "nan is neither a number of rows"),
        ("eval --tasks copa --compare ''", "no settings to compare"),
        ("eval --tasks copa --compare full,foo", "setting 'foo': unknown; choose from full"),
        ("generate --compare full,locl:0.2", "setting 'locl:0.2': unknown; did you mean local?"),
        ("generate --compare ful,local:0.2", "setting 'ful': unknown; did you mean full?"),
        (
            "recommend --budgets 0.1,ten",
            "'ten' is not an amount: write a number of tokens, such as",
        ),
        ("generate --budget 20%", "--budget: '20%' is not an amount: write a number of tokens"),
        ("generate --budget 35%", "or a fraction, such as 0.35"),
        ("generate --budget 350%", "or a fraction, such as 0.2"),
        ("generate --compare full,h2o:0.1-0.1", "'0.1-0.1' is not an amount"),
        ("generate --profile no.json", "error: cannot read no.json: No such file"),
        (f"generate --profile {shlex.quote(__file__)}", "test_cli.py: is not a profile made"),
        *[(f"{command} --model ''", "--model: is empty: name a model") for command in COMMANDS],
        ("eval --tasks copa --model ' '", "is empty: name a model, or leave --model out"),
        (f"calibrate --text {__file__} --output FOLDER.json", "FOLDER.json is a folder"),
        ("analyze --output FOLDER.json", "FOLDER.json is a folder, not a file"),
        ("analyze --output /dev/null", "/dev/null is not a file: name one to write"),
        ("analyze --output -", "- is not a file"),
        ("analyze --output deep.json --text deep.json", "deep.json is an input file"),
        ("calibrate --output deep.json --text ./deep.json", "deep.json is an input file"),
        ("generate --profile deep.json", "deep.json: is not a profile made"),
        ("analyze --output circle", "--output: cannot write circle: "),
        ("calibrate --text deep.json --output circle.json", "cannot write circle.json: "),
    ],
)
def test_one_line_says_which_argument_is_wrong(line, words, capfd, tmp_path, monkeypatch):
    """Each mistake is one line on stderr with exit code 2. No shell is needed for these."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FOLDER.json").mkdir()
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for link in {"circle", "circle.json"} & set(line.split()):
        (tmp_path / link).symlink_to(tmp_path / link)
    with pytest.raises(SystemExit) as exit_:
        cli.main(shlex.split(line))
    assert exit_.value.code == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert words in captured.err
    assert len(captured.err.splitlines()) == 1
    assert len(captured.err) < 300


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["eval", "--help"], 0, ""),
        (["recommend", "--help"], 0, ""),
        (["recommend", "--budgets", "few"], 2, "'few' is not an amount"),
        (["recommend"], 1, install_command("hf")),
        (["eval", "--perplexity", "README.md"], 1, install_command("hf")),
    ],
)
def test_the_core_alone(arguments, code, words, without_torch):
    done = h2o(*arguments, env=without_torch)
    assert done.returncode == code, done.stderr
    assert words in done.stderr
    assert len(done.stderr.splitlines()) == bool(words)


def test_other_transformers_are_named_before_a_model_is_loaded(tmp_path, monkeypatch, capsys):
    pytest.importorskip("transformers")
    (tmp_path / "transformers-4.57.6.dist-info").mkdir()
    metadata = tmp_path / "transformers-4.57.6.dist-info" / "METADATA"
    metadata.write_text("Metadata-Version: 2.1\nName: transformers\nVersion: 4.57.6\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert cli.main(["generate"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert "transformers >= 5.16 and < 6, but transformers is 4.57.6" in said


def test_version(capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert re.fullmatch(r"h2o-kv \d+\.\d+\.\d+\S*\n", capsys.readouterr().out)


def test_marks_and_line_ends_are_no_part_of_a_prompt(tiny, tmp_path, capsys):
    texts = [b"one\ntwo", b"\xef\xbb\xbfone\r\ntwo"]
    results = []
    for text in texts:
        (tmp_path / "prompt").write_bytes(text)
        options = ["--model", tiny, "--max-new-tokens", "5", "--heavy", "3", "--recent", "3"]
        results.append(generated(capsys, *options, "--prompt-file", str(tmp_path / "prompt")))
    assert results[0]["prompt_tokens"] == results[1]["prompt_tokens"] == 7


def test_an_empty_prompt_is_noticed_before_the_model_is_loaded(capsys):
    assert cli.main(["generate", "--model", "no/such/model", "--prompt", " "]) == 1
    assert "the prompt is empty" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("user", "wanted"),
    [({}, cli.SPIN_COUNT), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_threads_do_not_wait_in_loops_unless_told(user, wanted, monkeypatch):
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")  # so that monkeypatch restores it
        monkeypatch.delenv(name)
    for name, value in user.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["generate", "--prompt", " "]) == 1
    assert os.environ.get("GOMP_SPINCOUNT") == wanted
