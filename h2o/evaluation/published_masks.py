"""The masks with which the authors of H2O measured accuracy: which keys each row of a text sees.

The authors (Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
Language Models", NeurIPS 2023; code at github.com/FMInference/H2O) ran one forward pass over the
whole text under a mask instead of a cache that drops keys. Their masks do not all follow the
paper's Algorithm 1. `MASKS` has them by name:

    "local": the masks for lm-eval with OPT and GPT-NeoX, and with LLaMA until April 2024. Rows
        below `heavy` are causal. A later row sees itself, the heavy - 1 best among the keys that
        the row before kept, scored by causal attention that is never renormalized, and the last
        recent + 1 keys.
    "global": the masks for lm-eval with LLaMA since then. Every row sees the last recent + 1 keys
        and, as far as they are not in its future, the `heavy` keys that receive the most causal
        attention from the whole text, **rows of the future included**. No cache can do this.
    "flexgen": the cache of this package, except that the key that drops out of the recent window
        always replaces the lowest of the heavy ones, even if its own score is lower still. (The
        authors' FlexGen code has recent = heavy - 1.)

`tests/reference/published_masks.py` has each of them as a readable mask [n, n].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import numpy as np
import torch
from torch import Tensor

from h2o.attention_blocks import attend_blocks, logit_blocks, visible


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
    """Attention of one text without padding under one of the masks, in blocks of rows. Arguments
    and results are those of `Masks.attend_rows` without the batch axis.

    "flexgen" shares its choice among the heads of a group, as a cache does. The other two choose
    for each query head, as the authors' code does, which repeats the keys.
    """
    H, n, _ = query.shape
    evicted_at = np.full((H, n), n, dtype=np.int32)

    def blocks() -> Iterator[tuple[int, Tensor]]:
        return logit_blocks(query, keys, scale)

    choose = RULES[variant](blocks, evicted_at, len(keys), heavy, recent, prompt_length)

    def hide(first: int, logits: Tensor) -> Tensor:
        choose(first, logits)
        left = torch.from_numpy(evicted_at).to(query.device)
        return ~visible(left, first, *logits.shape[1:])

    out = attend_blocks(query, keys, values, hide, scale=scale)
    return out, torch.from_numpy(evicted_at).to(out.device)


# A rule returns a function (first row, logits) that completes evicted_at for these rows before
# their attention is computed. It is called on all blocks in order. Keys are chosen row by row from
# a few thousand numbers, for which NumPy's calls cost a fraction of torch's.
Choose = Callable[[int, Tensor], None]
Blocks = Callable[[], Iterator[tuple[int, Tensor]]]


def _window_ends(n: int, recent: int) -> np.ndarray:
    """evicted_at [n] of a window of the last recent + 1 keys."""
    return np.minimum(np.arange(n, dtype=np.int32) + recent + 1, n)


def _local(
    blocks: Blocks, evicted_at: np.ndarray, G: int, heavy: int, recent: int, prompt_length: int
) -> Choose:
    """Each row from `heavy` on drops the lowest of the heavy keys before its own key joins them.

    A key is seen as long as it is among the heavy keys or in the window.
    """
    H, n = evicted_at.shape
    window = _window_ends(n, recent)
    if heavy == 0:
        evicted_at[:] = window
        return lambda first, logits: None
    # Keys are in descending order of position, so that argmin, which returns the first of equal
    # values, returns the highest position. +inf marks keys that do not compete.
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
    """One set of keys for all rows, from the column sums of the whole text, future included."""
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
    """The key that leaves the window always replaces the lowest of the heavy keys."""
    H, n = evicted_at.shape
    shared = evicted_at.reshape(G, H // G, n)
    score = np.full((G, n), np.inf, dtype=np.float32)  # descending and +inf as in _local
    every = np.arange(G)

    def drop(newest: int, row: int) -> None:
        """Drop the lowest of the keys at positions up to `newest`."""
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


RULES = {"local": _local, "global": _global, "flexgen": _flexgen}


@dataclasses.dataclass(frozen=True)
class PublishedMasks:
    """One of the masks, for `h2o.simulated(masks=...)`: a `h2o.hf.simulation.masks.Masks`."""

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
        """Compute attention of each row of a padded batch."""
        B, H, N, D = query.shape
        out = query.new_zeros(B, N, H, D)
        evicted_at = torch.zeros(B, H, N, dtype=torch.int32, device=query.device)
        for b, columns in enumerate(real):
            row = query[b, :, columns], keys[b, :, columns], values[b, :, columns]
            how = {"prompt_length": prompts[b], "scale": scale}
            out[b, columns], left = attend(self.name, *row, *budgets[b], **how)
            # The first row that does not see a key comes right after the last row that does.
            after = torch.cat([columns[:1], columns[:-1] + 1, columns.new_tensor([N])])
            evicted_at[b, :, columns] = after[left.long()].int()
        return out, evicted_at


MASKS = {name: PublishedMasks(name, has_prompt=name == "flexgen") for name in RULES}
"""The authors' masks by name."""
