"""Outputs of a prompt by torch's own attention, on devices where it is faster than h2o's kernel.

The flash attention of torch and of cuDNN returns, besides the outputs, the log of each softmax's
denominator. Given these log sums (`known_log_sums`), the kernels compute the scores in one pass
over queries and keys instead of two. `fastest` measures once which attention is the fastest on a
device for short and for long prompts. It considers only those that agree with the torch backend.

The torch functions used here are private. If a version lacks one, that attention is not used.

Shape letters as in `h2o.ops`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from h2o.backends import kernel_check
from h2o.backends.default_settings import default_settings
from h2o.policy import Policy

T = TypeVar("T")
Attention = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Causal attention of query [B, H, Q, D] over keys and values [B, G, Q, D], with a scale. Returns
outputs [B, H, Q, D] and log sums [B, H, Q] in float32."""


def flash(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """FlashAttention 2, on CUDA devices of compute capability 8.0 or higher."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention
    out, log_sums, *_ = attention(query, keys, values, 0.0, True, scale=scale)
    return out, log_sums


def cudnn(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """cuDNN's attention, which makes a new plan for each new shape."""
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, log_sums, *_ = attention(query, keys, values, None, True, 0.0, True, scale=scale)
    return out, log_sums.reshape(query.shape[:3])


TORCH_ATTENTIONS: dict[str, Attention] = {"flash": flash, "cuDNN": cudnn}
"""The attentions of torch, by the name that `h2o info` prints."""

DEPTHS = (64, 128, 256)
"""Upper limits of the head dimensions for which the kernels are compiled. The fastest attention is
chosen for each."""

LEAST_TOKENS = 1024
"""Minimum length of a prompt in tokens. Shorter prompts do not gain from the additional launches.
"""

LEAST_SCALE = 1e-6
"""Minimum scale of q.k, because the kernels divide log sums by it."""


class TimedPrompt(NamedTuple):
    """A prompt that is timed."""

    least: int
    """Number of tokens from which the fastest attention is used."""
    tokens: int
    H: int
    G: int
    calls: int
    """Number of calls that such a prompt makes. Only `SAMPLE` of them are timed."""


TIMED_PROMPTS = (
    TimedPrompt(LEAST_TOKENS, 2048, 32, 8, 32),
    TimedPrompt(16384, 16384, 8, 2, 4 * 32),
)
"""Prompts of a model with 32 layers of 32 query heads. The longer one uses a quarter of the heads
in four times the calls: the same work in a quarter of the memory (120 MB for a depth of 128)."""

SAMPLE = 4


class AttendOperands(NamedTuple):
    """The operands of `_core.call("attend", ...)`, in order."""

    query: Tensor
    keys: Tensor
    values: Tensor | None
    mask: Tensor | None
    slots: Any
    out: Tensor
    scores: Tensor
    scale: float
    softcap: float
    policy: Policy
    sink_logits: Tensor | None
    log_sums: Tensor | None
    known_log_sums: Tensor | None


def depth_of(D: int) -> int:
    """The entry of `DEPTHS` for a head dimension; 0 if there is none."""
    return next((depth for depth in DEPTHS if D <= depth), 0)


def attend_by(
    choose: Callable[[AttendOperands], Attention | None],
    attend: Callable[..., None],
    *,
    strict: bool = False,
) -> Callable[..., None]:
    """The operation `attend` with the outputs from the attention that `choose` returns, if that
    attention supports the call. The operands must have been checked.

    If torch raises an error, as cuDNN does for some shapes, `attend` computes the outputs too. With
    `strict` the error propagates.
    """

    def run(*operands: Any) -> None:
        call = AttendOperands(*operands)
        attention = choose(call) if _suits(call) else None
        if attention is not None:
            try:
                call = call._replace(known_log_sums=_write_outputs(attention, call))
            except RuntimeError as error:  # before anything was written
                if strict:
                    raise
                _warn_unable(error)
        attend(*call)

    return run


def _warn_unable(error: RuntimeError) -> None:
    line, *_ = str(error).splitlines() or [type(error).__name__]
    text = f"torch's attention cannot compute this prompt, so h2o's kernels do ({line})"
    warnings.warn(text, RuntimeWarning, stacklevel=4)


def _suits(call: AttendOperands) -> bool:
    """Whether flash attention supports everything that a call needs."""
    D = call.query.shape[3]
    more = (call.slots, call.sink_logits, call.log_sums, call.known_log_sums)
    return (
        all(x is None for x in more)
        and call.softcap == 0
        and call.scale >= LEAST_SCALE
        and call.query.dtype in (torch.float16, torch.bfloat16)
        and D % 8 == 0
        and depth_of(D) > 0
        and all(x is None or _is_aligned(x) for x in call[:3])
    )


def _is_aligned(x: Tensor) -> bool:
    """Whether all rows are contiguous and begin at multiples of 16 bytes."""
    *steps, step = x.stride()
    return step == 1 and x.data_ptr() % 16 == 0 and all(n % 8 == 0 for n in steps)


def _write_outputs(attention: Attention, call: AttendOperands) -> Tensor:
    """Write the outputs of a call, and return the log sums [B, H, Q].

    With a mask, tokens are moved to the front in order and padding to the end, so that no token
    sees padding in causal attention.
    """
    query, keys = call.query, call.keys
    values = keys if call.values is None else call.values
    if call.mask is None:
        out, log_sums = attention(query, keys, values, call.scale)
        call.out.copy_(out.transpose(1, 2))
        return log_sums
    pads = call.mask == 0
    order = pads.byte().argsort(dim=1, stable=True)
    place = order.argsort(dim=1)
    query, keys, values = (
        x.take_along_dim(order[:, None, :, None], 2) for x in (query, keys, values)
    )
    values.masked_fill_(pads.take_along_dim(order, 1)[:, None, :, None], 0)  # 0 times NaN is NaN
    out, log_sums = attention(query, keys, values, call.scale)
    call.out.copy_(out.transpose(1, 2).take_along_dim(place[:, :, None, None], 1))
    call.out.masked_fill_(pads[:, :, None, None], 0)
    return log_sums.take_along_dim(place[:, None], 2)


# ---- Which attention ---------------------------------------------------------------------------


def fastest(
    kernels: SimpleNamespace,
    by_torch: SimpleNamespace,
    depth: int,
    device: Any,
    wait: Callable[[], None],
) -> dict[int, str]:
    """Names of the fastest attentions for an entry of `DEPTHS`, by the number of tokens from which
    each is used.

    Args:
        kernels, by_torch: the operations of `_core.call`. `by_torch` gives the correct results.
        wait: waits for the device.
    """
    attends = {"": kernels.attend} | {
        name: attend_by(_always(attention), kernels.attend, strict=True)
        for name, attention in TORCH_ATTENTIONS.items()
    }

    @functools.cache
    def is_usable(name: str) -> bool:
        """Whether torch has this attention and it agrees with the torch backend."""
        operations = SimpleNamespace(**vars(kernels) | {"attend": attends[name]})
        mistakes = partial(kernel_check.mistakes, operations, by_torch, device, _cases(depth))
        return not name or not _if_available(mistakes, ["not available"])

    chosen: dict[int, str] = {}
    last = ""
    for prompt in TIMED_PROMPTS if TORCH_ATTENTIONS else ():
        with default_settings(torch.device(device)):
            seconds = {
                name: _if_available(partial(_seconds, attend, depth, prompt, wait), math.inf)
                for name, attend in attends.items()
            }
        name = next(name for name in sorted(seconds, key=seconds.__getitem__) if is_usable(name))
        if name != last:
            chosen[prompt.least] = last = name
    return chosen


def _always(attention: Attention) -> Callable[[AttendOperands], Attention]:
    return lambda call: attention


def _cases(depth: int) -> tuple[kernel_check.Case, ...]:
    case = kernel_check.Case(depth, torch.bfloat16, kernel_check.LONG, simulated=False)
    return case, dataclasses.replace(
        case, D=depth - 8, dtype=torch.float16, pads=True, score_by="max"
    )


def _if_available(run: Callable[[], T], otherwise: T) -> T:
    """The result of `run`, or `otherwise` if this torch or this device lacks the attention."""
    try:
        return run()
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, TypeError, RuntimeError):
        return otherwise


