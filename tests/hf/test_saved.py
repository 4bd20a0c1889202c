"""One document, many questions: caches that are forked, or written to a file and loaded."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import pickle
import re

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from h2o import H2OCache, H2OConfig, Profile
from h2o.compat import with_cache
from h2o.hf.cache import cache_file
from h2o.hf.cache_state.layer_snapshot import take_snapshot
from h2o.hf.layers.layer import H2OLayer
from tests.hf.modes import uneven
from tests.hf.tiny import (
    FAMILIES,
    IMAGE_STARTS,
    LATENT,
    LATENT_AND_STATES,
    LAYOUTS,
    batch,
    failing,
    greedy,
    model,
    prompts,
    slow_if,
    with_image,
)

SMALL = {"heavy": 6, "recent": 6}
SETTINGS = {
    "rectangular": ("llama", {}),
    "fractions": ("llama", {"heavy": 0.2, "recent": 0.1, "min_tokens": 0}),
    "own budgets": ("qwen2", {"head_shares": uneven, "sinks": 1}),
    "by layer and head": ("llama", {"heavy": lambda i, n: [5 + i, 9], "recent": [3, 4]}),
    "int8": ("llama", {"kv_dtype": "int8", "score_by": "mean"}),
    "int8-int4": ("wide", {"kv_dtype": "int8-int4", "head_shares": uneven}),
    "int4": ("wide", {"kv_dtype": "int4", "head_shares": uneven}),
    "bytes": (
        "wide",
        {"heavy": 0.3, "recent": 0.2, "min_tokens": 0, "budget_unit": "bytes", "kv_dtype": "int8"},
    ),
    "norms": ("llama", {"value_weighted": True, "decay": 0.9}),
    "max": ("llama", {"score_by": "max"}),
    "echo": ("llama", {"score_by": "mean-echo"}),
    "cache_relative": ("llama", {"positions": "cache_relative", "sinks": 2}),
    "cache_relative, own budgets": (
        "llama",
        {"positions": "cache_relative", "head_shares": uneven},
    ),
    "trace": ("llama", {"trace": True, "head_shares": uneven}),
}
ECHO = {"score_by": "mean-echo", "head_shares": "echo"}
SHARED_BY_ECHO = {
    "by echo": ("llama", ECHO),
    "by echo, cache_relative": ("llama", ECHO | {"positions": "cache_relative"}),
    "by echo, compileable": ("llama", ECHO | {"compileable": True}),
    "by echo, traced": ("llama", ECHO | {"trace": True}),
    "by echo, bytes": ("wide", ECHO | SETTINGS["bytes"][1]),
    "latents, int8": ("deepseek_v2", {"kv_dtype": "int8"}),
}
ALL_FAMILIES = FAMILIES | LATENT | LATENT_AND_STATES
_OF_KINDS = ("gemma3", "mistral-window", "gpt_oss", "gemma4_text", "deepseek_v2", "youtu",
             "llama, int8 weights", "qwen3_5, whole", *LAYOUTS)  # fmt: skip
KINDS = [name for name in _OF_KINDS if name in ALL_FAMILIES]
"""One family for each kind of layer. The layers of the other families are of the same kinds."""
answered = functools.partial(greedy, tokens=6)
every_setting = pytest.mark.parametrize(
    "setting",
    [*SETTINGS, *SHARED_BY_ECHO, *[slow_if(name not in KINDS, name) for name in ALL_FAMILIES]],
)
every_second_setting = pytest.mark.parametrize(
    "setting",
    [
        *[slow_if(i % 2 > 0, name) for i, name in enumerate((*SETTINGS, *SHARED_BY_ECHO, *KINDS))],
        *[slow_if(True, name) for name in ALL_FAMILIES if name not in KINDS],
    ],
)
"""Every second setting, for tests of forks. Files and forks hold what
hf/cache_state/layer_snapshot.py lists, so the tests of files, with every setting, notice what the
list lacks."""


def opened(setting):
    """A model, the parameters of a cache for it, and a document."""
    family, more = (SETTINGS | SHARED_BY_ECHO).get(setting, (setting, {}))
    parameters = SMALL | more
    document = {"input_ids": prompts(40)[0]}
    if family == "wide":  # int4 values are in groups of 32
        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=97, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=32, intermediate_size=48, initializer_range=0.5,
            attn_implementation="h2o", pad_token_id=0, eos_token_id=None,
        )  # fmt: skip
        ours = LlamaForCausalLM(config).eval()
    else:
        ours, document = model(family), with_image(family, document)
    if more.get("head_shares") is uneven:
        parameters = parameters | {"head_shares": uneven(ours)}
    return ours, parameters, document


def has_read(ours, document, **parameters):
    cache = H2OCache(ours.config, **parameters)
    ours(**document, **with_cache(cache))
    return cache


def after(document, question):
    """The document followed by a question, in which no token stands for an image."""
    question = question.clamp(max=IMAGE_STARTS - 1)
    return {"input_ids": torch.cat([document["input_ids"], question], dim=1)}


def assert_same(one, other):
    """Assert that all layers have the same bits, except in memory that was never written."""
    for a, b in zip(one.layers, other.layers, strict=True):
        (tensors, numbers), (more, others) = take_snapshot(a), take_snapshot(b)
        assert numbers == others
        assert tensors.keys() == more.keys()
        for name, x in tensors.items():
            torch.testing.assert_close(more[name], x, rtol=0, atol=0, equal_nan=True)


@every_second_setting
def test_copies_are_independent(setting):
    """A fork, a copy and a pickle must share no memory with their original, and answer like a cache
    that has seen the document itself."""
    ours, parameters, document = opened(setting)
    cache, before = (has_read(ours, document, **parameters) for _ in range(2))
    copies = [cache.fork(), copy.deepcopy(cache), pickle.loads(pickle.dumps(cache))]
    for question, twin in zip(prompts(5, 9, 1, seed=1), copies, strict=True):
        inputs, alone = after(document, question), before.fork()
        expected = answered(ours, inputs, **with_cache(alone))
        assert answered(ours, inputs, **with_cache(twin)).tolist() == expected.tolist()
        assert_same(twin, alone)
        assert_same(cache, before)
    shared = {x.data_ptr() for layer in cache.layers for x in take_snapshot(layer).tensors.values()}
    for layer in cache.fork().layers:
        assert not shared & {x.data_ptr() for x in take_snapshot(layer).tensors.values()}


@every_second_setting
def test_questions_in_one_batch(setting):
    """Padding between a document and questions of different lengths must not change the answers in
    the rows of a fork."""
    ours, parameters, document = opened(setting)
    questions = dict(enumerate(prompts(5, 9, 2, seed=1)))
    cache = has_read(ours, document, **parameters)
    ids = torch.zeros(3, 49, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, question in questions.items():
        text = after(document, question)["input_ids"][0]
        ids[row, :40], ids[row, 40 - len(text) :] = text[:40], text[40:]
        mask[row, :40], mask[row, 40 - len(text) :] = 1, 1
    inputs = {"input_ids": ids, "attention_mask": mask, **with_cache(cache.fork(rows=3))}
    if cache.guard.counts_padding:
        with pytest.raises(ValueError, match="has padding between tokens"):
            answered(ours, inputs)
        return  # windows and states would count the padding
    together = answered(ours, inputs)
    for row, question in questions.items():
        alone = answered(ours, after(document, question), **with_cache(cache.fork()))
        assert together[row].tolist() == alone[0].tolist()


@every_setting
def test_a_file_goes_on_with_the_same_tokens(setting, tmp_path):
    ours, parameters, document = opened(setting)
    cache = has_read(ours, document, **parameters)
    path = tmp_path / "document.safetensors"
    cache.save(path, ours)
    loaded = H2OCache.load(path, ours)
    assert_same(loaded, cache)
    assert str(loaded.report()) == str(cache.report())
    assert loaded.config == cache.config
    assert loaded.is_compileable == cache.is_compileable
    inputs = after(document, *prompts(7, seed=1))
    expected = answered(ours, inputs, **with_cache(cache.fork()))
    assert answered(ours, inputs, **with_cache(loaded)).tolist() == expected.tolist()
    loaded.reset()  # the loaded settings must evict from other documents as a new cache does
    fresh, others = H2OCache(ours.config, **parameters), batch(prompts(31, 20, seed=3))
    expected = answered(ours, others, **with_cache(fresh))
    assert answered(ours, others, **with_cache(loaded)).tolist() == expected.tolist()
    assert_same(loaded, fresh)
    assert [x.name for x in tmp_path.iterdir()] == [path.name]
    (tmp_path / "new").touch()
    assert path.stat().st_mode == (tmp_path / "new").stat().st_mode  # readable by others


def test_a_file_of_rows_amid_an_answer(tmp_path):
    """A file of padded rows in bfloat16, written during an answer and loaded with a config, must
    continue the answer."""
    ours = model("llama").bfloat16()
    ids = torch.cat(prompts(20, 20))
    mask = torch.ones_like(ids)
    mask[0, :6] = 0
    cache = H2OCache(ours.config, **SMALL, trace=True)
    out = ours.generate(
        ids, attention_mask=mask, **with_cache(cache), max_new_tokens=6, do_sample=False
    )
    cache.save(tmp_path / "rows")
    loaded = H2OCache.load(tmp_path / "rows", ours.config)
    assert loaded.layers[1].keys.dtype == torch.bfloat16
    mask = torch.cat([mask, mask.new_ones(2, out.shape[1] - 20)], dim=1)
    inputs = {"input_ids": out, "attention_mask": mask}
    expected = greedy(ours, inputs, **with_cache(cache))
    assert greedy(ours, inputs, **with_cache(loaded)).tolist() == expected.tolist()
    assert torch.equal(loaded.evicted_at(1), cache.evicted_at(1))


def test_a_file_of_a_profile_and_of_nothing_read(tmp_path):
    ours = model("llama")
    profile = Profile(
        fractions=(0.1, 0.5),
        shares=(((0.5, 1.5), (1.0, 1.0)), ((1.25, 0.75), (1.0, 1.0))),
        window=64,
    )
    (ids,) = prompts(40)
    cache = H2OCache(
        ours.config, heavy=0.2, recent=0.2, min_tokens=0, head_shares=profile, prompt_length=50
    )
    cache.save(tmp_path / "empty", ours)
    loaded = H2OCache.load(tmp_path / "empty", ours)
    assert loaded.get_seq_length() == 0
    expected = greedy(ours, {"input_ids": ids}, **with_cache(cache))
    assert greedy(ours, {"input_ids": ids}, **with_cache(loaded)).tolist() == expected.tolist()
    budget = loaded.report().layers[0].budget_by_head
    assert budget == cache.report().layers[0].budget_by_head != [[20, 20]]


def test_a_file_of_what_was_taken_over(tmp_path):
    """A file of a converted DynamicCache, written before any pass, must record that its keys have
    no scores yet."""
    ours = model("llama")
    document, question = prompts(30, 6)
    full = DynamicCache(config=ours.config)
    ours(document, **with_cache(full))
    cache = H2OCache.from_dynamic_cache(full, ours.config, **SMALL)
    cache.save(tmp_path / "taken", ours)
    loaded = H2OCache.load(tmp_path / "taken", ours)
    assert loaded.report().layers[0].unscored
    inputs = after({"input_ids": document}, question)
    expected = greedy(ours, inputs, **with_cache(cache))
    assert greedy(ours, inputs, **with_cache(loaded)).tolist() == expected.tolist()


def test_a_path_where_no_file_can_be_is_the_one_that_is_named(tmp_path):
    """The error must name the path that the user gave, not the hidden temporary file."""
    ours = model("llama")
    cache = has_read(ours, {"input_ids": prompts(40)[0]}, **SMALL)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    for place in ("folder", "file/cache", "missing/cache", "x" * 256):
        with pytest.raises(OSError, match=f": {re.escape(repr(str(tmp_path / place)))}$"):
            cache.save(tmp_path / place)
        assert sorted(x.name for x in tmp_path.rglob("*")) == ["file", "folder"]
    cache.save(tmp_path / ("x" * 255))


@pytest.fixture
def written(tmp_path):
    ours = model("llama")
    cache = has_read(ours, {"input_ids": prompts(40)[0]}, **SMALL)
    path = tmp_path / "document.safetensors"
    cache.save(path, ours)
    return path, ours


def rewritten(path, change):
    """Rewrite a file with the JSON that `change(text, tensors)` returns, and the old checksum."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
    metadata["h2o"] = change(metadata["h2o"], tensors)
    save_file(tensors, path, metadata)
    return metadata["h2o"], tensors


