"""Weights that are packed for decode steps give the same answers up to rounding."""

from __future__ import annotations

import copy
import importlib.util
import io

import pytest
import torch
from torch import nn
from transformers import DynamicCache

from h2o import H2OCache, compat, packed_weights
from h2o.compat import with_cache
from h2o.hf.batching.packed_weights import FEW
from tests.hf.tiny import batch, model, prompts

pytestmark = pytest.mark.skipif(
    not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    reason="the CPU does not compute in bfloat16",
)
SMALL = {"heavy": 6, "recent": 6}
NEAR = {"rtol": 2e-2, "atol": 2e-2}


def one_linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 33)).bfloat16().eval()


def counted(monkeypatch):
    """A list that gets the number of rows of each product with a packed weight."""
    rows, linear = [], torch.ops.mkldnn._linear_pointwise

    def counting(x, *others):
        rows.append(x.shape[:-1].numel())
        return linear(x, *others)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", counting)
    return rows


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "deepseek_v2"])
def test_a_text_is_the_same(name, monkeypatch):
    ours, inputs, logits = model(name).bfloat16(), batch(prompts(17, 40)), []
    rows = counted(monkeypatch)

    def text():
        cache = H2OCache(ours.config, **SMALL)
        (ids, mask), found = inputs.values(), []
        for step in range(12):
            found.append(ours(ids, attention_mask=mask, **with_cache(cache)).logits[:, -1])
            ids = logits[0][step].argmax(-1)[:, None] if logits else found[-1].argmax(-1)[:, None]
            mask = torch.cat([mask, torch.ones_like(ids)], dim=1)
        return found

    logits.append(text())
    assert not rows
    with packed_weights(ours) as size:
        logits.append(text())
    linear = [x for x in ours.modules() if type(x) is nn.Linear]
    assert size == sum(x.weight.nbytes for x in linear)
    assert set(rows) == {2}  # the decode steps use packed weights, the prompt does not
    torch.testing.assert_close(*logits, **NEAR)
    assert not any("forward" in vars(x) for x in ours.modules())


def test_hooks_and_changed_weights():
    module, x, seen = one_linear(), torch.randn(1, 48).bfloat16(), []
    module[0].register_forward_hook(lambda _, inputs, out: seen.append(out.shape))
    with packed_weights(module):

        def check():
            wanted = nn.functional.linear(x, module[0].weight, module[0].bias)
            torch.testing.assert_close(module(x), wanted, **NEAR)

        check()
        module[0].weight.mul_(-2)
        check()
        module[0].weight = nn.Parameter(module[0].weight.flip(0))
        check()
        module[0].weight.data = module[0].weight.data * 3
        check()
        module.float()
        x = x.float()
        check()
    assert seen == [(1, 33)] * 5


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_adapters_that_are_merged_within_the_block():
    """PEFT writes through a weight's `.data`, which torch does not count as a change. The outdated
    copy must not be used."""
    peft = pytest.importorskip("peft")
    how = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    ours = peft.get_peft_model(model("llama").bfloat16(), how).bfloat16().eval()
    inputs = batch(prompts(9))

    def logits():
        with torch.no_grad():
            return ours(**inputs, use_cache=False).logits

    adapted = logits()
    with ours.disable_adapter():
        base = logits()
    assert (adapted - base).abs().max() > 3
    near = {"rtol": 0, "atol": 1}
    with packed_weights(ours):
        torch.testing.assert_close(logits(), adapted, **near)
        ours.merge_adapter()
        torch.testing.assert_close(logits(), adapted, **near)
        with ours.disable_adapter():  # PEFT unmerges the adapter
            torch.testing.assert_close(logits(), base, **near)
        torch.testing.assert_close(logits(), adapted, **near)


WRITES = {
    "all numbers": lambda weight: weight.data.copy_(-2 * weight),
    "one number": lambda weight: weight.data[3, 5].neg_(),
    "rows, exchanged": lambda weight: weight.data.copy_(weight.roll(1, 0)),
}


@pytest.mark.parametrize("write", WRITES)
def test_writes_that_torch_does_not_count_are_noticed_by_the_next_text(write, monkeypatch):
    """`hotswap_adapter` and trainers that copy weights to a generator write through `.data`. Decode
    steps must use the new weights. The output layer must do so too, although it computes with one
    token of a prompt."""
    ours, (ids,), packed, pack = (
        model("llama").bfloat16(),
        prompts(12),
        [],
        compat.pack_linear_weight,
    )
    monkeypatch.setattr(compat, "pack_linear_weight", lambda x: (packed.append(x), pack(x))[1])

    def text(model, cache):
        model(ids[:, :9], logits_to_keep=1, **with_cache(cache))
        return [model(x, **with_cache(cache)).logits for x in ids[:, 9:].split(1, 1)]

    with packed_weights(ours):
        for weight in (ours.model.layers[1].mlp.up_proj.weight, ours.lm_head.weight):
            WRITES[write](weight)
            for make in (H2OCache, lambda config, **_: DynamicCache(config=config)):
                packed.clear()
                got = text(ours, make(ours.config, **SMALL))
                assert len(packed) == (make is H2OCache)  # the second text finds the new copy
                wanted = text(copy.deepcopy(ours), make(ours.config, **SMALL))
                torch.testing.assert_close(got, wanted, **NEAR)


@pytest.mark.usefixtures("gradients")
def test_which_products_are_as_before(monkeypatch):
    module, rows = one_linear(), counted(monkeypatch)
    with packed_weights(module):
        module(torch.randn(1, 48).bfloat16()).sum().backward()
        assert module[0].weight.grad is not None
        with torch.no_grad():
            module(torch.randn(FEW + 1, 48).bfloat16())
            assert not rows
            module(torch.randn(FEW, 48).bfloat16())
            assert module(torch.randn(2, 0, 48).bfloat16()).shape == (2, 0, 33)
    assert rows == [FEW, 0]


def test_what_is_not_packed():
    module = one_linear()
    with packed_weights(module) as size:
        assert size == module[0].weight.nbytes
        with packed_weights(module) as again:  # an inner block uses the outer block's weights
            assert again == 0
        assert "forward" in vars(module[0])
    with packed_weights(module.float()) as size:
        assert size == 0
    with torch.inference_mode():
        inner = one_linear()
    with packed_weights(inner) as size:
        assert size == 0


@pytest.mark.skipif(not importlib.util.find_spec("torchao"), reason="torchao quantizes weights")
def test_quantized_modules_go_on():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    module, x = one_linear(), torch.randn(1, 48).bfloat16()
    quantize_(module, Int8WeightOnlyConfig())
    wanted = module(x)
    with packed_weights(module) as size:
        assert size == 0
        assert torch.equal(module(x), wanted)


def test_copies_and_files_of_a_model_within_the_block():
    module, x = one_linear(), torch.randn(1, 48).bfloat16()
    with packed_weights(module):
        wanted = module(x)
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        for other in (copy.deepcopy(module), torch.load(file, weights_only=False)):
            assert torch.equal(other(x), wanted)
            other[0].weight.mul_(2)
            assert not torch.equal(other(x), wanted)
        assert torch.equal(module(x), wanted)


def test_an_error_within_the_block():
    module = one_linear()
    with pytest.raises(KeyError), packed_weights(module):
        raise KeyError
    assert "forward" not in vars(module[0])