def _seconds(
    attend: Callable[..., None], D: int, prompt: TimedPrompt, wait: Callable[[], None]
) -> float:
    """Time that a prompt spends in `attend` in all layers, on torch's default device.

    The prompt has a new length, because planning for a new length takes time in one layer of every
    such prompt.
    """

    def time_calls(call: AttendOperands, calls: int) -> float:
        wait()
        begin = time.perf_counter()
        for _ in range(calls):
            attend(*call)
        wait()
        return time.perf_counter() - begin

    time_calls(_random_call(D, prompt, prompt.tokens - 3), 1)  # warm-up: loads libraries
    call = _random_call(D, prompt, prompt.tokens - 1)
    first = time_calls(call, 1)
    later = min(time_calls(call, SAMPLE) for _ in range(2)) / SAMPLE
    return first + (prompt.calls - 1) * later


def _random_call(D: int, prompt: TimedPrompt, tokens: int) -> AttendOperands:
    """A call with random bfloat16 operands, from its own generator, not the program's."""
    device = torch.get_default_device()
    generator = torch.Generator(device).manual_seed(0)
    query, keys, values = (
        torch.randn(1, x, tokens, D, dtype=torch.bfloat16, device=device, generator=generator)
        for x in (prompt.H, prompt.G, prompt.G)
    )
    return AttendOperands(
        query, keys, values, None, None, torch.empty_like(query).view(1, tokens, prompt.H, D),
        torch.empty(1, prompt.G, tokens, dtype=torch.float32, device=device), D**-0.5, 0.0,
        Policy(), None, None, None,
    )  # fmt: skip
