"""Models whose weights torchao, torch.ao, bitsandbytes or a GGUF file has quantized."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from h2o import H2OCache, H2OConfig, calibrate, patched
from h2o.compat import with_cache
from h2o.model_identity import model_fingerprint, sample
from tests.default_model import random_default_model
from tests.hf.tiny import FAMILIES, greedy, llama, model, prompts

pytest.importorskip("torchao")

NAMES = [name for name, family in FAMILIES.items() if family.weights]


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_quantized(name):
    ours = model(name)
    kinds = {type(x.weight) for x in ours.modules() if isinstance(x, torch.nn.Linear)}
    assert any(issubclass(kind, torch.Tensor) and "Int" in kind.__name__ for kind in kinds)


@pytest.mark.parametrize("name", NAMES)
def test_patched(name):
    ours, theirs = model(name, "sdpa"), model(name, "sdpa")
    (ids,) = prompts(30)
    full = greedy(theirs, {"input_ids": ids}).tolist()
    with patched(ours, H2OConfig.full()):
        assert greedy(ours, {"input_ids": ids}).tolist() == full
    with patched(ours, heavy=5, recent=5) as patch:
        small = greedy(ours, {"input_ids": ids})
        assert patch.cache.report().layers[0].kept == [10]
    assert small.tolist() != full


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_told_from_that_of_other_weights(name, tmp_path):
    """A fingerprint leaves out quantized weights, and must still notice that the others differ."""
    ours = model(name)
    H2OCache(ours.config, heavy=6, recent=6).save(tmp_path / "document", ours)
    for parameter in ours.parameters():
        if type(parameter) is torch.nn.Parameter:
            parameter.neg_()
    with pytest.raises(ValueError, match=r"the weights of .* differ"):
        H2OCache.load(tmp_path / "document", ours)


def packed(name, factor=1.0):
    """A family's model whose linear weights, multiplied by a factor, torch.ao has quantized. They
    are no longer parameters."""
    ours = model(name)
    for module in ours.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data *= factor
    return torch.ao.quantization.quantize_dynamic(ours, {torch.nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_a_file_is_told_from_that_of_other_packed_weights(tmp_path):
    ours = packed("llama")
    H2OCache(ours.config, heavy=6, recent=6).save(tmp_path / "document", ours)
    H2OCache.load(tmp_path / "document", packed("llama"))
    with pytest.raises(ValueError, match=r"the weights of .*packed_params.* differ"):
        H2OCache.load(tmp_path / "document", packed("llama", 1.1))
    assert model_fingerprint(ours) == model_fingerprint(packed("llama"))
    assert model_fingerprint(ours) != model_fingerprint(packed("llama", 1.1))


def in_blocks(ours):
    """The model with linear weights in GGUF's blocks of eight bits, and the same weights unpacked.

    transformers multiplies blocks by a kernel from the hub. Its own unpacking stands in for it."""
    gguf = pytest.importorskip("gguf")
    layers = pytest.importorskip("transformers.integrations.gguf.utils")  # since 5.24
    kind, unpacked = int(gguf.GGMLQuantizationType.Q8_0), copy.deepcopy(ours)
    for name, linear in list(ours.named_modules()):
        if not isinstance(linear, torch.nn.Linear) or linear.in_features % 32:
            continue
        packed = layers.GgufLinear(linear.in_features, linear.out_features, kind)
        blocks = gguf.quants.quantize(linear.weight.detach().numpy(), kind)
        packed.weight = torch.nn.Parameter(torch.from_numpy(blocks), requires_grad=False)
        ours.set_submodule(name, packed)
        restored = gguf.quants.dequantize(blocks, kind)
        unpacked.get_submodule(name).weight.data = torch.from_numpy(restored)
    return ours, unpacked


def test_weights_in_the_blocks_of_a_gguf_file(tmp_path, monkeypatch):
    ours, unpacked = in_blocks(model("llama"))
    kernels = pytest.importorskip("transformers.integrations.gguf.kernels")

    def mul_mat_vec(blocks, x, kind, rows):
        return x @ kernels.dequantize(blocks, kind, x.dtype).reshape(rows, -1).T

    monkeypatch.setattr(kernels, "_gguf_kernel", SimpleNamespace(mul_mat_vec=mul_mat_vec))
    assert sum(type(x).__name__ == "GgufLinear" for x in ours.modules()) > 10
    (ids,) = prompts(30)
    for budget in ({"heavy": 5, "recent": 5}, {"budget": 0.2, "min_tokens": 0}):
        with patched(ours, **budget) as patch:
            small = greedy(ours, {"input_ids": ids})
            assert patch.cache.report().layers[0].kept < [30]
        with patched(unpacked, **budget):
            assert torch.equal(greedy(unpacked, {"input_ids": ids}), small)
    H2OCache(ours, heavy=6, recent=6).save(tmp_path / "document", ours)
    H2OCache.load(tmp_path / "document", ours)
    for module in ours.modules():
        if type(module).__name__ == "GgufLinear":
            module.weight ^= 1
    with pytest.raises(ValueError, match=r"the weights of .* differ"):
        H2OCache.load(tmp_path / "document", ours)


class Unpacks(torch.nn.Linear):
    """A module that changes its weight when it is asked for its state, as those of bitsandbytes
    do."""

    def _save_to_state_dict(self, *args):
        self.weight.data = self.weight.data.flip(0)
        super()._save_to_state_dict(*args)


def test_weights_are_only_read(tmp_path):
    ours, (ids,) = model("llama"), prompts(20)
    for layer in ours.model.layers:
        layer.mlp.down_proj.__class__ = Unpacks
    tensors = dict((*ours.named_parameters(), *ours.named_buffers()))
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    cache = H2OCache(ours.config, heavy=6, recent=6)
    ours(ids, **with_cache(cache))
    cache.save(tmp_path / "document", ours)
    H2OCache.load(tmp_path / "document", ours)
    model_fingerprint(ours)
    sample(ours)
    calibrate(ours, ids[0].repeat(8), window=64, windows=1, refine=0, fractions=(0.5,), draws=1)
    for name, tensor in (*ours.named_parameters(), *ours.named_buffers()):
        assert tensor is tensors[name]
        assert torch.equal(tensor, before[name])


BITSANDBYTES = {
    "8 bits": {"load_in_8bit": True},
    "4 bits": {"load_in_4bit": True},
    "4 bits, two scales": {"load_in_4bit": True, "bnb_4bit_use_double_quant": True},
}


@pytest.mark.parametrize("how", BITSANDBYTES)
@pytest.mark.filterwarnings("ignore")
def test_a_file_of_a_model_in_bitsandbytes(how, tmp_path):
    """On a CPU the first forward pass changes the layout of 4-bit weights. A model that has not run
    yet must be accepted too, and saving must not change answers."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    plain = llama(2, hidden_size=128, head_dim=32, intermediate_size=128)
    (ids,) = prompts(40)
    other = copy.deepcopy(plain)
    other.model.layers[1].mlp.up_proj.weight *= 1.05
    for each, name in ((plain, "model"), (other, "other")):
        each.save_pretrained(tmp_path / name)

    def load(name):
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / name, dtype=torch.bfloat16, attn_implementation="h2o",
            quantization_config=BitsAndBytesConfig(**BITSANDBYTES[how]),
        ).eval()  # fmt: skip

    ours = load("model")
    assert type(ours.model.layers[1].mlp.up_proj.weight) is not torch.nn.Parameter
    first = model_fingerprint(ours)
    cache, full = H2OCache(ours.config, heavy=100, recent=100), DynamicCache(config=ours.config)
    logits = [
        [ours(piece, **with_cache(x)).logits for piece in ids.split([39, 1], 1)]
        for x in (cache, full)
    ]
    for got, expected in zip(*logits, strict=True):
        assert (got - expected).abs().mean() < 0.1 * expected.abs().mean()
    cache.save(tmp_path / "document", ours)
    assert model_fingerprint(ours) == first
    again = ours(ids[:, :39], **with_cache(DynamicCache(config=ours.config))).logits
    assert torch.equal(again, logits[1][0])
    for same in (ours, load("model")):
        H2OCache.load(tmp_path / "document", same)
    with pytest.raises(ValueError, match=r"the weights of .*up_proj.* differ"):
        H2OCache.load(tmp_path / "document", load("other"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_latents_are_expanded_by_packed_weights():
    """The bias of such a layer is a method. Its absence must not be taken for a bias."""
    ours, (ids,) = packed("deepseek_v3"), prompts(24)
    logits = []
    for cache in (DynamicCache(config=ours.config), H2OCache(ours.config, heavy=64, recent=64)):
        with torch.no_grad():
            ours(ids[:, :-4], **with_cache(cache))
            logits.append(ours(ids[:, -4:], **with_cache(cache)).logits)
    assert (logits[0] - logits[1]).abs().mean() < 0.1 * logits[0].abs().mean()


def test_the_script_of_the_documents(tmp_path, monkeypatch, capsys):
    """docs/how_to/keep_less_memory.md has a script that quantizes weights while it loads them."""
    page = Path(__file__).parents[2] / "docs/how_to/keep_less_memory.md"
    text = page.read_text("utf-8")
    script = re.search(r"^```python\n(# int4\.py .*?)^```$", text, re.DOTALL | re.MULTILINE)[1]
    ours, tokenizer = random_default_model(
        num_hidden_layers=2, hidden_size=64, intermediate_size=64, head_dim=32,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=False,
    )  # fmt: skip
    ours.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "argv", ["int4.py", str(tmp_path), "A lighthouse is", "Once"])
    names = {}
    exec(compile(script.replace("=50", "=3"), "int4.py", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) >= 2
    linear = [x.weight for x in names["model"].modules() if isinstance(x, torch.nn.Linear)]
    assert len(linear) == 15  # with the output layer
    assert all("Int4" in type(weight).__name__ for weight in linear)
