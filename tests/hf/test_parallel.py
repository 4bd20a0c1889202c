"""Tensor parallelism: a model that is split over two processes gives what it gives in one."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, DynamicCache

from h2o import H2OCache, Profile
from h2o.compat import with_cache
from h2o.config.layer_plan import expand_to_heads
from h2o.hf.model_traits import tensor_parallel
from h2o.model_identity import describe, sample
from tests.default_model import random_default_model
from tests.hf import cut, cut_latents, gathered
from tests.hf.tiny import Family, prompts
from tests.hf.tiny import model as tiny_model
from tests.launch import ROOT, TORCHRUN, launch

HEADS = {
    "vocab_size": 98,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 2,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"], "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
}  # fmt: skip
FAMILIES = {
    "llama": Family("llama", HEADS | {"head_dim": 32}),
    "qwen3": Family("qwen3", HEADS),
    "qwen3_5_text": Family("qwen3_5_text", HEADS | LINEAR),  # every process has all of the states
    "gemma3_text": Family(
        "gemma3_text",
        HEADS | {"sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"]},
    ),
}


@pytest.mark.slow
def test_two_processes_give_what_one_gives(tmp_path):
    models, expected, profiles = {}, {}, {}
    for name, family in FAMILIES.items():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(family.build_config()).eval()
        model.save_pretrained(tmp_path / name)
        model.set_attn_implementation("h2o")
        profile = Profile(
            (0.2, 0.6), (cut.SHARES, cut.SHARES[::-1]), 64, describe(model.config), sample(model)
        )
        profile.save(tmp_path / name / "profile.json")
        models[name] = model
        expected[name] = cut.everything(model, tmp_path, profile)
        profiles[name] = cut.calibrated(model)
        (tmp_path / "cache.safetensors").rename(tmp_path / name / "whole.safetensors")
    reads_images = tiny_model("llava")
    reads_images.save_pretrained(tmp_path / "llava")
    expected["llava"] = cut.with_images(reads_images)
    launch(["-m", "tests.hf.cut", tmp_path], TORCHRUN)
    for name in expected:
        first, second = (torch.load(tmp_path / name / x / "found.pt") for x in "01")
        for case, (tokens, kept) in expected[name].items():
            assert first[case][0].tolist() == second[case][0].tolist() == tokens.tolist(), case
            for all_heads, *parts in zip(kept, first[case][1], second[case][1], strict=True):
                assert joined(parts).tolist() == all_heads.tolist(), case
        if name not in FAMILIES:
            continue
        for rank, results in enumerate((first, second)):
            said = f"heads of tensor parallel rank {1 - rank} of 2, but this is .* rank {rank} of 2"
            for file in ("cache", "taken"):
                assert re.search(said, results.pop(f"{file} of the other process"))
                path = tmp_path / name / str(rank) / f"{file}.safetensors"
                with pytest.raises(
                    ValueError, match=rf"rank {rank} of 2, but this is a whole model"
                ):
                    H2OCache.load(path, models[name])
            said = f"heads of a whole model, but this is .* rank {rank} of 2. Load it in a single"
            assert re.search(said, results.pop("of the whole model"))
            said = r"holds 2 of 4 key/value heads, .* not know which. Pass the model to save\(\)"
            assert re.search(said, results.pop("taken over"))
            said = f"shows all heads .* rank {rank} of 2: load the model whole.* without tp_plan"
            assert re.search(said, results.pop("analysis"))
        calibrated, again = first.pop("calibrated")
        assert second.pop("calibrated") == [calibrated, again] == [calibrated, calibrated]
        assert calibrated["weights"]
        Profile.from_dict(calibrated).check(models[name])
        torch.testing.assert_close(
            torch.tensor(calibrated["shares"]),
            torch.tensor(profiles[name].shares),
            atol=2e-3,
            rtol=0,
        )


@pytest.mark.slow
def test_two_processes_hold_the_same_latents(tmp_path):
    """Processes must score latents by all heads together, as a single process does. DeepSeek V3's
    heads are not split."""
    expected = {}
    for name in ("deepseek_v2", "glm4_moe_lite", "deepseek_v3"):
        ours = tiny_model(name)
        ours.save_pretrained(tmp_path / name)
        expected[name] = cut_latents.everything(ours, tmp_path)
    launch(["-m", "tests.hf.cut_latents", tmp_path], TORCHRUN)
    for name, cases in expected.items():
        for rank in "01":
            found = torch.load(tmp_path / name / rank / "found.pt")
            said = {case: found.pop(case) for case in ("quantized", "simulated")}
            if name == "deepseek_v3":
                assert said == {"quantized": None, "simulated": None}
            else:
                assert "Leave out kv_dtype" in said["quantized"]
                assert "without tp_plan" in said["simulated"]
            assert found.keys() == cases.keys()
            for case, (tokens, kept) in cases.items():
                assert found[case][0].tolist() == tokens.tolist(), (name, case)
                for ours, theirs in zip(found[case][1], kept, strict=True):
                    assert ours.tolist() == theirs.tolist(), (name, case)


@pytest.mark.slow
def test_what_fsdp_gathers_is_whole(tmp_path):
    """Under FSDP a process must not take its shards for a part of the heads. Caches, files and
    analyses must be those of a single process."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"].build_config()).eval()
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("h2o")
    wanted = gathered.answers(model, tmp_path / "cache")
    launch(["-m", "tests.hf.gathered", tmp_path], TORCHRUN)
    for name in ("0None", "1None", "0('fsdp',)", "1('fsdp',)"):
        torch.testing.assert_close(torch.load(tmp_path / f"{name}.pt"), wanted)
        assert (
            H2OCache.load(tmp_path / f"{name}.cache", model).layers[0].facts.part
            == tensor_parallel.WHOLE
        )


