"""Tensor parallel: a model cut over two processes gives what it gives in one."""

from __future__ import annotations

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM

from h2o.hf import parallel
from h2o.shares import levelled
from tests.hf import cut
from tests.hf.tiny import Family
from tests.launch import TORCHRUN, launch

HEADS = {
    "vocab_size": 98,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}
FAMILIES = {
    "llama": Family("llama", HEADS),
    "qwen3": Family("qwen3", HEADS),
}


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path):
    expected = {}
    for name, family in FAMILIES.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(family.build_config()).eval()
        model.save_pretrained(tmp_path / name)
        model.set_attn_implementation("h2o")
        expected[name] = cut.everything(model, tmp_path)
    (tmp_path / "cache.safetensors").unlink()
    launch(["-m", "tests.hf.cut", tmp_path], TORCHRUN)
    for name in FAMILIES:
        first, second = (torch.load(tmp_path / name / x / "found.pt") for x in "01")
        for case, (tokens, kept) in expected[name].items():
            assert first[case][0].tolist() == second[case][0].tolist() == tokens.tolist(), case
            for whole, *parts in zip(kept, first[case][1], second[case][1], strict=True):
                assert joined(parts).tolist() == whole.tolist(), case


def joined(parts):
    """Heads of both processes, the shorter ones padded as `kept` pads them."""
    most = max(part.shape[-1] for part in parts)
    return torch.cat(
        [torch.nn.functional.pad(x, (0, most - x.shape[-1]), value=-1) for x in parts], 1
    )


def test_budgets_of_the_heads_that_are_here():
    rows = [[(1, 2), (3, 4), (5, 6), (7, 8)]] * 2
    assert levelled(rows, 2, (1, 2)) == [[(5, 6), (7, 8)]] * 2
    assert levelled(rows, 1, (2, 4)) == [[(5, 6)]] * 2
    assert levelled([[(1, 2)], rows[0]], 2, (0, 2)) == [[(1, 2)] * 2, [(1, 2), (3, 4)]]
    assert levelled(rows, 4, (1, 2)) == rows  # whole where it computes: not cut by heads
    assert levelled([[(1, 2)]], 2, (1, 2)) == [[(1, 2)]]
    for part in ((0, 1), (0, 4)):
        with pytest.raises(ValueError, match=r"2 key/value heads, .* how much 4 heads may keep"):
            levelled(rows, 2, part)


@pytest.fixture
def last_of_four():
    """This process is the last of four, of which the others are not there."""
    distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield
    distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "names", "place"),
    [
        ((4,), ("tp",), (3, 4)),
        ((4,), None, (3, 4)),
        ((2, 2), ("fsdp", "tp"), (1, 2)),
        ((1, 1, 4), ("pp", "fsdp", "tp"), (3, 4)),
        ((2, 2), ("pp", "fsdp"), parallel.WHOLE),
    ],
)
def test_which_part_is_here(last_of_four, shape, names, place):
    """By the sharded parameters, or by what transformers noted on modules before 5.11."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 8))
    assert parallel.part(module) == parallel.WHOLE
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    module[0]._hf_device_mesh = mesh
    assert parallel.part(module) == place
    del module[0]._hf_device_mesh
    weight = distribute_tensor(module[0].weight, mesh, [Shard(0)] * len(shape))
    module[0].weight = torch.nn.Parameter(weight)
    assert parallel.part(module) == place
