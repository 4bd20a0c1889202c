"""vLLM with h2o's pages: every request in a batch gets the answer that it gets alone."""

from __future__ import annotations

import logging
import time

import pytest
import torch

from h2o import H2OCache, H2OConfig, models
from h2o.cli.texts import article
from h2o.compat import with_cache
from h2o.config import UNLIMITED
from h2o.hf.prompt import echo_scorer
from tests.vllm.engines import (
    NEW,
    AttentionBackendEnum,
    MiB,
    SamplingParams,
    alone,
    engine,
    prompts,
    served,
    standing_for,
    tiny,
)
from tests.vllm.held import held

SMALL = {"heavy": 8, "recent": 8}
PAGES, REQUESTS = "h2o.vllm.page_store.PageStore", "h2o.vllm.validation.Requests"


@pytest.mark.parametrize("name", ["llama", "qwen3", "opt", "gpt_neox", "gemma"])
def test_tokens_are_those_of_an_h2o_cache(name, tmp_path):
    """Two rounds use fewer pages than there are requests, so pages are used again."""
    # Without grouped heads in the model, vLLM still believes what its config says about groups.
    model = tiny(name, tmp_path, **({"num_key_value_heads": 4} if name == "gpt_neox" else {}))
    requests = prompts() + prompts(seed=1)
    wanted = alone(model, requests, H2OConfig(**SMALL))
    with engine(tmp_path, SMALL, kv_cache_memory_bytes=40_000) as llm:
        for _ in range(2):
            assert served(llm, requests) == wanted


@pytest.mark.parametrize("chunk", [256, 32])
def test_budgets_that_are_divided_across_layers(chunk, llama, monkeypatch):
    """Budgets distributed over all layers, with prompts whole or in chunks together with others,
    with and without pins, and with pages that are used again."""
    monkeypatch.setattr(echo_scorer, "FEWEST_HEADS", 1)
    folder, model = llama
    config, requests = H2OConfig(budget=24), prompts() + prompts(seed=1)
    pinned = [ids for ids in requests if len(ids) > 8]
    options = {"max_num_batched_tokens": chunk, "kv_cache_memory_bytes": 100_000}
    with engine(folder, {"budget": 24}, **options) as llm:
        for _ in range(2):
            assert served(llm, requests) == alone(model, requests, config)
        wanted = alone(model, pinned, config, pinned=[(3, 8)])
        assert served(llm, pinned, extra_args={"h2o_pinned": "3:8"}) == wanted


def test_an_engine_that_has_ended_leaves_no_pages_in_the_process(llama, monkeypatch, request):
    """Neither pages nor requests may stay, whether layers share a page or not."""
    monkeypatch.setattr(echo_scorer, "FEWEST_HEADS", 1)
    # pytest keeps log records, and one of vLLM's has a traceback that refers to the engine.
    logging.disable()
    request.addfinalizer(lambda: logging.disable(logging.NOTSET))
    for entry in ({"budget": 24}, SMALL):
        with engine(llama[0], entry) as llm:
            served(llm, prompts())
            here = held()
            del llm
        assert here[PAGES] > 0
        assert here[REQUESTS] == 1
        deadline = time.monotonic() + 60
        while {PAGES, REQUESTS} & {*held()}:  # the numbers of the last step are still to be written
            assert time.monotonic() < deadline
            time.sleep(1)


