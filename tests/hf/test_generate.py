"""generate() with an H2OCache: conversations, beams, threads, fractions, a real model."""

from __future__ import annotations

import copy
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import DynamicCache

from h2o import H2OCache, H2OConfig, models
from h2o.compat import with_cache
from tests.hf.tiny import batch, greedy, model, prompts

SMALL = H2OConfig(heavy=6, recent=6)
CACHE_RELATIVE = H2OConfig(heavy=6, recent=6, positions="cache_relative")


def teacher_forced(ours, ids, config):
    """A cache after a prompt of 20 tokens, and the rest of `ids` fed one by one."""
    cache = H2OCache(ours.config, config)
    ours(ids[:, :20], **with_cache(cache))
    for i in range(20, ids.shape[1]):
        ours(ids[:, i : i + 1], **with_cache(cache))
    return cache


@pytest.mark.parametrize(
    ("config", "sampled"), [(SMALL, False), (SMALL, True), (CACHE_RELATIVE, False)]
)
def test_beams_are_permuted_with_their_state(config, sampled):
    """Each row must hold the keys that its own text leaves without beams, not those of another
    beam."""
    ours = model("gpt_neox")
    (prompt,) = prompts(20)
    cache = H2OCache(ours.config, config)
    seen = []

    def look(ids, logits):  # a logits processor runs after the forward pass, before beams move
        seen.append((ids.clone(), [cache.kept(layer) for layer in range(2)]))
        return logits

    torch.manual_seed(1)
    ours.generate(
        prompt, max_new_tokens=15, num_beams=4, do_sample=sampled, **with_cache(cache),
        logits_processor=[look],
    )  # fmt: skip
    crossed = 0
    for (before, _), (texts, _) in itertools.pairwise(seen):
        crossed += not torch.equal(texts[:, :-1], before)
    for texts, kept in (seen[5], seen[-1]):
        for b, text in enumerate(texts):
            straight = teacher_forced(ours, text[None], config)
            for layer in range(2):
                position, score = straight.kept(layer)
                assert torch.equal(kept[layer][0][b], position[0])
                torch.testing.assert_close(kept[layer][1][b], score[0], rtol=0, atol=1e-4)
    assert crossed > 5


def test_beam_search_of_a_batch_is_that_of_each_row():
    ours = model("llama")
    rows = prompts(11, 20, 16)
    inputs = batch(rows)

    def beams(inputs):
        cache = H2OCache(ours.config, heavy=0.3, recent=0.3, min_tokens=0)
        return ours.generate(**inputs, max_new_tokens=10, num_beams=3, **with_cache(cache))

    together = beams(inputs)[:, -10:]
    for b, row in enumerate(rows):
        alone = beams({"input_ids": row, "attention_mask": torch.ones_like(row)})
        assert together[b].tolist() == alone[0, -10:].tolist()


def test_two_calls_are_one_conversation():
    """A second call with all ids, or with the new ids and the whole mask, must continue where the
    first call ended."""
    ours = model("qwen2")
    (prompt,) = prompts(20)
    cache = H2OCache(ours.config, SMALL)
    first = ours.generate(prompt, max_new_tokens=6, do_sample=False, **with_cache(cache))
    assert cache.get_seq_length() == 25  # the last token has not been fed
    more = torch.cat([first, torch.tensor([[5, 6, 7]])], dim=1)
    twin = copy.deepcopy(cache)
    second = ours.generate(more, max_new_tokens=6, do_sample=False, **with_cache(cache))
    mask = torch.ones_like(more)
    ids = more[:, 25:]
    same = ours.generate(
        ids, attention_mask=mask, max_new_tokens=6, do_sample=False, **with_cache(twin)
    )
    assert same[:, 4:].tolist() == second[:, 29:].tolist()
    assert [layer.seen for layer in cache.report().layers] == [[34]] * 2
    # and by hand: prompt, decode steps, one chunk of four, decode steps
    straight = H2OCache(ours.config, SMALL)
    ours(prompt, **with_cache(straight))
    for i in range(20, 25):
        ours(first[:, i : i + 1], **with_cache(straight))
    logits = ours(more[:, 25:], **with_cache(straight)).logits
    assert logits[0, -1].argmax() == second[0, 29]


@pytest.mark.parametrize("chunk", [1, 8, 22, 23])
@pytest.mark.parametrize("side", ["left", "none"])
def test_chunks_of_a_prompt_in_generate(side, chunk):
    """Budgets must be fractions of the whole prompt, not of its first chunk, as if its length were
    given, also if the last chunk is a single token or the first one is the whole prompt."""
    ours = model("llama")
    inputs = batch(prompts(12, 23) if side == "left" else prompts(23, 23))
    lengths = inputs["attention_mask"].sum(1).tolist()
    settings = {"heavy": 0.3, "recent": 0.3, "min_tokens": 0, "trace": True}
    answers, budgets = [], []
    for length in (lengths, None):
        cache = H2OCache(ours.config, **settings, prompt_length=length)
        answers.append(greedy(ours, inputs, **with_cache(cache), prefill_chunk_size=chunk).tolist())
        budgets.append([cache.report().layers[0].budget, cache.evicted_at(0).tolist()])
        cache.reset()  # the next prompt has another length
        greedy(ours, {"input_ids": prompts(50)[0]}, 2, **with_cache(cache), prefill_chunk_size=7)
        assert cache.report().layers[0].budget == [30]
    assert answers[0] == answers[1]
    assert budgets[0] == budgets[1]
    whole = H2OCache(ours.config, **settings)
    greedy(ours, inputs, **with_cache(whole))
    assert whole.report().layers[0].budget == budgets[1][0]


