"""Results of models that are split over two processes: `torchrun -m tests.hf.cut FOLDER`.

Each folder in FOLDER has a model. Each rank writes its results to a folder next to the model.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from torch import distributed
from transformers import DynamicCache

from h2o import (
    H2OCache,
    H2OConfig,
    Profile,
    analyze,
    backends,
    calibrate,
    generate_all,
    patched,
    simulated,
    supports,
)
from h2o.compat import CACHE, with_cache
from h2o.hf.model_traits.tensor_parallel import part_of_heads
from tests.hf.tiny import batch, greedy, prompts, with_image

SHARES = [[1.0, 3.0, 2.0, 0.7], [0.6, 1.0, 1.5, 4.0]]
CACHES = {
    "even": {"heavy": 6, "recent": 6},
    "fractions": {
        "heavy": 0.2,
        "recent": 0.1,
        "min_tokens": 0,
        "value_weighted": True,
        "score_by": "mean",
    },
    "head_shares": {"heavy": 10, "recent": 8, "sinks": 2, "head_shares": SHARES},
    "shares of bytes": {
        "heavy": 0.3,
        "recent": 0.1,
        "min_tokens": 0,
        "budget_unit": "bytes",
        "head_shares": SHARES,
    },
    "heads": {"heavy": [[3, 9, 5, 1], [4, 4, 8, 2]], "recent": 6},
    "int8": {"heavy": 10, "recent": 8, "head_shares": SHARES, "kv_dtype": "int8"},
    "echo": {"heavy": 10, "recent": 8, "score_by": "mean-echo"},
    "pinned": {"heavy": 10, "recent": 8, "pinned": [(4, 9)]},
    "traced": {"heavy": 10, "recent": 8, "trace": True},
    "compiled": {"heavy": 10, "recent": 8, "compileable": True},
    "few bits": {"heavy": 10, "recent": 8, "kv_dtype": "int8-int4"},
    "cache_relative": {
        "heavy": 10,
        "recent": 8,
        "head_shares": SHARES,
        "positions": "cache_relative",
    },
}


def everything(model, folder, profile):
    """{name: (tokens, positions kept [layers, B, G, K])}. `folder` belongs to this process, and
    `profile` is that of the whole model."""
    inputs = batch(prompts(40, 33))
    results = {}
    shared = {"heavy": 10, "recent": 8, "head_shares": profile}
    support = supports(model.config)
    for name, parameters in (CACHES | {"profile": shared}).items():
        if name == "cache_relative" and support.not_cache_relative:
            continue
        if name == "compiled" and "sliding" in support.layers:
            continue
        if name == "few bits" and model.config.head_dim % 32:
            continue
        cache = H2OCache(model.config, **parameters)
        results[name] = greedy(model, inputs, 20, **with_cache(cache)), kept(cache)
    with patched(model, **shared) as patch:  # patched() sees the model's weights, not only a config
        results["patched"] = greedy(model, inputs, 20), kept(patch.cache)
    config = H2OConfig(**CACHES["head_shares"])
    cache = H2OCache(model.config, config)
    with backends.by_torch():
        results["torch backend"] = greedy(model, inputs, 20, **with_cache(cache)), kept(cache)
    cache = H2OCache(model.config, config)
    with torch.autocast("cpu", torch.bfloat16):
        results["autocast"] = greedy(model, inputs, 5, **with_cache(cache)), []  # rounded otherwise
    if {*support.layers} == {"h2o"}:
        results["gaps"] = after_gaps(model, H2OCache(model.config, config))
    drawn = H2OConfig(heavy=10, recent=8, score_by="random")
    for name, chosen in {"simulated": config, "random": drawn}.items():
        with simulated(model, chosen, trace=True) as simulation, torch.no_grad():
            logits = model(**inputs, use_cache=False).logits
        gone = list(map(simulation.evicted_at, simulation.layers()))
        results[name] = logits.argmax(-1), gone
    cache = H2OCache(model.config, config)
    results["beams"] = greedy(model, inputs, 10, **with_cache(cache), num_beams=3), kept(cache)
    (ids,) = prompts(40)
    if "sliding" not in support.layers:
        answers = generate_all(model, [ids[0], ids[0, :25]], config, rows=2, max_new_tokens=10)
        results["generate_all"] = torch.tensor([answer.ids for answer in answers]), []
    cache = H2OCache(model.config, config)
    with torch.no_grad():
        model(ids, **with_cache(cache))
    cache.save(folder / "cache.safetensors", model)
    for name, again in {
        "forked": cache.fork(2),
        "loaded": H2OCache.load(folder / "cache.safetensors", model),
    }.items():
        more = torch.cat([ids, *prompts(5)], dim=1).repeat(2 if name == "forked" else 1, 1)
        results[name] = greedy(model, {"input_ids": more}, 20, **with_cache(again)), kept(again)
    if "states" in support.layers:  # of which no token can be removed
        return results
    cache = H2OCache(model.config, config)
    with torch.no_grad():
        model(ids, **with_cache(cache))
    cache.evict([(3, 9)], ids=ids)
    more = torch.cat([ids[:, :3], ids[:, 9:], *prompts(5)], dim=1)
    results["evict"] = greedy(model, {"input_ids": more}, 20, **with_cache(cache)), kept(cache)
    cache = H2OCache(model.config, config)
    lookup = {CACHE: cache, "prompt_lookup_num_tokens": 3}
    results["prompt lookup"] = greedy(model, {"input_ids": ids.repeat(1, 2)}, 20, **lookup), []
    return results


def with_images(model):
    """Results of a model that reads images, with one in each row."""
    cache = H2OCache(model.config, **CACHES["even"])
    inputs = with_image("llava", batch(prompts(40, 33)))
    return {"images": (greedy(model, inputs, 20, **with_cache(cache)), kept(cache))}


def after_gaps(model, cache):
    """Results of rows with padding between two turns."""
    ids = torch.cat(prompts(40, 40))
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[0, 27:31] = mask[1, 33:] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    for begin, end in ((0, 27), (27, 33), (33, 40)):
        how = {"attention_mask": mask[:, :end], "position_ids": positions[:, begin:end]}
        with torch.no_grad():
            logits = model(ids[:, begin:end], **how, **with_cache(cache)).logits
    return logits.argmax(-1) * mask[:, 33:], kept(cache)


def calibrated(model, resume=None):
    """A profile calibrated on two windows and refined."""
    (ids,) = prompts(130)
    return calibrate(model, ids, window=64, fractions=(0.15, 0.4), resume=resume)


def taken_over(model):
    """A cache converted from a DynamicCache, before its first own pass."""
    full = DynamicCache(config=model.config)
    with torch.no_grad():
        model(*prompts(30), **with_cache(full))
    return H2OCache.from_dynamic_cache(full, model.config, heavy=6, recent=6)


def refused(call, *arguments):
    """The message of the ValueError that a call raises; None if it raises none."""
    try:
        call(*arguments)
    except ValueError as error:
        return str(error)


def kept(cache):
    return [cache.kept(layer.layer_idx)[0] for layer in cache.layers if hasattr(layer, "slots")]


def in_two_parts():
    """Arguments of from_pretrained that split a model over two processes."""
    try:
        from transformers.distributed import DistributedConfig

        return {"distributed_config": DistributedConfig(tp_size=2)}
    except (ImportError, TypeError):
        return {"tp_plan": "auto"}


def main(folder):
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    rank = os.environ["RANK"]
    for place in (x for x in folder.iterdir() if x.is_dir()):
        auto = AutoModelForImageTextToText if place.name == "llava" else AutoModelForCausalLM
        model = auto.from_pretrained(place, attn_implementation="h2o", **in_two_parts())
        folder_of_rank = place / rank
        folder_of_rank.mkdir()
        if place.name == "llava":
            assert part_of_heads(model) == (int(rank), 2)
            torch.save(with_images(model.eval()), folder_of_rank / "found.pt")
            continue
        profile = Profile.load(place / "profile.json")
        results = everything(model.eval(), folder_of_rank, profile)
        file = place / "unfinished.json"  # the second call reads all results from this file
        results["calibrated"] = [calibrated(model, file).as_dict() for _ in range(2)]
        results["analysis"] = refused(analyze, model, *prompts(40))
        taken = taken_over(model)
        results["taken over"] = refused(taken.save, folder_of_rank / "taken.safetensors")
        taken.save(folder_of_rank / "taken.safetensors", model)
        H2OCache.load(folder_of_rank / "taken.safetensors", model)
        distributed.barrier()
        other = place / str(1 - int(rank))
        for name in ("cache", "taken"):
            results[f"{name} of the other process"] = refused(
                H2OCache.load, other / f"{name}.safetensors", model
            )
        file_of_one = place / "whole.safetensors"
        results["of the whole model"] = refused(H2OCache.load, file_of_one, model)
        torch.save(results, folder_of_rank / "found.pt")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
