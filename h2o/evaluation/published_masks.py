"""The published forms of H2O as masks over a whole text: which keys each row sees.

The authors (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative
Inference of Large Language Models", NeurIPS 2023; code at
github.com/FMInference/H2O) measured accuracy not with a cache that drops keys but
with one forward pass over the whole text under a mask, and their masks do
not all follow the paper's Algorithm 1. To compare with published numbers, this
module has each of them by name, twice: `simulation_mask` is the readable truth, a
mask [n, n]; `attend` does the same in blocks of rows, for texts of any length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from h2o.attention_blocks import logit_blocks, visible

__all__ = ["MASKS", "PublishedMasks", "attend", "simulation_mask"]


def simulation_mask(
    logits: Tensor,
    heavy: int | float,
    recent: int | float,
    variant: str = "h2o",
    prompt_length: int = 1,
    sinks: int = 0,
) -> Tensor:
    """Which keys each row sees when a whole text goes through one of the published forms of H2O.

    For study and tests: memory is O(n^2) a head, time O(n) torch calls.

    Args:
        logits: [B, H, n, n], scaled q.k; the upper triangle is not read. Each head is on its
            own (R = 1).
        heavy, recent: an int is a number of tokens, a float in [0, 1] a fraction of n,
            int(ratio * n); variant "h2o" takes at least one token where it is not 0.
        variant:
            "h2o": the cache of this package. Rows below `prompt_length` attend causally to
                everything, then the budget is enforced at once and after each further row.
            "local": the authors' masks for lm-eval with OPT and GPT-NeoX, and with LLaMA until
                April 2024. Rows below `heavy` are causal. A later row sees itself and the
                heavy - 1 best among the keys that the row before kept, scored by causal
                attention that is never renormalized, and beside these the last recent + 1 keys.
            "global": the authors' masks for lm-eval with LLaMA since then. Every row sees, as
                far as they are not in its future, the `heavy` keys that receive the most causal
                attention from the whole text, **rows of the future included**, and the last
                recent + 1 keys. No cache can do this.
            "flexgen": as "h2o", but the key that drops out of the recent window always replaces the
                lowest of the heavy ones, even if its own score is lower still. (The authors'
                FlexGen code has recent = heavy - 1.)
        prompt_length: rows before the first eviction, at least 1; "h2o" and "flexgen" only.
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
    if prompt_length < 1 or sinks < 0:
        raise ValueError(f"prompt_length must be at least 1 ({prompt_length}), sinks 0 ({sinks})")
    if heavy + recent + sinks == 0 and variant in ("h2o", "flexgen"):
        raise ValueError(f"a budget of no key at all: heavy, recent and sinks are 0 (n is {n})")
    if sinks and variant != "h2o":
        raise ValueError(f"variant {variant!r} has no sinks (sinks={sinks})")
    if prompt_length > 1 and variant not in ("h2o", "flexgen"):
        raise ValueError(f"variant {variant!r} has no prompt (prompt_length={prompt_length})")
    logits = logits.double().masked_fill(~_causal(logits), -torch.inf)
    if variant in ("h2o", "flexgen"):
        return _cache_mask(logits, heavy, recent, prompt_length, sinks, variant == "flexgen")
    if variant == "local":
        return _local_mask(logits, heavy) | _band(logits, recent)
    if variant == "global":
        received = logits.softmax(-1).sum(-2)
        best = _best(received, torch.ones_like(received, dtype=torch.bool), heavy)
        return best[..., None, :] & _causal(logits) | _band(logits, recent)
    raise ValueError(f"variant is 'h2o', 'local', 'global' or 'flexgen', not {variant!r}")


