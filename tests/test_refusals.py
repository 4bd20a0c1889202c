"""Settings that do not fit a model: one line says so before anything is measured."""

import json
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from h2o import cli  # noqa: E402
from h2o.config.profile import Profile  # noqa: E402
from h2o.errors import UserError  # noqa: E402
from h2o.evaluation.model_fit import check_fit  # noqa: E402
from h2o.evaluation.setting import parse_all  # noqa: E402
from h2o.model_identity import describe, sample  # noqa: E402
from tests.test_cli import PROMPT, ROOT, shell, tiny  # noqa: E402, F401

PROFILE = str(ROOT.parent / "data" / "SmolLM2-135M-Instruct.profile.json")

OF_OTHERS = "it has attention code of its own"


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):  # noqa: F811
    """Folders of random models by name, all with the tokenizer of `tiny`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": 0, "vocab_size": 256}
    heads = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    wide = {"hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    made = {"llama": tiny}
    for name, kind, shape in (
        (
            "gpt_neo",
            "gpt_neo",
            {
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "attention_types": [[["global"], 2]],
            },
        ),
        ("falcon", "falcon", wide),
        ("bloom", "bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
        ("gpt2", "gpt2", heads),
        ("head_dim 24", "llama", {**wide, "intermediate_size": 48}),
    ):
        made[name] = str(tmp_path_factory.mktemp("models") / name.replace(" ", "-"))
        config = AutoConfig.for_model(kind, **shape, **ends)
        AutoModelForCausalLM.from_config(config).save_pretrained(made[name])
        tokenizer.save_pretrained(made[name])
    return made


GENERATE = "generate --max-new-tokens 2 --prompt TEXT"
EVAL = "eval --perplexity FILE --output-path OUT --window 60 --limit 1"
NEEDLE = "eval --needle FILE --output-path OUT --lengths 50 --limit 1"
RECOMMEND = "recommend --text FILE --output OUT --length 20 --texts 1"


@pytest.mark.parametrize(
    ("command", "model", "words"),
    [
        (GENERATE, "gpt_neo", OF_OTHERS),
        (GENERATE, "falcon", OF_OTHERS),
        (GENERATE, "bloom", OF_OTHERS),
        (f"{GENERATE} --positions cache_relative", "gpt2", "no rotary position embedding"),
        (f"{GENERATE} --kv-dtype int8-int4", "head_dim 24", "multiple of 32, not 24"),
        (f"{GENERATE} --profile {PROFILE}", "llama", "this profile is of another model"),
        (f"{GENERATE} --profile shipped", "llama", "no profile for this model"),
        (f"{EVAL} --compare full,h2o:8+8", "gpt_neo", OF_OTHERS),
        (f"{EVAL} --compare full,h2o:8+8 --protocol drop", "gpt_neo", OF_OTHERS),
        (f"{EVAL} --compare full,calibrated:0.2", "llama", "calibrated:0.2: no profile"),
        (f"{EVAL} --compare full,calibrated:0.2 --profile {PROFILE}", "llama", "another model"),
        (f"{EVAL} --compare full,h2o:8+8/kv_dtype=int8-int4", "head_dim 24", "multiple of 32"),
        (f"{EVAL} --compare full,h2o:8+8 --device nope", "llama", "--device nope"),
        (f"{NEEDLE} --compare full,h2o:8+8/positions=cache_relative", "gpt2", "no rotary"),
        (f"{RECOMMEND} --compare h2o:8+8", "falcon", OF_OTHERS),
        ("analyze --text FILE --output OUT/page.html", "gpt_neo", OF_OTHERS),
        ("calibrate --text FILE --output OUT/profile.json", "gpt_neo", "gpt_neo"),
    ],
)  # fmt: skip
def test_what_does_not_fit_the_model_is_one_line(
    command, model, words, folders, tmp_path, capsys, monkeypatch
):
    """The error is one line, and comes before the model has been run."""
    (tmp_path / "text").write_text("A sentence of the text. " * 12)
    places = {"TEXT": PROMPT, "FILE": str(tmp_path / "text")}
    arguments = [
        places.get(x, x.replace("OUT", str(tmp_path / "out"))) for x in command.split()
    ] + ["--model", folders[model]]  # fmt: skip
    run = pytest.fail  # a model first embeds its tokens
    monkeypatch.setattr(torch.nn.Embedding, "forward", lambda *_: run("a model was run"))
    assert cli.main(arguments) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert words in lines[-1]
    assert lines[-1].startswith(f"h2o {arguments[0]}: error: ")
    assert all("loading" in line for line in lines[:-1])
    assert not list(tmp_path.glob("out/*.json"))


def test_a_profile_of_other_weights_is_refused(folders, tmp_path, capsys):
    """The profile's model has the same shape but other weights, like a fine-tuned model. The
    model's own profile is accepted."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(folders["llama"])
    shares = (((0.5, 1.5), (1.25, 0.75)),)
    for name, factor in (("own", 1), ("other", 1.1)):
        weights = {x: [factor * y for y in values] for x, values in sample(loaded).items()}
        profile = Profile((0.2,), shares, 100, describe(loaded.config), weights)
        (tmp_path / f"{name}.json").write_text(json.dumps(profile.as_dict()))
    for option in ("", "--preset calibrated --budget 0.5"):
        for name, code in (("own", 0), ("other", 1)):
            command = f"generate --max-new-tokens 2 {option} --model {folders['llama']}"
            file = str(tmp_path / f"{name}.json")
            arguments = [*command.split(), "--prompt", PROMPT, "--profile", file]
            assert cli.main(arguments) == code
            said = capsys.readouterr()
            assert ("equal, but the weights of" in said.err) == code
            assert bool(said.out) != code


def test_full_needs_no_cache_of_ours(folders, tmp_path, capsys):
    (tmp_path / "text").write_text("A sentence of the text. " * 12)
    arguments = ["eval", "--perplexity", str(tmp_path / "text"), "--window", "60", "--compare"]
    where = ["--output-path", str(tmp_path / "out"), "--model", folders["gpt_neo"]]
    assert cli.main([*arguments, "full", *where]) == 0
    assert "full" in capsys.readouterr().out


def test_a_model_is_tried_as_its_config_is(folders):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folders["gpt2"])
    check = partial(check_fit, parse_all("full,h2o:8+8"))
    check(config)
    model = AutoModelForCausalLM.from_pretrained(folders["gpt2"])
    check(model)
    with pytest.raises(UserError, match=r"h2o:8\+8: .*float64"):
        check(model.double())