def test_an_edited_or_truncated_file(written):
    """An edit that leaves a valid file, with the same bytes in a tensor of another shape, must be
    noticed too."""
    path, ours = written

    def reshape(text, tensors):
        tensors["0.slots.keys"] = tensors["0.slots.keys"].squeeze(0)
        return text

    rewritten(path, reshape)
    with pytest.raises(ValueError, match=r"document.safetensors: .*was edited or damaged"):
        H2OCache.load(path, ours)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"document.safetensors: is truncated, damaged"):
        H2OCache.load(path, ours)


def test_flipped_bits(written):
    path, ours = written
    content = path.read_bytes()
    for at in range(8, len(content), len(content) // 40):
        path.write_bytes(content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :])
        with pytest.raises(ValueError, match=r"edited or damaged|truncated, damaged"):
            H2OCache.load(path, ours)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"layout": 99}, "was written in layout 99, but this version of h2o reads layout"),
        ({"kind": "h2o profile"}, "wanted 'h2o cache'"),
        ({"layers": []}, "has 0 layers, but the model has 2"),
        ({"layers": [{"seen": 40}] * 2}, "layer 0 was written by another version.*widest"),
        ({"settings": {"config": {"heavy": 1, "head_shares": None, "news": 1}}},
         "later version of h2o.*news"),
    ],
)  # fmt: skip
def test_files_of_other_versions(written, content, words):
    """Files of other versions must be refused even though their checksum is right."""
    path, ours = written
    text, tensors = rewritten(path, lambda text, _: json.dumps(json.loads(text) | content))
    save_file(tensors, path, {"h2o": text, "sha256": cache_file._checksum(text, tensors)})
    with pytest.raises(ValueError, match=words):
        H2OCache.load(path, ours)


