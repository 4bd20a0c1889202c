"""`Masks`: masks over a whole text that `simulated` can apply instead of an H2O cache."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Masks(Protocol):
    """A rule that decides by `heavy` and `recent` alone which earlier keys each token of a text
    sees. `h2o.evaluation.published_masks.MASKS` has the rules of the H2O paper's authors."""

    @property
    def name(self) -> str:
        """The rule's name in errors."""

    @property
    def has_prompt(self) -> bool:
        """Whether a prompt's tokens see all keys before them, so that `prompt_length` matters."""

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
            real: the columns of each row that are not padding.
            prompts, budgets: prompt length and (heavy, recent) of each row, in tokens.
            scale: factor of q.k, 1 / sqrt(D) by default.

        Returns:
            (out, evicted_at): [B, N, H, D], 0 at padding; [B, H, N] int32, as padded columns.
        """
