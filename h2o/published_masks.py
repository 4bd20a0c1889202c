"""Which key each token sees: whole-text masks of the published forms of H2O, in plain torch.

The authors (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative
Inference of Large Language Models", NeurIPS 2023; code at
github.com/FMInference/H2O) measured accuracy not with a cache that drops keys but
with one forward pass over the whole text under a mask, and their masks do
not all follow the paper's Algorithm 1. To compare with published numbers, this
module has each of them by name.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["simulation_mask"]


def simulation_mask(
    logits: Tensor,
    heavy: int | float,
    recent: int | float,
    variant: str = "h2o",
    prompt_len: int = 1,
    sinks: int = 0,
) -> Tensor:
    """Which key each token sees when a whole text goes through one of the published forms of H2O.

    For study and tests: memory is O(n^2) a head, time O(n) torch calls.

    Args:
        logits: [B, H, n, n], scaled q.k; the upper triangle is not read. Each head is on its
            own (R = 1).
        heavy, recent: an int is a number of tokens, a float in [0, 1] a fraction of n,
            int(ratio * n); variant "h2o" takes at least one token where it is not 0.
        variant:
            "h2o": the cache of this package. Rows below `prompt_len` attend causally to
                everything, then the budget is enforced at once and after each further row.
            "local": the authors' masks for lm-eval with OPT and GPT-NeoX, and with LLaMA until
                April 2024. Rows below `heavy` are causal. A later row sees itself and the
                heavy - 1 best among the keys that the row before kept, scored by causal
                attention that is never renormalised, and beside these the last recent + 1 keys.
            "global": the authors' masks for lm-eval with LLaMA since then. Every row sees, as
                far as they are not in its future, the `heavy` keys that receive the most causal
                attention from the whole text, **rows of the future included**, and the last
                recent + 1 keys. No cache can do this.
            "flexgen": as "h2o", but the key that drops out of the recent window always replaces the
                lowest of the heavy ones, even if its own score is lower still. (The authors'
                FlexGen code has recent = heavy - 1.)
        prompt_len: rows before the first eviction, at least 1; "h2o" and "flexgen" only.
        sinks: the first positions, never evicted; "h2o" only.

    Returns:
        [B, H, n, n] bool, true where row i sees key j.

    Raises:
        ValueError: an unknown variant, or an argument that it does not have; other shapes.
        TypeError: logits that are no torch tensor.
    """
    if not isinstance(logits, Tensor):
        raise TypeError(f"logits must be a torch tensor, not {type(logits).__name__}")
    if logits.ndim != 4 or logits.shape[-2] != logits.shape[-1] or logits.numel() == 0:
        raise ValueError(f"logits must be [B, H, n, n], not {list(logits.shape)}")
    n = logits.shape[-1]
    least = 1 if variant == "h2o" else 0
    heavy, recent = _tokens("heavy", heavy, n, least), _tokens("recent", recent, n, least)
    if prompt_len < 1 or sinks < 0:
        raise ValueError(f"prompt_len must be at least 1 ({prompt_len}), sinks 0 ({sinks})")
    if heavy + recent + sinks == 0 and variant in ("h2o", "flexgen"):
        raise ValueError(f"a budget of no key at all: heavy, recent and sinks are 0 (n is {n})")
    if sinks and variant != "h2o":
        raise ValueError(f"variant {variant!r} has no sinks (sinks={sinks})")
    if prompt_len > 1 and variant not in ("h2o", "flexgen"):
        raise ValueError(f"variant {variant!r} has no prompt (prompt_len={prompt_len})")
    logits = logits.double().masked_fill(~_causal(logits), -torch.inf)
    if variant in ("h2o", "flexgen"):
        return _cache_mask(logits, heavy, recent, prompt_len, sinks, variant == "flexgen")
    if variant == "local":
        return _local_mask(logits, heavy) | _band(logits, recent)
    if variant == "global":
        received = logits.softmax(-1).sum(-2)
        best = _best(received, torch.ones_like(received, dtype=torch.bool), heavy)
        return best[..., None, :] & _causal(logits) | _band(logits, recent)
    raise ValueError(f"variant is 'h2o', 'local', 'global' or 'flexgen', not {variant!r}")


def _cache_mask(
    logits: Tensor, heavy: int, recent: int, prompt_len: int, sinks: int, flexgen: bool
) -> Tensor:
    """Row by row: attend to what is held and to itself, add the probabilities, evict."""
    n = logits.shape[-1]
    position = torch.arange(n, device=logits.device)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    held = torch.zeros_like(seen[..., 0, :])
    score = torch.zeros_like(logits[..., 0, :])
    for i in range(n):
        held[..., i] = True
        seen[..., i, :] = held
        p = logits[..., i, :].masked_fill(~held, -torch.inf).softmax(-1)
        score += p.masked_fill(~held, 0.0)  # where one logit is NaN, all of p is
        if i + 1 < prompt_len or i + 1 <= sinks + heavy + recent:
            continue
        reserved = (position < sinks) | (position > i - recent)
        if flexgen and i + 1 > prompt_len and heavy > 0:
            reserved = reserved | (position == i - recent)
            stay = _best(score, held & ~reserved, heavy - 1)
        else:
            stay = _best(score, held & ~reserved, heavy)
        held = held & reserved | stay
    return seen


def _local_mask(logits: Tensor, heavy: int) -> Tensor:
    """The heavy part of variant "local"."""
    p = logits.softmax(-1)
    seen = torch.zeros_like(logits, dtype=torch.bool)
    seen[..., :heavy, :] = _causal(logits)[:heavy]
    score = p[..., :heavy, :].sum(-2)
    kept = torch.zeros_like(seen[..., 0, :])
    kept[..., :heavy] = True
    for i in range(heavy, logits.shape[-1] if heavy else 0):
        kept = _best(score, kept, heavy - 1)
        kept[..., i] = True
        seen[..., i, :] = kept
        score = (score + p[..., i, :]) * kept
    return seen


def _best(score: Tensor, candidates: Tensor, count: int) -> Tensor:
    """[..., n] bool: the `count` highest of the candidates; equal: the lower position; NaN last.

    Sums of probabilities are never negative, so NaN may be -1 and the others -2.
    """
    rank = score.masked_fill(score.isnan(), -1.0).masked_fill(~candidates, -2.0)
    order = rank.argsort(dim=-1, descending=True, stable=True)[..., :count]
    return torch.zeros_like(candidates).scatter(-1, order, True) & candidates


def _causal(logits: Tensor) -> Tensor:
    n = logits.shape[-1]
    return torch.ones(n, n, dtype=torch.bool, device=logits.device).tril()


def _band(logits: Tensor, recent: int) -> Tensor:
    """[n, n]: row i and the keys i - recent to i, which are recent + 1."""
    return _causal(logits).triu(-recent)


def _tokens(name: str, budget: int | float, n: int, least: int) -> int:
    """`least` is what a fraction above 0 comes to at least."""
    if isinstance(budget, float):
        if not 0.0 <= budget <= 1.0:
            raise ValueError(f"{name} as a fraction lies in [0, 1], not {budget}")
        return max(int(budget * n), least if budget > 0 else 0)
    if budget < 0:
        raise ValueError(f"{name} must not be negative, is {budget}")
    return budget
