"""What a run of the benchmarks is asked for. Imports nothing heavy: the command line needs it."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLES = {
    "prefill": "P1, P2: a prompt's attention with scores, against SDPA without and eager with",
    "memory": "P2: the memory that it takes, against eager",
    "decode": "P3, P4, P5: a decode step of one layer, against SDPA and a plain read loop",
    "strides": "P13: the decode step over strided views, against contiguous ones",
    "lengths": "P19: the rate of a prefill with scores on long prompts, against 4096 tokens",
    "evict": "P6: the cut of a prompt to its budget, against topk + sort + gather",
    "simulate": "P7: eviction simulated over a whole text, against a Python loop and dense SDPA",
    "bits": "P14: a decode step over keys and values in eight and four bits, against bfloat16",
    "merging": "P15: what merging adds to a decode step, the cut of a prompt and a simulation",
    "uneven": "P16: a decode step over heads of uneven size, against even ones",
    "overhead": "P9: one call on tiny tensors",
    "portable": "P20: the torch backend on the CPU, against eager with scores and the core's step",
    "threads": "whether torch's operators get slower beside h2o",
    "model": "P8: SmolLM2 from prompt to text, H2OCache against DynamicCache and QuantizedCache",
    "openvino": "P10: the same against OpenVINO GenAI, in an environment of its own",
    "compiled": "P21: a decoded token compiled, by weights, against eager, OpenVINO GenAI and vLLM",
    "batch": "P22: sixteen prompts at a time against DynamicCache, OpenVINO GenAI and vLLM",
    "kvpress": "P11: prefill against kvpress, in an environment of its own",
}

GPU_TABLES = {
    "prefill": "G1: a prompt's attention with scores, against SDPA, FlexAttention and eager",
    "decode": "G2, G3: a decode step with its eviction, against SDPA and FlashInfer",
    "long": "G4: 131072 tokens with scores, against SDPA without",
    "graph": "G5: one CUDA graph for a whole generation, against the same called anew",
    "flexgen": "G6: the authors' row for OPT-6.7B, 24 texts of 2048 + 2048 tokens",
    "kvpress": TABLES["kvpress"],
}
"""What --device cuda has."""

DTYPES = ("float32", "bfloat16", "float16")

QUICK = {"rounds": 2, "prompts": (40,), "tokens": 2}
"""What --quick has where nothing else is said."""

FEWEST_ROUNDS = 5
"""Fewer repetitions than this are no figure."""


@dataclass(frozen=True)
class Options:
    """Attributes:
    rounds: repetitions of each contender.
    dtypes: names among DTYPES; a table leaves out what it has no row for.
    quick: tiny shapes: tries the code, measures nothing.
    prompts: prompt lengths of the whole-model tables.
    tokens: decoded tokens in each round of the whole-model tables.
    device: "cpu", "cuda" or "rehearsal", see `add_arguments`.
    """

    rounds: int = 7
    dtypes: tuple[str, ...] = DTYPES
    quick: bool = False
    prompts: tuple[int, ...] = (512, 2048, 4096, 7500)
    tokens: int = 16
    device: str = "cpu"

    def where(self) -> Any:
        """See `h2o.bench.devices`."""
        from .devices import DEVICES

        return DEVICES[self.device]()

    def wanted(self, *names: str) -> list[tuple[str, Any]]:
        """(name, torch dtype) of those that were asked for."""
        import torch

        return [(name, getattr(torch, name)) for name in names if name in self.dtypes]


def tables(device: str) -> dict[str, str]:
    """Those of a device, name -> what it measures."""
    return TABLES if device == "cpu" else GPU_TABLES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `h2o bench`."""
    told = "; ".join(f"{name}: {text}" for name, text in TABLES.items())
    on_gpu = "; ".join(f"{name}: {text}" for name, text in GPU_TABLES.items())
    add = parser.add_argument
    add("tables", nargs="*", metavar="table", help=f"all of them by default. {told}. With --device "
        f"cuda: {on_gpu}")  # fmt: skip
    add("--device", choices=("cpu", "cuda", "rehearsal"), default="cpu", help="cuda: another list "
        "of tables, on torch's current CUDA device; rehearsal: those on the CPU, in the shapes "
        "of --quick, to see that they run")  # fmt: skip
    add("--rounds", type=int, help=f"repetitions ({Options.rounds})")
    add("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES), metavar="DTYPE",
        help="among %(choices)s")  # fmt: skip
    add("--prompts", nargs="+", type=int, metavar="N", help="prompt lengths of the whole-model "
        f"tables ({' '.join(map(str, Options.prompts))})")  # fmt: skip
    add("--tokens", type=int, help=f"decoded in each round ({Options.tokens})")
    add("--threads", type=int, help="torch's number of threads")
    add("--quick", action="store_true", help="tiny shapes, few rounds: tries everything, "
        "measures nothing")  # fmt: skip
    add("--output", type=Path, default=Path("benchmarks/results"), metavar="FOLDER",
        help="where results are written (%(default)s)")  # fmt: skip
    add("--name", help="of the result files (latest; else the device)")


def check(parser: argparse.ArgumentParser, told: argparse.Namespace) -> Options:
    """The options; ends with an error message for those that make no sense."""
    there = tables(told.device)
    unknown = sorted(set(told.tables) - set(there))
    if unknown:
        parser.error(f"no table {unknown[0]!r}: there are {', '.join(there)}")
    told.quick |= told.device == "rehearsal"
    told.name = told.name or ("latest" if told.device == "cpu" else told.device)
    usual = QUICK if told.quick else {name: getattr(Options, name) for name in QUICK}
    for name, value in usual.items():
        if getattr(told, name) is None:
            setattr(told, name, value)
    if told.rounds < FEWEST_ROUNDS and not told.quick:
        parser.error(f"argument --rounds: fewer than {FEWEST_ROUNDS} are no figure")
    counts = {"rounds": told.rounds, "tokens": told.tokens, "threads": told.threads or 1}
    for name, number in [*counts.items(), *(("prompts", length) for length in told.prompts)]:
        if number < 1:
            parser.error(f"argument --{name}: must be at least 1, not {number}")
    if told.threads == 0:
        parser.error("argument --threads: must be at least 1, not 0")
    return Options(
        told.rounds, tuple(told.dtypes), told.quick, tuple(told.prompts), told.tokens, told.device
    )
