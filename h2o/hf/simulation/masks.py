"""`Masks`: masks over a whole text, which `simulated` takes in place of an H2O cache."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Masks(Protocol):
    """A rule by which each row of a text sees some of the keys before it, from `heavy` and `recent`
    alone. `h2o.evaluation.published_masks.MASKS` has those of the H2O paper's authors."""

    @property
    def name(self) -> str:
        """How errors call the rule."""

    @property
    def has_prompt(self) -> bool:
        """Whether rows of a prompt see everything, so that `prompt_length` has a meaning."""

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
        """Attention of each row of a padded batch.

        Args:
            query: [B, H, N, D].
            keys, values: [B, G, N, D].
            real: the columns of each row that are no padding.
            prompts, budgets: prompt length and (heavy, recent), in tokens, of each row.
            scale: factor of q.k, 1 / sqrt(D) by default.

        Returns:
            (out, evicted_at): [B, N, H, D], 0 at padding; [B, H, N] int32 in padded columns.
        """
