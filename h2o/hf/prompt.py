"""How long a prompt is, which fractions are of: told, or what the first forward pass brings."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from h2o.config import H2OConfig
from h2o.hf.conversation import Conversation

__all__ = ["counted", "lengths", "refuse_chunk"]


def counted(
    mask: Tensor | None, B: int, Q: int, config: H2OConfig, conversation: Conversation
) -> list[int]:
    """Tokens of each of B rows of a first pass of Q columns, by their mask [B, Q].

    Q for all where nothing but the room they may take depends on it, and counting them would have
    to wait for the device.
    """
    needed = config.needs_prompt_length and conversation.prompt_length is None
    if mask is None or not (needed or mask.is_cpu):
        return [Q] * B
    tokens: list[int] = mask.sum(1).tolist()
    return tokens


def lengths(config: H2OConfig, given: int | Sequence[int] | None, found: list[int]) -> list[int]:
    """Tokens of each row's prompt: `given`, for all rows or for each, or those of a first pass.

    Errors: ValueError for another number of rows, and where a fraction is of a single token.
    """
    if isinstance(given, int):
        return [given] * len(found)
    if given is not None:
        if len(given) != len(found):
            raise ValueError(
                f"prompt_length has {len(given)} entries for a batch of {len(found)} rows"
            )
        return list(given)
    if config.needs_prompt_length and max(found) == 1:
        raise ValueError(
            "a fraction of a prompt of 1 token: if that is all of it, tell H2OCache "
            "prompt_length=1; if the prompt comes in chunks, tell H2OCache its prompt_length, use "
            "h2o.patched(), or give numbers of tokens"
        )
    return found


def refuse_chunk(config: H2OConfig, conversation: Conversation, seen: int, new: int) -> None:
    """A second forward of several tokens, with no decode step before it, is a chunk.

    Not so in a copy: what is copied and then asked is a prompt, whatever follows. Errors:
    ValueError where the budget is a fraction and the prompt's length was not told.
    """
    if (
        config.needs_prompt_length
        and conversation.prompt_length is None
        and not conversation.copied
    ):
        raise ValueError(
            f"this looks like the second chunk of a prompt, but the budget is a fraction of "
            f"the whole prompt. If it is one, give H2OCache(..., prompt_length="
            f"{seen + new}); if the first {seen} tokens were all of it, prompt_length="
            f"{seen}, or a cache.fork() for each text that follows them. "
            "h2o.patched() and numbers of tokens need neither"
        )
