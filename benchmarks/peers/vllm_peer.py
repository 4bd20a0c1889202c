"""Generation with vLLM's CPU build, in bfloat16, with its whole cache.

Run by peers.Peer with the model's folder and the number of threads. A request is
{"ids": [[...], ...], "tokens": n}; the answer {"prefill_s": ..., "token_s": ..., "seconds": of the
whole call, "prompt": tokens of the first prompt}. The first two are vLLM's own times of the
first prompt's request.
"""

import json
import os
import sys
import time

folder, threads = sys.argv[1], sys.argv[2]
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what vLLM prints
os.environ |= {
    "OMP_NUM_THREADS": threads,
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else one core is kept free
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}

from vllm import LLM, SamplingParams  # noqa: E402

model = LLM(
    folder,
    dtype="bfloat16",
    max_model_len=8192,
    max_num_batched_tokens=8192,
    enable_prefix_caching=False,
    disable_log_stats=False,
)
for line in sys.stdin:
    request = json.loads(line)
    settings = SamplingParams(temperature=0.0, max_tokens=request["tokens"], ignore_eos=True)
    prompts = [{"prompt_token_ids": ids} for ids in request["ids"]]
    start = time.perf_counter()
    done = model.generate(prompts, settings, use_tqdm=False)
    seconds = time.perf_counter() - start
    metrics = done[0].metrics
    answer = {
        "prefill_s": metrics.first_token_latency,
        "token_s": (metrics.last_token_ts - metrics.first_token_ts) / (request["tokens"] - 1),
        "seconds": seconds,
        "prompt": len(request["ids"][0]),
    }
    print(json.dumps(answer), file=answers, flush=True)
