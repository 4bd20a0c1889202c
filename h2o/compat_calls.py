"""The inputs of a forward pass, which transformers does not tell a cache, and what surrounds the
pass.

Code of h2o that calls a model tells the cache the inputs (`ModelCall.of`). For all other calls the
functions of this module read the local variables of transformers' own functions on the stack. Each
says which ones, and what happens in a version that lacks them. Transforms of torch.func and torch's
compiler surround a pass.
"""

from __future__ import annotations

import functools
import inspect
import sys
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from transformers.utils.output_capturing import _active_collector

from h2o.compat import cache_in
from h2o.model_identity import config_of


def chunks_of_prompt() -> tuple[Any, list[int], Tensor | None] | None:
    """The cache, the columns of each chunk and the whole attention mask, while
    `generate(prefill_chunk_size=...)` prefills several chunks; otherwise None.

    A cache cannot tell a first chunk from a prompt. So this function reads the local variables of
    `GenerationMixin._prefill`, which cuts the chunks in all versions from 5.16 to 5.24."""
    frame = None if torch.compiler.is_compiling() else inspect.currentframe()
    while frame is not None and frame.f_code.co_name != "_prefill":
        frame = frame.f_back
    found = {} if frame is None else frame.f_locals
    if getattr(found.get("generation_config"), "prefill_chunk_size", None) is None:
        return None
    chunks = [chunk.shape[1] for chunk in found["input_chunks"]]
    cache, mask = cache_in(found["model_kwargs"]), found["attention_mask"]
    return (cache, chunks, mask) if len(chunks) > 1 else None


class ModelCall(NamedTuple):
    """Inputs of a forward pass for its new tokens."""

    mask: Tensor | None
    """[B, n], 0 for padding. None: no padding."""
    positions: Tensor | None
    """[dims, B or 1, Q], with several positions per token in multimodal models. None if the model
    computes them later or has none."""
    is_chosen: bool
    """Whether the caller gave positions. False if the model or `generate()` computed them, from the
    columns or from the mask."""
    is_injected: bool
    """Whether a wrapper of the model replaced the input of a decode step by embeddings."""
    ids: Tensor | None
    """[B, Q]. None if the caller gives embeddings."""
    dropped: Tensor | None
    """[B, n], the first input_ids, which `generate()` drops because the cache has them."""
    is_assisted: bool
    """Whether the pass belongs to assisted decoding."""
    config: Any
    """The config for which the mask is made, that of the language model. None if unknown."""

    @classmethod
    def of(
        cls, model: Any, ids: Tensor, mask: Tensor | None, positions: Tensor | None
    ) -> ModelCall | None:
        """A call with these input_ids, attention_mask and position_ids. None if the model gets no
        position_ids, so that only the model knows them."""
        if positions is None:
            return None
        config = config_of(model).get_text_config(decoder=True)
        return cls(mask, _by_dimension(positions), True, False, ids, None, False, config)


def find_call(cache: Any) -> ModelCall | None:
    """The inputs of the forward pass whose mask is being made for a cache. transformers does not
    pass them to a cache, so they are read from its calls: "attention_mask" of the mask function,
    "position_ids" of forward(). None if no call has a mask, or a version names it differently.

    For a cache that can be compiled `generate()` makes the mask before forward(). The ids and
    positions are then those of `prepare_inputs_for_generation`."""
    masks, of_forward, of_others, calls = [], [], [], set()
    embedded, ids, dropped, config = False, None, None, None
    for name, here in _calls_under_way(cache, _has_inputs):
        calls.add(name)
        masks += [here["attention_mask"]] if "attention_mask" in here else []
        config = here.get("config") if config is None else config
        if name == "forward":
            embedded = here.get("inputs_embeds") is not None
            ids = here.get("input_ids", ids)
            of_forward += [here["position_ids"]] if "position_ids" in here else []
        elif name == "prepare_inputs_for_generation" and ids is None:
            ids = here.get("model_inputs", {}).get("input_ids")
        elif "position_ids" in here:
            of_others.append(here["position_ids"])
        if name == "_prefill" and here.get("next_sequence_length"):
            dropped = here["input_ids"][:, : -here["next_sequence_length"]]
    if not masks:
        return None
    # The innermost forward(), the first one here, has the positions as the model completed them.
    positions = of_forward or of_others[:1] or [None]
    given, used = positions[-1], positions[0]
    if hasattr(given, "h2o_replaces"):
        given = used = given.h2o_replaces[0]
    mask = masks[0] if isinstance(masks[0], Tensor) and masks[0].ndim == 2 else None
    is_generated = "generate" in calls
    is_injected = embedded and given is None and is_generated and "_prefill" not in calls
    is_chosen = given is not None and not is_generated
    return ModelCall(
        mask, _by_dimension(used), is_chosen, is_injected, ids, dropped,
        "_assisted_decoding" in calls, config,
    )  # fmt: skip


