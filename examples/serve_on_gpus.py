"""Compare vLLM with h2o, on several GPUs or machines, with generate() and an H2OCache.

    pip install '.[vllm,hf]' ray        # in the folder of h2o's sources, on each machine
    ray start --head                    # on one machine, if ranks run on several
    ray start --address=HEAD:6379       # on each of the others
    python examples/serve_on_gpus.py --model NAME --ranks 8 --executor ray

All requests are sent at once. The script prints a line of JSON: the platform, the speed, how many
answers equal those of an H2OCache, and for the others the first token that differs (in 16 bits some
answers diverge late). Without a GPU, vLLM's CPU build runs the same with `--executor mp`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

import h2o
from h2o import models
from h2o.compat import with_cache  # the argument has another name in some transformers versions

LONGEST = 1200
"""Most tokens of a prompt"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: the embedded SmolLM2-135M")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--ranks", type=int, default=1, help="tensor parallel ranks")
    parser.add_argument("--executor", default="mp", choices=["mp", "ray"])
    parser.add_argument("--kept", type=int, default=256, help="keys per head")
    parser.add_argument("--bytes", type=int, default=10**9, help="bytes for the pages of a rank")
    parser.add_argument("--requests", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=24, help="new tokens per request")
    parser.add_argument("--eager", action="store_true", help="run vLLM without compilation")
    options = parser.parse_args()
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from vllm.platforms import current_platform

    if options.executor == "ray" and not current_platform.ray_device_key:
        parser.error(
            f"vLLM's Ray executor does not support {current_platform.device_name}: "
            "use --executor mp"
        )
    name = options.model or str(models.embedded_folder())
    prompts = passages(name, options.requests)
    # In a separate process, so that its memory is free for vLLM afterwards.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        expected = pool.submit(alone, name, options, prompts).result()
    report = {"platform": current_platform.device_name, **vars(options)}
    report |= served(name, options, prompts, expected, current_platform.is_cuda())
    print("\n" + json.dumps(report), flush=True)


def passages(name: str, count: int) -> list[list[int]]:
    """Make `count` prompts of 3 to LONGEST tokens, which begin at different words of a text."""
    from transformers import AutoTokenizer

    text = " ".join(f"Station {n} reports {n * n % 97} ships, {n % 13} storms." for n in range(900))
    ids = AutoTokenizer.from_pretrained(name)(text)["input_ids"]
    lengths = [3 + (LONGEST - 3) * (5 * i % count) // max(count - 1, 1) for i in range(count)]
    return [ids[37 * i % 1000 :][:n] for i, n in enumerate(lengths)]


def alone(name: str, options: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Answer each prompt by generate() with an H2OCache."""
    from transformers import GenerationConfig

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, _ = h2o.load_model(name, dtype=options.dtype, device=device)
    config, answers = h2o.H2OConfig.robust(options.kept), []
    greedy = GenerationConfig(
        max_new_tokens=options.tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    for prompt in prompts:
        ids = torch.tensor([prompt], device=device)
        cache = h2o.H2OCache(model.config, config)
        out = model.generate(ids, **with_cache(cache), generation_config=greedy)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


def served(
    name: str, options: Any, prompts: list[list[int]], expected: list[list[int]], on_gpus: bool
) -> dict[str, Any]:
    """Answer all prompts at once with vLLM. Returns fields of the report."""
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(
        name,
        dtype=options.dtype,
        tensor_parallel_size=options.ranks,
        distributed_executor_backend=options.executor,
        max_model_len=LONGEST + options.tokens,
        kv_cache_memory_bytes=options.bytes,
        enforce_eager=options.eager,
        disable_log_stats=False,
        additional_config={"h2o": {"preset": "robust", "budget": options.kept}},
        **({"attention_backend": "CUSTOM"} if on_gpus else {}),
    )
    sampling = SamplingParams(temperature=0, max_tokens=options.tokens, ignore_eos=True)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    llm.generate(requests[:2], sampling, use_tqdm=False)  # kernels are loaded and checked
    start = time.perf_counter()
    outs = llm.generate(requests, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    answers = [list(out.outputs[0].token_ids) for out in outs]
    same = [shared(*pair) for pair in zip(answers, expected, strict=True)]
    first = [out.metrics.first_token_latency for out in outs]
    spans = [out.metrics.last_token_ts - out.metrics.first_token_ts for out in outs]
    return {
        "vllm": __version__,
        "tokens_a_second": round(sum(map(len, answers)) / seconds, 1),
        "first_token_s": round(statistics.median(first), 3),
        "token_ms": round(1000 * statistics.median(spans) / max(options.tokens - 1, 1), 2),
        "as_alone": f"{same.count(options.tokens)} of {len(same)}",
        "others_part_at": [n for n in same if n < options.tokens],
    }


def shared(answer: list[int], other: list[int]) -> int:
    """Number of tokens before the first that differs."""
    differ = [a != b for a, b in zip(answer, other, strict=True)]
    return differ.index(True) if True in differ else len(differ)


if __name__ == "__main__":  # workers import this file
    main()
