"""vLLM engines in this process on tiny models, and the answers of `generate()` to the same
requests."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

import torch
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
from vllm.plugins import load_general_plugins
from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

from h2o import H2OCache, H2OConfig, without_spans
from h2o.compat import with_cache
from tests.hf.tiny import FAMILIES, LATENT, VOCABULARY

# Without this, each engine makes the garbage collector trace the 700,000 objects of imported
# modules seven times. vLLM's own calls would undo it, and would keep what an ended engine leaves.
gc.freeze()
gc.freeze = gc.unfreeze = lambda: None

LENGTHS = (5, 100, 40, 1, 17, 60, 33, 90, 3, 64)
NEW = 24
MiB = 1 << 20


def tiny(name: str, folder: Path, **config: Any) -> Any:
    """Make a tiny model of a family and save it in a folder."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(3)
    built = (FAMILIES | LATENT)[name].build_config()
    for field, value in config.items():
        setattr(built, field, value)
    model = AutoModelForCausalLM.from_config(built).eval().float()
    model.save_pretrained(folder)
    return model


def prompts(lengths: tuple[int, ...] = LENGTHS, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


@contextlib.contextmanager
def engine(folder: Path, h2o: Any = None, **options: Any) -> Iterator[LLM]:
    """vLLM on a model, with the entry `h2o` unless it is None."""
    defaults = {
        "dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True,
        "max_model_len": 256, "max_num_batched_tokens": 256, "max_num_seqs": 8,
        "kv_cache_memory_bytes": 8 * MiB, "disable_log_stats": True,
    }  # fmt: skip
    if h2o is not None:
        defaults["additional_config"] = {"h2o": h2o}
    try:
        llm = LLM(str(folder), **defaults | options)
        try:
            yield llm
        finally:  # now, not when the last traceback that refers to it is freed
            llm.llm_engine.engine_core.shutdown()
            del llm
    finally:  # an engine that could not be made leaves its connector behind
        ensure_kv_transfer_shutdown()
        cleanup_dist_env_and_memory()


def served(llm: LLM, requests: list[list[int]], new: int = NEW, **params: Any) -> list[list[int]]:
    """Tokens of vLLM's answers to all requests at once."""
    sampling = SamplingParams(
        **{"temperature": 0, "max_tokens": new, "ignore_eos": True, "detokenize": False} | params
    )
    outs = llm.generate([{"prompt_token_ids": x} for x in requests], sampling, use_tqdm=False)
    return [list(out.outputs[0].token_ids) for out in outs]


def alone(
    model: Any, requests: list[list[int]], config: H2OConfig, new: int = NEW, pinned: Any = None
) -> list:
    """Tokens of `generate()` with an H2OCache, for each request alone."""
    config = dataclasses.replace(config, ratio_of="prompt")  # as pages have one size
    model.set_attn_implementation("h2o")
    answers = []
    for request in requests:
        ids = torch.tensor([request])
        cache = H2OCache(model.config, config, prompt_length=len(request), pinned=pinned)
        out = model.generate(ids, **with_cache(cache), max_new_tokens=new, do_sample=False)
        answers.append(out[0, len(request) :].tolist())
    return answers


def after_prefix(
    model: Any,
    requests: list[list[int]],
    prefix: int,
    config: H2OConfig,
    chunk: int = 1 << 20,
    pinned: Any = None,
    forgets: Any = (),
) -> list:
    """Tokens of `generate()` with an H2OCache that has prefilled the prefix, has removed the spans
    `forgets`, and has prefilled the rest in chunks."""
    config = dataclasses.replace(config, ratio_of="prompt")
    model.set_attn_implementation("h2o")
    answers = []
    for request in requests:
        ids, cache = torch.tensor([request]), H2OCache(model.config, config, pinned=pinned)
        end = prefix if prefix < len(request) else 0
        with torch.no_grad():
            if end:
                model(ids[:, :end], **with_cache(cache))
                cache.evict(forgets, ids=ids[:, :end])
                ids = without_spans(ids, forgets)
                end = int(cache.get_seq_length())
            while ids.shape[1] - end > chunk:
                model(ids[:, end : end + chunk], **with_cache(cache))
                end += chunk
        known = {"attention_mask": torch.ones_like(ids), **with_cache(cache)}
        out = model.generate(ids, **known, max_new_tokens=NEW, do_sample=False)
        answers.append(out[0, ids.shape[1] :].tolist())
    return answers


@contextlib.contextmanager
def standing_for(one: AttentionBackendEnum, other: AttentionBackendEnum) -> Iterator[None]:
    """Within the block, vLLM uses the backend `other` whenever it would use `one`."""
    load_general_plugins()  # has an effect only once per process
    path = one.get_path()
    register_backend(one, other.get_path())
    selector._cached_get_attn_backend.cache_clear()
    try:
        yield
    finally:
        register_backend(one, path)
        selector._cached_get_attn_backend.cache_clear()
