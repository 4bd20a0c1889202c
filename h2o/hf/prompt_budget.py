"""The budgets (heavy, recent) of each row and head of a layer in tokens, once a prompt is known.

Budgets may be fractions of the prompt: of the length that the user gave, or else of the tokens of
the first forward pass. Plain numbers; the only tensor read is the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from h2o.config import H2OConfig
from h2o.head_budgets import levelled
from h2o.hf.pass_state import PassState

__all__ = ["PromptBudget", "budget_of", "counted", "refuse_chunk"]


class PromptBudget(NamedTuple):
    """The budgets of a layer for the rows of a batch."""

    by_row: list[list[tuple[int, int]]]
    """(heavy, recent) of each row and each head, or one for all heads"""
    widest: list[int]
    """The largest budget k = sinks + heavy + recent of any row; of each head, or of all"""
    raised: bool
    """Whether, in some row, a fraction came to less than one token and was raised to one"""


def counted(
    mask: Tensor | None, B: int, Q: int, config: H2OConfig, pass_state: PassState
) -> list[int]:
    """Tokens of each of B rows of a first pass of Q columns, by their mask [B, Q].

    Q for all where nothing but the room they may take depends on it, and counting them would have
    to wait for the device.
    """
    needed = config.needs_prompt_length and pass_state.prompt_length is None
    if mask is None or not (needed or mask.is_cpu):
        return [Q] * B
    tokens: list[int] = mask.sum(1).tolist()
    return tokens


def budget_of(
    config: H2OConfig,
    prompt_length: int | Sequence[int] | None,
    counts: list[int],
    heads: int,
    part: tuple[int, int],
    row_size: tuple[int, int, float],
) -> PromptBudget:
    """The budgets of a layer.

    Args:
        config: the layer's.
        prompt_length: tokens of the whole prompt of all rows or of each, where the user gave it.
        counts: tokens of each row as they are here, which are taken for the prompt otherwise.
        heads: key/value heads of the layer that are here.
        part: which part of the model's heads they are (`h2o.hf.tensor_parallel`).
        row_size: head dimension, bytes of an element as the model gives it, and rows of a token
            (`H2OConfig.for_keys`).

    Raises:
        ValueError: another number of rows or heads; a fraction of a single token.
    """
    lengths = _lengths(config, prompt_length, counts)
    config = config.for_keys(*row_size)
    by_row = levelled([config.head_tokens(length) for length in lengths], heads, part)
    widest = [config.sinks + max(map(sum, rows)) for rows in zip(*by_row, strict=True)]
    return PromptBudget(by_row, widest, any(map(config.is_raised, filter(None, lengths))))


def _lengths(
    config: H2OConfig, prompt_length: int | Sequence[int] | None, counts: list[int]
) -> list[int]:
    """Tokens of each row's prompt."""
    if isinstance(prompt_length, int):
        return [prompt_length] * len(counts)
    if prompt_length is not None:
        if len(prompt_length) != len(counts):
            raise ValueError(
                f"prompt_length has {len(prompt_length)} entries for a batch of {len(counts)} rows"
            )
        return list(prompt_length)
    if config.needs_prompt_length and max(counts) == 1:
        raise ValueError(
            "a fraction of a prompt of 1 token: if that is all of it, tell H2OCache "
            "prompt_length=1; if the prompt comes in chunks, tell H2OCache its prompt_length, use "
            "h2o.patched(), or give numbers of tokens"
        )
    return counts


def refuse_chunk(config: H2OConfig, pass_state: PassState, seen: int, new: int) -> None:
    """A second forward of several tokens, with no decode step before it, is a chunk.

    Not so in a copy: what is copied and then asked is a prompt, whatever follows.

    Raises:
        ValueError: the budget is a fraction, and the prompt's length was not given.
    """
    if config.needs_prompt_length and pass_state.prompt_length is None and not pass_state.copied:
        raise ValueError(
            f"this looks like the second chunk of a prompt, but the budget is a fraction of "
            f"the whole prompt. If it is one, give H2OCache(..., prompt_length="
            f"{seen + new}); if the first {seen} tokens were all of it, prompt_length="
            f"{seen}, or a cache.fork() for each text that follows them. "
            "h2o.patched() and numbers of tokens need neither"
        )
