"""P6, P7: the eviction of a prompt, and eviction simulated over a whole text."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import h2o.ops
from tests.reference import operations as reference

from . import correctness, inputs
from .correctness import WrongResult
from .options import Options
from .peers import torch_peers
from .timing import Contender, Row, race


def evict(options: Options) -> Iterator[Row]:
    """P6: the eviction of a prompt to its budget."""
    B, H, G, D, n = (1, 4, 2, 64, 96) if options.quick else (1, 32, 8, 128, 4096)
    heavy = recent = n // 10
    for name, dtype in options.wanted("float32", "bfloat16"):
        query, keys, values = inputs.text(B, H, G, n, D, dtype)
        out, scores = h2o.ops.attend(query, keys, values)
        slots = h2o.ops.new_slots(keys, heavy + recent + 1, heavy, recent)
        peer = torch_peers.TopkGather(keys, heavy, recent)
        peer(keys, values, scores)
        h2o.ops.evict(keys, values, scores, slots)
        positions, kept_scores = reference.kept(slots)
        if not (positions.equal(peer.index) and kept_scores.equal(peer.scores)):
            raise WrongResult("evict and topk + sort + gather keep different keys")

        def empty(slots=slots) -> None:
            slots.seen_tokens.zero_()
            slots.positions.fill_(-1)
            slots.next_slot.zero_()

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
        part = times["h2o evict"].median / times["h2o attend"].median
        yield Row(
            "P6", "prompt eviction / topk + sort + gather",
            f"{name}, n={n}, k={heavy + recent}, G={G}, D={D}",
            ours=times["h2o evict"], peer=times["topk + sort + gather"],
            error="same keys, same scores", facts={"fraction of the prefill": part},
        )  # fmt: skip


def simulate(options: Options) -> Iterator[Row]:
    """P7: simulation with a budget of 20% from the first token on, against the authors' code and
    dense attention."""
    B, H, G, D, n = (1, 4, 2, 64, 96) if options.quick else (1, 32, 8, 128, 4096)
    heavy = int(0.1 * n)
    recent = int(0.2 * n) - heavy
    prompt = torch.ones(B, dtype=torch.int32)
    budget = torch.tensor([[heavy, recent]], dtype=torch.int32).expand(B, 2).contiguous()
    for name, dtype in options.wanted("float32", "bfloat16"):
        text = inputs.text(B, H, G, n, D, dtype)
        error = check_simulation(dtype, min(n, 512))
        out = text[0].new_empty(B, n, H, D)
        way, sdpa = torch_peers.fastest(torch_peers.sdpa(*text, causal=True))

        def ours(text=text, out=out) -> None:
            h2o.ops.simulate(*text, prompt, budget, out=out)

        def attend(text=text, out=out) -> None:
            h2o.ops.attend(*text, out=out)

        def masked(text=text) -> None:
            torch_peers.masked_simulation(*text, heavy, recent)

        def authors(text=text) -> None:
            torch_peers.authors_simulation(*text, heavy, recent)

        contenders = [
            Contender("h2o simulate", ours),
            Contender("the authors' Python loop", authors),
            Contender("the same in a Python loop", masked),
            Contender(f"SDPA {way}, dense", sdpa),
            Contender("h2o attend, dense", attend),
        ]
        times = race(contenders, options.rounds)
        for peer in contenders[1:]:
            yield Row(
                "P7", f"simulation / {peer.name}",
                f"{name}, n={n}, k={heavy + recent}, H={H}, G={G}, D={D}",
                ours=times["h2o simulate"], peer=times[peer.name], error=error,
            )  # fmt: skip


def check_simulation(dtype: torch.dtype, n: int) -> str:
    """Check outputs and evictions of a shorter text with two groups of two heads against the
    reference."""
    query, keys, values = inputs.text(1, 4, 2, n, 64, dtype)
    heavy = recent = n // 10
    prompt, budget = torch.ones(1, dtype=torch.int32), torch.tensor([[heavy, recent]]).int()
    out, evicted_at, _ = h2o.ops.simulate(query, keys, values, prompt, budget)
    wide = (x.double() for x in (query, keys, values))
    true, true_evicted_at, _ = reference.simulate(*wide, prompt, budget)
    naive, _ = torch_peers.masked_simulation(query, keys, values, heavy, recent)
    differ = (evicted_at != true_evicted_at).sum().item()
    evictions = (true_evicted_at < n).sum().item()
    difference = f"{differ} of {evictions} evictions differ"
    if differ:
        raise WrongResult(difference)
    error = correctness.compare("out", out, naive.transpose(1, 2), true)
    return f"{error}, {difference}"
