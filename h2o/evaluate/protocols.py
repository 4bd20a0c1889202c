"""How log-likelihoods come about with an evicting cache: as tensors of a batch and forward passes.

- "simulate": one forward over context and continuation, in which every row sees what a cache would
  have kept (`h2o.simulated`), from the first token on.
- "drop": the context as prompt through an `H2OCache`, then the continuation token by token. Its
  first token is predicted from the full prompt, before anything is dropped, so answers of one token
  cannot feel the budget; `Tally` counts them.

Rows are padded with a mask, and budgets are each row's own: numbers do not depend on batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from h2o.config import H2OConfig
from h2o.evaluate.setting import Setting
from h2o.hf import simulation
from h2o.hf.cache import H2OCache

__all__ = ["PROTOCOLS", "Tally", "check", "drop", "one_token_note", "simulate"]

PROTOCOLS = ("simulate", "drop")

Forward = Callable[..., Tensor]
"""(last, ids, mask, more arguments for the model) -> logits [B, last, vocabulary] of the last
columns"""


@dataclasses.dataclass
class Tally:
    """What happened since `H2OLM.use`; part of every result file."""

    requests: int = 0
    one_token_answers: int = 0
    truncated: int = 0
    tokens_seen: int = 0
    tokens_kept: int = 0
    """Summed over requests, as `tokens_seen`: at the end of the text ("simulate") or of the
    prompt ("drop")."""


def check(setting: Setting, protocol: str, prompt_length: int, ratio_of: str | None) -> str:
    """What fractions refer to; ValueError for what does not go together."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol is simulate or drop, not {protocol!r}")
    if protocol == "drop":
        if not setting.dropping:
            raise ValueError(f"{setting.why_not_dropping}; use protocol=simulate")
        if prompt_length != 1 or ratio_of not in (None, "prompt"):
            raise ValueError(
                "protocol=drop takes the context as prompt, and fractions of it: prompt_length and "
                "ratio_of are for protocol=simulate"
            )
        return "prompt"
    ratio_of = ratio_of or "text"
    variant = "h2o" if setting.variant == "full" else setting.variant
    simulation.check(setting.config, variant, prompt_length, ratio_of)
    return ratio_of


def one_token_note(answers: int, requests: int) -> str:
    return (
        f"protocol=drop: {answers} of {requests} requests have answers of one "
        "token, which is predicted before anything is dropped: no budget can change them"
    )


def simulate(
    forward: Forward, model: Any, texts: Sequence[list[int]], tails: Sequence[int], **how: Any
) -> list[Tensor]:
    """One forward over the whole texts, right-padded.

    Args:
        tails: tokens at the end of each text that are to be predicted.
        how: the rest of `h2o.simulated`'s arguments.

    Returns:
        Of each text the logits [tail, vocabulary].
    """
    longest = max(map(len, texts)) - 1
    ids = torch.zeros(len(texts), longest, dtype=torch.long, device="cpu")
    mask = torch.zeros_like(ids)
    for row, text in enumerate(texts):
        ids[row, : len(text) - 1] = ids.new_tensor(text[:-1])
        mask[row, : len(text) - 1] = 1
    starts = [len(text) - 1 - tail for text, tail in zip(texts, tails, strict=True)]
    first = min(starts)
    with simulation.simulated(model, **how):
        logits = forward(longest - first, ids, mask, use_cache=False)
    return [
        logits[row, start - first : start - first + tail]
        for row, (start, tail) in enumerate(zip(starts, tails, strict=True))
    ]


def drop(
    forward: Forward,
    model: Any,
    prompts: Sequence[list[int]],
    continuations: Sequence[list[int]],
    config: H2OConfig,
) -> list[Tensor]:
    """The contexts as one left-padded prompt, then all continuations token by token.

    Returns:
        Of each continuation the logits [its tokens, vocabulary].
    """
    longest, steps = max(map(len, prompts)), max(map(len, continuations))
    ids = torch.zeros(len(prompts), longest + steps - 1, dtype=torch.long, device="cpu")
    mask = torch.zeros_like(ids)
    for row, (prompt, continuation) in enumerate(zip(prompts, continuations, strict=True)):
        stop = longest + len(continuation) - 1
        ids[row, longest - len(prompt) : stop] = ids.new_tensor(prompt + continuation[:-1])
        mask[row, longest - len(prompt) : stop] = 1
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    lengths = list(map(len, prompts))
    cache = H2OCache(model.config, config, prompt_length=lengths)
    logits = []
    for start, stop in [(0, longest), *((t, t + 1) for t in range(longest, ids.shape[1]))]:
        logits.append(
            forward(
                1,
                ids[:, start:stop],
                mask[:, :stop],
                position_ids=positions[:, start:stop],
                past_key_values=cache,
                use_cache=True,
            )
        )
    stacked = torch.cat(logits, dim=1)
    return [stacked[row, : len(tokens)] for row, tokens in enumerate(continuations)]