@pytest.mark.slow
def test_the_script_of_the_documents(tmp_path):
    """docs/how_to/use_several_processes.md has a script that runs as it stands, and what the page
    warns of raises an error."""
    page = (ROOT / "docs/how_to/use_several_processes.md").read_text("utf-8")
    script = re.search(r"^```python\n(# answer\.py .*?)^```$", page, re.DOTALL | re.MULTILINE)[1]
    config = 'h2o.H2OConfig.robust(0.2, budget_unit="bytes")'
    assert config in script
    model, tokenizer = random_default_model(
        num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        hidden_size=64, intermediate_size=64,
    )  # fmt: skip
    model.save_pretrained(tmp_path / "m")
    tokenizer.save_pretrained(tmp_path / "m")
    (tmp_path / "answer.py").write_text(script)
    (tmp_path / "budget.py").write_text(script.replace(config, "budget=0.2"))
    (tmp_path / "text").write_text("A lighthouse is a tower. " * 80)
    out, _ = launch([tmp_path / "answer.py", tmp_path / "m", tmp_path / "text"])
    assert len(tokenizer(out).input_ids) > 20
    _, error = launch([tmp_path / "budget.py", tmp_path / "m", tmp_path / "text"], code=1)
    assert "cut over several processes cannot be combined with head_shares" in error


def shard(module, mesh):
    """Give a module a parameter that is cut over a mesh, as its weights would be, or whole for
    None."""
    weight = torch.zeros(4)
    if mesh is not None:
        weight = distribute_tensor(weight, mesh, [Shard(0)] * mesh.ndim)
    module.register_parameter("cut", torch.nn.Parameter(weight))


def joined(parts):
    """Heads of both processes, padded to one length like the result of `kept`."""
    most = max(part.shape[-1] for part in parts)
    return torch.cat(
        [torch.nn.functional.pad(x, (0, most - x.shape[-1]), value=-1) for x in parts], 1
    )


def test_files_of_other_heads(last_of_four, tmp_path):
    """A file of one part of the heads must be refused by a process that has other heads."""
    path, (ids,) = tmp_path / "cache", prompts(30)
    ours = copy.deepcopy(tiny_model("llama"))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    for layer in ours.model.layers:
        shard(layer.self_attn.q_proj, mesh)
    cache = H2OCache(ours.config, heavy=6, recent=6)
    ours(ids, **with_cache(cache))
    cache.save(path, ours)
    loaded = H2OCache.load(path, ours)
    assert [layer.facts.part for layer in loaded.layers] == [(3, 4)] * 2
    loaded.save(path, ours)  # the loaded cache knows its part
    with pytest.raises(
        ValueError, match=r"rank 3 of 4, and a config .* Pass the model to load\(\)"
    ):
        H2OCache.load(path, ours.config)
    other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    for layer in ours.model.layers:
        shard(layer.self_attn.q_proj, other)
    with pytest.raises(ValueError, match=r"rank 3 of 4, but this is tensor parallel rank 1 of 2"):
        H2OCache.load(path, ours)
    on_one = copy.deepcopy(ours)
    for layer in on_one.model.layers:
        shard(layer.self_attn.q_proj, None)
    with pytest.raises(ValueError, match=r"rank 3 of 4, but this is a whole model. Start as many"):
        H2OCache.load(path, on_one)
    cache = H2OCache(on_one.config, heavy=6, recent=6)
    cache.save(path, on_one)
    H2OCache.load(path, ours)  # an empty cache has no heads yet
    on_one(ids, **with_cache(cache))
    cache.save(path, on_one)
    with pytest.raises(ValueError, match=r"heads of a whole model, but this is .* rank 1 of 2. Lo"):
        H2OCache.load(path, ours)
    with pytest.raises(ValueError, match=r"of a whole model, and a config .* Pass the model to"):
        H2OCache.load(path, ours.config)  # a config does not say which heads this process has
    assert H2OCache.load(path, on_one).get_seq_length() == 30