def broken_off(ours, cache):
    """Run a pass of one more token that fails between the two layers."""
    with failing(ours.model.layers[1]):
        ours(prompts(1)[0], **with_cache(cache))


@pytest.mark.parametrize("again", ["other layers", "keys that wait"])
def test_a_good_file_outlives_a_pass_that_broke_off(written, again):
    path, ours = written
    cache = H2OCache.load(path, ours)
    before, wanted = path.read_bytes(), str(cache.report())
    if again == "other layers":
        broken_off(ours, cache)
    else:  # as after Ctrl-C during the first layer's attention
        cache.update(*torch.zeros(2, 1, 2, 1, 8), 0)
    for refused in (lambda: cache.save(path, ours), cache.fork):
        with pytest.raises(RuntimeError, match=r"was interrupted|never reached"):
            refused()
    assert path.read_bytes() == before
    assert [x.name for x in path.parent.iterdir()] == [path.name]
    assert str(H2OCache.load(path, ours).report()) == wanted


def test_a_file_of_a_pass_that_broke_off(written, monkeypatch):
    """A file of an interrupted pass, as earlier versions of h2o wrote it, must be refused."""
    path, ours = written
    monkeypatch.setattr(H2OCache, "_copying", lambda _: contextlib.nullcontext())
    cache = H2OCache.load(path, ours)
    broken_off(ours, cache)
    cache_file.write(path, cache, ours)
    with pytest.raises(
        ValueError, match=r"document.safetensors: the last forward pass was interrupted"
    ):
        H2OCache.load(path, ours)
    cache.reset()
    broken_off(ours, cache)  # now in its first pass
    cache_file.write(path, cache, ours)
    with pytest.raises(ValueError, match=r"interrupted between two layers"):
        H2OCache.load(path, ours)


