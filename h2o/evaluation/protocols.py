"""Protocols: how the log-likelihoods of a batch are computed with an evicting cache.

- "simulate": one forward pass over context and continuation, in which every row sees the keys that
  a cache would have kept (`h2o.simulated`). Eviction starts with the first token.
- "drop": prefill of the context with an `H2OCache`, then the continuation one token at a time. The
  first token of the continuation is predicted from the full prompt, before anything is evicted. No
  budget can change answers of one token; `Tally` counts them.
- "read": as "drop", but the cache is cut before the question of the prompt
  (`h2o.evaluation.questions`), as if the document had been prefilled before anyone asked.

Random eviction, a baseline that no cache has, is simulated in all protocols. The context, or the
document in it, is then the prompt of the simulation.

Rows are padded with a mask and have their own budgets, so results do not depend on batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from h2o.arguments.plain_values import check_choice, check_count
from h2o.compat import with_cache
from h2o.compat_calls import ModelCall
from h2o.evaluation.published_masks import MASKS
from h2o.evaluation.setting import Setting
from h2o.hf.cache.cache import H2OCache
from h2o.hf.document.compress import compress_document
from h2o.hf.model_traits.wrappers import forward_accepts, input_device
from h2o.hf.simulation import checks, simulation

PROTOCOLS = ("simulate", "drop", "read")


@dataclasses.dataclass
class Tally:
    """Counts of requests and tokens since `H2OLM.use`, which are part of every result file."""

    requests: int = 0
    one_token_answers: int = 0
    one_token_contexts: int = 0
    truncated: int = 0
    tokens_seen: int = 0
    tokens_kept: int = 0
    """Number of keys kept at the end of the text ("simulate" without a prompt, and "drop" if the
    prompt is one token), of the prompt or of the document ("read"), summed over requests like
    `tokens_seen`"""

    def __add__(self, other: Tally) -> Tally:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Tally(*map(sum, pairs))


def check(setting: Setting, protocol: str, prompt_length: int) -> None:
    """Raise ValueError for a setting, protocol and prompt length that cannot be combined, and
    TypeError for anything but a `Setting`."""
    if not isinstance(setting, Setting):
        raise TypeError(
            "expected a Setting, such as h2o.evaluation.setting.parse('robust:0.2') or "
            f"h2o.evaluation.setting.from_config(config), not {setting!r}"
        )
    if setting.is_mask and setting.variant not in MASKS:
        raise ValueError(
            f"setting {setting.name!r}: there are no masks {setting.variant!r} in "
            f"h2o.evaluation.published_masks.MASKS, only {', '.join(MASKS)}. Add yours: "
            f"MASKS[{setting.variant!r}] = ..."
        )
    check_choice("protocol", protocol, PROTOCOLS)
    prompt_length = check_count("prompt_length", prompt_length)
    if setting.reads_twice and protocol != "read":
        raise ValueError(f"{setting.why_no_cache}; use protocol=read")
    if protocol != "simulate":
        if setting.is_mask:
            raise ValueError(f"{setting.why_no_cache}; use protocol=simulate")
        if prompt_length != 1:
            raise ValueError(
                f"protocol={protocol} uses the context as the prompt: prompt_length requires "
                "protocol=simulate"
            )
    else:
        checks.check(setting.config, MASKS.get(setting.variant), prompt_length, "text")


def why_no_text(setting: Setting, protocol: str) -> str:
    """Why a setting has no answers to tasks that generate text; empty if it has."""
    if setting.is_random:
        return f"generates text, which needs a cache: leave out {setting.name}, which is simulated"
    if protocol == "simulate" and setting.variant != "full":
        return "generates text, which cannot be simulated: use protocol=drop"
    return ""


def fractions_of(prompt_length: int, ratio_of: str) -> str:
    """What fractional budgets of a text are fractions of: what the setting says (`ratio_of`), or
    all of the "text" if it has no prompt (`prompt_length` 1)."""
    return "text" if prompt_length == 1 else ratio_of


def fraction_base(tokens: int, prompt_length: int) -> int:
    """Number of tokens that fractional budgets of a text of `tokens` tokens refer to."""
    return tokens if prompt_length == 1 else min(tokens, prompt_length)


def one_token_notes(tally: Tally, settings: Iterable[Setting]) -> list[str]:
    """Warnings about requests under protocol=drop that say nothing about the settings."""
    notes, requests = [], tally.requests
    if answers := tally.one_token_answers:
        notes.append(
            f"protocol=drop: {answers} of {requests} requests have answers of one "
            "token, which is predicted before anything is evicted: no budget can change them"
        )
    has_fractions = any(setting.config.needs_prompt_length for setting in settings)
    if has_fractions and (contexts := tally.one_token_contexts):
        notes.append(
            f"protocol=drop: {contexts} of {requests} requests have contexts of one token, as in "
            "tasks of whole texts. A fraction of one token is one key, however long the text is: "
            "use protocol=simulate, or budgets in tokens"
        )
    return notes


WINDOW_REMEDY = "pass --prompt-length, such as half of --window"
CONTEXT_REMEDY = (
    "pass --protocol drop, which makes the context the prompt, or --prompt-length with --perplexity"
)


def without_prompt_notes(settings: Iterable[Setting], remedy: str) -> list[str]:
    """Warnings about settings that rank by echo, for texts that have no prompt to rank.

    Args:
        remedy: what gives the text a prompt, `WINDOW_REMEDY` or `CONTEXT_REMEDY`.
    """
    names = [setting.name for setting in settings if setting.config.score_by == "mean-echo"]
    if not names:
        return []
    return [
        f"{', '.join(names)}: there is no prompt, and so no echo. Keys are ranked by mean "
        "attention, and all heads have equal budgets unless a profile divides them, as in robust "
        f"and robust-bytes. For echo {remedy}"
    ]


@torch.no_grad()
def run_forward(model: Any, last: int, ids: Tensor, mask: Tensor, **more: Any) -> Tensor:
    """Compute logits [B, last, vocabulary] of the last columns."""
    device = input_device(model)
    if forward_accepts(model, "logits_to_keep"):
        more["logits_to_keep"] = last  # the output matrix is the largest one of a small model
    if (positions := more.get("position_ids")) is not None:
        more["position_ids"] = positions.to(device)
    return model(ids.to(device), attention_mask=mask.to(device), **more).logits[:, -last:]


def simulate(model: Any, pairs: Sequence[tuple[list[int], list[int]]], **how: Any) -> list[Tensor]:
    """Run one forward pass over contexts and continuations, right-padded.

    Args:
        pairs: context and continuation of each row.
        how: further arguments of `h2o.simulated`.

    Returns:
        The logits [tokens, vocabulary] of each continuation.
    """
    ids, mask = pad_rows([context + answer[:-1] for context, answer in pairs], left=False)
    first = min(len(context) for context, _ in pairs)
    with simulation.simulated(model, **how):
        logits = run_forward(model, ids.shape[1] - first + 1, ids, mask, use_cache=False)
    return [
        logits[row, len(context) - first : len(context) - first + len(answer)]
        for row, (context, answer) in enumerate(pairs)
    ]


def pad_rows(rows: Sequence[list[int]], left: bool = True, pad: int = 0) -> tuple[Tensor, Tensor]:
    """Pad rows of tokens to ids [B, n] and a mask [B, n], 0 at padding."""
    side = "left" if left else "right"
    texts = [torch.tensor(tokens, dtype=torch.long, device="cpu") for tokens in rows]
    masks = list(map(torch.ones_like, texts))
    ids = pad_sequence(texts, batch_first=True, padding_value=pad, padding_side=side)
    return ids, pad_sequence(masks, batch_first=True, padding_side=side)


def read_documents(
    model: Any, setting: Setting, ids: Tensor, mask: Tensor, tokenizer: Any
) -> H2OCache:
    """Prefill left-padded documents [B, n] with a new cache, and cut the cache to its budget."""
    readings = 2 if setting.reads_twice else 1
    return compress_document(
        model, ids, setting.config, readings=readings, attention_mask=mask, tokenizer=tokenizer
    )


def by_cache(
    model: Any,
    prompts: tuple[Tensor, Tensor],
    continuations: Sequence[list[int]],
    cache: H2OCache,
) -> list[Tensor]:
    """Prefill the rest of left-padded prompts, then feed all continuations one token at a time.

    Args:
        prompts: ids and mask [B, n]. The cache may hold the first padded columns already.

    Returns:
        The logits [tokens, vocabulary] of each continuation.
    """
    longest = prompts[0].shape[1]
    rest = pad_rows([tokens[:-1] for tokens in continuations], left=False)
    ids, mask = (torch.cat(parts, dim=1) for parts in zip(prompts, rest, strict=True))
    positions = (mask.cumsum(-1) - 1).clamp(min=0)  # counted from each row's first token
    logits = []
    steps = ((t, t + 1) for t in range(longest, ids.shape[1]))
    for start, stop in [(cache.get_seq_length(), longest), *steps]:
        new = ids[:, start:stop], mask[:, :stop], positions[:, start:stop]
        with cache.guard.telling(ModelCall.of(model, *new)):
            logits.append(
                run_forward(
                    model, 1, *new[:2], position_ids=new[2], **with_cache(cache), use_cache=True
                )
            )
    stacked = torch.cat(logits, dim=1)
    return [stacked[row, : len(tokens)] for row, tokens in enumerate(continuations)]
