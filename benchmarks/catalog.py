"""The list of tables, and the devices that have each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from . import (
    attention_tables,
    busy_table,
    decode_tables,
    disk_table,
    echo_table,
    engine_tables,
    eviction_tables,
    latent_table,
    memory_table,
    model_tables,
    random_model_tables,
    serving_table,
    store_tables,
    throughput_tables,
    torch_backend_tables,
)
from .options import Options
from .targets import DEVICES
from .timing import Row


class Table(NamedTuple):
    """A table, by its name on the command line.

    Attributes:
        run: yields the rows, on the device of the options.
        cpu, cuda: what it measures on such a device; None: it has no rows there.
    """

    name: str
    run: Callable[[Options], Iterator[Row]]
    cpu: str | None = None
    cuda: str | None = None


KVPRESS = "P11: prefill against kvpress, in a separate environment"

TABLES = (
    Table(
        "prefill", attention_tables.prefill,
        cpu="P1, P2: a prompt's attention with scores, against SDPA without and eager with",
        cuda="G1: a prompt's attention with scores, against SDPA, FlexAttention and eager",
    ),
    Table(
        "memory", memory_table.memory,
        cpu="P2: the memory that a prefill takes, against eager",
    ),
    Table(
        "decode", decode_tables.decode,
        cpu="P3, P4, P5: a decode step of one layer, against SDPA and a plain read loop",
        cuda="G2, G3: a decode step with its eviction, against SDPA and FlashInfer",
    ),
    Table(
        "lengths", attention_tables.lengths,
        cpu="P19: the rate of a prefill with scores for long prompts, against 4096 tokens",
    ),
    Table(
        "long", attention_tables.long,
        cuda="G4: 131072 tokens with scores, against SDPA without",
    ),
    Table(
        "evict", eviction_tables.evict,
        cpu="P6: the eviction of a prompt to its budget, against topk + sort + gather",
    ),
    Table(
        "simulate", eviction_tables.simulate,
        cpu="P7: eviction simulated over a whole text, against a Python loop and dense SDPA",
    ),
    Table(
        "bits", store_tables.bits,
        cpu="P14: a decode step over keys and values in eight and four bits, against bfloat16",
    ),
    Table(
        "uneven", store_tables.uneven,
        cpu="P16: a decode step over heads with uneven budgets, against even ones",
    ),
    Table(
        "latents", latent_table.latents,
        cpu="P23: a decode step of latent attention with its projections, against transformers",
    ),
    Table(
        "echo", echo_table.echo,
        cpu="P24: a prompt ranked by echo, with equal heads and with one budget, against robust",
    ),
    Table("overhead", decode_tables.overhead, cpu="P9: one call on tiny tensors"),
    Table(
        "portable", torch_backend_tables.portable,
        cpu="P20: the torch backend on the CPU, against eager with scores and the core's step",
    ),
    Table(
        "busy", busy_table.busy,
        cpu="a decode step during 0, 1, 2 and 4 busy processes, against SDPA",
    ),
    Table(
        "model", model_tables.generate,
        cpu="P8: SmolLM2 from prompt to text, H2OCache against DynamicCache and QuantizedCache",
    ),
    Table(
        "openvino", engine_tables.openvino,
        cpu="P10: SmolLM2 from prompt to text, against OpenVINO GenAI in a separate environment",
    ),
    Table(
        "compiled", engine_tables.compiled,
        cpu="P21: compiled decode steps, by weights, against eager, OpenVINO GenAI and vLLM",
    ),
    Table(
        "throughput", throughput_tables.throughput,
        cpu="R1, R2, R3: tokens per second at a fixed number of bytes, against other engines",
    ),
    Table(
        "serving", serving_table.serving,
        cpu="S1 to S4: vLLM with h2o, against vLLM with every key, by number of requests",
    ),
    Table(
        "disk", disk_table.disk,
        cpu="R4: tokens per second with weights on disk, a fifth of the keys against all keys",
    ),
    Table(
        "graph", random_model_tables.graph,
        cuda="G5: one CUDA graph for a whole generation, against steps without a graph",
    ),
    Table(
        "flexgen", random_model_tables.flexgen,
        cuda="G6: the authors' row for OPT-6.7B, 24 texts of 2048 + 2048 tokens",
    ),
    Table("kvpress", model_tables.kvpress, cpu=KVPRESS, cuda=KVPRESS),
)  # fmt: skip


def tables(device: str) -> dict[str, Table]:
    """The tables for a choice of --device, by name."""
    kind = DEVICES[device].tables
    return {table.name: table for table in TABLES if getattr(table, kind)}


def described() -> str:
    """Text for --help: what each table measures."""

    def listed(device: str) -> str:
        texts = {name: getattr(table, device) for name, table in tables(device).items()}
        return "; ".join(f"{name}: {text}" for name, text in texts.items())

    return f"{listed('cpu')}. With --device cuda: {listed('cuda')}"
