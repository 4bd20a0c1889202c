"""How fast a model is with the full cache and with h2o's, on this machine.

For each prompt length every cache generates from the same prompt, in turn (A B C, B C A, ...): a
machine's speed drifts, so what is compared is always of the same round. The full cache is
transformers' DynamicCache under sdpa, and all of them go through the model's own generate(), as
they do for those who use them. A streamer takes the times: it is handed the first token at the end
of the prefill, and the others one by one.
"""

from __future__ import annotations

import gc
import importlib.resources
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from h2o import models, packages
from h2o.errors import UnsupportedError, UserError
from h2o.evaluation.fitting import check_fit
from h2o.evaluation.setting import Setting

__all__ = ["Measurement", "Request", "Result", "measure"]

PACKAGES = ("h2o-kv", "torch", "transformers", "numpy")


@dataclass(frozen=True)
class Request:
    """What to measure."""

    settings: Sequence[Setting]
    """the caches, "full" first"""
    prompts: Sequence[int] = (512, 2048, 4096)
    """lengths, in tokens"""
    model: str | None = None
    """as for `h2o.models.load_model`"""
    dtype: str = "auto"
    device: str = "cpu"
    """torch's name of it"""
    tokens: int = 16
    """decoded after the first, in each round"""
    rounds: int = 5
    """after one that is not timed"""


@dataclass(frozen=True)
class Measurement:
    """One cache at one prompt length. Times are medians over the rounds."""

    prompt_tokens: int
    setting: str
    """"full", or as the grammar of `h2o eval --compare` spells it"""
    prefill_seconds: float
    """from the prompt to the first token"""
    token_seconds: float
    """of each later one"""
    tokens_per_second: float
    bytes_held: int
    """by the cache at the end: keys, values, and what h2o keeps beside them"""
    prefill_speedup: float
    """the full cache's time / this one's, the median over rounds: above 1 this one is faster"""
    token_speedup: float
    bytes_ratio: float
    """this one's bytes / the full cache's"""
    prefill_samples: list[float]
    """seconds, by round"""
    token_samples: list[float]


@dataclass(frozen=True)
class Result:
    """What was measured, and where; `asdict` of it is the output of --json."""

    model: str
    dtype: str
    tokens: int
    rounds: int
    machine: dict[str, Any]
    versions: dict[str, str | None]
    measurements: list[Measurement]