def test_another_model(written):
    path, ours = written
    with pytest.raises(ValueError, match="another model: this model's model_type is qwen2, not"):
        H2OCache.load(path, model("qwen2"))
    with pytest.raises(ValueError, match="num_hidden_layers is 1, not 2"):
        H2OCache.load(path, LlamaConfig(**(ours.config.to_dict() | {"num_hidden_layers": 1})))
    tuned = copy.deepcopy(ours)
    for parameter in tuned.parameters():
        torch.nn.init.normal_(parameter)
    with pytest.raises(ValueError, match=r"the weights of .* differ"):
        H2OCache.load(path, tuned)
    H2OCache.load(path, tuned.config)  # a config has only a shape to compare
    with pytest.raises(ValueError, match="made for another model: this model's model_type is"):
        H2OCache(ours.config, **SMALL).save(path, model("qwen2"))
    assert H2OCache.load(path, ours).get_seq_length() == 40  # the old file is still there


def test_a_model_with_other_angles(written):
    """A file that was saved without the model, too, must not be loaded for a model that rotates
    keys by other angles. All weights are the same."""
    path, ours = written
    cache = has_read(ours, {"input_ids": prompts(40)[0]}, **SMALL)
    cache.save(path)
    other = copy.deepcopy(ours)
    other.config.rope_parameters["rope_theta"] = 123.0
    message = r"another model: this model's config\.rope_parameters\.rope_theta is 123\.0, not 10"
    for given in (other, other.config):
        with pytest.raises(ValueError, match=message):
            H2OCache.load(path, given)
    with pytest.raises(ValueError, match="made for " + message):
        cache.save(path, other)
    assert H2OCache.load(path, ours).get_seq_length() == 40
    assert H2OCache.load(path, ours.config).get_seq_length() == 40


