"""Time a model on this machine with one cache, and compare the times with the full cache's.

The speed of a machine drifts, so ratios compare runs of the same round.
"""

from __future__ import annotations

import gc
import operator
import os
import platform
import statistics
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from h2o import ops
from h2o.errors import UnsupportedError, UserError
from h2o.evaluation.generation import bytes_of_keys, new_cache, time_tokens
from h2o.evaluation.setting import Setting


class Sample(NamedTuple):
    """One cache's figures in one round."""

    prefill_seconds: float
    token_seconds: float
    """Seconds per token, without the first."""
    bytes_held: int
    """Bytes of keys, values and h2o's bookkeeping at the end."""


def run(setting: Setting, model: Any, ids: torch.Tensor, tokens: int) -> Sample:
    """Generate with one cache. Raises: UserError for a length or model that it cannot support."""
    count, length = tokens + 1, ids.shape[1]
    config = GenerationConfig(max_new_tokens=count, min_new_tokens=count, pad_token_id=0)
    gc.collect()
    try:
        policy = None if setting.variant == "full" else setting.config
        cache: Any = new_cache(model, policy, length)
        times = time_tokens(model, ids, cache, generation_config=config)
    except torch.OutOfMemoryError:
        raise UserError(
            f"{setting.name}: {ids.device} has not enough memory for a prompt of "
            f"{length} tokens: pass a smaller --length"
        ) from None
    except (UnsupportedError, ValueError) as error:
        raise UserError(f"{setting.name}: {error}") from error
    if policy is None:
        return Sample(times.prefill, times.decode / tokens, bytes_of_keys(cache))
    total = cache.report().total
    held = total.bytes_held + total.bytes_bookkeeping
    return Sample(times.prefill, times.decode / tokens, held)


def summarize(samples: list[Sample], full: list[Sample]) -> dict[str, Any]:
    """The figures of a cache as medians over rounds, and their ratios to those of the full cache,
    round by round. A speedup is the full cache's time divided by this cache's."""
    prefill, token, held = (list(x) for x in zip(*samples, strict=True))
    full_prefill, full_token, full_held = zip(*full, strict=True)
    seconds = statistics.median(token)
    return {
        "prefill_seconds": statistics.median(prefill),
        "token_seconds": seconds,
        "tokens_per_second": 1 / seconds,
        "bytes_held": held[-1],
        "prefill_speedup": statistics.median(map(operator.truediv, full_prefill, prefill)),
        "token_speedup": statistics.median(map(operator.truediv, full_token, token)),
        "bytes_ratio": held[-1] / full_held[-1],
        "prefill_samples": prefill,
        "token_samples": token,
    }


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Describe the machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else processor()
    return {
        "device": str(device),
        "name": name,
        "processor": processor(),
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "core": ops.info(),
    }


def processor() -> str:
    """The CPU's name, from Linux's /proc/cpuinfo if there is one."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
