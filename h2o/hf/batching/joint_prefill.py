"""Prefill of several prompts of `h2o.generate_all` in one forward pass.

A forward pass reads all weights, however few tokens it has, and on a GPU it takes as long as the
launch of its kernels. Consecutive short prompts therefore share a pass, padded on the left, in a
cache with one row for each prompt. Prefilled one by one they would take longer by these factors:

    8 prompts of   8 tokens: 2.7    32 tokens: 1.6    128 tokens: 1.15   (SmolLM2, one thread, AVX2)
    64 prompts of 16 tokens: 8.6    64 tokens: 6.9    128 tokens: 4.6    (Llama-3.1-8B's size, H200)
The keys that a row keeps depend on its own tokens only.

A graph takes longer prompts together too, and packs them into one row of tokens instead of padding
them (`h2o.hf.batching.compiled_prefill`).

Shape letter: B prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from h2o.compat import accepts, with_cache
from h2o.hf.batching.request import ActiveRequest
from h2o.hf.cache.cache import H2OCache
from h2o.hf.model_traits.wrappers import input_device, unwrap

TOKENS_A_STEP = 2048
"""Prompt tokens to prefill between two decode steps, like vLLM's `max_num_batched_tokens`. With
fewer, rows stay idle; with more, active rows wait."""


class Limits(NamedTuple):
    """Limits of a pass over several prompts."""

    tokens: int
    """Tokens, with padding, beyond which a larger pass makes a token hardly cheaper."""
    pads: int
    """Padding tokens that one more prompt may add. They take less time than a pass of its own."""


ON_CPU = Limits(tokens=512, pads=32)
ELSEWHERE = Limits(tokens=2048, pads=512)
"""On the H200 each pass that is avoided saves 34 ms, the time of 1,900 tokens in a large pass."""


def can_share(request: ActiveRequest) -> bool:
    """Whether a prompt can be prefilled together with others: in one chunk, without prefix or pins,
    with the config of the call, and by a model that keeps padded rows apart."""
    guard, settings = request.cache.guard, request.settings
    return (
        request.tokens_prefilled == 0
        and request.generation_config.prefill_chunk_size is None
        and request.cache.config == settings.config
        and not (guard.pins or guard.has_states or guard.rope_deltas.is_possible)
        and not (settings.virtual or settings.angles)
        and accepts(unwrap(settings.model).forward, "position_ids")
    )


def fits(request: ActiveRequest, group: Sequence[ActiveRequest]) -> bool:
    """Whether a prompt is prefilled with a group of others that all can share a pass."""
    compiled = group[0].compiled_prefill
    if not can_share(request) or request.compiled_prefill is not compiled:
        return False
    if compiled is not None:
        tokens = sum(x.prompt_tokens for x in (*group, request))
        return len(group) < compiled.prompts and tokens <= TOKENS_A_STEP
    on_cpu = input_device(request.settings.model).type == "cpu"
    limits = ON_CPU if on_cpu else ELSEWHERE
    lengths = [x.prompt_tokens for x in group]
    longest = max(*lengths, request.prompt_tokens)
    before, after = len(group) * max(lengths), (len(group) + 1) * longest
    pads = after - before - request.prompt_tokens
    return after <= limits.tokens and pads <= limits.pads


def prefill_together(group: Sequence[ActiveRequest]) -> tuple[H2OCache, Tensor]:
    """Prefill the prompts of a group.

    Returns:
        A cache with a row for each prompt, and logits [B, vocabulary] of their first new tokens.
    """
    compiled = group[0].compiled_prefill
    with torch.no_grad():
        if compiled is None:
            prefilled = _prefill_padded(group)
        else:
            logits = compiled.prefill([x.ids for x in group], **group[0].last_logits)
            prefilled = compiled.cache, logits
    for request in group:
        request.tokens_prefilled = request.prompt_tokens
    return prefilled


def _prefill_padded(group: Sequence[ActiveRequest]) -> tuple[H2OCache, Tensor]:
    settings, lengths = group[0].settings, [x.prompt_tokens for x in group]
    rows = [x.ids[0] for x in group]
    ids, mask = (
        pad_sequence(x, batch_first=True, padding_side="left")
        for x in (rows, [torch.ones_like(row) for row in rows])
    )
    cache = H2OCache(settings.model.config, settings.config, prompt_length=lengths)
    output = settings.model(
        input_ids=ids,
        attention_mask=None if min(lengths) == max(lengths) else mask,
        position_ids=(mask.cumsum(1) - 1).clamp(min=0),
        use_cache=True,
        **with_cache(cache),
        **group[0].last_logits,
    )
    logits: Tensor = output.logits[:, -1]
    return cache, logits
