"""Generation with vLLM's CPU build in bfloat16, with its full cache or with h2o.

Started by peers.Peer with the model's folder, the number of threads and, if needed, options of
vLLM's engine in JSON. `{"additional_config": {"h2o": {...}}}` is h2o's entry.

A request is {"ids": [[...], ...], "tokens": n or one number per prompt, "arguments": `vllm_xargs`,
if any}. The answer has

    prefill_s, token_s          times of the first prompt's request
    each_first_s, each_token_s  the same of each request, from its arrival
    seconds                     time of the whole call
    prompt                      tokens of the first prompt
    ids                         the new tokens
    held                        the most requests at a time

All times except `seconds` are vLLM's own.

The answer to a request {"ids": [[...], ...], "context": n, "top": k, "arguments": ...} is
{"logprobs": ...}: for each prompt, and for each of its tokens from n + 1 on, the k most likely
tokens as {token: log-probability}.
"""

import json
import os
import sys
import time

folder, threads, *rest = sys.argv[1:]
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM prints to standard output
os.environ |= {
    "OMP_NUM_THREADS": threads,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else vLLM leaves one core unused
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm import LLM, SamplingParams  # noqa: E402

defaults = {
    "dtype": "bfloat16",
    "max_model_len": 8192,
    "max_num_batched_tokens": 8192,
    "enable_prefix_caching": False,
    "disable_log_stats": False,
    "kv_cache_memory_bytes": 2_000_000_000,  # VLLM_CPU_KVCACHE_SPACE would override options
}
model = LLM(folder, **defaults | json.loads(*rest or ["{}"]))


def logprobs(request: dict) -> list[list[dict[int, float]]]:
    settings = SamplingParams(
        max_tokens=1, prompt_logprobs=request["top"], flat_logprobs=True, detokenize=False,
        extra_args=request.get("arguments"),
    )  # fmt: skip
    prompts = [{"prompt_token_ids": ids} for ids in request["ids"]]
    return [
        [
            {token: one.logprob for token, one in likeliest.items()}
            for likeliest in done.prompt_logprobs[request["context"] + 1 :]
        ]
        for done in model.generate(prompts, settings, use_tqdm=False)
    ]


for line in sys.stdin:
    request = json.loads(line)
    if "top" in request:
        print(json.dumps({"logprobs": logprobs(request)}), file=answers, flush=True)
        continue
    tokens = request["tokens"]
    if isinstance(tokens, int):
        tokens = [tokens] * len(request["ids"])
    settings = [
        SamplingParams(
            temperature=0.0, max_tokens=n, ignore_eos=True, extra_args=request.get("arguments")
        )
        for n in tokens
    ]
    prompts = [{"prompt_token_ids": ids} for ids in request["ids"]]
    start = time.perf_counter()
    done = model.generate(prompts, settings, use_tqdm=False)
    seconds = time.perf_counter() - start
    metrics = [one.metrics for one in done]
    first = [m.first_token_latency for m in metrics]
    gaps = [
        (m.last_token_ts - m.first_token_ts) / max(n - 1, 1)
        for m, n in zip(metrics, tokens, strict=True)
    ]
    starts = [m.scheduled_ts for m in metrics]
    answer = {
        "prefill_s": first[0],
        "token_s": gaps[0],
        "each_first_s": first,
        "each_token_s": gaps,
        "held": max(sum(m.scheduled_ts <= t < m.last_token_ts for m in metrics) for t in starts),
        "seconds": seconds,
        "prompt": len(request["ids"][0]),
        "ids": [list(one.outputs[0].token_ids) for one in done],
    }
    print(json.dumps(answer), file=answers, flush=True)
