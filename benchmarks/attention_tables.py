"""P1, P2, P19, G1, G4: a prompt's attention with scores, for usual and for very long prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import h2o.ops

from . import correctness, inputs
from .correctness import WrongResult
from .options import DTYPES, Options
from .peers import attention_peers, torch_peers
from .targets import Cpu
from .timing import Contender, Row, Times, race


def prefill(options: Options) -> Iterator[Row]:
    """P1, P2, G1: attention with scores of 4096 tokens.

    On a GPU the peers are every variant of SDPA that it supports, and FlexAttention; on a CPU the
    faster variant of SDPA.
    """
    device = options.target()
    B, H, G, D, n = (1, 4, 2, 64, 96) if options.quick else (1, 32, 8, 128, 4096)
    for name, dtype in options.wanted(*DTYPES):
        text = [x.to(device.type) for x in inputs.text(B, H, G, n, D, dtype)]
        error = correctness.check_attend(*text, torch_peers.eager_with_sums)
        case = f"{name}, n={n}, H={H}, G={G}, D={D}"
        if device.tables == "cpu":
            peers, label = cpu_peers(text), cpu_label
        else:
            peers, label = gpu_prefill_peers(text), gpu_label("G1")
        yield from attention_rows(options, device, text, peers, label, case, error)


def cpu_peers(text: list[Tensor]) -> attention_peers.Offers:
    """The faster variant of SDPA, and eager attention except in float16, where it takes minutes."""
    peers = attention_peers.Offers()
    way, sdpa = torch_peers.fastest(torch_peers.sdpa(*text, causal=True))
    peers.runs[f"SDPA {way}"] = sdpa
    if text[0].dtype != torch.float16:
        peers.runs["eager + sums"] = lambda: torch_peers.eager_with_sums(*text)
    return peers


def cpu_label(peer: str) -> tuple[str, str]:
    """Identifier and work of the row for a peer."""
    if peer.startswith("SDPA"):
        return "P1", "prefill with scores / SDPA without"
    return "P2", "prefill with scores / eager with"


def gpu_prefill_peers(text: list[Tensor]) -> attention_peers.Offers:
    peers = attention_peers.Offers()
    peers.sdpa(*text, causal=True)
    peers.offer("FlexAttention", lambda: attention_peers.flex(*text))
    peers.offer("eager + sums", lambda: lambda: torch_peers.eager_with_sums(*text))
    return peers


def gpu_label(row: str) -> Callable[[str], tuple[str, str]]:
    return lambda peer: (row, f"prefill with scores / {peer}")


def attention_rows(
    options: Options, device: Cpu, text: list[Tensor], peers: attention_peers.Offers,
    label: Callable[[str], tuple[str, str]], case: str, error: str,
) -> Iterator[Row]:  # fmt: skip
    """Rows of `h2o.ops.attend` over a text against each of the peers."""
    query, keys, _ = text
    B, H, n, D = query.shape
    out, scores = query.new_empty(B, n, H, D), keys.new_empty(keys.shape[:3], dtype=torch.float32)

    def attend() -> None:
        h2o.ops.attend(*text, out=out, scores=scores)

    contenders = [Contender("h2o attend", attend, work=4.0 * B * H * D * n * (n + 1) / 2)]
    contenders += [Contender(name, run) for name, run in peers.runs.items()]
    peak = device.compute_peak(query.dtype, options.quick)
    times = race(contenders + ([peak] if peak else []), options.rounds, device)
    facts = device.facts(attend) | peers.facts()
    for name in peers.runs:
        row, what = label(name)
        yield Row(
            row, what, case, ours=times["h2o attend"], peer=times[name], bound=device.compute,
            peak=times[peak.name] if peak else None, error=error, facts=facts,
        )  # fmt: skip


def long(options: Options) -> Iterator[Row]:
    """G4: 131072 tokens with scores. Peers that store the n x n matrix have no room for it."""
    device = options.target()
    H, G, D, n = (4, 2, 64, 256) if options.quick else (32, 8, 128, 131072)
    for name, dtype in options.wanted("bfloat16"):
        text = [torch.randn(1, h, n, D, device=device.type, dtype=dtype) for h in (H, G, G)]
        _, scores = h2o.ops.attend(*text)
        error = check_mass(scores, H // G)
        peers = attention_peers.Offers()
        peers.sdpa(*text, causal=True)
        case = f"{name}, n={n}, H={H}, G={G}, D={D}"
        yield from attention_rows(options, device, text, peers, gpu_label("G4"), case, error)


def lengths(options: Options) -> Iterator[Row]:
    """P19: the rate of a prefill with scores for long prompts, against the rate for 4096 tokens."""
    H, G, D = (4, 2, 64) if options.quick else (4, 1, 128)
    base, *longer = (64, 96, 128) if options.quick else (4096, 32768, 65536)
    for name, dtype in options.wanted("float32", "bfloat16"):
        contenders, error = [], ""
        for n in (base, *longer):
            query, keys, values = inputs.text(1, H, G, n, D, dtype)
            out, scores = query.new_empty(1, n, H, D), torch.empty(1, G, n)
            error = check_mass(h2o.ops.attend(query, keys, values)[1], H // G)

            def attend(x=(query, keys, values), out=out, scores=scores) -> None:
                h2o.ops.attend(*x, out=out, scores=scores)

            contenders.append(Contender(f"{n} tokens", attend, work=2.0 * H * D * n * (n + 1)))
        times = race(contenders, options.rounds)
        short = times[f"{base} tokens"]
        for n in longer:
            ours = times[f"{n} tokens"]
            scaled = [s * ours.work / short.work for s in short.samples]
            yield Row(
                "P19", f"prefill with scores / the rate of {base} tokens",
                f"{name}, n={n}, H={H}, G={G}, D={D}", ours=ours,
                peer=Times(f"{base} tokens", scaled), error=error,
            )  # fmt: skip


def check_mass(scores: Tensor, R: int) -> str:
    """Check that the scores [B, G, n] of a head sum to its number of queries, R * n, since each
    query gives 1 in total."""
    rows = scores.shape[-1] * R
    off = (scores.double().sum(-1) / rows - 1).abs().max().item()
    if not off < 1e-3:
        raise WrongResult(f"the sum of the scores of {rows} queries is off by {off:.1e}")
    return f"sum of the scores off by {off:.0e}"