def test_no_cache_file(tmp_path):
    ours = model("llama")
    with pytest.raises(FileNotFoundError):
        H2OCache.load(tmp_path / "none", ours)
    save_file({"weight": torch.ones(2)}, tmp_path / "other")
    with pytest.raises(ValueError, match=r"H2OCache\.save did not write"):
        H2OCache.load(tmp_path / "other", ours)
    with pytest.raises(FileNotFoundError):
        H2OCache(ours.config, **SMALL).save(tmp_path / "no" / "folder")


def test_states_are_whole():
    """Every attribute of a layer that a pass changes must be in the layer's state or be computed
    from it."""
    ours = model("llama")
    (ids,) = prompts(40)
    anew = {"capacity", "keys", "values", "is_initialized", "batch_size", "num_heads", "guard"}
    anew |= {"_ranks", "facts"}
    for positions in ("original", "cache_relative"):
        config = H2OConfig(**SMALL, positions=positions)
        cache = H2OCache(ours.config, config, trace=True)
        before = [attributes(layer) for layer in cache.layers]
        greedy(ours, {"input_ids": ids}, **with_cache(cache))
        for layer, old in zip(cache.layers, before, strict=True):
            assert isinstance(layer, H2OLayer)
            changed = {name for name, x in attributes(layer).items() if x is not old.get(name)}
            names = {name.partition(".")[0] for name in take_snapshot(layer).tensors}
            assert {"slots", "facts"} <= changed
            assert changed - anew <= names | set(take_snapshot(layer).numbers)


def attributes(layer):
    """Attributes of a layer and of its form, scorer and runner."""
    parts = layer, layer.variant, layer.scorer, layer.runner
    return {name: x for part in parts if part is not None for name, x in vars(part).items()}


@pytest.mark.parametrize("dtype", [torch.long, torch.bool])
def test_a_traced_prompt_with_pads(tmp_path, dtype):
    """The trace must not keep the caller's mask, which all layers share and the caller may
    change."""
    ours, mask = model("llama"), torch.ones(2, 20, dtype=dtype)
    mask[0, :7] = 0
    cache = H2OCache(ours.config, **SMALL, trace=True)
    ours(prompts(20)[0].repeat(2, 1), attention_mask=mask, **with_cache(cache))
    wanted = cache.evicted_at(1).tolist()
    mask[:] = 0
    cache.save(tmp_path / "cache", ours)
    loaded = H2OCache.load(tmp_path / "cache", ours)
    assert loaded.evicted_at(1).tolist() == cache.evicted_at(1).tolist() == wanted
    assert [row[0][:8].count(0) for row in wanted] == [7, 0]
