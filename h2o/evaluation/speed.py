"""Measure the speed of a model on this machine with the full cache and with h2o's.

For each prompt length every cache generates from the same prompt, in turn (A B C, B C A, ...). The
speed of a machine drifts, so ratios compare runs of the same round.
"""

from __future__ import annotations

import gc
import importlib.resources
import os
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from h2o import packages
from h2o.errors import UnsupportedError, UserError
from h2o.evaluation.setting import Setting

PACKAGES = ("h2o-kv", "torch", "transformers", "numpy")


class Contender:
    """One cache, which generates from the same prompt in every round."""

    def __init__(self, setting: Setting, model: Any, tokenizer: Any, ids: Any, tokens: int) -> None:
        self.setting, self.model, self.tokenizer = setting, model, tokenizer
        self.ids, self.tokens = ids, tokens
        self.prefill: list[float] = []
        self.token: list[float] = []
        self.bytes_held = 0

    def run(self) -> None:
        """Run one round. Raises: UserError for a length or model that the cache cannot support."""
        import torch
        from transformers import GenerationConfig

        from h2o.evaluation.generation import bytes_of_keys, new_cache, time_tokens

        count, length = self.tokens + 1, self.ids.shape[1]
        config = GenerationConfig(max_new_tokens=count, min_new_tokens=count, pad_token_id=0)
        gc.collect()
        try:
            policy = None if self.setting.variant == "full" else self.setting.config
            cache: Any = new_cache(self.model, policy, length)
            times = time_tokens(
                self.model, self.tokenizer, self.ids, cache, generation_config=config
            )
        except torch.OutOfMemoryError:
            raise UserError(
                f"{self.setting.name}: {self.model.device} has not enough memory for a prompt of "
                f"{length} tokens: pass shorter --prompts"
            ) from None
        except (UnsupportedError, ValueError) as error:
            raise UserError(f"{self.setting.name}: {error}") from error
        self.prefill.append(times.prefill)
        self.token.append(times.decode / self.tokens)
        if policy is None:
            self.bytes_held = bytes_of_keys(cache)
        else:
            total = cache.report().total
            self.bytes_held = total.bytes_held + total.bytes_bookkeeping

    def summarize(self, full: Contender) -> dict[str, Any]:
        """The figures as medians over rounds, and their ratios to those of the full cache.

        A speedup is the full cache's time divided by this cache's. Bytes are those of keys, values
        and h2o's bookkeeping at the end.
        """
        token = statistics.median(self.token)
        return {
            "prompt_tokens": self.ids.shape[1],
            "setting": self.setting.name,
            "prefill_seconds": statistics.median(self.prefill),
            "token_seconds": token,
            "tokens_per_second": 1 / token,
            "bytes_held": self.bytes_held,
            "prefill_speedup": median_ratio(full.prefill, self.prefill),
            "token_speedup": median_ratio(full.token, self.token),
            "bytes_ratio": self.bytes_held / full.bytes_held,
            "prefill_samples": self.prefill,
            "token_samples": self.token,
        }


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
        rounds: number of timed rounds. An untimed round comes first.
        log: called with a line before each part.

    Raises: UserError for a model or a length that a cache does not support.
    """
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and max(prompts) + tokens + 1 > limit:
        raise UserError(
            f"a prompt of {max(prompts)} tokens and {tokens + 1} new ones exceed "
            f"the {limit} positions of the model: pass shorter --prompts"
        )
    measurements = []
    for length in prompts:
        ids = make_prompt(tokenizer, length).to(model.device)
        contenders = [Contender(x, model, tokenizer, ids, tokens) for x in settings]
        take_turns(contenders, rounds, lambda text, n=length: log(f"{n} tokens: {text}"))
        measurements += [contender.summarize(contenders[0]) for contender in contenders]
    return {
        "dtype": str(model.dtype).removeprefix("torch."),
        "tokens": tokens,
        "rounds": rounds,
        "machine": describe_machine(model.device),
        "versions": packages.versions(*PACKAGES),
        "measurements": measurements,
    }


def take_turns(contenders: list[Contender], rounds: int, log: Callable[[str], None]) -> None:
    """Run each contender once untimed to warm up libraries, then in the timed rounds."""
    log("warming up")
    for contender in contenders:
        contender.run()
        contender.prefill.clear()
        contender.token.clear()
    for i in range(rounds):
        log(f"round {i + 1} of {rounds}")
        first = i % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            contender.run()


def make_prompt(tokenizer: Any, tokens: int) -> Any:
    """Token ids [1, tokens]: the document that h2o ships, repeated as often as needed."""
    import torch

    document = importlib.resources.files("h2o").joinpath("data/lighthouse.txt")
    ids = tokenizer(document.read_text("utf-8")).input_ids
    repeated = (ids * (tokens // len(ids) + 1))[:tokens]
    return torch.tensor([repeated], dtype=torch.long, device="cpu")


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Median of the ratios, round by round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def describe_machine(device: Any) -> dict[str, Any]:
    """Describe the machine."""
    import torch

    from h2o import ops

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
