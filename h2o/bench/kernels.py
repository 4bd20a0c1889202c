"""P1 to P6 and P9: the operations of the core against torch's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle

import torch
from torch import Tensor
from transformers import LlamaConfig

import h2o
import h2o.ops
from h2o import reference
from h2o.hf.attention import h2o_attention_forward

from . import inputs, rivals
from .machine import roofline
from .measure import Contender, Row, Times, race
from .options import Options


def prefill(options: Options) -> Iterator[Row]:
    """P1, P2: a prompt's attention with scores."""
    B, H, G, D, n = (1, 4, 2, 64, 96) if options.quick else (1, 32, 8, 128, 4096)
    work = 4.0 * B * H * D * n * (n + 1) / 2
    for name, dtype in options.wanted("float32", "bfloat16", "float16"):
        query, keys, values = inputs.text(B, H, G, n, D, dtype)
        error = inputs.check_attend(query, keys, values, rivals.eager_with_sums)
        out = query.new_empty(B, n, H, D)
        scores = torch.empty(B, G, n)
        way, sdpa = rivals.fastest(rivals.sdpa(query, keys, values, causal=True))

        def ours(x=(query, keys, values), out=out, scores=scores) -> None:
            h2o.ops.attend(*x, out=out, scores=scores)

        contenders = [Contender("h2o attend", ours, work=work), Contender(f"SDPA {way}", sdpa)]
        if dtype != torch.float16:

            def eager(x=(query, keys, values)) -> None:
                rivals.eager_with_sums(*x)

            contenders.append(Contender("eager + sums", eager))
        times = race(contenders + peak_contenders(dtype), options.rounds)
        case = f"{name}, n={n}, H={H}, G={G}, D={D}"
        common = {
            "ours": times["h2o attend"], "bound": "FMA", "peak": times.get("FMA"), "error": error
        }  # fmt: skip
        yield Row(
            "P1", "prefill with scores / SDPA without", case, peer=times[f"SDPA {way}"], **common
        )
        if "eager + sums" in times:
            yield Row(
                "P2", "prefill with scores / eager with", case, peer=times["eager + sums"], **common
            )


def peak_contenders(dtype: torch.dtype) -> list[Contender]:
    loops = roofline()
    if loops is None:
        return []
    run, flops = loops.multiply_adds(dtype)
    return [Contender("FMA", run, work=flops)]


def decode(options: Options) -> Iterator[Row]:
    """P3, P4, P5: one decode step of one layer, layers in turn as in a model.

    With several layers no store fits into the last cache, which is how a model's decode meets
    them.
    """
    shape = (2, 4, 2, 64, 40, 12) if options.quick else (8, 32, 8, 128, 4096, 820)
    layers = 2 if options.quick else 8
    for name, dtype in options.wanted("float32", "bfloat16", "float16"):
        yield from decode_rows(options, name, dtype, shape, layers)


