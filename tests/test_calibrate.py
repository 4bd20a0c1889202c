"""The command `h2o calibrate`."""

import json

import pytest

from h2o import Profile, cli
from tests.test_cli import tiny  # noqa: F401

pytest.importorskip("torch")
pytest.importorskip("transformers")

TEXT = "".join(chr(97 + i * i % 23) for i in range(150))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text(TEXT[::-1])
    return tmp_path


def test_calibrate(tiny, folder, capsys):  # noqa: F811
    texts = [str(folder / name) for name in ("a.txt", "b.txt")]
    output = folder / "made" / "profile.json"
    arguments = ["calibrate", "--model", tiny, "--text", *texts, "--output", str(output)]
    assert cli.main([*arguments, "--window", "60", "--limit", "3"]) == 0
    out, err = capsys.readouterr()
    assert "21 of 21 passes" in err
    assert out == f"{Profile.load(output)}\n"
    content = json.loads(output.read_text())
    assert [(x["name"], x["windows"], x["tokens"]) for x in content["texts"]] == [
        ("a.txt", 2, 150),
        ("b.txt", 1, 150),
    ]
    assert content["window"] == 60
    assert TEXT[:20] not in output.read_text()
    assert len(Profile.load(output).shares_for(0.3)) == 2
    assert [path.name for path in output.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    ("text", "more", "code", "message"),
    [
        ("no.txt", [], 2, "cannot read"),
        ("a.txt", ["--output", "profile.txt"], 2, "profile.txt must end in .json"),
        ("a.txt", ["--window", "200"], 1, "a.txt has 150 tokens, fewer than a window of 200"),
        ("a.txt", ["--window", "2001"], 1, "--window 2001 exceeds the 2000 positions of the model"),
        ("a.txt", ["--window", "60", "--limit", "0"], 2, "--limit: must be at least 1"),
    ],
)
def test_mistakes(tiny, folder, capsys, monkeypatch, text, more, code, message):  # noqa: F811
    monkeypatch.chdir(folder)
    try:
        exit_code = cli.main(
            ["calibrate", "--model", tiny, "--text", text, "--output", "p.json", *more]
        )
    except SystemExit as end:
        exit_code = end.code
    assert exit_code == code
    assert message in capsys.readouterr().err
    assert not (folder / "p.json").exists()


@pytest.mark.parametrize("command", ["calibrate --text a.txt --output p.json", "analyze"])
def test_several_processes(command, folder, capsys, monkeypatch):
    """Several processes started by torchrun get an error before any file is read or written."""
    monkeypatch.chdir(folder)
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    before = sorted(folder.iterdir())
    assert cli.main(command.split()) == 1
    said = capsys.readouterr().err
    assert f"h2o {command.split()[0]} is for one process, and 2 were launched" in said
    assert sorted(folder.iterdir()) == before


def test_the_shipped_profile_is_of_the_default_model():
    """The default model is recognized by its shape, and a model of another shape gets no
    profile."""
    from transformers import LlamaConfig

    shape = {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    }  # fmt: skip
    profile = Profile.shipped(LlamaConfig(**shape))
    assert profile is not None
    assert len(profile.shares_for(0.1)) == 30
    assert Profile.shipped(LlamaConfig(**shape | {"num_hidden_layers": 32})) is None
    assert all(len(text["sha256"]) == 64 for text in profile.texts)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_shipped_profile_knows_its_weights(dtype):
    import h2o

    model, _ = h2o.load_model(dtype=dtype, attn_implementation="h2o")
    profile = Profile.shipped(model)
    assert profile is not None
    for parameter in model.parameters():
        parameter.data *= 1.1
    with pytest.raises(ValueError, match="weights of"):
        profile.check(model)
