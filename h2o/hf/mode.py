"""`Mode`: a kind of model, a setting, a way to run a cache, or a call with a cache of its own.

`h2o.hf.modes` says which of them can be combined.
"""

from __future__ import annotations

from enum import Enum


class Mode(str, Enum):
    """A mode. Its value is its name in messages."""

    __str__ = str.__str__

    # kinds of models
    HYBRID = "a model with recurrent states"
    WINDOWS = "a model with sliding windows"
    LATENT = "multi-head latent attention"
    SHARED_KEYS = "layers that attend to the keys of others"
    IMAGES = "images in the prompt"
    TENSOR_PARALLEL = "a model that is cut over several processes"
    # settings
    HEAD_BUDGETS = "budgets by layer or head"
    SHARED_BUDGET = 'head_shares="echo"'
    ECHO = 'score_by="mean-echo"'
    RANDOM = 'score_by="random"'
    BITS = "kv_dtype"
    FEW_BITS = "a kv_dtype with values in four bits"
    CACHE_RELATIVE = 'positions="cache_relative"'
    GROWTH = 'a fraction with ratio_of="seen"'
    PINS = "pinned"
    TRACE = "trace=True"
    COMPILED = "compileable=True"
    # ways to run a cache
    PADDING = "a padded prompt"
    GAPS = "padding between tokens"
    CHUNKS = "a prompt in several forward passes"
    BEAMS = "beam search"
    CROP = "crop()"
    NAMED_SPANS = "evict()"
    TURNS = "several turns on one cache"
    FORK = "fork()"
    FILE = "save() and load()"
    ROW_MOVES = "rows that are selected, reordered or repeated"
    AUTOCAST = "torch.autocast"
    TORCH_BACKEND = "the torch backend"
    # calls
    FROM_DYNAMIC = "H2OCache.from_dynamic_cache"
    GENERATE_ALL = "h2o.generate_all"
    PATCHED = "h2o.patched"
    REREADING = "readings=2"
    SIMULATED = "h2o.simulated"
    VLLM = "h2o in vLLM"
