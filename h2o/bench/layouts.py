"""P13 and P19: the same work in tensors of other strides, and on prompts of other lengths."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import h2o.ops

from . import inputs
from .measure import Contender, Row, Times, race
from .options import Options


def strides(options: Options) -> Iterator[Row]:
    """P13: the decode step over keys and values that are views, as other stores lay them out.

    All of a layer fits into the last cache: in memory the pages of such views would be measured.
    """
    B, H, G, D, k = (2, 4, 2, 64, 12) if options.quick else (1, 32, 8, 128, 820)
    fill = 2 * k
    for name, dtype in options.wanted("float32", "bfloat16"):
        query, keys, values = inputs.text(B, H, G, fill + 1, D, dtype)
        token = tuple(x[:, :, fill:].contiguous() for x in (query, keys, values))
        prompt = (keys[:, :, :fill], values[:, :, :fill], query[:, :, :fill])
        first = inputs.filled_slots(*(x.contiguous() for x in prompt), k - k // 2, k // 2)
        row = 32768 // dtype.itemsize
        ways: dict[str, Callable[[Tensor], Tensor]] = {
            "contiguous": torch.clone,
            "[B,S,G,D]": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
            "rows of 32 KiB": lambda x, row=row: torch.cat(
                [x, x.new_zeros(*x.shape[:3], row - x.shape[3])], dim=3
            )[..., : x.shape[3]],
        }
        stores = {way: with_layout(first, lay) for way, lay in ways.items()}
        answers = {way: h2o.ops.step(*token, held) for way, held in stores.items()}
        for way, out in answers.items():
            if not out.equal(answers["contiguous"]):
                raise inputs.WrongResult(f"{way} gives another answer than contiguous")
        out = query.new_empty(B, 1, H, D)
        contenders = []
        for way, slots in stores.items():

            def step(held=slots, out=out, token=token) -> None:
                h2o.ops.step(*token, held, out=out)

            contenders.append(Contender(way, step))
        times = race(contenders, options.rounds)
        case = f"{name}, B={B}, H={H}, G={G}, D={D}, {k} keys"
        for way in list(ways)[1:]:
            yield Row(
                "P13", f"decode step, {way} / contiguous", case, ours=times[way],
                peer=times["contiguous"], error="bitwise equal",
            )  # fmt: skip


def with_layout(slots, lay: Callable[[Tensor], Tensor]):
    """A copy of the slots whose keys and values are laid out so."""
    copy = inputs.copy_slots(slots)
    return copy._replace(keys=lay(copy.keys), values=lay(copy.values))


def lengths(options: Options) -> Iterator[Row]:
    """P19: the rate of a prefill with scores on long prompts, against the rate on 4096 tokens."""
    H, G, D = (4, 2, 64) if options.quick else (4, 1, 128)
    short, *long = (64, 96, 128) if options.quick else (4096, 32768, 65536)
    for name, dtype in options.wanted("float32", "bfloat16"):
        contenders, error = [], ""
        for n in (short, *long):
            query, keys, values = inputs.text(1, H, G, n, D, dtype)
            out, scores = query.new_empty(1, n, H, D), torch.empty(1, G, n)
            error = check_mass(h2o.ops.attend(query, keys, values)[1], H // G)

            def ours(x=(query, keys, values), out=out, scores=scores) -> None:
                h2o.ops.attend(*x, out=out, scores=scores)

            contenders.append(Contender(f"{n} tokens", ours, work=2.0 * H * D * n * (n + 1)))
        times = race(contenders, options.rounds)
        base = times[f"{short} tokens"]
        for n in long:
            ours_n = times[f"{n} tokens"]
            scaled = [s * ours_n.work / base.work for s in base.samples]
            yield Row(
                "P19", f"prefill with scores / the rate of {short} tokens",
                f"{name}, n={n}, H={H}, G={G}, D={D}", ours=ours_n,
                peer=Times(f"{short} tokens", scaled), error=error,
            )  # fmt: skip


def check_mass(scores: Tensor, R: int) -> str:
    """Every query spends 1: the scores of a head sum to its rows."""
    rows = scores.shape[-1] * R
    off = (scores.double().sum(-1) / rows - 1).abs().max().item()
    if not off < 1e-3:
        raise inputs.WrongResult(f"the scores of {rows} rows sum to {off:.1e} too much or little")
    return f"sum of the scores off by {off:.0e}"
