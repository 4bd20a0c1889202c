"""Count the calls of h2o's Python functions in one forward pass of a small model.

    python -m tools.count_calls [--list]

A repeatable measure of what h2o adds to a pass, on any machine: the number of calls, and of the
files that the called functions are in. tests/hf/test_calls.py bounds them.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, NamedTuple

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import h2o
from h2o.compat import with_cache

BUDGETS = {"heavy, recent": {"heavy": 64, "recent": 64}, "budget=0.2": {"budget": 0.2}}


class Calls(NamedTuple):
    """Calls of functions in h2o."""

    by_function: dict[tuple[str, str], int]
    """Number of calls by (file, function)"""

    @property
    def total(self) -> int:
        return sum(self.by_function.values())

    @property
    def files(self) -> int:
        return len({file for file, _ in self.by_function})


def small_model() -> Any:
    """A llama of two layers without training."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=128, max_position_embeddings=512,
        attn_implementation="h2o",
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def count(run: Callable[[], Any]) -> Calls:
    """Count the calls while `run` runs."""
    found: dict[tuple[str, str], int] = collections.Counter()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        path, _, file = frame.f_code.co_filename.rpartition("/h2o/")
        if event == "call" and path:
            found[file, frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return Calls(dict(found))


@torch.no_grad()
def passes() -> dict[str, Calls]:
    """Calls of the passes that are compared, each after one of its kind."""
    model, ids = small_model(), torch.randint(0, 128, (1, 100))
    found = {}
    for name, budget in BUDGETS.items():
        for _ in range(2):
            cache = with_cache(h2o.H2OCache(model, **budget))
            found[f"prompt, {name}"] = count(lambda cache=cache: model(ids, **cache))
        for _ in range(3):
            found[f"step, {name}"] = count(lambda cache=cache: model(ids[:, :1], **cache))
    return found


def main() -> None:
    for name, calls in passes().items():
        print(f"{name:24} {calls.total:5} calls in {calls.files:3} files")
        if "--list" in sys.argv:
            for (file, function), times in sorted(calls.by_function.items()):
                print(f"{times:8} {file}: {function}")


if __name__ == "__main__":
    main()
