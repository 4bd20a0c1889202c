"""Like tests/hf/cut.py for latent attention, where every process holds the latents of all heads."""

from __future__ import annotations

import os
import sys
import warnings
from functools import partial
from pathlib import Path

import torch

from h2o import H2OCache, simulated
from h2o.compat import with_cache
from tests.hf import cut
from tests.hf.cut import in_two_parts, kept, refused, taken_over
from tests.hf.tiny import batch, greedy, prompts

CACHES = {
    **{name: cut.CACHES[name] for name in ("even", "fractions")},
    "decayed": {"heavy": 6, "recent": 6, "sinks": 2, "decay": 0.9},
    "max": {"heavy": 6, "recent": 6, "score_by": "max"},
}


def everything(model, folder):
    """{name: (tokens, positions kept [layers, B, 1, K])}"""
    results, inputs = {}, batch(prompts(40, 33))
    for name, parameters in CACHES.items():
        cache = H2OCache(model.config, **parameters)
        results[name] = greedy(model, inputs, 20, **with_cache(cache)), kept(cache)
    (ids,) = prompts(40)
    cache = H2OCache(model.config, **CACHES["even"])
    with torch.no_grad():
        for piece in ids.split([20, 12, 8], 1):
            model(piece, **with_cache(cache))
    cache.save(folder / "cache.safetensors", model)
    again = {
        "forked": cache.fork(),
        "loaded": H2OCache.load(folder / "cache.safetensors", model),
        "taken over": taken_over(model),
    }
    text = {"input_ids": torch.cat([ids, *prompts(5)], dim=1)}
    for name, cache in again.items():
        results[name] = greedy(model, text, 20, **with_cache(cache)), kept(cache)
    cache = H2OCache(model.config, **CACHES["even"])
    cache.activate_past_recording()
    with torch.no_grad():
        model(ids, **with_cache(cache))
        model(prompts(9)[0], **with_cache(cache))
    cache.crop(-5)
    results["cropped"] = greedy(model, text, 20, **with_cache(cache)), kept(cache)
    return results


def main(folder):
    from transformers import AutoModelForCausalLM

    for place in (x for x in folder.iterdir() if x.is_dir()):
        model = AutoModelForCausalLM.from_pretrained(
            place, attn_implementation="h2o", **in_two_parts()
        ).eval()
        own = place / os.environ["RANK"]
        own.mkdir()
        results = everything(model, own)
        call = torch.no_grad()(partial(model, prompts(20)[0]))
        quantized = H2OCache(model.config, heavy=6, recent=6, kv_dtype="int8")
        results["quantized"] = refused(partial(call, **with_cache(quantized)))
        with simulated(model, heavy=6, recent=6):
            results["simulated"] = refused(partial(call, use_cache=False))
        torch.save(results, own / "found.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