def test_files_of_heads_that_were_taken_over(last_of_four, tmp_path):
    """Before the first pass only the model knows which heads a converted cache has, so a file must
    not be written without the model."""
    path, (ids,) = tmp_path / "cache", prompts(30)
    on_one = copy.deepcopy(tiny_model("llama"))
    shard(on_one.model.layers[0].self_attn.q_proj, None)
    full = DynamicCache(config=on_one.config)
    on_one(ids, **with_cache(full))
    H2OCache.from_dynamic_cache(full, on_one.config, heavy=6, recent=6).save(path)  # of all heads
    for layer in full.layers:  # as if each of two processes had one of two heads
        layer.keys, layer.values = layer.keys[:, :1], layer.values[:, :1]
    ours = copy.deepcopy(on_one)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp", "tp"))
    shard(ours.model.layers[0].self_attn.q_proj, mesh)
    taken = H2OCache.from_dynamic_cache(full, on_one.config, heavy=6, recent=6)
    with pytest.raises(
        ValueError, match=r"1 of 2 key/value heads, .* does not know which. Pass the model"
    ):
        taken.save(tmp_path / "none")
    assert not (tmp_path / "none").exists()
    taken.save(path, ours)
    assert H2OCache.load(path, ours).layers[0].facts.part == (1, 2)
    with pytest.raises(ValueError, match=r"rank 1 of 2, but this is a whole model"):
        H2OCache.load(path, on_one)


def test_a_model_that_is_cut_but_for_its_attention(last_of_four):
    """A model whose attention is not split, like many with experts, must count as having all
    heads."""
    ours = copy.deepcopy(tiny_model("llama"))
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    shard(ours.model.layers[0].mlp.up_proj, mesh)
    assert tensor_parallel.part(ours) == (3, 4)
    assert tensor_parallel.part_of_heads(ours) == tensor_parallel.WHOLE
    shard(ours.model.layers[1].self_attn.q_proj, mesh)
    assert tensor_parallel.part_of_heads(ours) == (3, 4)


def test_budgets_of_the_heads_that_are_here():
    rows = [[(1, 2), (3, 4), (5, 6), (7, 8)]] * 2
    assert expand_to_heads(rows, 2, (1, 2)) == [[(5, 6), (7, 8)]] * 2
    assert expand_to_heads(rows, 1, (2, 4)) == [[(5, 6)]] * 2
    assert expand_to_heads([[(1, 2)], rows[0]], 2, (0, 2)) == [[(1, 2)] * 2, [(1, 2), (3, 4)]]
    assert expand_to_heads(rows, 4, (1, 2)) == rows  # attention is not split: all heads are here
    assert expand_to_heads([[(1, 2)]], 2, (1, 2)) == [[(1, 2)]]
    for part in ((0, 1), (0, 4)):
        with pytest.raises(ValueError, match=r"2 key/value heads, .* numbers for 4 heads"):
            expand_to_heads(rows, 2, part)


@pytest.fixture
def last_of_four():
    """Make this process the last of four, of which the other three do not exist."""
    distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    yield
    distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")  # of torch 2.6
@pytest.mark.parametrize(
    ("shape", "names", "place"),
    [
        ((4,), ("tp",), (3, 4)),
        ((4,), None, (3, 4)),
        ((2, 2), ("fsdp", "tp"), (1, 2)),
        ((1, 1, 4), ("pp", "fsdp", "tp"), (3, 4)),
        ((2, 2), ("pp", "fsdp"), tensor_parallel.WHOLE),
        ((4,), ("fsdp",), tensor_parallel.WHOLE),
        ((4,), ("ep",), tensor_parallel.WHOLE),
    ],
)
def test_which_part_is_here(last_of_four, shape, names, place):
    """The part of a model must be read from its sharded parameters."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 8))
    assert tensor_parallel.part(module) == tensor_parallel.WHOLE
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    weight = distribute_tensor(module[0].weight, mesh, [Shard(0)] * len(shape))
    module[0].weight = torch.nn.Parameter(weight)
    assert tensor_parallel.part(module) == place


def test_what_fsdp_cuts_is_no_part(last_of_four):
    """FSDP's mesh has no name by default. It must not be taken for a tensor parallel mesh without a
    name."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 8))
    fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
    assert module[0].weight.placements == (Shard(0),)
    assert tensor_parallel.part(module) == tensor_parallel.WHOLE