class TokenTimes:
    """A streamer that notes when generate() hands over each token, once the device is done."""

    def __init__(self, synchronize: Callable[[], Any]) -> None:
        self.synchronize = synchronize
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        """First the prompt [1, n], when its reading is about to start, then each token."""
        self.synchronize()
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Contender:
    """One cache, which generates from one prompt round by round."""

    def __init__(self, setting: Setting, model: Any, ids: Any, tokens: int) -> None:
        self.setting, self.model, self.ids, self.tokens = setting, model, ids, tokens
        self.prefill: list[float] = []
        self.token: list[float] = []
        self.bytes_held = 0

    def run(self) -> None:
        """One round. Raises: UserError for a model or a length that this cache cannot serve."""
        import torch
        from transformers import GenerationConfig

        from h2o.borrowed import with_cache
        from h2o.hf.cache.new_cache import new_cache

        device = self.model.device
        count = self.tokens + 1
        config = GenerationConfig(
            max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        streamer = TokenTimes(torch.get_device_module(device).synchronize)
        gc.collect()
        try:
            policy = None if self.setting.variant == "full" else self.setting.config
            cache = new_cache(self.model, policy, self.ids.shape[1])
            self.model.generate(
                self.ids,
                attention_mask=torch.ones_like(self.ids),
                **with_cache(cache),
                generation_config=config,
                streamer=streamer,
            )
        except torch.OutOfMemoryError:
            raise UserError(
                f"{self.setting.name}: {device} has no memory for a prompt of "
                f"{self.ids.shape[1]} tokens: name shorter --prompts"
            ) from None
        except (UnsupportedError, ValueError) as error:
            raise UserError(f"{self.setting.name}: {error}") from error
        start, first, *_, last = streamer.times
        self.prefill.append(first - start)
        self.token.append((last - first) / self.tokens)
        self.bytes_held = bytes_held(cache)

    def measured(self, full: Contender) -> Measurement:
        """Its figures, beside those of the full cache."""
        token = statistics.median(self.token)
        return Measurement(
            prompt_tokens=self.ids.shape[1],
            setting=self.setting.name,
            prefill_seconds=statistics.median(self.prefill),
            token_seconds=token,
            tokens_per_second=1 / token,
            bytes_held=self.bytes_held,
            prefill_speedup=median_ratio(full.prefill, self.prefill),
            token_speedup=median_ratio(full.token, self.token),
            bytes_ratio=self.bytes_held / full.bytes_held,
            prefill_samples=self.prefill,
            token_samples=self.token,
        )


def measure(request: Request, say: Callable[[str], None]) -> Result:
    """Loads the model and times every cache at every length; `say` gets a line before each part.

    Raises: UserError.
    """
    models.need_transformers()
    device = models.torch_device(request.device)
    fit = check_fit(request.settings)
    how = {"dtype": request.dtype, "device": request.device}
    model, tokenizer = models.load_model(
        request.model, **how, attn_implementation=None, say=say, check=fit
    )
    limit = getattr(model.config, "max_position_embeddings", None)
    longest = max(request.prompts) + request.tokens + 1
    if limit and longest > limit:
        raise UserError(
            f"a prompt of {max(request.prompts)} tokens and {request.tokens + 1} new ones are more "
            f"than the {limit} positions of the model: name shorter --prompts"
        )
    measurements = []
    for length in request.prompts:
        ids = prompt_ids(tokenizer, length).to(device)
        contenders = [Contender(x, model, ids, request.tokens) for x in request.settings]
        take_turns(contenders, request.rounds, lambda text, n=length: say(f"{n} tokens: {text}"))
        measurements += [contender.measured(contenders[0]) for contender in contenders]
    return Result(
        model=request.model or models.DEFAULT_MODEL,
        dtype=str(model.dtype).removeprefix("torch."),
        tokens=request.tokens,
        rounds=request.rounds,
        machine=machine(device),
        versions=packages.versions(*PACKAGES),
        measurements=measurements,
    )


def take_turns(contenders: list[Contender], rounds: int, say: Callable[[str], None]) -> None:
    """One untimed run of each, in which libraries make themselves ready, then the rounds."""
    say("warming up")
    for contender in contenders:
        contender.run()
        contender.prefill.clear()
        contender.token.clear()
    for i in range(rounds):
        say(f"round {i + 1} of {rounds}")
        first = i % len(contenders)
        for contender in contenders[first:] + contenders[:first]:
            contender.run()


def prompt_ids(tokenizer: Any, tokens: int) -> Any:
    """[1, tokens]: the document that h2o ships, repeated as often as needed."""
    import torch

    document = importlib.resources.files("h2o").joinpath("data/lighthouse.txt")
    ids = tokenizer(document.read_text("utf-8")).input_ids
    repeated = (ids * (tokens // len(ids) + 1))[:tokens]
    return torch.tensor([repeated], dtype=torch.long, device="cpu")


def bytes_held(cache: Any) -> int:
    """Of keys, values, and what h2o keeps beside them."""
    if hasattr(cache, "report"):
        total = cache.report().total
        return total.bytes_held + total.bytes_bookkeeping
    from h2o.hf.cache.new_cache import bytes_of_keys

    return bytes_of_keys(cache)


def median_ratio(numerators: list[float], denominators: list[float]) -> float:
    """Of the ratios round by round."""
    return statistics.median(a / b for a, b in zip(numerators, denominators, strict=True))


def machine(device: Any) -> dict[str, Any]:
    """What the figures depend on beside the software."""
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
    """The CPU's name, as Linux tells it."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
