"""torch.compile of decode steps and chunks: `H2OCache(..., compileable=True)`."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import CompileConfig

from h2o import H2OCache, H2OConfig, UnsupportedError, ops
from h2o.compat import with_cache
from h2o.hf.attention.attention_call import NewTokens, attention, evict_after
from h2o.hf.layers import pass_runners
from h2o.hf.model_traits.shared_keys import SHARES_KEYS
from h2o.quantization import smoothing_of
from tests.hf.modes import policy
from tests.hf.recordings import recording
from tests.hf.test_saved import assert_same
from tests.hf.tiny import (
    DEVICE,
    batch,
    failing,
    greedy,
    llama,
    model,
    needs_compiler,
    prompts,
    slow_if,
)
from tests.inputs import drifting

SMALL = {"heavy": 6, "recent": 6}


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Discard all compiled graphs before and after each test."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def compiling(backend="eager"):
    """Arguments that make generate() compile whole graphs, on a CPU too."""
    config = CompileConfig(fullgraph=True, dynamic=None, backend=backend, mode=None)
    config._compile_all_devices = True
    return {"compile_config": config}


def graphs():
    return counters["stats"]["unique_graphs"]


@needs_compiler
@pytest.mark.parametrize(
    "chosen",
    [
        slow_if(x in ("fractions", "sinks, mean"), x)  # to the graph these are numbers only
        for x in ("fractions", "sinks, mean", "value-weighted", "head_shares", "int8")
    ],
)
def test_policies_give_the_same_tokens(chosen):
    ours = llama(1)
    config = dataclasses.replace(policy(chosen, ours), ratio_of="prompt")
    (ids,) = prompts(20)
    plain = H2OCache(ours.config, config)
    cache = H2OCache(ours.config, config, compileable=True)
    expected = greedy(ours, {"input_ids": ids}, **with_cache(plain))
    got = greedy(ours, {"input_ids": ids}, **with_cache(cache), **compiling())
    assert got.tolist() == expected.tolist()
    assert graphs() == 1
    assert str(cache.report()) == str(plain.report())
    torch.testing.assert_close(cache.kept(0), plain.kept(0), rtol=0, atol=0)


@needs_compiler
@pytest.mark.parametrize("name", ["opt", slow_if(True, "gpt_neox")])
def test_families(name):
    ours = model(name)
    (ids,) = prompts(20)
    expected = greedy(ours, {"input_ids": ids}, **with_cache(H2OCache(ours.config, **SMALL)))
    cache = H2OCache(ours.config, **SMALL, compileable=True)
    got = greedy(ours, {"input_ids": ids}, **with_cache(cache), **compiling())
    assert got.tolist() == expected.tolist()
    assert graphs() == 1


@needs_compiler
def test_one_graph_for_steps_prompts_and_caches():
    """A prompt of another length, a prompt shorter than the budget, and a fork must not need
    another graph."""
    ours = llama(1)
    for seed, length in enumerate((20, 20, 31, 5)):
        inputs = {"input_ids": prompts(length, seed=seed)[0]}
        expected = greedy(ours, inputs, **with_cache(H2OCache(ours.config, **SMALL)))
        cache = H2OCache(ours.config, **SMALL, compileable=True)
        got = greedy(ours, inputs, **with_cache(cache), **compiling())
        assert got.tolist() == expected.tolist()
    more = {"input_ids": torch.cat([inputs["input_ids"], got, prompts(4)[0]], dim=1)}
    fork = cache.fork()
    expected = greedy(ours, more, **with_cache(cache), **compiling())
    assert greedy(ours, more, **with_cache(fork), **compiling()).tolist() == expected.tolist()
    assert graphs() == 1
    assert not counters["graph_break"]


@needs_compiler
@pytest.mark.parametrize("rows", [slow_if(True, 1), 3])
def test_padded_rows_are_one_recording(rows):
    """The mask grows by a column with each token, which must not cause another recording."""
    ours, recordings = llama(1), set()
    inputs = {name: x[:rows] for name, x in batch(prompts(5, 17, 23)).items()}
    expected = greedy(ours, inputs, 24, **with_cache(H2OCache(ours.config, **SMALL)))
    cache = H2OCache(ours.config, **SMALL, compileable=True)
    got = greedy(ours, inputs, 24, **with_cache(cache), **compiling(recording(recordings)))
    assert got.tolist() == expected.tolist()
    assert len(recordings) == 1
    assert not counters["graph_break"]


@needs_compiler
def test_slots_stay_where_they_are():
    ours = llama(1)
    (ids,) = prompts(20)
    cache = H2OCache(ours.config, **SMALL, compileable=True)
    ours(ids, **with_cache(cache))

    def places():
        return [x.data_ptr() for layer in cache.layers for x in layer.slots if x is not None]

    before = places()
    step = torch.compile(ours.forward, fullgraph=True, backend="aot_eager")
    for token in range(5, 9):
        step(input_ids=torch.tensor([[token]], device=DEVICE), **with_cache(cache))
    assert places() == before
    assert cache.get_seq_length() == 24


@needs_compiler
def test_chunks_in_one_graph():
    """Chunks of any length must share one graph and leave the same slots as eager chunks."""
    ours = llama(1)
    ids = batch(prompts(5, 40, 33))
    caches = [H2OCache(ours.config, **SMALL, compileable=x) for x in (True, False)]
    forward = torch.compile(ours.forward, fullgraph=True, backend="aot_eager")
    for begin, end in itertools.pairwise((0, 12, 20, 27, 40)):
        piece = {name: x[:, begin:end].clone() for name, x in ids.items()}
        outs = []
        for cache in caches:
            graph = begin > 0 and cache.is_compileable
            if graph:
                for x in piece.values():
                    torch._dynamo.mark_dynamic(x, 1)
            outs.append((forward if graph else ours)(**piece, **with_cache(cache)).logits)
        real = piece["attention_mask"].bool()
        torch.testing.assert_close(outs[0][real], outs[1][real])
    assert graphs() == 1
    assert [int(cache.get_seq_length()) for cache in caches] == [40, 40]
    torch.testing.assert_close(caches[0].kept(0), caches[1].kept(0))


def test_a_chunk_that_fails_leaves_the_slots_as_they_were(monkeypatch):
    pass_runners.register()
    text = drifting(3, B=2, N=12)
    query, keys, values = (torch.from_numpy(x).to(DEVICE) for x in text)
    slots = ops.new_slots(keys, 8, 2, 2)
    fields = {"mask": None, "scale": None, "softcap": 0.0}
    policy = {"sinks": 0, "score_by": "sum", "decay": 1.0, "value_weighted": False}

    def chunk(begin, end):
        new = (x[:, :, begin:end] for x in (query, keys, values))
        return torch.ops.h2o.chunk(*new, *slots, **policy, **fields)

    chunk(0, 7)
    before = [None if x is None else x.clone() for x in slots]
    with monkeypatch.context() as patch:
        patch.setattr(ops, "evict", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            chunk(7, 12)
    for x, y in zip(slots, before, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)


@pytest.mark.parametrize("is_operator", [True, False])
def test_a_row_gets_its_smoothing_with_its_first_tokens(monkeypatch, is_operator):
    """Row 0 is padding in the first chunk, and attention of the second one fails once."""
    pass_runners.register()
    text = drifting(3, B=2, N=12, D=32)
    query, keys, values = (torch.from_numpy(x).to(DEVICE) for x in text)
    slots = ops.new_slots(keys, 8, 2, 2, kv_dtype="int4", offsets=True)
    mask = torch.ones(2, 12, dtype=torch.bool, device=DEVICE)
    mask[0, :7] = False

    def chunk(begin, end):
        new = [x[:, :, begin:end] for x in (query, keys, values)]
        fields = {"mask": mask[:, begin:end], "scale": None, "softcap": 0.0}
        if is_operator:
            torch.ops.h2o.chunk(*new, *slots, *ops.Policy(), **fields)
            return
        tokens = NewTokens(*new, **fields)
        policy = ops.Policy()
        evict_after(lambda: attention(tokens, slots, policy), tokens, slots, policy)

    chunk(0, 7)
    first = smoothing_of(query[:, :, :7], keys[:, :, :7], None)[1]
    assert torch.equal(slots.smoothing, torch.stack([torch.ones_like(first), first]))
    with monkeypatch.context() as patch:
        patch.setattr(ops, "attend", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            chunk(7, 12)
    assert (slots.smoothing[0] == 1).all()
    chunk(7, 12)
    second = smoothing_of(query[:, :, 7:], keys[:, :, 7:], None)[0]
    assert torch.equal(slots.smoothing, torch.stack([second, first]))


@pytest.mark.parametrize(("operator", "begin"), [("step", 11), ("chunk", 9)])
def test_what_the_operations_say_of_themselves(operator, begin):
    """The operators must write only to tensors that they declare, give fake tensors the right
    shape, and compile."""
    pass_runners.register()
    text = drifting(3, B=2, N=12, D=32)
    query, keys, values = (torch.from_numpy(x).to(DEVICE) for x in text)
    four_bits = {"kv_dtype": "int4", "offsets": True}
    stores = ({}, {"value_weighted": True}, {"kv_dtype": "int8"}, four_bits)
    for kind, capacity in itertools.product(stores, (8, [8, 5])):
        slots = ops.new_slots(keys, capacity, 2, 2, **kind)
        policy = {"value_weighted": kind.get("value_weighted", False)}
        _, scores = ops.attend(query[:, :, :11], keys[:, :, :11], values[:, :, :11])
        ops.evict(keys[:, :, :11], values[:, :, :11], scores, slots, **policy)
        new = [x[:, :, begin:] for x in (query, keys, values)]
        torch.library.opcheck(
            getattr(torch.ops.h2o, operator).default,
            (*new, *slots),
            {
                "mask": None, "scale": None, "softcap": 0.0, "sinks": 0, "score_by": "sum",
                "decay": 1.0, **policy,
            },
            test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_static"),
        )  # fmt: skip


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("gemma3", {}, "sliding window"),
        ("mistral-window", {}, "sliding window"),
        ("llama", {"positions": "cache_relative"}, "cache_relative"),
        ("llama", {"trace": True}, "trace=True"),
        ("deepseek_v3", {}, "latent"),
        *[("gemma4_text", {}, "keys of others")] * SHARES_KEYS,
    ],
)
def test_what_changes_its_shape(name, parameters, words):
    with pytest.raises(UnsupportedError, match=rf"compileable=True cannot be .*{words}"):
        H2OCache(model(name).config, **SMALL, **parameters, compileable=True)


def test_a_budget_without_end():
    ours = model("llama")
    cache = H2OCache(ours.config, H2OConfig.full(), compileable=True)
    with pytest.raises(ValueError, match="the whole budget at once"):
        ours(prompts(20)[0], **with_cache(cache))


def test_a_pass_that_broke_off():
    ours = model("llama")
    cache = H2OCache(ours.config, **SMALL, compileable=True)
    with failing(ours.model.layers[1]):
        ours(prompts(20)[0], **with_cache(cache))
    with pytest.raises(RuntimeError, match="layers have seen 20 tokens, the others none"):
        ours(torch.tensor([[5]], device=DEVICE), **with_cache(cache))


@needs_compiler
def test_a_file_of_it(tmp_path):
    ours = llama(1)
    cache = H2OCache(ours.config, **SMALL, compileable=True)
    ids, question = prompts(20, 4)
    ours(ids, **with_cache(cache))
    cache.save(tmp_path / "document", ours)
    loaded = H2OCache.load(tmp_path / "document", ours)
    assert loaded.is_compileable
    assert_same(loaded, cache)
    inputs = {"input_ids": torch.cat([ids, question], dim=1)}
    expected = greedy(ours, inputs, **with_cache(cache))
    got = greedy(ours, inputs, **with_cache(loaded), **compiling())
    assert got.tolist() == expected.tolist()


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # the compiler's own
def test_weights_may_be_frozen():
    """With frozen weights the compiler copies constants into the graph. If it copied the slots of a
    cache, a second cache would get these."""
    ours = model("llama")
    with torch._inductor.config.patch(freezing=True):
        for seed, length in enumerate((20, 20, 33, 12)):
            (ids,) = prompts(length, seed=seed)
            cache = H2OCache(ours.config, **SMALL, compileable=True)
            expected = greedy(
                ours, {"input_ids": ids}, **with_cache(H2OCache(ours.config, **SMALL))
            )
            got = greedy(ours, {"input_ids": ids}, **with_cache(cache), **compiling("inductor"))
            assert got.tolist() == expected.tolist()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # the compiler's own
def test_nothing_of_the_slots_is_copied():
    """A compiled step must not copy slots: all that it allocates is less than a hundredth of one
    layer's slots."""
    ours = model("llama")
    (ids,) = prompts(20)
    budget = {"heavy": 3000, "recent": 3000}
    cache = H2OCache(ours.config, **budget, compileable=True)
    expected = greedy(ours, {"input_ids": ids}, **with_cache(H2OCache(ours.config, **budget)))
    got = greedy(ours, {"input_ids": ids}, **with_cache(cache), **compiling("inductor"))
    assert got.tolist() == expected.tolist()
    step = {"input_ids": torch.tensor([[5]]), "position_ids": torch.tensor([[36]])}
    step = {name: x.to(DEVICE) for name, x in step.items()}
    ours._compiled_call(**step, **with_cache(cache))
    with torch.profiler.profile(profile_memory=True) as profile:
        ours._compiled_call(**step, **with_cache(cache))
    events = profile.events()
    assert "h2o::step" in {event.name for event in events}
    allocated = sum(max(0, event.self_cpu_memory_usage) for event in events)
    held = sum(x.nbytes for x in cache.layers[0].slots if x is not None)
    assert 0 < allocated < held / 100
