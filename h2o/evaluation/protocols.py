"""How log-likelihoods come about with an evicting cache: as tensors of a batch and forward passes.

- "simulate": one forward over context and continuation, in which every row sees what a cache would
  have kept (`h2o.simulated`), from the first token on.
- "drop": the context as prompt through an `H2OCache`, then the continuation token by token. Its
  first token is predicted from the full prompt, before anything is dropped, so answers of one token
  cannot feel the budget; `Tally` counts them.
- "read": the same, but that the prompt is cut to the budget before its question
  (`h2o.evaluation.questions`) is read, as where a document is there before anybody asks.

Rows are padded with a mask, and budgets are each row's own: numbers do not depend on batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from h2o.borrowed import with_cache
from h2o.evaluation.published_masks import MASKS
from h2o.evaluation.setting import Setting
from h2o.hf.cache.cache import H2OCache
from h2o.hf.document.compress import compress_document
from h2o.hf.simulation import simulation

__all__ = [
    "PROTOCOLS",
    "Tally",
    "by_cache",
    "check",
    "documents",
    "one_token_note",
    "padded",
    "simulate",
]

PROTOCOLS = ("simulate", "drop", "read")

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
    """Summed over requests, as `tokens_seen`: at the end of the text ("simulate"), of the prompt
    ("drop") or of the document ("read")."""

    def __add__(self, other: Tally) -> Tally:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Tally(*map(sum, pairs))


def check(setting: Setting, protocol: str, prompt_length: int, ratio_of: str | None) -> str:
    """What fractions refer to; ValueError for what does not go together."""
    if protocol not in PROTOCOLS:
        raise ValueError(f"protocol is simulate, drop or read, not {protocol!r}")
    if setting.reads_twice and protocol != "read":
        raise ValueError(f"{setting.why_no_cache}; use protocol=read")
    if protocol != "simulate":
        if setting.is_mask:
            raise ValueError(f"{setting.why_no_cache}; it goes with protocol=simulate only")
        if prompt_length != 1 or ratio_of not in (None, "prompt"):
            raise ValueError(
                f"protocol={protocol} takes the context as prompt, and fractions of it: "
                "prompt_length and ratio_of are for protocol=simulate"
            )
        return "prompt"
    ratio_of = ratio_of or "text"
    simulation.check(setting.config, MASKS.get(setting.variant), prompt_length, ratio_of)
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


def padded(rows: Sequence[list[int]], left: bool = True, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Rows of tokens as ids [B, n] and a mask [B, n], 0 at a pad."""
    longest = max(map(len, rows))
    ids = torch.full((len(rows), longest), pad, dtype=torch.long, device="cpu")
    mask = torch.zeros_like(ids)
    for row, tokens in enumerate(rows):
        start = longest - len(tokens) if left else 0
        ids[row, start : start + len(tokens)] = ids.new_tensor(tokens)
        mask[row, start : start + len(tokens)] = 1
    return ids, mask


def documents(
    forward: Forward, model: Any, setting: Setting, ids: Tensor, mask: Tensor, tokenizer: Any
) -> H2OCache:
    """A cache that has read left-padded documents [B, n], and been cut to its budget."""
    if setting.reads_twice:
        mask = mask.to(model.device)
        return compress_document(
            model, ids, setting.config, readings=2, attention_mask=mask, tokenizer=tokenizer
        )
    config = setting.config.for_model(model)
    cache = H2OCache(model.config, config, prompt_length=mask.sum(1).tolist())
    forward(1, ids, mask, position_ids=positions(mask), use_cache=True, **with_cache(cache))
    return cache


def positions(mask: Tensor) -> Tensor:
    """Of tokens [B, n], counted from each row's first."""
    return (mask.cumsum(-1) - 1).clamp(min=0)


def by_cache(
    forward: Forward,
    prompts: tuple[Tensor, Tensor],
    continuations: Sequence[list[int]],
    cache: H2OCache,
) -> list[Tensor]:
    """What the cache has not read of left-padded prompts, then all continuations token by token.

    Args:
        prompts: ids and mask [B, n]; the cache holds the first columns already, or none.

    Returns:
        Of each continuation the logits [its tokens, vocabulary].
    """
    longest = prompts[0].shape[1]
    rest = padded([tokens[:-1] for tokens in continuations], left=False)
    ids, mask = (torch.cat(parts, dim=1) for parts in zip(prompts, rest, strict=True))
    places, logits = positions(mask), []
    steps = ((t, t + 1) for t in range(longest, ids.shape[1]))
    for start, stop in [(cache.get_seq_length(), longest), *steps]:
        logits.append(
            forward(
                1,
                ids[:, start:stop],
                mask[:, :stop],
                position_ids=places[:, start:stop],
                **with_cache(cache),
                use_cache=True,
            )
        )
    stacked = torch.cat(logits, dim=1)
    return [stacked[row, : len(tokens)] for row, tokens in enumerate(continuations)]
