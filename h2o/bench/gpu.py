"""G1 to G6: what a GPU does with h2o's kernels, against torch's attention and others'.

A decode step is timed as a CUDA graph over several layers, as servers run it: the host's time is
then nobody's, and no layer finds its keys in the GPU's cache. A peer that is not installed, or does
not take these tensors, is left out, which the row says.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, OPTConfig

import h2o
import h2o.ops

from . import gpu_rivals, inputs, rivals
from .devices import Host
from .kernels import check_steps
from .measure import Contender, Row, Times, race
from .options import Options
from .peers import PeerMissing
from .whole_model import Decoding


def timed(
    options: Options, device: Host, ours: dict[str, Contender], peers: gpu_rivals.Offers,
    peak: Contender,
) -> tuple[dict[str, Times], dict[str, Times], Times]:  # fmt: skip
    """Times of ours, of the peers that can be had, and of the plain loop."""
    contenders = [*ours.values(), *(Contender(name, run) for name, run in peers.runs.items())]
    times = race([*contenders, peak], options.rounds, device)
    return (
        {name: times[contender.name] for name, contender in ours.items()},
        {name: times[name] for name in peers.runs},
        times[peak.name],
    )


def prefill(options: Options) -> Iterator[Row]:
    """G1: a prompt's attention with scores, and the part of it that the scores take."""
    device = options.where()
    B, H, G, D, n = (1, 4, 2, 64, 96) if options.quick else (1, 32, 8, 128, 4096)
    for name, dtype in options.wanted("bfloat16", "float16", "float32"):
        text = [x.to(device.type) for x in inputs.text(B, H, G, n, D, dtype)]
        error = inputs.check_attend(*text, rivals.eager_with_sums)
        peers = gpu_rivals.Offers()
        peers.sdpa(*text, causal=True)
        peers.offer("FlexAttention", lambda text=text: gpu_rivals.flex(*text))
        peers.offer("eager + sums", lambda text=text: lambda: rivals.eager_with_sums(*text))
        case = f"{name}, n={n}, H={H}, G={G}, D={D}"
        yield from attention(options, device, "G1", text, peers, case, error)


def attention(
    options: Options, device: Host, row: str, text: list[Tensor], peers: gpu_rivals.Offers,
    case: str, error: str,
) -> Iterator[Row]:  # fmt: skip
    """Rows of `h2o.ops.attend` over a text against each of the peers."""
    query, keys, _ = text
    B, H, n, D = query.shape
    out, scores = query.new_empty(B, n, H, D), keys.new_empty(keys.shape[:3], dtype=torch.float32)

    def attend() -> None:
        h2o.ops.attend(*text, out=out, scores=scores)

    ours = Contender("h2o attend", attend, work=4.0 * B * H * D * n * (n + 1) / 2)
    matmul = device.products(query.dtype, options.quick)
    mine, others, peak = timed(options, device, {"attend": ours}, peers, matmul)
    facts = {
        **{f"seconds of {kernel}": s for kernel, s in device.kernels(attend).items()},
        "bytes beyond inputs and outputs": device.peak(attend),
        **peers.facts(),
    }
    for name, times in others.items():
        yield Row(
            row, f"prefill with scores / {name}", case, ours=mine["attend"], peer=times,
            bound="matmul", peak=peak, error=error, facts=facts,
        )  # fmt: skip


def long(options: Options) -> Iterator[Row]:
    """G4: 131072 tokens with scores. No peer that makes the n x n matrix has room for it."""
    device = options.where()
    H, G, D, n = (4, 2, 64, 256) if options.quick else (32, 8, 128, 131072)
    for name, dtype in options.wanted("bfloat16"):
        text = [torch.randn(1, h, n, D, device=device.type, dtype=dtype) for h in (H, G, G)]
        _, scores = h2o.ops.attend(*text)
        total = scores.sum(-1).double().mean().item() * G / H / n
        if not abs(total - 1) < 1e-3:  # each of n queries gives 1 in all
            raise inputs.WrongResult(f"scores add up to {total:.6f} of what they should")
        peers = gpu_rivals.Offers()
        peers.sdpa(*text, causal=True)
        error = f"scores add up to 1 + {total - 1:.0e} for a query"
        case = f"{name}, n={n}, H={H}, G={G}, D={D}"
        yield from attention(options, device, "G4", text, peers, case, error)


