"""`CompiledPrefill`: prefill prompts with a compiled graph, several packed into one sequence.

A cache allocates its slots when the prompt is known, which a graph cannot do. Here the slots are
permanent. They are emptied before each prompt, and the prompt, whatever its length, is processed
like a later chunk of a longer text.

Several prompts follow one another on the axis of tokens, without padding. Their positions tell the
model where each begins, and attention keeps them apart (`PackedRunner`). One graph therefore serves
any number of prompts. oneDNN needs such long sequences: for 500 tokens of SmolLM2-135M it runs half
of the matrix products on one of two cores, for 1,500 none.
"""

from __future__ import annotations

import itertools
import textwrap
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from h2o.compat import with_cache
from h2o.compat_wrappers import compile_errors, mark_dynamic, num_virtual_tokens
from h2o.config import H2OConfig
from h2o.hf.cache.cache import H2OCache
from h2o.hf.cache_state.slot_layout import writable
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.layers.pass_runners import PackedRunner
from h2o.hf.prompt.scorers import AttentionScorer

MOST_PROMPTS = 8
"""Largest number of prompts in one forward pass."""


class CompiledPrefill:
    """Prefill for one model: of several prompts (`prefill`), or of one prompt in chunks. For the
    latter call the object like the model, with its `cache`.

    Args:
        like: a cache of one row that has read a prompt. Only its budgets are used.
        rows: number of rows of the batch. Each prompt of a pass needs a row of slots too, so a pass
            has at most a quarter as many prompts.
    """

    def __init__(self, model: Any, like: H2OCache, rows: int) -> None:
        self.model = model
        self.prompts = prompts = min(MOST_PROMPTS, max(1, rows // 4))
        """Largest number of prompts in a forward pass"""
        self.cache = H2OCache(model.config, like.config, compileable=True)
        """Prompt i of the last forward pass is in row i"""
        self.cache.guard.has_independent_rows = True
        self._bounds = writable(torch.zeros(prompts + 1, dtype=torch.int64, device="cpu"))
        for layer, other in zip(self.cache.layers, like.layers, strict=True):
            layer.runner = PackedRunner(self._bounds)
            layer.take_rows([0], other, [0], prompts, other.seen)
            layer.select_rows(torch.zeros(1, dtype=torch.int32, device=layer.slots.keys.device))
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

    def empty(self) -> None:
        """Empty the cache for the next prompts."""
        for layer in self.cache.layers:
            layer.runner.empty_in_place(layer)
        self.cache.guard.reset()

    def __call__(self, *, input_ids: Tensor, **inputs: Any) -> Any:
        if input_ids.shape[1] == 1:  # a decode step, for which no graph is compiled
            return self.model(input_ids=input_ids, **inputs)
        return self._run(input_ids, [input_ids.shape[1]], inputs)

    def prefill(self, prompts: Sequence[Tensor], **inputs: Any) -> Tensor:
        """Empty the cache and prefill several prompts, token ids [1, n] each.

        Args:
            inputs: `logits_to_keep` if the model accepts it.

        Returns:
            Logits [len(prompts), vocabulary] of their first new tokens.
        """
        self.empty()
        lengths = [ids.shape[1] for ids in prompts]
        ids = torch.cat(list(prompts), dim=1)
        positions = torch.cat([torch.arange(n, device=ids.device) for n in lengths])
        inputs |= {"position_ids": positions[None], "use_cache": True, **with_cache(self.cache)}
        logits: Tensor = self._run(ids, lengths, inputs).logits[0]
        if "logits_to_keep" not in inputs:
            logits = logits[self._bounds[1:].to(logits.device) - 1]
        return logits[: len(prompts)]

    def _run(self, ids: Tensor, lengths: list[int], inputs: dict[str, Any]) -> Any:
        """Run the model on chunks of these lengths. If it accepts `logits_to_keep`, it returns
        logits [1, self.prompts, vocabulary]; the last ones are repeated if there are fewer."""
        ends = list(itertools.accumulate(lengths))
        ends += ends[-1:] * (self.prompts - len(ends))
        self._bounds[1:] = torch.tensor(ends, dtype=torch.int64, device="cpu")
        if "logits_to_keep" in inputs:
            inputs = inputs | {"logits_to_keep": self._bounds[1:].to(ids.device) - 1}
        # A chunk is a view of the prompt, and graphs are compiled for strides too.
        ids = ids.clone(memory_format=torch.contiguous_format)
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
