"""What a run of the benchmarks was asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Options:
    """Attributes:
    rounds: repetitions of each contender.
    dtypes: names among DTYPES; a table leaves out what it has no row for.
    quick: tiny shapes: tries the code, measures nothing.
    prompts: prompt lengths of the whole-model tables.
    tokens: decoded tokens in each round of the whole-model tables.
    """

    rounds: int = 7
    dtypes: tuple[str, ...] = tuple(DTYPES)
    quick: bool = False
    prompts: tuple[int, ...] = (512, 2048, 4096, 7500)
    tokens: int = 16

    def wanted(self, *names: str) -> list[tuple[str, torch.dtype]]:
        return [(name, DTYPES[name]) for name in names if name in self.dtypes]
