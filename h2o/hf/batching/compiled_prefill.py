"""`CompiledPrefill`: prefill prompts with a compiled graph, one after another in the same row.

A cache allocates its slots when the prompt is known, which a graph cannot do. Here the slots are
permanent. They are emptied before each prompt, and the prompt, whatever its length, is processed
like a later chunk of a longer text.
"""

from __future__ import annotations

import textwrap
import warnings
from typing import Any

import torch
from torch import Tensor

from h2o.compat_wrappers import compile_errors, mark_dynamic, num_virtual_tokens
from h2o.config import H2OConfig
from h2o.hf.cache.cache import H2OCache
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.prompt.scorers import AttentionScorer


class CompiledPrefill:
    """Prefill for one model. Call it like the model, with the cache that `get_empty_cache` returns.

    Args:
        like: a cache of one row that has read a prompt. Only its budgets are used.
    """

    def __init__(self, model: Any, like: H2OCache) -> None:
        self.model = model
        self._cache = H2OCache(model.config, like.config, compileable=True)
        for layer, other in zip(self._cache.layers, like.layers, strict=True):
            layer.take_rows([0], other, [0], 1, other.seen)
        self._forward = CompiledForward(model, "prompts")

    @staticmethod
    def can_compile(model: Any, config: H2OConfig) -> bool:
        """Whether a graph can run all layers and the budgets do not depend on the prompt."""
        if config.needs_prompt_length or num_virtual_tokens(model):
            return False
        return all(
            type(layer) is H2OLayer and type(layer.scorer) is AttentionScorer
            for layer in H2OCache(model.config, config, compileable=True).layers
        )

    def __bool__(self) -> bool:
        """Whether a graph exists or may still be compiled."""
        return bool(self._forward)

    def get_empty_cache(self) -> H2OCache:
        """The cache, emptied for the next prompt."""
        for layer in self._cache.layers:
            layer.runner.empty_in_place(layer)
        self._cache.guard.reset()
        return self._cache

    def __call__(self, *, input_ids: Tensor, **inputs: Any) -> Any:
        if input_ids.shape[1] == 1:  # a decode step, for which no graph of one row is compiled
            return self.model(input_ids=input_ids, **inputs)
        # A chunk is a view of the prompt, and graphs are compiled for strides too.
        ids = input_ids.clone(memory_format=torch.contiguous_format)
        for tensor in (ids, inputs.get("position_ids")):
            if tensor is not None:
                mark_dynamic(tensor, 1)
        return self._forward(input_ids=ids, **inputs)


class CompiledForward:
    """Call a model through torch.compile, or eagerly after a warning if compiling fails. `what`
    names the passes in the warning."""

    def __init__(self, model: Any, what: str) -> None:
        self.model, self.what = model, what
        self._graph = torch.compile(model.forward, fullgraph=True)

    def __call__(self, **inputs: Any) -> Any:
        if self._graph is not None:
            try:
                return self._graph(**inputs)
            except compile_errors() as error:  # raised before anything has run
                reason = textwrap.shorten(str(error), 300, placeholder=" ...")
                text = f"{self.what} are not compiled: {reason}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)
                self._graph = None
        return self.model(**inputs)

    def __bool__(self) -> bool:
        """Whether a graph exists or may still be compiled."""
        return self._graph is not None