def decode_rows(
    options: Options, name: str, dtype: torch.dtype, shape: tuple[int, ...], layers: int
) -> Iterator[Row]:
    B, H, G, D, n, k = shape
    fill = min(n, 2 * k)
    query, keys, values = inputs.text(B, H, G, fill + 32, D, dtype)
    prompt = (keys[:, :, :fill], values[:, :, :fill], query[:, :, :fill])
    first = inputs.filled_slots(*(x.contiguous() for x in prompt), k - k // 2, k // 2)
    steps = [
        tuple(x[:, :, i : i + 1].contiguous() for x in (query, keys, values))
        for i in range(fill, fill + 32)
    ]
    error = check_steps(first, steps[:8])
    stores = [inputs.copy_slots(first) for _ in range(layers)]
    out = query.new_empty(B, 1, H, D)
    ours = step_in_turn(stores, steps, out)
    same = sdpa_in_turn(steps[0][0], [(s.keys[:, :, :k], s.values[:, :, :k]) for s in stores])
    full = [torch.randn(2, B, G, n, D).to(dtype).unbind() for _ in range(max(1, layers // 4))]
    whole = sdpa_in_turn(steps[0][0], full)
    held = 2 * B * G * (k + 1) * D * keys.element_size()
    contenders = [
        Contender("h2o step", ours, work=held),
        Contender(f"SDPA {same[0]}", same[1]),
        Contender(f"SDPA {whole[0]}, {n} keys", whole[1]),
    ]
    loops = roofline()
    if loops is not None:
        read, size = loops.reads([x for s in stores for x in (s.keys, s.values)])
        contenders.append(Contender("read", read, work=size))
    times = race(contenders, options.rounds)
    case = f"{name}, B={B}, H={H}, G={G}, D={D}, {k} keys"
    common = {
        "ours": times["h2o step"], "bound": "read", "peak": times.get("read"), "error": error
    }  # fmt: skip
    yield Row("P3", "decode step / SDPA, same keys", case, peer=times[f"SDPA {same[0]}"], **common)
    if "read" in times:
        yield Row(
            "P4", "decode step / read loop", case, peer=read_once(times["read"], held), **common
        )
    yield Row(
        "P5", f"decode step / SDPA, all {n} keys", case,
        peer=times[f"SDPA {whole[0]}, {n} keys"], **common,
    )  # fmt: skip


def read_once(loop: Times, held: float) -> Times:
    """The time that the plain loop needs for as many bytes as one step reads."""
    assert loop.work is not None
    return Times("read loop", [s * held / loop.work for s in loop.samples])


def step_in_turn(stores, steps, out: Tensor) -> Callable[[], None]:
    turn, token = cycle(stores), cycle(steps)

    def run() -> None:
        query, key, value = next(token)
        h2o.ops.step(query, key, value, next(turn), out=out)

    return run


def sdpa_in_turn(query: Tensor, pairs) -> tuple[str, Callable[[], None]]:
    """The better way of SDPA over these (keys, values) in turn."""
    ways: dict[str, list] = {}
    for keys, values in pairs:
        for way, run in rivals.sdpa(query, keys, values, causal=False).items():
            ways.setdefault(way, []).append(run)

    def rotate(runs) -> Callable[[], None]:
        turn = cycle(runs)
        return lambda: next(turn)()

    way, run = rivals.fastest({way: rotate(runs) for way, runs in ways.items()})
    return way, run


def check_steps(slots, steps) -> str:
    """A few steps of the operation against the reference, outputs and kept sets."""
    ours, truth = inputs.copy_slots(slots), inputs.copy_slots(slots)
    told = ""
    for query, key, value in steps:
        naive = plain_step(query, key, value, ours)
        out = h2o.ops.step(query, key, value, ours)
        true = reference.step(query, key, value, truth)
        told = inputs.compare("out", out, naive, true)
    return f"{told}, {inputs.check_kept(ours, truth, len(steps))}"


def plain_step(query: Tensor, key: Tensor, value: Tensor, slots) -> Tensor:
    """Attention of one query in torch, in the dtype of the tensors; out [B,1,H,D]."""
    R = query.shape[1] // key.shape[1]
    rows = []
    for b in range(query.shape[0]):
        heads = []
        for g in range(key.shape[1]):
            held = slots.positions[b, g] >= 0
            k = torch.cat([slots.keys[b, g, held], key[b, g]])
            v = torch.cat([slots.values[b, g, held], value[b, g]])
            logits = query[b, g * R : (g + 1) * R, 0] @ k.T * query.shape[-1] ** -0.5
            heads.append(logits.softmax(-1) @ v)
        rows.append(torch.cat(heads))
    return torch.stack(rows)[:, None]


def evict(options: Options) -> Iterator[Row]:
    """P6: the cut of a prompt to its budget."""
    B, H, G, D, n = (1, 4, 2, 64, 96) if options.quick else (1, 32, 8, 128, 4096)
    heavy = recent = n // 10
    for name, dtype in options.wanted("float32", "bfloat16"):
        query, keys, values = inputs.text(B, H, G, n, D, dtype)
        out, scores = h2o.ops.attend(query, keys, values)
        slots = h2o.ops.new_slots(keys, heavy + recent + 1, heavy, recent)
        peer = rivals.TopkGather(keys, heavy, recent)
        peer(keys, values, scores)
        h2o.ops.evict(keys, values, scores, slots)
        positions, kept_scores = reference.kept(slots)
        if not (positions.equal(peer.index) and kept_scores.equal(peer.scores)):
            raise inputs.WrongResult("evict and topk + sort + gather keep different keys")

        def empty(slots=slots) -> None:
            slots.lengths.zero_()
            slots.positions.fill_(-1)
            slots.free.zero_()

        def cut(x=(keys, values, scores), slots=slots) -> None:
            h2o.ops.evict(*x, slots)

        def gather(x=(keys, values, scores), peer=peer) -> None:
            peer(*x)

        def attend(x=(query, keys, values), out=out, scores=scores) -> None:
            h2o.ops.attend(*x, out=out, scores=scores)

        contenders = [
            Contender("h2o evict", cut, before=empty),
            Contender("topk + sort + gather", gather, before=empty),
            Contender("h2o attend", attend),
        ]
        times = race(contenders, options.rounds)
        share = times["h2o evict"].median / times["h2o attend"].median
        yield Row(
            "P6", "prompt eviction / topk + sort + gather",
            f"{name}, n={n}, k={heavy + recent}, G={G}, D={D}",
            ours=times["h2o evict"], peer=times["topk + sort + gather"],
            error="same keys, same scores", facts={"share of the prefill": share},
        )  # fmt: skip


def overhead(options: Options) -> Iterator[Row]:
    """P9: what one call costs when there is next to nothing to compute."""
    query, keys, values = inputs.text(1, 1, 1, 12, 16, torch.float32)
    slots = inputs.filled_slots(keys[:, :, :8], values[:, :, :8], query[:, :, :8], 2, 2)
    token = [x[:, :, 8:9].contiguous() for x in (query, keys, values)]
    out = query.new_empty(1, 1, 1, 16)
    _, sdpa = rivals.fastest(rivals.sdpa(token[0], keys, values, causal=False))
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


def layer_of_transformers(query, keys, values) -> Callable[[], None]:
    """What a decode step of transformers calls in each layer, after a prompt of 8 tokens."""
    cache = h2o.H2OCache(LlamaConfig(num_hidden_layers=1), heavy=2, recent=2)
    module = torch.nn.Module().eval()

    def feed(q, k, v) -> None:
        h2o_attention_forward(module, q, *cache.update(k, v, 0), None, scaling=0.25)

    feed(*(x[:, :, :8] for x in (query, keys, values)))
    token = [x[:, :, 8:9] for x in (query, keys, values)]
    return lambda: feed(*token)
