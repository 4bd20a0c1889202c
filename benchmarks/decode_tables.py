"""P3 to P5, P9, G2, G3: a decode step of a layer.

On a GPU it is timed as a CUDA graph over several layers, as servers run it. The host's time is then
not included, and no layer finds its keys in the GPU's cache. On a CPU each call is one layer, and
several layers take turns, so that together they do not fit into the last-level cache, as in the
decode of a whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, LlamaConfig

import h2o
import h2o.ops

from . import correctness, inputs
from .machine import roofline
from .options import DTYPES, Options
from .peers import attention_peers, torch_peers
from .targets import Cpu, DryRun
from .timing import Contender, Row, Times, race

Pairs = Sequence[tuple[Tensor, Tensor]]
"""(keys, values) of each layer, [B, G, S, D]"""

TOKENS = 32
"""Different tokens that are decoded in turn, so that the evicted keys change"""


class Layers:
    """Equal layers after a prompt, ready for a decode step.

    Attributes:
        steps: (query, key, value) of each of TOKENS tokens.
        stores: slots of each layer.
        bytes_read: bytes of the keys and values that a step of one layer reads.
        error: error of the first steps against the reference, as text.
    """

    def __init__(self, device: Cpu, dtype: torch.dtype, shape: Sequence[int], layers: int) -> None:
        B, H, G, D, n, k = shape
        fill = min(n, 2 * k)
        text = inputs.text(B, H, G, fill + TOKENS, D, dtype)
        query, keys, values = (x.to(device.type) for x in text)
        prompt = (x[:, :, :fill].contiguous() for x in (keys, values, query))
        first = inputs.filled_slots(*prompt, k - k // 2, k // 2)
        self.steps = [
            tuple(x[:, :, i : i + 1].contiguous() for x in (query, keys, values))
            for i in range(fill, fill + TOKENS)
        ]
        self.error = correctness.check_steps(first, self.steps[:8])
        self.stores = [inputs.copy_slots(first) for _ in range(layers)]
        self.bytes_read = 2.0 * B * G * (k + 1) * D * keys.element_size()
        self.shape = shape

    def new_out(self) -> Tensor:
        B, H, _, D, *_ = self.shape
        return self.steps[0][0].new_empty(B, 1, H, D)

    def same_keys(self) -> Pairs:
        """The keys and values in the stores, one less than a step attends to."""
        k = self.shape[-1]
        return [(s.keys[:, :, :k], s.values[:, :, :k]) for s in self.stores]

    def all_keys(self, layers: int) -> Pairs:
        """Random keys and values, as many as a full cache has."""
        query = self.steps[0][0]
        B, _, G, D, n, _ = self.shape
        drawn = (torch.randn(2, B, G, n, D, device=query.device) for _ in range(layers))
        return [x.to(query.dtype).unbind() for x in drawn]


def decode(options: Options) -> Iterator[Row]:
    """P3 to P5, G2, G3: a decode step with its eviction, against attention alone, over the same
    keys and over those of a full cache."""
    device = options.target()
    dtypes = DTYPES if device.tables == "cpu" else ("bfloat16", "float16")
    shapes = [(2, 4, 2, 64, 40, 12)] if options.quick else [(8, 32, 8, 128, 4096, 820)]
    if device.tables == "cuda" and not options.quick:
        shapes.append((1, 32, 8, 128, 4096, 820))
    count = 2 if options.quick else 8
    for shape in shapes:
        for name, dtype in options.wanted(*dtypes):
            B, H, G, D, _, k = shape
            case = f"{name}, B={B}, H={H}, G={G}, D={D}, {k} keys"
            layers = Layers(device, dtype, shape, count)
            if isinstance(device, DryRun):
                yield from gpu_decode_rows(options, device, layers, f"{case}, {count} layers")
            else:
                yield from cpu_decode_rows(options, layers, case)


def cpu_decode_rows(options: Options, layers: Layers, case: str) -> Iterator[Row]:
    """P3, P4, P5: one layer per call, with the layers in turn."""
    n, query = layers.shape[4], layers.steps[0][0]
    same = sdpa_in_turn(query, layers.same_keys())
    all_keys = sdpa_in_turn(query, layers.all_keys(max(1, len(layers.stores) // 4)))
    contenders = [
        Contender("h2o step", step_in_turn(layers), work=layers.bytes_read),
        Contender(f"SDPA {same[0]}", same[1]),
        Contender(f"SDPA {all_keys[0]}, {n} keys", all_keys[1]),
    ]
    loops = roofline()
    if loops is not None:
        read, size = loops.reads([x for s in layers.stores for x in (s.keys, s.values)])
        contenders.append(Contender("read", read, work=size))
    times = race(contenders, options.rounds)
    common = {
        "ours": times["h2o step"], "bound": "read", "peak": times.get("read"),
        "error": layers.error,
    }  # fmt: skip
    yield Row("P3", "decode step / SDPA, same keys", case, peer=times[f"SDPA {same[0]}"], **common)
    if "read" in times:
        loop = read_once(times["read"], layers.bytes_read)
        yield Row("P4", "decode step / read loop", case, peer=loop, **common)
    yield Row(
        "P5", f"decode step / SDPA, all {n} keys", case,
        peer=times[f"SDPA {all_keys[0]}, {n} keys"], **common,
    )  # fmt: skip


def read_once(loop: Times, size: float) -> Times:
    """The time that the plain loop needs for the bytes that one step reads."""
    assert loop.work is not None
    return Times("read loop", [s * size / loop.work for s in loop.samples])


def step_in_turn(layers: Layers) -> Callable[[], None]:
    stores, tokens, out = cycle(layers.stores), cycle(layers.steps), layers.new_out()

    def run() -> None:
        query, key, value = next(tokens)
        h2o.ops.step(query, key, value, next(stores), out=out)

    return run


def sdpa_in_turn(query: Tensor, pairs: Pairs) -> tuple[str, Callable[[], None]]:
    """Name and function of the faster variant of SDPA over these (keys, values) in turn."""
    ways: dict[str, list[Callable[[], Any]]] = {}
    for keys, values in pairs:
        for way, run in torch_peers.sdpa(query, keys, values, causal=False).items():
            ways.setdefault(way, []).append(run)

    def rotate(runs: list[Callable[[], Any]]) -> Callable[[], None]:
        turn = cycle(runs)
        return lambda: next(turn)()

    return torch_peers.fastest({way: rotate(runs) for way, runs in ways.items()})


def gpu_decode_rows(options: Options, device: DryRun, layers: Layers, case: str) -> Iterator[Row]:
    """G2, G3: all layers in one graph."""
    outs = [layers.new_out() for _ in layers.stores]

    def step() -> None:
        for slots, out in zip(layers.stores, outs, strict=True):
            h2o.ops.step(*layers.steps[0], slots, out=out)

    n, query = layers.shape[4], layers.steps[0][0]
    peers = attention_peers.Offers(device.captured)
    peers.decode("the same keys", query, layers.same_keys())
    peers.decode(f"all {n} keys", query, layers.all_keys(len(layers.stores)))
    peak = device.copy_peak(options.quick)
    contenders = [
        Contender("h2o step", device.captured(step), work=layers.bytes_read * len(layers.stores)),
        Contender("h2o step, no graph", step),
        *(Contender(name, run) for name, run in peers.runs.items()),
        peak,
    ]
    times = race(contenders, options.rounds, device)
    facts = {"seconds without a graph": times["h2o step, no graph"].median, **peers.facts()}
    for peer in peers.runs:
        yield Row(
            "G3" if "all" in peer else "G2", f"decode step, eviction included / {peer}", case,
            ours=times["h2o step"], peer=times[peer], bound="copy", peak=times[peak.name],
            error=layers.error, facts=facts,
        )  # fmt: skip


# ---- One call ----


def overhead(options: Options) -> Iterator[Row]:
    """P9: the cost of one call when there is almost nothing to compute."""
    query, keys, values = inputs.text(1, 1, 1, 12, 16, torch.float32)
    slots = inputs.filled_slots(keys[:, :, :8], values[:, :, :8], query[:, :, :8], 2, 2)
    token = [x[:, :, 8:9].contiguous() for x in (query, keys, values)]
    out = query.new_empty(1, 1, 1, 16)
    _, sdpa = torch_peers.fastest(torch_peers.sdpa(token[0], keys, values, causal=False))
    contenders = [
        Contender("h2o step, out given", lambda: h2o.ops.step(*token, slots, out=out)),
        Contender("h2o step", lambda: h2o.ops.step(*token, slots)),
        Contender("SDPA", sdpa),
    ]
    times = race(contenders, options.rounds)
    case = "float32, B=H=G=1, D=16, 4 keys"
    for name in ("h2o step, out given", "h2o step"):
        yield Row(
            "P9", f"one call of {name} on tiny tensors", case,
            ours=times[name], peer=times["SDPA"],
        )  # fmt: skip
    times = race([Contender("layer", layer_of_transformers(query, keys, values))], options.rounds)
    yield Row("P9", "one layer's cache.update and attention function", case, ours=times["layer"])


def layer_of_transformers(query: Tensor, keys: Tensor, values: Tensor) -> Callable[[], None]:
    """The calls of a transformers decode step in each layer, after a prompt of 8 tokens."""
    cache = h2o.H2OCache(LlamaConfig(num_hidden_layers=1), heavy=2, recent=2)
    module = torch.nn.Module().eval()
    attention = AttentionInterface()["h2o"]

    def feed(q: Tensor, k: Tensor, v: Tensor) -> None:
        attention(module, q, *cache.update(k, v, 0), None, scaling=0.25)

    feed(*(x[:, :, :8] for x in (query, keys, values)))
    token = [x[:, :, 8:9] for x in (query, keys, values)]
    return lambda: feed(*token)
