"""P8, P11: SmolLM2-135M-Instruct from prompt to text."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from importlib import resources
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AttentionInterface,
    DynamicCache,
    GenerationConfig,
    QuantizedCache,
)
from transformers.masking_utils import AttentionMaskInterface
from transformers.utils import is_optimum_quanto_available

import h2o
from h2o import models
from h2o.evaluation.setting import parse

from .correctness import WrongResult
from .options import Options
from .peers.environments import Peer
from .timing import Contender, Row, Times, race

BUDGET = 0.2
"""The budget as a fraction of the prompt, half for heavy hitters and half for recent tokens"""


def load(dtype: str) -> tuple[Any, Any]:
    return models.load_model(dtype=dtype, attn_implementation=None)


def prompt(tokenizer: Any, tokens: int) -> Tensor:
    """The document that the package includes, repeated to [1, tokens]."""
    text = resources.files("h2o").joinpath("data/lighthouse.txt").read_text(encoding="utf-8")
    ids = tokenizer(text).input_ids
    return torch.tensor([(ids * (tokens // len(ids) + 1))[:tokens]])


class TokenClock:
    """A streamer that records when generate() returns each token."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []

    def put(self, value: Tensor) -> None:
        if value.ndim == 1:  # the prompt comes first, as [1, n]
            self.times.append(time.perf_counter())
            self.tokens += value.tolist()

    def end(self) -> None:
        pass


class NoCache(DynamicCache):
    """A cache that counts tokens and keeps none."""

    seen = 0

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        self.seen += keys.shape[2] if layer_idx == 0 else 0
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, self.seen


