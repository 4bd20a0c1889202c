"""`Masks`: masks over a whole text that `simulated` can apply instead of an H2O cache."""

from __future__ import annotations

from typing import Any, Protocol

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


def check_masks(masks: Any) -> None:
    """Raise TypeError for anything but an object like `Masks`."""
    if isinstance(masks, type):
        raise TypeError(
            f"masks is the class {masks.__name__}; expected an object of it, such as "
            f"masks={masks.__name__}(...)"
        )
    missing = [name for name in ("attend_rows", "name", "has_prompt") if not hasattr(masks, name)]
    if missing:
        raise TypeError(
            "masks must be one of h2o.evaluation.published_masks.MASKS, such as "
            'masks=MASKS["local"], or an object with the method attend_rows and the attributes '
            f"name and has_prompt, not {masks!r}, which has no {missing[0]}"
        )


def attend_rows(masks: Masks, query: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    """Return what `masks.attend_rows` returns for these arguments.

    Raises:
        TypeError: it is not two tensors.
        ValueError: they have other shapes than `Masks` says.
    """
    returned = masks.attend_rows(query, *arguments)
    is_pair = isinstance(returned, tuple) and len(returned) == 2
    if not is_pair or not all(isinstance(x, Tensor) for x in returned):
        raise TypeError(
            f"attend_rows of the masks {masks.name!r} returned {_brief(returned)}; expected the "
            "tensors (out, evicted_at)"
        )
    B, H, N, D = query.shape
    for name, x, shape in zip(
        ("out", "evicted_at"), returned, ((B, N, H, D), (B, H, N)), strict=True
    ):
        if x.shape != shape:
            raise ValueError(
                f"attend_rows of the masks {masks.name!r} returned {name} of shape "
                f"{list(x.shape)}; expected {list(shape)}"
            )
    return returned


def _brief(value: Any) -> str:
    """None by name, other values by their type."""
    return "None" if value is None else f"a {type(value).__name__}"
