"""P10, P21: SmolLM2 against the compiling engines OpenVINO GenAI and vLLM (CPU build), each in a
separate environment; and compiled decode steps of h2o.

Weights are float32 and bfloat16 as transformers loads them, and int8 and int4, which are bfloat16
with linear layers quantized by torchao (pip install torchao). vLLM uses bfloat16 weights, OpenVINO
the 4-bit weights of the model's file. Both keep every key, except where a row names OpenVINO's own
eviction.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import h2o
from h2o import models

from .model_tables import BUDGET, Decoding, Generation, load, prompt
from .options import Options
from .peers.environments import Peer, PeerMissing
from .timing import Contender, Row, Times, race

WEIGHTS = ("float32", "bfloat16", "int8", "int4")


class Engine:
    """Generation in a peer's process, timed by the peer."""

    def __init__(self, name: str, peer: Peer, **request: Any) -> None:
        self.name, self.peer, self.request = name, peer, request
        self.decode: list[float] = []
        self.prompt = 0

    def __call__(self) -> float:
        """Return the seconds to the first token. Appends those per later token to `decode`."""
        answer = self.peer.ask(**self.request)
        self.decode.append(answer["token_s"])
        self.prompt = answer["prompt"]
        return answer["prefill_s"]

    def decode_times(self, rounds: int) -> Times:
        """Decode times of the timed rounds, without the warm-up before them."""
        return Times(self.name, self.decode[-rounds:])


def openvino_peer() -> Peer:
    return Peer("openvino", str(models.find_weights()), str(torch.get_num_threads()))


def vllm_peer() -> Peer:
    return Peer("vllm", str(models.embedded_folder()), str(torch.get_num_threads()))


@contextlib.contextmanager
def both() -> Iterator[dict[str, Peer]]:
    """Start OpenVINO and vLLM. A peer that cannot be installed is reported and left out."""
    with contextlib.ExitStack() as stack:
        peers = {}
        for name, start in (("OpenVINO", openvino_peer), ("vLLM", vllm_peer)):
            try:
                peers[name] = stack.enter_context(start())
            except PeerMissing as problem:
                print(f"{name}: left out: {problem}", file=sys.stderr)
        yield peers


def continued(peers: dict[str, Peer], tokenizer: Any, ids: Tensor, tokens: int) -> list[Engine]:
    """Engines for the peers of `both` with the same prompts [B, n]."""
    requests: dict[str, dict[str, Any]] = {
        "OpenVINO": {"texts": [tokenizer.decode(x) for x in ids], "dtype": "bf16", "kept": 0},
        "vLLM": {"ids": ids.tolist()},
    }
    return [Engine(name, peer, tokens=tokens, **requests[name]) for name, peer in peers.items()]


def openvino(options: Options) -> Iterator[Row]:
    """P10: prefill and decode against OpenVINO, with its full cache and with its cache eviction.

    OpenVINO runs a compiled graph. transformers runs eagerly with weights in the dtype of the row.
    """
    length = options.prompts[-1]
    with openvino_peer() as peer:
        for dtype, _ in options.wanted("float32", "bfloat16"):
            model, tokenizer = load(dtype)
            ids = prompt(tokenizer, length)
            ours = Generation("H2OCache", model, ids, options.tokens)
            request = {
                "texts": [tokenizer.decode(ids[0])],
                "dtype": {"float32": "f32", "bfloat16": "bf16"}[dtype],
                "tokens": options.tokens + 1,
            }
            others = [
                Engine("OpenVINO, full cache", peer, **request, kept=0),
                Engine("OpenVINO, cache eviction", peer, **request, kept=int(length * BUDGET)),
            ]
            contenders = [Contender(way.name, way, own_clock=True) for way in (ours, *others)]
            prefill = race(contenders, options.rounds)
            for other in others:
                case = f"{dtype}, {length} tokens, keys kept {BUDGET:.0%}"
                facts = {"prompt tokens of the peer": other.prompt}
                yield Row(
                    "P10", f"SmolLM2, prefill / {other.name}", case,
                    ours=prefill["H2OCache"], peer=prefill[other.name], facts=facts,
                )  # fmt: skip
                yield Row(
                    "P10", f"SmolLM2, a decoded token / {other.name}", case,
                    ours=ours.decode_times(options.rounds),
                    peer=other.decode_times(options.rounds), facts=facts,
                )  # fmt: skip


# ---- Compiled steps ----


def load_with(weights: str) -> tuple[Any, Any]:
    """The model with these weights, and its tokenizer."""
    if not weights.startswith("int"):
        return load(weights)
    try:
        from torchao import quantization
        from torchao.prototype.quantization.int4.inference_workflow import (
            PrototypeInt4WeightOnlyConfig,  # has a layout for the CPU
        )
    except ImportError:
        raise PeerMissing("int8 and int4 weights need: pip install torchao") from None
    model, tokenizer = load("bfloat16")
    eight = weights == "int8"
    kind = quantization.Int8WeightOnlyConfig if eight else PrototypeInt4WeightOnlyConfig
    quantization.quantize_(model, kind() if eight else kind(group_size=32))
    return model, tokenizer


class Steps:
    """Decode steps after a prompt. Each round continues where the last one ended."""

    def __init__(self, name: str, model: Any, ids: Tensor, compiled: bool, steps: int) -> None:
        self.name, self.steps = name, steps
        model.set_attn_implementation("h2o")
        half = max(1, int(ids.shape[1] * BUDGET / 2))
        cache = h2o.H2OCache(model.config, heavy=half, recent=half, compileable=compiled)
        self.decoding = Decoding(model, ids, cache, compiled)

    def __call__(self) -> float:
        """Return the seconds per token."""
        start = time.perf_counter()
        for _ in range(self.steps):
            self.decoding.step()
        return (time.perf_counter() - start) / self.steps


def compiled(options: Options) -> Iterator[Row]:
    """P21: a compiled decode step, by weights, against an eager one and both engines."""
    loaded = {weights: load_with(weights) for weights in WEIGHTS}
    tokenizer = loaded["bfloat16"][1]
    with both() as peers:
        for length in options.prompts:
            torch._dynamo.reset()  # discards graphs of another length
            ids = prompt(tokenizer, length)
            engines = continued(peers, tokenizer, ids, options.tokens + 1)
            ways = {
                (weights, way): Steps(
                    f"{weights}, {way}", model, ids, way == "compiled", options.tokens
                )
                for weights, (model, _) in loaded.items()
                for way in ("eager", "compiled")
            }
            contenders = [
                Contender(way.name, way, own_clock=True) for way in [*ways.values(), *engines]
            ]
            times = race(contenders, options.rounds)
            for weights in WEIGHTS:
                ours = times[ways[weights, "compiled"].name]
                eager = times[ways[weights, "eager"].name]
                others = {engine.name: engine.decode_times(options.rounds) for engine in engines}
                for name, peer in {"eager": eager, **others}.items():
                    yield Row(
                        "P21", f"SmolLM2, a decoded token, compiled / {name}",
                        f"{weights} weights, {length} tokens, keys kept {BUDGET:.0%}",
                        ours=ours, peer=peer,
                    )  # fmt: skip