@pytest.mark.parametrize("chunk", [256, 16])
def test_pins_of_requests(chunk, llama, monkeypatch, caplog):
    """Pins also hold for prompts prefilled in chunks. Pins that do not fit are reported in the
    log."""
    monkeypatch.setattr(logging.getLogger("vllm.h2o"), "handlers", [caplog.handler])
    folder, model = llama
    config, requests = H2OConfig(heavy=20, recent=8), prompts((100, 40, 17, 60))
    wanted = alone(model, requests, config, pinned=[(3, 9)])
    assert wanted != alone(model, requests, config)
    with engine(folder, {"heavy": 20, "recent": 8}, max_num_batched_tokens=chunk) as llm:
        assert served(llm, requests, extra_args={"h2o_pinned": "3:9"}) == wanted
        assert "without the pins" not in caplog.text
        unpinned = served(llm, requests, extra_args={"h2o_pinned": "0:40"})
        assert unpinned == alone(model, requests, config)
        assert "without the pins" in caplog.text


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
@pytest.mark.parametrize("entry", [SMALL, {"heavy": 60, "recent": 40, "kv_dtype": "int8"}])
def test_full_attention_beside_sliding_windows(name, entry, tmp_path):
    """Layers with a window belong to vLLM. Their blocks and h2o's pages have the same number of
    bytes and share memory. With one entry pages are smaller than vLLM's blocks, with the other
    larger."""
    sizes = {"sliding_window": 32, "tie_word_embeddings": True, "head_dim": 32}
    model = tiny(name, tmp_path, **sizes)
    requests = prompts() + prompts(seed=1)
    wanted = alone(model, requests, H2OConfig(**entry))
    with engine(tmp_path, entry, kv_cache_memory_bytes=2 * MiB) as llm:
        assert kinds(llm) == {"H2OAttention", "CPUAttentionBackendImpl"}
        for _ in range(2):
            assert served(llm, requests) == wanted


def test_windows_in_blocks_that_were_pages(tmp_path):
    """Fields of a page that its request has left can be NaN as keys, so vLLM must not find them
    where it masks keys of a window."""
    model = tiny("gemma2", tmp_path, sliding_window=32, tie_word_embeddings=True, head_dim=32)
    entry = {"heavy": 60, "recent": 40}
    requests = prompts((40, 100, 7, 60, 90, 33, 120, 20))
    wanted = alone(model, requests, H2OConfig(**entry))
    options = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "num_gpu_blocks_override": 20}
    with engine(tmp_path, entry, **options) as llm:
        for _ in range(2):
            assert served(llm, requests) == wanted


def test_who_leaves_in_the_middle_of_a_prompt_harms_no_windows(tmp_path):
    """The pages that two requests left may already hold windows of others when the next prompt
    needs their buffers for chunks."""
    tiny("gemma2", tmp_path, sliding_window=32, tie_word_embeddings=True, head_dim=32)
    long, requests = prompts((120, 110), 2), prompts((5, 3, 4, 6, 100))
    options = {"max_num_batched_tokens": 32, "long_prefill_token_threshold": 16}

    def log_likelihoods():
        sampling = SamplingParams(
            temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False, logprobs=0
        )
        outs = llm.generate([{"prompt_token_ids": x} for x in requests], sampling, use_tqdm=False)
        return [next(iter(x.values())).logprob for out in outs for x in out.outputs[0].logprobs]

    with engine(tmp_path, SMALL, **options) as llm:
        wanted = log_likelihoods()
        for i, ids in enumerate(long):
            sampling = SamplingParams(max_tokens=8)
            llm.llm_engine.add_request(f"long {i}", {"prompt_token_ids": ids}, sampling)
        llm.llm_engine.step()
        llm.llm_engine.abort_request(["long 0", "long 1"])
        assert log_likelihoods() == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize(
    "entry",
    [
        {"heavy": 32, "recent": 32},
        {"preset": "calibrated", "budget": 48},
        {"budget": 48},
        {"budget": 0.3, "budget_unit": "keys", "kv_dtype": None, "min_tokens": 16},
    ],
)
def test_tokens_of_smollm2(entry):
    """Uneven budgets from the shipped profile, prompts ranked by echo, and budgets that each
    prompt's echo distributes over all layers. Keys are stored as floats, because the rounding of a
    different matrix product can change an 8-bit code, and with it a token."""
    preset, budget = entry.get("preset"), entry.get("budget")
    config = H2OConfig.preset(preset, budget) if preset else H2OConfig(**entry)
    model, tokenizer = models.load_model(dtype="float32", attn_implementation="h2o")
    model.generation_config.eos_token_id = None
    ids = tokenizer(article())["input_ids"]
    lengths = (5, 200, 64, 120, 1, 90, 170, 33)
    requests = [ids[7 * n + k :][:n] for k in (0, 1) for n in lengths]
    wanted = alone(model, requests, config)
    longest = slice(1, None, len(lengths))
    assert wanted[longest] != alone(model, requests[longest], H2OConfig.full())
    with engine(models.embedded_folder(), entry, kv_cache_memory_bytes=64 * MiB) as llm:
        assert served(llm, requests) == wanted