def no_attention(module: Any, query: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
    return query.transpose(1, 2), None


def no_mask(*_: Any, **__: Any) -> None:
    return None


FEWEST = "H2OCache, 4% of the bytes"

CONFIGS = {
    "H2OCache": h2o.H2OConfig.authors(BUDGET),
    FEWEST: parse("calibrated-bytes:0.04").config,
}

QUANTIZED = "QuantizedCache, 4 bits"

ATTENTION = {
    **dict.fromkeys(CONFIGS, "h2o"),
    **dict.fromkeys(("DynamicCache", QUANTIZED), "sdpa"),
    "no attention": "nothing",
}
"""Contender -> attn_implementation. "no attention" is the time of the rest of the model, which no
cache can reduce."""

COMPARED = (
    ("H2OCache", "DynamicCache", f"{BUDGET:.0%} of the keys"),
    (FEWEST, "DynamicCache", "4% of the bytes"),
    (FEWEST, QUANTIZED, f"4% of the bytes / {QUANTIZED}"),
)
"""Our contender, the peer, and the name of the budget"""

AttentionInterface.register(ATTENTION["no attention"], no_attention)
AttentionMaskInterface.register(ATTENTION["no attention"], no_mask)


class Generation:
    """Generation from one prompt with one cache. A round is prefill and decode."""

    def __init__(self, name: str, model: Any, ids: Tensor, tokens: int) -> None:
        self.name, self.model, self.ids = name, model, ids
        self.config = GenerationConfig(
            max_new_tokens=tokens + 1, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        self.decode: list[float] = []
        self.tokens: list[int] = []
        self.cache: Any = None

    def make_cache(self) -> Any:
        if self.name in CONFIGS:
            return h2o.H2OCache(self.model.config, CONFIGS[self.name])
        if self.name == QUANTIZED:
            return QuantizedCache("quanto", self.model.config, nbits=4)
        kind = NoCache if self.name == "no attention" else DynamicCache
        return kind(config=self.model.config)

    def __call__(self) -> float:
        """Return the seconds to the first token. Appends those per later token to `decode`."""
        self.model.set_attn_implementation(ATTENTION[self.name])
        self.cache = self.make_cache()
        clock = TokenClock()
        start = time.perf_counter()
        self.model.generate(
            self.ids,
            attention_mask=torch.ones_like(self.ids),
            cache=self.cache,
            generation_config=self.config,
            streamer=clock,
        )
        self.tokens = clock.tokens
        steps = len(clock.times) - 1
        self.decode.append((clock.times[-1] - clock.times[0]) / steps)
        return clock.times[0] - start

    def bytes_held(self) -> int:
        """Bytes of keys and values, with h2o's bookkeeping."""
        if self.name in CONFIGS:
            total = self.cache.report().total
            return total.bytes_held + total.bytes_bookkeeping
        names = ("keys", "values", "_quantized_keys", "_quantized_values")
        tensors = [getattr(layer, name, None) for layer in self.cache.layers for name in names]
        return sum(part.nbytes for x in tensors if x is not None for part in with_memory(x))

    def decode_times(self, rounds: int) -> Times:
        """Decode times of the timed rounds, without the warm-up before them."""
        return Times(self.name, self.decode[-rounds:])


def with_memory(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that make up a quantized one, or the tensor itself."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from with_memory(getattr(tensor, name))


class Decoding:
    """Decode steps of a model after a prompt. Each reads and writes the same tensors.

    compiled: whether torch.compile compiles the whole step.
    """

    def __init__(self, model: Any, ids: Tensor, cache: Any, compiled: bool = False) -> None:
        self.forward = torch.compile(model.forward, fullgraph=True) if compiled else model.forward
        self.cache = cache
        out = model(ids, cache=cache, logits_to_keep=1)
        self.token = out.logits[:, -1:].argmax(-1)
        self.position = torch.full_like(self.token, ids.shape[1])
        self.last = model.config.max_position_embeddings - 1

    def step(self) -> None:
        out = self.forward(
            self.token, position_ids=self.position, cache=self.cache, logits_to_keep=1
        )
        self.token.copy_(out.logits[:, -1:].argmax(-1))
        self.position.add_(1).clamp_(max=self.last)  # more steps are timed than positions exist


def generate(options: Options) -> Iterator[Row]:
    """P8: generate() with DynamicCache and SDPA, with an H2OCache of 20% of the keys, and with the
    calibrated preset at 4% of the bytes, which is also compared with transformers'
    QuantizedCache."""
    names = list(ATTENTION)
    if not is_optimum_quanto_available():
        print(f"{QUANTIZED}: left out: needs pip install optimum-quanto", file=sys.stderr)
        names.remove(QUANTIZED)
    for dtype, _ in options.wanted("float32", "bfloat16"):
        model, tokenizer = load(dtype)
        for length in options.prompts:
            ids = prompt(tokenizer, length)
            ways = [Generation(name, model, ids, options.tokens) for name in names]
            error = check_full_budget(model, ids[:, :512]) if dtype == "float32" else ""
            contenders = [Contender(way.name, way, own_clock=True) for way in ways]
            prefill = race(contenders, options.rounds)
            decode = {way.name: way.decode_times(options.rounds) for way in ways}
            sizes = {way.name: way.bytes_held() for way in ways[:-1]}
            for phase, times in (("prefill", prefill), ("decode", decode)):
                facts = {
                    "phase": phase,
                    "prompt": length,
                    "dtype": dtype,
                    "bytes held": sizes,
                    "seconds without attention": times["no attention"].median,
                }
                what = "SmolLM2, prefill" if phase == "prefill" else "SmolLM2, a decoded token"
                for name, peer, kept in COMPARED:
                    if peer in times:
                        yield Row(
                            "P8", what, f"{dtype}, {length} tokens, {kept}",
                            ours=times[name], peer=times[peer], error=error, facts=facts,
                        )  # fmt: skip


def check_full_budget(model: Any, ids: Tensor) -> str:
    """Check that h2o generates the tokens of the full cache if its budget evicts nothing."""
    full = Generation("DynamicCache", model, ids, 8)
    ours = Generation("H2OCache", model, ids, 8)
    ours.make_cache = lambda: h2o.H2OCache(model.config, heavy=1.0, recent=512)  # type: ignore[method-assign]
    full()
    ours()
    if full.tokens != ours.tokens:
        raise WrongResult(f"full budget generates {ours.tokens}, DynamicCache {full.tokens}")
    return "full budget generates the same tokens as DynamicCache"


def kvpress(options: Options) -> Iterator[Row]:
    """P11: prefill with scores against kvpress' ObservedAttentionPress.

    Both run the model without its head, with a cache that is cut to 20% layer by layer.
    """
    length = min(4096, options.prompts[-1])
    folder = str(models.embedded_folder())
    device = options.target()
    with Peer("kvpress", folder, str(torch.get_num_threads()), device.type) as peer:
        for dtype, _ in options.wanted("float32", "bfloat16"):
            model, tokenizer = load(dtype)
            model.set_attn_implementation("h2o")
            model.to(device.type)
            ids = prompt(tokenizer, length).to(device.type)

            def ours(model=model, ids=ids) -> None:
                cache = h2o.H2OCache(model.config, heavy=BUDGET / 2, recent=BUDGET / 2)
                model.model(input_ids=ids, cache=cache)

            request = {"ids": ids[0].tolist(), "dtype": dtype, "ratio": 1 - BUDGET}

            def press(request=request) -> float:
                return peer.ask(**request)["seconds"]

            contenders = [Contender("H2OCache", ours), Contender("kvpress", press, own_clock=True)]
            times = race(contenders, options.rounds, device)
            yield Row(
                "P11", "SmolLM2, prefill / kvpress ObservedAttention",
                f"{dtype}, {length} tokens, keys kept {BUDGET:.0%}",
                ours=times["H2OCache"], peer=times["kvpress"],
            )  # fmt: skip