def _by_dimension(positions: Any) -> Tensor | None:
    """Positions as [dims, B or 1, Q]. A multimodal model may put those of the text alone before
    its three dimensions."""
    if not isinstance(positions, Tensor) or not 2 <= positions.ndim <= 3:
        return None
    if positions.ndim == 2:
        return positions[None]
    return positions[1:] if len(positions) == 4 else positions


def replace_positions(ids: Tensor, given: Tensor | None) -> Tensor:
    """Positions of 0 for ids [B, Q], or embeddings [B, Q, ...], instead of those that the caller of
    a model gave it. A cache still checks the given ones."""
    zeros = torch.zeros(ids.shape[:2], dtype=torch.long, device=ids.device)
    zeros.h2o_replaces = (given,)  # type: ignore[attr-defined]
    return zeros


def find_rope_deltas_module() -> tuple[Any, int]:
    """The module with the attribute `rope_deltas` that led to the call of a cache, or None, and the
    number of rows of its input, or 0."""
    for _, here in _calls_under_way():
        module = here.get("self")
        for one in (module, getattr(module, "model", None)):
            if isinstance(one, nn.Module) and "rope_deltas" in vars(one):
                inputs = (here.get(x) for x in ("inputs_tensor", "input_ids", "inputs_embeds"))
                return one, next((len(x) for x in inputs if isinstance(x, Tensor)), 0)
    return None, 0


@functools.cache
def _has_inputs(code: CodeType) -> bool:
    """Whether `find_call` reads local variables of a function. To collect those of all calls on the
    stack would take as long as a third of a decode step's checks."""
    if code.co_name in ("forward", "prepare_inputs_for_generation", "_prefill"):
        return True
    names = (*code.co_varnames, *code.co_cellvars, *code.co_freevars)
    return not {"attention_mask", "position_ids", "config"}.isdisjoint(names)


def _calls_under_way(
    cache: Any = None, is_read: Callable[[CodeType], bool] | None = None
) -> list[tuple[str, dict[str, Any]]]:
    """Name and local variables of each transformers call on the stack, the innermost first.
    Functions for which `is_read` is False come without variables.

    A function of another package ends the list. It may wrap the model's forward(), as accelerate's
    hooks do, so calls of `_OUTER` that have `cache` follow."""
    calls, is_wrapped = [], False
    frame = sys._getframe(1)
    while frame is not None:
        name, package = frame.f_code.co_name, frame.f_globals.get("__name__", "").partition(".")[0]
        if package.startswith("transformers"):  # or transformers_modules: a model's remote code
            # Locals of other calls may hold tensors.
            if not is_wrapped or (name in _OUTER and _has_cache(frame.f_locals, cache)):
                is_needed = is_read is None or is_read(frame.f_code)
                calls.append((name, frame.f_locals if is_needed else {}))
        elif package not in ("h2o", "torch"):
            is_wrapped = True
            if cache is None:
                break
        frame = frame.f_back
    return calls


_OUTER = ("forward", "generate", "_prefill", "_assisted_decoding")
"""Calls that a wrapper of forward() may hide"""


def _has_cache(here: dict[str, Any], cache: Any) -> bool:
    """Whether a call with these local variables passes on a cache."""
    passed = (here, here.get("model_kwargs"), here.get("kwargs"))
    return any(isinstance(x, dict) and cache_in(x) is cache for x in passed)


def wants_attention_weights() -> bool:
    """Whether the current model call has `output_attentions=True`, which not every model passes on
    to its attention function."""
    return "attentions" in (_active_collector.get() or ())


def has_transforms() -> bool:
    """Whether a transform of torch.func, forward-mode differentiation or torch.jit.trace is
    active."""
    is_forward = forward_ad._current_level >= 0
    is_func = torch._C._functorch.peek_interpreter_stack() is not None
    return is_forward or is_func or bool(torch.jit.is_tracing())


def is_called_compiled() -> bool:
    """Whether a compiled model or function called the caller. transformers then gives attention a
    4-D mask, though the user gave none."""
    if torch.compiler.is_compiling():
        return True
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(None))
    return any(type(caller).__name__ == "OptimizeContext" for caller in callers)


def is_transformed(*tensors: Tensor | None) -> bool:
    """Whether a transform of torch.func wraps any of the tensors, or one has a tangent of
    forward-mode differentiation, or torch.jit.trace records what is done to them."""
    if torch.compiler.is_compiling() or not has_transforms():
        return False
    if torch.jit.is_tracing():
        return True
    with torch._C.DisableTorchFunctionSubclass():
        given = [x for x in tensors if x is not None]
        is_hidden = any(map(torch._C._functorch.is_functorch_wrapped_tensor, given))
        return is_hidden or any(forward_ad.unpack_dual(x).tangent is not None for x in given)