def test_requests_that_come_while_others_are_answered(llama):
    """A request comes every second step, so prompts are prefilled during others' steps. Some
    requests are aborted."""
    folder, model = llama
    requests = prompts() + prompts(seed=1)
    waiting, answers, steps = list(enumerate(requests)), {}, 0
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    with engine(folder, SMALL, kv_cache_memory_bytes=40_000) as llm:
        while waiting or llm.llm_engine.has_unfinished_requests():
            if waiting and steps % 2 == 0:
                i, ids = waiting.pop(0)
                llm.llm_engine.add_request(str(i), {"prompt_token_ids": ids}, sampling)
                if i % 7 == 6:
                    llm.llm_engine.abort_request([str(i - 1)])
            for out in llm.llm_engine.step():
                if out.finished:
                    answers[int(out.request_id)] = list(out.outputs[0].token_ids)
            steps += 1
    wanted = dict(enumerate(alone(model, requests, H2OConfig(**SMALL))))
    assert answers == {i: answer for i, answer in wanted.items() if i not in (5, 12)}


POLICIES = {
    "robust": {"preset": "robust", "budget": 20},
    "fractions": {"heavy": 0.2, "recent": 0.1, "min_tokens": 0, "sinks": 2},
    "bytes": {"preset": "robust", "budget": 0.2, "budget_unit": "bytes"},
    "faded": {"heavy": 10, "recent": 6, "decay": 0.9, "score_by": "max"},
    "of heads": {"heavy": [[4, 12], [9, 3]], "recent": 4, "kv_dtype": "int8"},
    "head_shares": {"heavy": 12, "recent": 12, "head_shares": [[1, 2], [3, 1]]},
    "echo": {"heavy": 10, "recent": 6, "sinks": 2, "score_by": "mean-echo", "value_weighted": True},
    "shared echo": {"budget": 24},
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies_and_stored_dtypes(name, llama, monkeypatch):
    monkeypatch.setattr(echo_scorer, "FEWEST_HEADS", 1)
    folder, model = llama
    entry = POLICIES[name]
    unit = entry.get("budget_unit", "keys")
    config = H2OConfig.preset(entry["preset"], entry["budget"], unit) if (
        "preset" in entry
    ) else H2OConfig(**entry)  # fmt: skip
    with engine(folder, entry) as llm:
        assert served(llm, prompts()) == alone(model, prompts(), config)


@pytest.mark.parametrize("entry", [SMALL, POLICIES["echo"]])
def test_prompts_in_chunks_are_cut_at_their_end(entry, llama):
    folder, model = llama
    with engine(folder, entry, max_num_batched_tokens=32) as llm:
        assert served(llm, prompts()) == alone(model, prompts(), H2OConfig(**entry))


def test_prompts_of_embeddings_are_cut_at_their_end(llama):
    """Prompts of embeddings have no tokens from which vLLM's model runners could tell their
    length."""
    folder, model = llama
    requests = prompts((100, 5, 60))
    model.set_attn_implementation("h2o")
    with torch.no_grad():
        embedded = [model.get_input_embeddings()(torch.tensor(ids)) for ids in requests]
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
    with engine(folder, SMALL, max_num_batched_tokens=32, enable_prompt_embeds=True) as llm:
        outs = llm.generate([{"prompt_embeds": x} for x in embedded], sampling, use_tqdm=False)
    answers = [list(out.outputs[0].token_ids) for out in outs]
    assert answers == alone(model, requests, H2OConfig(**SMALL))


def test_prompts_wait_for_a_place_in_which_their_chunks_are_kept(llama):
    """Without waiting, some prompts that come in chunks at once would be cut before their end."""
    folder, model = llama
    requests = prompts((100, 90, 5, 80, 70, 60, 50))
    options = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 16}
    for places in (1, 2):
        with engine(folder, SMALL | {"whole_prompts": places}, **options) as llm:
            assert served(llm, requests) == alone(model, requests, H2OConfig(**SMALL))


