"""Prefill with kvpress' ObservedAttentionPress, the press that is closest to H2O.

Started by peers.Peer with the model's folder, the number of threads and a device. A request is
{"ids": [...], "dtype": "float32", "ratio": share of the keys that is dropped}; the answer is
{"seconds": ..., "kept": keys that are left}. The forward pass is that of kvpress' own pipeline: the
model without its head, under the press, with eager attention, which this press needs for its
scores.
"""

import json
import sys
import time

import torch
from kvpress import ObservedAttentionPress
from transformers import AutoModelForCausalLM, DynamicCache

folder, threads, device = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.set_num_threads(threads)
models = {}
for line in sys.stdin:
    request = json.loads(line)
    dtype = request["dtype"]
    if dtype not in models:
        models[dtype] = (
            AutoModelForCausalLM.from_pretrained(
                folder, dtype=getattr(torch, dtype), attn_implementation="eager"
            )
            .to(device)
            .eval()
        )
    model = models[dtype]
    ids = torch.tensor([request["ids"]], device=device)
    with torch.inference_mode():
        start = time.perf_counter()
        with ObservedAttentionPress(compression_ratio=request["ratio"])(model):
            cache = DynamicCache()
            model.model(input_ids=ids, past_key_values=cache)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - start
    kept = cache.layers[0].keys.shape[2]
    print(json.dumps({"seconds": seconds, "kept": kept}), flush=True)