def test_chunks_after_a_dynamic_cache():
    """The converted tokens count toward the prompt, whether the ids of all tokens come again or
    only those of the new ones."""
    ours, (ids,) = model("llama"), prompts(60)
    full = DynamicCache(config=ours.config)
    ours(ids[:, :20], **with_cache(full))
    settings = {"heavy": 0.25, "recent": 0.25, "min_tokens": 0}
    for new in (ids, ids[:, 20:]):
        cache = H2OCache.from_dynamic_cache(full, ours.config, **settings)
        inputs = {"input_ids": new, "attention_mask": torch.ones_like(ids)}
        greedy(ours, inputs, 2, **with_cache(cache), prefill_chunk_size=8)
        assert cache.report().layers[0].budget == [30]


def test_a_first_chunk_that_failed_leaves_no_length():
    ours, (long, short) = model("llama"), prompts(60, 20)
    settings = {"heavy": 20, "recent": 0.2, "min_tokens": 0, "pinned": "prompt"}
    cache = H2OCache(ours.config, **settings)
    with pytest.raises(ValueError, match="pinned"):
        greedy(ours, {"input_ids": long}, 2, **with_cache(cache), prefill_chunk_size=16)
    greedy(ours, {"input_ids": short}, 2, **with_cache(cache))
    assert cache.report().layers[0].budget == [24]


def test_chunks_into_another_cache_are_refused():
    """A cache that is not the one of generate() does not know which tokens it will get."""
    ours, (ids,) = model("llama"), prompts(40)
    other = H2OCache(ours.config, heavy=0.3, recent=0.3, min_tokens=0)
    inner = model("llama")

    def run_inner(*_):
        inner(ids[:, :8], **with_cache(other))

    hook = ours.register_forward_pre_hook(run_inner)
    with hook, pytest.raises(ValueError, match=r"Pass H2OCache\(..., prompt_length="):
        greedy(ours, {"input_ids": ids}, 2, prefill_chunk_size=8)


def test_half_precision_is_near_the_full_cache():
    for dtype in (torch.bfloat16, torch.float16):
        ours, theirs = model("llama").to(dtype), model("llama", "sdpa").to(dtype)
        inputs = batch(prompts(12, 23))
        exact = model("llama", "sdpa")
        cache = H2OCache(ours.config, H2OConfig.full())
        got = ours(**inputs, **with_cache(cache)).logits.float()
        sdpa = theirs(**inputs).logits.float()
        truth = exact(**inputs).logits
        real = inputs["attention_mask"].bool()
        error = (got - truth)[real].abs().mean()
        assert error < 2 * (sdpa - truth)[real].abs().mean()
        assert cache.layers[0].keys.dtype == dtype
        assert cache.layers[0].slots.scores.dtype == torch.float32


def test_autocast():
    """Rotated queries and keys are in float32 and values are not. All must be stored in autocast's
    dtype."""
    ours, theirs = model("llama"), model("llama", "sdpa")
    inputs = batch(prompts(12, 23))
    real = inputs["attention_mask"].bool()
    with torch.autocast("cpu", torch.bfloat16):
        cache = H2OCache(ours.config, H2OConfig.full())
        got = ours(**inputs, **with_cache(cache)).logits[real]
        expected = theirs(**inputs).logits[real]
        ours(inputs["input_ids"][:, :1], **with_cache(cache))
    assert cache.layers[0].keys.dtype == torch.bfloat16
    assert (got - expected).abs().mean() < 0.05 * expected.abs().mean()


@pytest.mark.filterwarnings("ignore:You are calling .generate:UserWarning")
def test_offloaded_weights():
    """accelerate moves weights in and out around each module. Keys must not lose their layer."""
    accelerate = pytest.importorskip("accelerate")
    inputs = batch(prompts(12, 23))
    ours = model("llama")
    expected = greedy(ours, inputs, **with_cache(H2OCache(ours.config, SMALL)))
    accelerate.cpu_offload(ours, execution_device="cpu")
    got = greedy(ours, inputs, **with_cache(H2OCache(ours.config, SMALL)))
    assert got.tolist() == expected.tolist()


@pytest.mark.parametrize("name", ["gpt_neox", "deepseek_v3"])
def test_threads_with_caches_of_their_own_do_not_meet(name):
    ours, texts = model(name), prompts(20, 27)
    together = threading.Barrier(2)

    def run(ids, wait=lambda: None):
        wait()
        cache = H2OCache(ours.config, SMALL)
        tokens = greedy(ours, {"input_ids": ids}, 20, **with_cache(cache))
        return tokens.tolist(), [x.tolist() for x in cache.kept(1)]

    alone = [run(ids) for ids in texts]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            assert list(pool.map(run, texts, [together.wait] * 2)) == alone


@pytest.mark.slow
def test_smollm2_with_every_token_kept_writes_what_sdpa_writes():
    ours, tokenizer = models.load_model()
    text = "The heart of a lighthouse is its lens. Augustin Fresnel, who in 1822"
    inputs = tokenizer(text, return_tensors="pt")
    ours.set_attn_implementation("sdpa")
    expected = greedy(ours, dict(inputs), 100)
    ours.set_attn_implementation("h2o")
    cache = H2OCache(ours.config, H2OConfig.full())
    assert greedy(ours, dict(inputs), 100, **with_cache(cache)).tolist() == expected.tolist()
    small = H2OCache(ours.config, heavy=8, recent=8)
    assert greedy(ours, dict(inputs), 100, **with_cache(small)).tolist() != expected.tolist()
    assert small.report().layers[0].kept == [16]