def _cache_mask(
    logits: Tensor, heavy: int, recent: int, prompt_length: int, sinks: int, flexgen: bool
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
        if i + 1 < prompt_length or i + 1 <= sinks + heavy + recent:
            continue
        reserved = (position < sinks) | (position > i - recent)
        if flexgen and i + 1 > prompt_length and heavy > 0:
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


def attend(
    variant: str,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    heavy: int,
    recent: int,
    *,
    prompt_length: int = 1,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one text without pads under a variant of `simulation_mask`, in blocks of rows.

    Shapes have no batch axis.

    Args:
        variant: "local", "global" or "flexgen"; "h2o" is `h2o.ops.simulate`.
        query: [H, n, D].
        keys, values: [G, n, D], H = G * R.
        heavy, recent: numbers of tokens; see `simulation_mask`.
        prompt_length: tokens before the first eviction, "flexgen" only.
        scale: factor of q.k, 1 / sqrt(D) by default.

    Returns:
        (out, evicted_at): [n, H, D] like `query`; [H, n] int32, the first row that no longer sees
        the key, n if none. "flexgen" shares its choice among the heads of a group, as a cache
        does. The other two choose for each query head, as the authors' code does, which
        repeats the keys.
    """
    H, n, D = query.shape
    rule = {"local": _local, "global": _global, "flexgen": _flexgen}[variant]
    evicted_at = np.full((H, n), n, dtype=np.int32)
    if scale is None:
        scale = D**-0.5

    def blocks() -> Iterator[tuple[int, Tensor]]:
        return logit_blocks(query, keys, scale)

    out = torch.empty(n, H, D, dtype=query.dtype, device=query.device)
    grouped = values.float().repeat_interleave(H // len(keys), dim=0)
    choose = rule(blocks, evicted_at, len(keys), heavy, recent, prompt_length)
    for first, logits in blocks():
        choose(first, logits)
        rows, seen = logits.shape[1:]
        seen_keys = visible(torch.from_numpy(evicted_at).to(out.device), first, rows, seen)
        p = logits.masked_fill(~seen_keys, -torch.inf).softmax(-1)
        out[first : first + rows] = (p @ grouped[:, :seen]).transpose(0, 1).to(out.dtype)
    return out, torch.from_numpy(evicted_at).to(out.device)


# A rule returns a function (first row, logits) that completes evicted_at for these rows, before
# they are attended. It is called on all blocks in order. Choosing is one row after the other on
# a few thousand numbers, which NumPy does at a fraction of torch's cost per call.
Choose = Callable[[int, Tensor], None]
Blocks = Callable[[], Iterator[tuple[int, Tensor]]]


def _window_ends(n: int, recent: int) -> np.ndarray:
    """evicted_at [n] of a window of the last recent + 1 keys."""
    return np.minimum(np.arange(n, dtype=np.int32) + recent + 1, n)


def _local(
    blocks: Blocks, evicted_at: np.ndarray, G: int, heavy: int, recent: int, prompt_length: int
) -> Choose:
    """Rows from `heavy` on drop the lowest of the heavy keys before they join them.

    The window is or-ed on top, so a key is seen until it is in neither.
    """
    H, n = evicted_at.shape
    window = _window_ends(n, recent)
    if heavy == 0:
        evicted_at[:] = window
        return lambda first, logits: None
    # Keys lie in descending order, so that argmin, which takes the first of equals, takes the
    # highest position. +inf marks keys that are not in competition.
    score = np.full((H, n), np.inf, dtype=np.float32)
    every = np.arange(H)

    def choose(first: int, logits: Tensor) -> None:
        rows, seen = logits.shape[1:]
        received = logits.softmax(-1).flip(-1).cpu().numpy()
        for i in range(first, first + rows):
            if i >= heavy:
                victim = score.argmin(-1)
                score[every, victim] = np.inf
                position = n - 1 - victim
                evicted_at[every, position] = np.maximum(window[position], i)
            score[:, n - 1 - i] = 0.0
            score[:, n - seen :] += received[:, i - first]

    return choose


def _global(
    blocks: Blocks, evicted_at: np.ndarray, G: int, heavy: int, recent: int, prompt_length: int
) -> Choose:
    """A fixed set for all rows, from the column sums of the whole text. It knows the future."""
    H, n = evicted_at.shape
    received = torch.zeros(H, n, dtype=torch.float32, device="cpu")
    for _, logits in blocks():
        received[:, : logits.shape[-1]] += logits.softmax(-1).sum(-2).cpu()
    best = received.argsort(dim=-1, descending=True, stable=True)[:, :heavy].numpy()
    evicted_at[:] = _window_ends(n, recent)
    np.put_along_axis(evicted_at, best, n, axis=-1)
    return lambda first, logits: None


def _flexgen(
    blocks: Blocks, evicted_at: np.ndarray, G: int, heavy: int, recent: int, prompt_length: int
) -> Choose:
    """The key next to the window replaces the lowest of the heavy ones, unconditionally."""
    H, n = evicted_at.shape
    shared = evicted_at.reshape(G, H // G, n)
    score = np.full((G, n), np.inf, dtype=np.float32)  # descending and +inf as in _local
    every = np.arange(G)

    def drop(newest: int, row: int) -> None:
        """Of the keys at positions up to `newest` the lowest."""
        victim = n - 1 - newest + score[:, n - 1 - newest :].argmin(-1)
        score[every, victim] = np.inf
        shared[every, :, n - 1 - victim] = row

    def choose(first: int, logits: Tensor) -> None:
        rows, seen = logits.shape[1:]
        grouped = logits.flip(-1).cpu().numpy().reshape(G, H // G, rows, seen)
        for i in range(first, first + rows):
            score[:, n - 1 - i] = 0.0
            held = np.isfinite(score[:, n - seen :]) | np.isnan(score[:, n - seen :])
            p = np.where(held[:, None], grouped[:, :, i - first], -np.inf)
            p = np.exp(p - p.max(-1, keepdims=True))
            score[:, n - seen :] += (p / p.sum(-1, keepdims=True)).sum(1)
            count = i + 1
            if count < prompt_length or count <= heavy + recent:
                continue
            joins = 1 if count > prompt_length and heavy > 0 else 0
            for _ in range(int(held[0].sum()) - heavy - recent):
                drop(i - recent - joins, count)

    return choose


@dataclasses.dataclass(frozen=True)
class PublishedMasks:
    """A variant of `simulation_mask` as `h2o.simulated(masks=...)` takes it; its arguments are
    those of `h2o.hf.simulation.masks.Masks`."""

    name: str
    has_prompt: bool

    def attend_rows(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        real: list[Tensor],
        prompts: list[int],
        budgets: list[tuple[int, int]],
        scale: float | None,
    ) -> tuple[Tensor, Tensor]:
        """Attention of each row of a padded batch."""
        B, H, N, D = query.shape
        out = query.new_zeros(B, N, H, D)
        evicted_at = torch.zeros(B, H, N, dtype=torch.int32, device=query.device)
        for b, columns in enumerate(real):
            row = query[b, :, columns], keys[b, :, columns], values[b, :, columns]
            how = {"prompt_length": prompts[b], "scale": scale}
            out[b, columns], left = attend(self.name, *row, *budgets[b], **how)
            # The row that is the first not to see a key stands right after the last that does.
            after = torch.cat([columns[:1], columns[:-1] + 1, columns.new_tensor([N])])
            evicted_at[b, :, columns] = after[left.long()].int()
        return out, evicted_at


MASKS = {
    name: PublishedMasks(name, has_prompt=name == "flexgen")
    for name in ("local", "global", "flexgen")
}
"""The authors' masks by name."""
