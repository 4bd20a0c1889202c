"""Wrappers that look at a whole prompt once in `generate()`, and at each input of `forward()` anew.

PEFT's prompt tuning puts its embeddings before every input, and an adapter that tokens of the
prompt switch on (aLoRA) is off in a decode step, which has none of them.
"""

from __future__ import annotations

from typing import Any

from h2o import compat
from h2o.errors import UnsupportedError
from h2o.hf.families.wrappers import unwrap

__all__ = ["check_no_tuned_prompt", "check_passes", "check_pins", "continuing", "virtual_tokens"]


def continuing(model: Any) -> Any:
    """The model that takes what follows on the first forward pass over a prompt: without the
    wrapper that would put its embeddings before the text again."""
    return unwrap(model) if virtual_tokens(model) else model


def check_passes(model: Any, what: str) -> None:
    """Checks that a model's forward passes may follow each other; `what` is named in the error.

    Raises:
        UnsupportedError: an adapter that tokens of the prompt switch on.
    """
    if compat.activates_by_tokens(compat.compiled_model(model)):
        raise UnsupportedError(
            f"{what} cannot serve aLoRA: PEFT looks for the invocation tokens in each forward "
            "pass, and a decode step has none of them. Call model.generate() with an H2OCache"
        )


def check_no_tuned_prompt(model: Any, what: str) -> None:
    """Checks what `check_passes` does, where all forward passes over a prompt must be alike."""
    check_passes(model, what)
    if virtual_tokens(model):
        raise UnsupportedError(
            f"{what} cannot serve prompt tuning: PEFT puts its embeddings before the text in each "
            "forward pass. Use h2o.generate_all, or model.generate() with an H2OCache"
        )


def check_pins(model: Any, pinned: Any) -> None:
    """Checks that pinned positions are those of the text.

    Raises:
        UnsupportedError: prompt tuning, whose embeddings are tokens of the row.
    """
    if pinned is not None and (n := virtual_tokens(model)):
        raise UnsupportedError(
            f"pinned counts the tokens of a row, and prompt tuning puts {n} before the text: call "
            f"model.generate() with H2OCache(model.config, pinned=[(start + {n}, stop + {n})])"
        )


def virtual_tokens(model: Any) -> int:
    """Embeddings that prompt tuning puts before a prompt; 0 for any other model."""
    return compat.num_virtual_tokens(compat.compiled_model(model))