def decode(options: Options) -> Iterator[Row]:
    """G2, G3: a decode step with its eviction, against attention alone over the same keys, and
    over all of them."""
    device = options.where()
    shapes = (
        [(2, 4, 2, 64, 40, 12, 2)]
        if options.quick
        else [(8, 32, 8, 128, 4096, 820, 8), (1, 32, 8, 128, 4096, 820, 8)]
    )
    for shape in shapes:
        for name, dtype in options.wanted("bfloat16", "float16"):
            yield from decode_rows(options, device, name, dtype, shape)


def decode_rows(
    options: Options, device: Host, name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> Iterator[Row]:
    B, H, G, D, n, k, layers = shape
    query, keys, values = (x.to(device.type) for x in inputs.text(B, H, G, 2 * k + 8, D, dtype))
    prompt = (x[:, :, : 2 * k].contiguous() for x in (keys, values, query))
    first = inputs.filled_slots(*prompt, k - k // 2, k // 2)
    steps = [
        tuple(x[:, :, i : i + 1].contiguous() for x in (query, keys, values))
        for i in range(2 * k, 2 * k + 8)
    ]
    error = check_steps(first, steps)
    stores = [inputs.copy_slots(first) for _ in range(layers)]
    outs = [query.new_empty(B, 1, H, D) for _ in range(layers)]

    def step() -> None:
        for slots, out in zip(stores, outs, strict=True):
            h2o.ops.step(*steps[0], slots, out=out)

    held = 2.0 * B * G * (k + 1) * D * keys.element_size()
    ours = {
        "graph": Contender("h2o step", device.captured(step), work=held * layers),
        "eager": Contender("h2o step, no graph", step),
    }
    same = [(s.keys[:, :, :k], s.values[:, :, :k]) for s in stores]
    full = [torch.randn(2, B, G, n, D, device=device.type).to(dtype).unbind() for _ in stores]
    peers = gpu_rivals.Offers(device.captured)
    for held_by, pairs in (("the same keys", same), (f"all {n} keys", full)):
        peers.decode(held_by, steps[0][0], pairs)
    copies = device.copies(options.quick)
    mine, others, peak = timed(options, device, ours, peers, copies)
    facts = {"seconds without a graph": mine["eager"].median, **peers.facts()}
    case = f"{name}, B={B}, H={H}, G={G}, D={D}, {k} keys, {layers} layers"
    for peer, times in others.items():
        yield Row(
            "G3" if "all" in peer else "G2", f"decode step, eviction included / {peer}", case,
            ours=mine["graph"], peer=times, bound="copy", peak=peak, error=error, facts=facts,
        )  # fmt: skip


# ---- Whole models, with random weights -----------------------------------------------------------


def made(config: Any, device: Host, dtype: torch.dtype) -> Any:
    with torch.device(device.type):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def share(model: Any) -> Any:
    return h2o.H2OCache(model.config, heavy=0.1, recent=0.1)


def graph(options: Options) -> Iterator[Row]:
    """G5: one CUDA graph for all tokens of a generation, against the same called anew."""
    device = options.where()
    n, small = (40, {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                     "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
                     "head_dim": 16})  # fmt: skip
    usual = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}  # fmt: skip
    n, sizes = (n, small) if options.quick else (4096, usual)
    for name, dtype in options.wanted("bfloat16"):
        model = made(LlamaConfig(**sizes, attn_implementation="h2o"), device, dtype)
        ids = torch.randint(2, sizes["vocab_size"], (1, n), device=device.type)
        captured, eager = (Decoding(model, ids, share(model)) for _ in range(2))
        replay, error = check_graph(captured, eager, device)
        model.set_attn_implementation("sdpa")
        full = Decoding(model, ids, DynamicCache(config=model.config))
        model.set_attn_implementation("h2o")
        contenders = [
            Contender("one graph", replay),
            Contender("H2OCache", eager.step),
            Contender(
                "DynamicCache, SDPA", full.step,
                before=lambda model=model, full=full: set_full(model, full, n),
            ),
        ]  # fmt: skip
        contenders[0].before = contenders[1].before = lambda model=model: (
            model.set_attn_implementation("h2o")
        )
        times = race(contenders, options.rounds, device)
        for peer in ("H2OCache", "DynamicCache, SDPA"):
            yield Row(
                "G5", f"a decoded token in one graph / {peer}, no graph",
                f"{name}, a Llama of {sum(x.numel() for x in model.parameters()) / 1e9:.2g}e9 "
                f"weights, {n} tokens, keys kept 20%",
                ours=times["one graph"], peer=times[peer], error=error,
            )  # fmt: skip


def set_full(model: Any, decoding: Decoding, n: int) -> None:
    """The whole cache is as long at each of its steps."""
    model.set_attn_implementation("sdpa")
    if decoding.cache.get_seq_length() > n:
        decoding.cache.crop(n - decoding.cache.get_seq_length())
    decoding.position.fill_(n)


def check_graph(captured: Decoding, eager: Decoding, device: Host) -> tuple[Callable[[], Any], str]:
    """The captured step, which gives the token that the other gives, and how long it goes on so:
    libraries may multiply otherwise in a graph, and what follows another token is another text."""
    captured.step()
    eager.step()
    replay = device.captured(captured.step)
    while int(eager.position[0]) < int(captured.position[0]):  # capturing has warmed up once
        eager.step()
    same = []
    for _ in range(4):
        replay()
        eager.step()
        same.append(torch.equal(captured.token, eager.token))
    if not same[0]:
        raise inputs.WrongResult("a captured step gives another token than the same called")
    return replay, f"{sum(same)} of 4 tokens as without a graph"


AUTHORS = {"authors' tokens/s on an A100": 995.0, "authors' bytes": 36.4e9}


def flexgen(options: Options) -> Iterator[Row]:
    """G6: the authors' row for FlexGen, OPT-6.7B with 24 texts of 2048 + 2048 tokens at 20%."""
    device = options.where()
    B, n, new = (2, 40, 8) if options.quick else (24, 2048, 2048)
    sizes = {"max_position_embeddings": n + new + 2, "attn_implementation": "h2o"}
    if options.quick:
        sizes |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "ffn_dim": 64, "word_embed_proj_dim": 64, "vocab_size": 97}  # fmt: skip
    else:
        sizes |= {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                  "ffn_dim": 16384, "word_embed_proj_dim": 4096}  # fmt: skip
        if device.describe().get("bytes", 0) < 40e9:
            raise PeerMissing("OPT-6.7B with 24 texts takes 40 GB of the GPU's memory")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = made(OPTConfig(**sizes), device, dtype)
    ids = torch.randint(5, model.config.vocab_size, (B, n), device=device.type)
    taken = device.peak(lambda: Decoding(model, ids, share(model)))
    decoding = Decoding(model, ids, share(model))
    token = device.captured(decoding.step)
    contenders = [
        Contender("prompt", lambda: Decoding(model, ids, share(model))),
        Contender("token", token),
    ]
    times = race(contenders, options.rounds, device)
    samples = [
        prompt + (new - 1) * one
        for prompt, one in zip(times["prompt"].samples, times["token"].samples, strict=True)
    ]
    weights = sum(x.nbytes for x in model.parameters())
    yield Row(
        "G6", "a batch generated, from its prompt and the time of a token",
        f"{str(dtype)[6:]}, OPT-6.7B, {B} texts of {n} + {new} tokens, keys kept 20%",
        ours=Times("h2o", samples),
        facts={
            "tokens/s": B * new / statistics.median(samples), "bytes": weights + taken, **AUTHORS
        },
    )  # fmt: skip
