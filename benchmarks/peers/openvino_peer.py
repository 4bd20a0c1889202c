"""Generation with OpenVINO GenAI, with the whole cache and with its own cache eviction.

Run by peers.Peer with the GGUF file and the number of threads. A request is
{"texts": [...], "dtype": "f32" or "bf16", "kept": tokens that the cache may keep, 0 for all,
"tokens": n}; the answer {"prefill_s": ..., "token_s": ..., "seconds": of the whole call,
"prompt": tokens of the first text}. The first two are OpenVINO's own metrics.
"""

import json
import sys
import time

import openvino_genai as genai

file, threads = sys.argv[1], int(sys.argv[2])
BLOCK = 32  # tokens in a block of its paged cache; sizes are multiples of it
pipelines = {}


def load(dtype, kept):
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 16384
    scheduler.cache_size = 4
    if kept:
        scheduler.use_cache_eviction = True
        half = kept // 2 // BLOCK * BLOCK
        scheduler.cache_eviction_config = genai.CacheEvictionConfig(
            BLOCK, half, kept // BLOCK * BLOCK, genai.AggregationMode.SUM
        )
    settings = {"INFERENCE_PRECISION_HINT": dtype, "INFERENCE_NUM_THREADS": threads}
    return genai.LLMPipeline(file, "CPU", scheduler_config=scheduler, **settings)


for line in sys.stdin:
    request = json.loads(line)
    key = request["dtype"], request["kept"]
    if key not in pipelines:
        pipelines[key] = load(*key)
    config = genai.GenerationConfig()
    config.max_new_tokens = request["tokens"]
    config.ignore_eos = True
    config.apply_chat_template = False
    start = time.perf_counter()
    metrics = pipelines[key].generate(request["texts"], config).perf_metrics
    answer = {
        "seconds": time.perf_counter() - start,
        "prefill_s": metrics.get_ttft().mean / 1000,
        "token_s": metrics.get_tpot().mean / 1000,
        "prompt": metrics.get_num_input_tokens(),
    }
    print(json.dumps(answer), flush=True)
