"""Results of a model whose weights FSDP shards: `torchrun -m tests.hf.gathered FOLDER`.

FOLDER has the model. Each rank writes its results to FOLDER as well.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

from h2o import H2OCache, analyze
from h2o.compat import with_cache
from tests.hf.cut import kept
from tests.hf.tiny import prompts


def answers(model, path):
    """Next logits of a cache and of its file, the keys kept, and the scores of an analysis."""
    ids, more = prompts(40, 1)
    cache = H2OCache(model.config, heavy=[[3, 9, 5, 1], [4, 4, 8, 2]], recent=6)
    with torch.no_grad():
        model(ids, **with_cache(cache))
        cache.save(path, model)
        loaded = H2OCache.load(path, model)
        logits = [model(more, **with_cache(x)).logits for x in (cache, loaded)]
    return logits, kept(loaded), torch.from_numpy(analyze(model, ids, heavy=6, recent=6).scores(0))


def main(folder):
    rank = os.environ["RANK"]
    distributed.init_process_group("gloo")
    for names in (None, ("fsdp",)):
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="h2o").eval()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=names)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        path = folder / f"{rank}{names}"
        torch.save(answers(model, path.with_suffix(".cache")), path.with_suffix(".pt"))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(Path(sys.argv[1]))