@pytest.mark.parametrize("name", ["cohere", "opt"])
def test_the_echo_of_prompts_is_that_of_an_h2o_cache(name, tmp_path):
    """Models with rotary pairs of neighboring elements, and without rotation."""
    model = tiny(name, tmp_path, tie_word_embeddings=True)
    wanted = alone(model, prompts(), H2OConfig(**POLICIES["echo"]))
    with engine(tmp_path, POLICIES["echo"]) as llm:
        assert served(llm, prompts()) == wanted
    by_attention = alone(model, prompts(), H2OConfig(**POLICIES["echo"] | {"score_by": "mean"}))
    assert (wanted == by_attention) == (name == "opt")


def test_requests_have_budgets_of_their_own(llama):
    """A wrong budget must be rejected before the request is accepted."""
    folder, model = llama
    requests = [prompt for prompt in prompts() if len(prompt) > 30]
    with engine(folder, SMALL) as llm:
        fewer, plain = (
            served(llm, requests, extra_args=arguments) for arguments in ({"h2o_heavy": 2}, None)
        )
        with pytest.raises(Exception, match="expected a number of tokens"):
            served(llm, requests[:1], extra_args={"h2o_heavy": "a lot"})
    assert fewer == alone(model, requests, H2OConfig(heavy=2, recent=8))
    assert plain == alone(model, requests, H2OConfig(**SMALL))
    assert fewer != plain


def test_the_backend_for_gpus_answers_the_same(llama):
    """The backend for GPUs replaces the CPU's, on this machine's memory."""
    folder, model = llama
    with standing_for(AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM):
        with engine(folder, SMALL, max_num_batched_tokens=32) as llm:
            assert served(llm, prompts()) == alone(model, prompts(), H2OConfig(**SMALL))
            (names,) = llm.apply_model(
                lambda model: {x.backend.name for x in model.modules() if hasattr(x, "impl")}
            )
            assert names == {"CUSTOM"}
        with pytest.raises(ValueError, match="CUSTOM is h2o's and needs an entry"):
            with engine(folder):
                pass


def test_prompts_that_are_cut_after_each_chunk(llama):
    """Requests come one at a time, so that the places of vLLM's cuts are known, then all at
    once."""
    folder, model = llama
    model.set_attn_implementation("h2o")
    wanted = []
    for prompt in prompts():
        cache = H2OCache(model.config, H2OConfig(**SMALL))
        for part in torch.tensor([prompt]).split(32, dim=1):
            out = model(part, **with_cache(cache))
        answer = [out.logits[0, -1].argmax().item()]
        while len(answer) < NEW:
            out = model(torch.tensor([answer[-1:]]), **with_cache(cache))
            answer.append(out.logits[0, -1].argmax().item())
        wanted.append(answer)
    assert wanted != alone(model, prompts(), H2OConfig(**SMALL))
    with engine(folder, SMALL | {"cut": "chunk"}, max_num_batched_tokens=32) as llm:
        assert [served(llm, [prompt])[0] for prompt in prompts()] == wanted
        assert all(len(answer) == NEW for answer in served(llm, prompts()))
        (kept_whole,) = llm.apply_model(
            lambda model: [x.impl.paged.whole for x in model.modules() if hasattr(x, "impl")]
        )
    assert kept_whole == [None, None]


