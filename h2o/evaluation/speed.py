"""Measure the speed of a model on this machine with the full cache and with h2o's.

For each prompt length every cache generates from the same prompt, in turn (A B C, B C A, ...). The
speed of a machine drifts, so ratios compare runs of the same round.
"""

from __future__ import annotations

import gc
import importlib.resources
import operator
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from h2o import ops, packages
from h2o.errors import UnsupportedError, UserError
from h2o.evaluation.generation import bytes_of_keys, new_cache, time_tokens
from h2o.evaluation.setting import Setting
from h2o.hf.model_traits.wrappers import input_device

PACKAGES = ("h2o-kv", "torch", "transformers", "numpy")


class Sample(NamedTuple):
    """One cache's figures in one round."""

    prefill_seconds: float
    token_seconds: float
    """Seconds per token, without the first."""
    bytes_held: int
    """Bytes of keys, values and h2o's bookkeeping at the end."""


def measure(
    model: Any,
    tokenizer: Any,
    settings: Sequence[Setting],
    prompts: Sequence[int],
    *,
    tokens: int,
    rounds: int,
    log: Callable[[str], None],
) -> dict[str, Any]:
    """Time every cache at every prompt length.

    Args:
        settings: the caches, "full" first.
        prompts: lengths in tokens.
        tokens: number of tokens decoded after the first one, in each round.
        rounds: number of timed rounds. An untimed round comes first, to warm up libraries.
        log: called with a line before each part.

    Raises: UserError for a model or a length that a cache does not support.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and max(prompts) + tokens + 1 > limit:
        raise UserError(
            f"a prompt of {max(prompts)} tokens and {tokens + 1} new ones exceed "
            f"the {limit} positions of the model: pass shorter --prompts"
        )
    device, measurements = input_device(model), []
    for length in prompts:
        ids = make_prompt(tokenizer, length).to(device)
        samples: dict[Setting, list[Sample]] = {setting: [] for setting in settings}
        for i in range(rounds + 1):
            log(f"{length} tokens: " + (f"round {i} of {rounds}" if i else "warming up"))
            first = max(0, i - 1) % len(settings)
            for setting in [*settings[first:], *settings[:first]]:
                sample = run(setting, model, ids, tokens)
                samples[setting] += [sample] if i else []
        full = samples[settings[0]]
        figures = {x.name: summarize(timed, full) for x, timed in samples.items()}
        measurements += [{"prompt_tokens": length, "setting": x} | y for x, y in figures.items()]
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokens": tokens,
        "rounds": rounds,
        "machine": describe_machine(device),
        "versions": packages.versions(*PACKAGES),
        "measurements": measurements,
    }


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
            f"{length} tokens: pass shorter --prompts"
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


def make_prompt(tokenizer: Any, tokens: int) -> torch.Tensor:
    """Token ids [1, tokens]: the document that h2o ships, repeated as often as needed."""
    document = importlib.resources.files("h2o").joinpath("data/lighthouse.txt")
    ids = tokenizer(document.read_text("utf-8")).input_ids
    repeated = (ids * (tokens // len(ids) + 1))[:tokens]
    return torch.tensor([repeated], dtype=torch.long, device="cpu")


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
