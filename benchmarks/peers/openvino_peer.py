"""Generation with OpenVINO GenAI, with the full cache and with its own cache eviction.

Started by peers.Peer with a GGUF file and the number of threads. A request is {"dtype": "f32" or
"bf16", "kept": tokens of a request that the cache may keep, 0 for all, "tokens": n} with either
    "texts": [...]. The answer is {"prefill_s": ..., "token_s": ..., "prompt": tokens of the first
        text}, with times by OpenVINO's own metrics; or
    "ids": [[...], ...]. Then "tokens" has one number per prompt, and "blocks" is the number of
        blocks of the cache that requests share, 0 for no limit. The answer is {"seconds": ...,
        "ids": the new tokens}.
"""

import json
import sys
import time
from pathlib import Path

import numpy
import openvino
import openvino_genai as genai

file, threads = sys.argv[1], int(sys.argv[2])
BLOCK = 32  # tokens in a block of its paged cache, of which sizes are multiples
pipelines = {}


def scheduler(kept, blocks=0):
    config = genai.SchedulerConfig()
    config.enable_prefix_caching = False
    config.max_num_batched_tokens = 16384
    config.cache_size = 0 if blocks else 4
    config.num_kv_blocks = blocks
    if kept:
        config.use_cache_eviction = True
        half = kept // 2 // BLOCK * BLOCK
        config.cache_eviction_config = genai.CacheEvictionConfig(
            BLOCK, half, kept // BLOCK * BLOCK, genai.AggregationMode.SUM
        )
    return config


def settings(dtype):
    return {"INFERENCE_PRECISION_HINT": dtype, "INFERENCE_NUM_THREADS": threads}


def load(dtype, kept):
    return genai.LLMPipeline(file, "CPU", scheduler_config=scheduler(kept), **settings(dtype))


def load_batching(dtype, kept, blocks):
    """Load the model for batching, which supports OpenVINO's own format only. The converted model
    is stored next to the GGUF file."""
    folder = Path(file).parent
    if not (folder / "openvino_model.xml").exists():
        genai.LLMPipeline(file, "CPU", enable_save_ov_model=True)
    config = scheduler(kept, blocks)
    return genai.ContinuousBatchingPipeline(str(folder), config, "CPU", settings(dtype))


def generation(tokens):
    config = genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.ignore_eos = True
    config.apply_chat_template = False
    return config


def answer_texts(request):
    pipeline = pipeline_of(load, request["dtype"], request["kept"])
    metrics = pipeline.generate(request["texts"], generation(request["tokens"])).perf_metrics
    return {
        "prefill_s": metrics.get_ttft().mean / 1000,
        "token_s": metrics.get_tpot().mean / 1000,
        "prompt": metrics.get_num_input_tokens(),
    }


def answer_ids(request):
    pipeline = pipeline_of(load_batching, request["dtype"], request["kept"], request["blocks"])
    prompts = [openvino.Tensor(numpy.array([ids])) for ids in request["ids"]]
    start = time.perf_counter()
    done = pipeline.generate(prompts, [generation(n) for n in request["tokens"]])
    return {
        "seconds": time.perf_counter() - start,
        "ids": [list(one.m_generation_ids[0]) for one in done],
    }


def pipeline_of(make, *key):
    if key not in pipelines:
        pipelines[key] = make(*key)
    return pipelines[key]


for line in sys.stdin:
    request = json.loads(line)
    answer = answer_ids(request) if "ids" in request else answer_texts(request)
    print(json.dumps(answer), flush=True)
