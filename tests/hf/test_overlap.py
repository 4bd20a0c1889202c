"""Overlapping blocks of one model, in tasks and generators that end in any order.

Each call uses the block of its own context, or entering the block raises an error. No block leaves
anything behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import copy
import gc
import itertools

import pytest

from h2o import H2OCache, H2OConfig, disable, enable, patched, simulated
from h2o.compat import CACHE, with_cache
from tests.hf.test_patching import expected_tokens, traces
from tests.hf.tiny import greedy, model, prompts

SMALL, TINY, MIDDLE = ({"heavy": n, "recent": n} for n in (6, 2, 4))


@pytest.fixture
def llama():
    llama = model("llama", "sdpa")
    before = traces(llama)
    yield llama
    assert traces(llama) == before


def kept(cache):
    return cache.report().layers[0].kept


def answer(llama, ids):
    return greedy(llama, {"input_ids": ids}, 12).tolist()


def test_tasks_are_each_served_by_their_own_block(llama):
    """A call in a task, or in a thread with the task's context, must use the task's own block,
    whichever task ends first."""
    texts = prompts(20, 24)
    want = [expected_tokens(llama, {"input_ids": ids}, **SMALL) for ids in texts]

    async def handler(ids, entered, leave):
        with patched(llama, **SMALL) as patch:
            entered.set()
            await leave.wait()
            got = answer(llama, ids)
            assert await asyncio.to_thread(answer, llama, ids) == got
            assert await asyncio.create_task(asyncio.to_thread(answer, llama, ids)) == got
            made = patch.cache
            assert made.get_seq_length() == ids.shape[1] + 11
            assert llama(ids)[CACHE] is patch.cache is not made
        return got

    async def serve(order):
        entered, leave = ([asyncio.Event() for _ in range(2)] for _ in range(2))
        handlers = []
        for i, ids in enumerate(texts):
            handlers.append(asyncio.create_task(handler(ids, entered[i], leave[i])))
            await entered[i].wait()
        for i in order:
            leave[i].set()
            await handlers[i]
        return [one.result() for one in handlers]

    for order in itertools.permutations(range(2)):
        assert asyncio.run(serve(order)) == want


@pytest.mark.parametrize("how", [TINY, {**SMALL, "trace": True}, {**SMALL, "pinned": [(0, 2)]}])
def test_a_task_with_other_settings_is_refused(llama, how):
    """A task with other settings must be refused before it changes the model, and accepted after
    the first task has ended."""
    (ids,) = prompts(20)
    want = expected_tokens(llama, {"input_ids": ids}, **SMALL)

    async def other():
        with patched(llama, **how):
            pass

    async def serve():
        with patched(llama, **SMALL):
            between = traces(llama)
            with pytest.raises(RuntimeError, match="by another task with other settings"):
                await asyncio.create_task(other())
            assert traces(llama) == between
            assert answer(llama, ids) == want
            with patched(llama, **how):  # nested
                pass
        await asyncio.create_task(other())

    asyncio.run(serve())


def test_a_task_that_fails_or_is_cancelled_leaves_nothing(llama):
    async def handler(end):
        with patched(llama, **SMALL):
            await end

    async def serve():
        loop = asyncio.get_running_loop()
        ends = [loop.create_future() for _ in range(3)]
        tasks = [asyncio.create_task(handler(end)) for end in ends]
        await asyncio.sleep(0)
        ends[0].set_exception(ZeroDivisionError())
        tasks[1].cancel()
        await asyncio.sleep(0)
        ends[2].set_result(None)
        return await asyncio.gather(*tasks, return_exceptions=True)

    failed, cancelled, done = asyncio.run(serve())
    assert isinstance(failed, ZeroDivisionError)
    assert isinstance(cancelled, asyncio.CancelledError)
    assert done is None


def test_generators_end_in_any_order(llama):
    """A generator that ends, or is dropped or closed in another context, must end its own block
    only."""
    (ids,) = prompts(20)
    want = expected_tokens(llama, {"input_ids": ids}, **SMALL)
    full = answer(llama, ids)

    def stream():
        with patched(llama, **SMALL):
            yield "begins"
            yield answer(llama, ids)

    for first, second in itertools.permutations(range(2)):
        both = [stream(), stream()]
        assert [next(one) for one in both] == ["begins"] * 2
        assert next(both[first]) == want
        assert next(both[first], "ended") == "ended"
        assert next(both[second]) == want
        contextvars.copy_context().run(both[second].close)
        assert answer(llama, ids) == full
    dropped, other = stream(), stream()
    next(dropped), next(other)
    del dropped
    gc.collect()
    assert next(other) == want
    other.close()


def test_an_async_generator_that_another_task_ends(llama):
    async def stream():
        with patched(llama, **SMALL):
            yield 1

    async def serve():
        one, other = stream(), stream()
        await asyncio.create_task(anext(one))
        await asyncio.create_task(anext(other))
        await asyncio.create_task(one.aclose())
        await other.aclose()

    asyncio.run(serve())


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_nested_blocks_that_end_out_of_order(llama, order):
    """The latest block that is still open must apply, in whichever order blocks end."""
    (ids,) = prompts(20)
    configs = [SMALL, TINY, MIDDLE]
    stacks = [contextlib.ExitStack() for _ in configs]
    patches = [
        stack.enter_context(patched(llama, **c)) for stack, c in zip(stacks, configs, strict=True)
    ]
    left = set(range(3))
    for ended in order:
        answer(llama, ids)
        assert kept(patches[max(left)].cache) == [sum(configs[max(left)].values())]
        stacks[ended].close()
        left.remove(ended)


def test_patches_that_are_undone_out_of_order(llama):
    (ids,) = prompts(20)
    outer, inner = enable(llama, **SMALL), enable(llama, **TINY)
    outer.undo()
    assert answer(llama, ids) == expected_tokens(llama, {"input_ids": ids}, **TINY)
    assert outer.cache is None
    twin = copy.deepcopy(llama)
    outer = enable(twin, **SMALL)
    disable(twin)
    assert kept(twin(ids)[CACHE]) == [4]
    disable(twin)
    assert twin.config._attn_implementation == "sdpa"
    assert inner.is_active
    inner.undo()


def test_a_copy_of_a_model_with_two_patches(llama):
    with patched(llama, **SMALL), patched(llama, **TINY):
        twin = copy.deepcopy(llama)
    (ids,) = prompts(20)
    assert answer(twin, ids) == expected_tokens(llama, {"input_ids": ids}, **TINY)
    disable(twin)
    assert answer(twin, ids) == expected_tokens(llama, {"input_ids": ids}, **SMALL)
    disable(twin)
    assert answer(twin, ids) == answer(llama, ids)
    assert set(vars(twin)) == set(vars(llama))


def test_enable_is_for_contexts_without_a_block(llama):
    (ids,) = prompts(20)
    contextvars.copy_context().run(enable, llama, **SMALL)
    assert answer(llama, ids) == expected_tokens(llama, {"input_ids": ids}, **SMALL)
    outside = contextvars.copy_context()
    with patched(llama, **MIDDLE):
        enable(llama, **TINY)
        assert answer(llama, ids) == expected_tokens(llama, {"input_ids": ids}, **MIDDLE)
        got = outside.run(answer, llama, ids)
        assert got == expected_tokens(llama, {"input_ids": ids}, **TINY)
        disable(llama)
    disable(llama)


def test_a_call_outside_of_every_block_is_served_by_the_latest(llama):
    """A call outside of every block, as in a streaming thread with an empty context, must use the
    latest block, unless its own arguments name a cache or none."""
    (ids,) = prompts(20)
    outside = contextvars.copy_context()
    with patched(llama, **MIDDLE), patched(llama, **SMALL):
        want = answer(llama, ids)
        assert outside.run(answer, llama, ids) == want
        assert isinstance(outside.run(llama, ids)[CACHE], H2OCache)
        cache = H2OCache(llama.config, **SMALL)
        assert outside.run(llama, ids, **with_cache(cache))[CACHE] is cache
        assert CACHE not in outside.run(llama, ids, use_cache=False)
    assert want == expected_tokens(llama, {"input_ids": ids}, **SMALL) != answer(llama, ids)


@pytest.mark.parametrize("inner", [patched, simulated])
@pytest.mark.parametrize("outer", [patched, simulated])
def test_a_simulation_is_one_tasks(llama, outer, inner):
    """A simulation sets the attention of the model for all tasks, so a second task must be refused
    when it enters."""

    async def handler(block, entered, leave):
        with block(llama, **SMALL):
            entered.set()
            await leave.wait()

    async def serve():
        entered, leave = asyncio.Event(), asyncio.Event()
        first = asyncio.create_task(handler(outer, entered, leave))
        await entered.wait()
        second = asyncio.create_task(handler(inner, asyncio.Event(), leave))
        await asyncio.sleep(0)
        leave.set()
        await first
        return (await asyncio.gather(second, return_exceptions=True))[0]

    error = asyncio.run(serve())
    if outer is inner is patched:
        assert error is None
    else:
        assert isinstance(error, RuntimeError)
        assert "by another task" in str(error)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("kinds", list(itertools.product([patched, simulated], repeat=3)))
def test_attention_is_that_of_the_latest_that_is_left(llama, kinds, order):
    stacks = [contextlib.ExitStack() for _ in kinds]
    names = []
    for stack, kind in zip(stacks, kinds, strict=True):
        stack.enter_context(kind(llama, **SMALL))
        names.append(llama.config._attn_implementation)
    left = dict(enumerate(names))
    for ended in order:
        assert llama.config._attn_implementation == left[max(left)]
        stacks[ended].close()
        del left[ended]


def test_a_cache_goes_on_after_its_block(llama):
    """A cache with cache-relative positions must continue to use them in a block with another kind
    of cache."""
    (ids,) = prompts(20)
    config = H2OConfig(**SMALL, positions="cache_relative")
    twin = copy.deepcopy(llama)
    twin.set_attn_implementation("h2o")
    cache = H2OCache(twin.config, config)
    want = [twin(x, **with_cache(cache)).logits for x in (ids, ids[:, :1])][-1]
    with patched(llama, config):
        cache = llama(ids)[CACHE]
        with patched(llama, **SMALL):
            got = llama(ids[:, :1], **with_cache(cache)).logits
    assert (got - want).abs().max() < 1e-3