@pytest.mark.slow
def test_compiled_layers_answer_the_same(llama):
    """To the compiler attention is one operation. Compiling takes minutes."""
    folder, model = llama
    with engine(folder, SMALL, enforce_eager=False) as llm:
        assert served(llm, prompts()) == alone(model, prompts(), H2OConfig(**SMALL))


def test_all_keys_are_dense_attention_and_without_the_entry_nothing_is_ours(llama):
    folder, _ = llama
    with engine(folder, {"heavy": UNLIMITED, "recent": 0}) as llm:
        answers = served(llm, prompts())
        assert kinds(llm) == {"H2OAttention"}
    with engine(folder) as llm:
        assert served(llm, prompts()) == answers
        assert kinds(llm) == {"CPUAttentionBackendImpl"}


def kinds(llm) -> set[str]:
    (names,) = llm.apply_model(
        lambda model: {type(x.impl).__name__ for x in model.modules() if hasattr(x, "impl")}
    )
    return names


def test_sampled_requests_do_not_depend_on_their_neighbors(llama):
    folder, _ = llama
    sampling = {"temperature": 1.0, "seed": 5}
    with engine(folder, SMALL) as llm:
        beside = served(llm, prompts(), **sampling)
        by_itself = [served(llm, [prompt], **sampling)[0] for prompt in prompts()]
    assert beside == by_itself
    assert len({*map(tuple, beside)}) == len(beside)


def test_log_likelihoods_of_a_prompt_are_those_of_all_keys(llama):
    """A prompt is cut only after its prefill, even in chunks, so no evicted key may be missing."""
    folder, model = llama
    model.set_attn_implementation("sdpa")
    sampling = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    with engine(folder, SMALL, max_num_batched_tokens=32) as llm:
        requests = [prompt for prompt in prompts() if len(prompt) > 16]
        outs = llm.generate([{"prompt_token_ids": x} for x in requests], sampling, use_tqdm=False)
    for prompt, out in zip(requests, outs, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
        wanted = [x[token].item() for x, token in zip(logprobs, prompt[1:], strict=True)]
        pairs = zip(out.prompt_logprobs[1:], prompt[1:], strict=True)
        assert [x[token].logprob for x, token in pairs] == pytest.approx(wanted, abs=1e-3)


def test_requests_that_begin_alike_share_nothing_unasked(llama, monkeypatch, caplog):
    """The kept keys depend on what follows, so vLLM's own prefix caching is off."""
    folder, model = llama
    monkeypatch.setattr(logging.getLogger("vllm.h2o"), "handlers", [caplog.handler])
    (long,) = prompts((120,))
    requests = [long[:n] for n in (120, 100, 110, 120)]
    # vLLM logs equal messages only once, so this engine has a size of its own.
    options = {"enable_prefix_caching": True, "kv_cache_memory_bytes": 3 * MiB}
    with engine(folder, SMALL, **options) as llm:
        assert not llm.llm_engine.vllm_config.cache_config.enable_prefix_caching
        for _ in range(2):
            assert served(llm, requests) == alone(model, requests, H2OConfig(**SMALL))
    assert "up to 2 prompts at a time are kept whole" in caplog.text


def test_more_requests_fit(llama):
    folder, _ = llama

    def fit(h2o) -> float:
        with engine(folder, h2o, kv_cache_memory_bytes=16 * MiB) as llm:
            cache = llm.llm_engine.vllm_config.cache_config
            return cache.num_gpu_blocks if h2o else cache.num_gpu_blocks * cache.block_size / 256

    assert fit(SMALL) > 10 * fit(None)


def test_no_page_holds_more_than_its_budget(llama):
    folder, _ = llama
    with engine(folder, SMALL) as llm:
        served(llm, prompts())
        (pages,) = llm.apply_model(
            lambda model: [x.impl.paged.store.pages for x in model.modules() if hasattr(x, "impl")]
        )
    for slots in pages:
        held = (slots.positions >= 0).sum(-1)
        assert held.max() == 16
        assert slots.positions.shape[-1] == 17
