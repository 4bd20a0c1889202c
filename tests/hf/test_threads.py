"""Several threads: a cache serves one at a time, and a patched model any number of calls."""

from __future__ import annotations

import contextvars
import functools
import gc
import threading
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

from h2o import H2OCache, enable, generate_all, patched, simulated
from h2o.compat import CACHE, with_cache
from h2o.hf.cache import cache_file
from h2o.hf.cache_state.layer_snapshot import take_snapshot
from tests.hf.tiny import FAMILIES, greedy, model, prompts

SMALL = {"heavy": 6, "recent": 6}


def in_another_thread(function):
    """Run a function in a new thread. Returns its result, or the exception that it raised."""
    results = []

    def run():
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(60)
    return results[0]


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_cache_that_another_thread_is_using(name):
    """A second thread must not change a cache while the first is between two layers."""
    ours = model(name)
    (ids,) = prompts(20)
    cache = H2OCache(ours.config, **SMALL)
    intruders = []

    def intrude(*_):
        if not intruders:
            states = torch.zeros(1, 2, 3, 8)
            intruders.append(in_another_thread(lambda: cache.update(states, states, 0)))
            intruders.append(in_another_thread(lambda: ours(ids[:, :3], **with_cache(cache))))
            intruders.append(in_another_thread(lambda: cache.reorder_cache(torch.tensor([0]))))
            intruders.append(in_another_thread(lambda: cache.batch_select_indices([0])))
            intruders.append(in_another_thread(lambda: cache.batch_repeat_interleave(2)))
            intruders.append(in_another_thread(cache.reset))

    hook = ours.model.layers[1].register_forward_pre_hook(intrude)
    ours(ids, **with_cache(cache))
    hook.remove()
    assert len(intruders) == 6
    for error in intruders:
        assert isinstance(error, RuntimeError)
        assert "one cache per thread" in str(error)
    alone = H2OCache(ours.config, **SMALL)
    expected = ours(ids, **with_cache(alone))
    step = ours(ids[:, :1], **with_cache(cache)).logits
    want = ours(ids[:, :1], **with_cache(expected[CACHE])).logits
    torch.testing.assert_close(step, want, rtol=0, atol=0)


def test_a_cache_goes_from_thread_to_thread():
    """Threads may use a cache one after the other. This must work even after one of them has ended
    in the middle of a pass, once `reset()` was called."""
    ours = model("llama")
    (ids,) = prompts(20)
    cache = H2OCache(ours.config, **SMALL)
    in_another_thread(lambda: ours(ids, **with_cache(cache)))
    ours(ids[:, :1], **with_cache(cache))
    assert cache.get_seq_length() == 21

    def fail(*_):
        raise MemoryError

    hook = ours.model.layers[0].mlp.register_forward_hook(fail)
    assert isinstance(in_another_thread(lambda: ours(ids[:, :1], **with_cache(cache))), MemoryError)
    hook.remove()
    with pytest.raises(RuntimeError, match="was interrupted"):
        ours(ids[:, :1], **with_cache(cache))
    cache.reset()
    greedy(ours, {"input_ids": ids}, **with_cache(cache))


class Meanwhile:
    """Calls a function when it is copied."""

    def __init__(self, function):
        self.function = function

    def __deepcopy__(self, memo):
        self.function()


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_pass_of_another_thread_while_a_cache_is_copied(name, tmp_path, monkeypatch):
    """A copy must not hold some layers from before the pass and others from after it, nor may such
    a file replace an earlier one."""
    ours, file = model(name), tmp_path / "cache"
    (ids,) = prompts(20)
    cache = H2OCache(ours.config, **SMALL)
    run = torch.no_grad()(lambda ids: ours(ids, **with_cache(cache)))
    run(ids)
    cache.save(file)
    before = file.read_bytes()

    def step():
        in_another_thread(lambda: run(ids[:, :1]))

    def snapshot(layer):
        if layer is cache.layers[1]:
            step()
        return take_snapshot(layer)

    cache.layers[1].probe = Meanwhile(step)
    with pytest.raises(RuntimeError, match="in use by another thread"):
        cache.fork()
    del cache.layers[1].probe
    monkeypatch.setattr(cache_file, "take_snapshot", snapshot)
    with pytest.raises(RuntimeError, match="in use by another thread"):
        cache.save(file)
    assert file.read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == ["cache"]
    assert cache.fork().get_seq_length() == cache.get_seq_length() == 22


