"""Models whose weights torchao or torch.ao has quantized."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from h2o import H2OCache, H2OConfig, patched
from h2o.compat import with_cache
from h2o.model_identity import model_fingerprint
from tests.default_model import random_default_model
from tests.hf.tiny import FAMILIES, LATENT, greedy, model, prompts

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


@pytest.mark.skipif(not LATENT, reason="needs a transformers that caches latents")
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