@pytest.mark.parametrize("generates", [True, False])
def test_a_call_keeps_its_cache_where_another_thread_makes_one_at_that_moment(
    generates, monkeypatch
):
    ours, (ids,) = model("llama", "sdpa"), prompts(20)
    used, theirs = [], []
    get_mask_sizes = H2OCache.get_mask_sizes

    def note(cache, *sizes):
        used.append(cache)
        return get_mask_sizes(cache, *sizes)

    def put(patch, name, value):
        object.__setattr__(patch, name, value)
        if name == "cache" and not theirs:
            theirs.append(None)
            theirs[0] = in_another_thread(patch.make_cache)

    with patched(ours, **SMALL) as patch:
        monkeypatch.setattr(H2OCache, "get_mask_sizes", note)
        monkeypatch.setattr(type(patch), "__setattr__", put)
        if generates:
            greedy(ours, {"input_ids": ids}, 3)
        else:
            ours(ids)
    assert isinstance(theirs[0], H2OCache)
    assert used
    assert all(cache is not theirs[0] for cache in used)


def test_a_block_serves_the_threads_that_it_starts():
    """A thread that a block starts, such as one that runs `generate()` with a streamer, must use
    the block's settings, with the block's context or without."""
    plain, (ids,) = model("llama", "sdpa"), prompts(20)
    full = greedy(plain, {"input_ids": ids}).tolist()
    with patched(plain, **SMALL):
        want = greedy(plain, {"input_ids": ids}).tolist()
        for context in (contextvars.copy_context(), contextvars.Context()):
            call = functools.partial(context.run, greedy, plain, {"input_ids": ids})
            assert in_another_thread(lambda call=call: call().tolist()) == want
    assert want != full


def test_an_enabled_model_that_is_collected_is_forgotten():
    """A collected model must not keep other threads from changing a model with the same config."""
    config = FAMILIES["llama"].build_config()
    one, two = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    reference = weakref.ref(one)
    enable(one, **SMALL)

    def simulate():
        with simulated(two, **SMALL):
            return "simulated"

    assert "by another thread" in str(in_another_thread(simulate))
    del one
    gc.collect()
    assert reference() is None
    assert in_another_thread(simulate) == "simulated"


@pytest.mark.parametrize("inner", [patched, simulated])
@pytest.mark.parametrize("outer", [patched, simulated])
def test_one_model_is_one_threads_to_change(outer, inner):
    plain = model("llama", "sdpa")
    before = set(vars(plain))

    def enter():
        with inner(plain, **SMALL):
            pass

    same = outer is inner is patched  # threads may share a patch with equal settings
    with outer(plain, **({"heavy": 4, "recent": 4} if same else SMALL)):
        error = in_another_thread(enter)
        assert isinstance(error, RuntimeError)
        assert "by another thread" in str(error)
        assert ("with other settings" in str(error)) == same
        enter()  # nested in the same thread
    assert set(vars(plain)) == before
    assert plain.config._attn_implementation == "sdpa"
    assert in_another_thread(enter) is None
    assert plain.config._attn_implementation == "sdpa"


def test_each_thread_patches_for_itself():
    """Threads that patch one model, like the handlers of a server, must each get their own caches.
    The last one to leave must restore the model."""
    plain, texts = model("llama", "sdpa"), prompts(20, 24, 28, 32)
    before = set(vars(plain))
    with patched(plain, **SMALL):
        want = [greedy(plain, {"input_ids": ids}).tolist() for ids in texts]
    together = threading.Barrier(len(texts))
    got: dict[int, list] = {}

    def handle(i):
        together.wait(60)
        for _ in range(3):
            with patched(plain, **SMALL) as patch:
                got[i] = greedy(plain, {"input_ids": texts[i]}).tolist()
                assert patch.cache.get_seq_length() == texts[i].shape[1] + 15
        got[i] = [got[i]]

    threads = [threading.Thread(target=handle, args=[i]) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[i] for i in range(len(texts))] == [[tokens] for tokens in want]
    assert set(vars(plain)) == before
    assert plain.config._attn_implementation == "sdpa"


def test_a_suspended_generate_all_leaves_the_model_as_it_was():
    plain, texts = model("llama", "sdpa"), prompts(20, 24, 28)
    config = {**SMALL, "rows": 2, "max_new_tokens": 6}
    prompts_ = [ids[0].tolist() for ids in texts]
    expected = [result.ids for result in generate_all(plain, prompts_, **config)]
    got, results = [], generate_all(plain, prompts_, **config)
    for result in results:
        got.append(result.ids)
        assert plain.config._attn_implementation == "sdpa"
        with simulated(plain, **SMALL):
            plain(texts[0], use_cache=False)
    assert got == expected
    dropped = generate_all(plain, prompts_, **config)
    next(dropped)
    assert plain.config._attn_implementation == "sdpa"
