"""`Kept`: the keys that a layer of a cache holds now, as tensors, text and plots.

`H2OCache.kept(layer)` returns a `Kept`, which has positions and scores. `h2o.utils.draw` makes text
and plots from them and from the ids of the text that the cache has seen.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o.arguments.plain_values import check_index
from h2o.arguments.torch_values import check_ids, check_mask
from h2o.spans import PINNED


class KeptToken(NamedTuple):
    """A token whose key a layer holds."""

    position: int
    """Index of the token in its row, not counting padding"""
    text: str
    """The token as text"""
    score: float
    """Attention that the key received while held, summed over heads; infinity if pinned"""
    heads: list[int]
    """The key/value heads that hold the key"""


class _Pair(NamedTuple):
    positions: Tensor
    scores: Tensor


class Kept(_Pair):
    """`positions, scores = cache.kept(layer)`, with methods to inspect them.

    `positions` are int64 [B, G, K], ascending, -1 where a row or head holds fewer keys than others.
    `scores` are float32 [B, G, K], 0 where the position is -1, infinity where a key is pinned.

    A cache knows positions, not tokens. Methods that show text therefore need the `input_ids`
    [B, n] or [n] of everything that the cache has seen, such as the result of `generate()`. If the
    prompt was padded, they also need its `attention_mask` [B, m], m <= n. Columns after the mask
    are assumed not to be padding.
    """

    _check_row: Callable[[Tensor, int], None] | None = None
    """Raises ValueError if the ids [n] of a row are not those that the cache had seen. None: they
    are not compared"""

    def columns(self, attention_mask: Any = None) -> Tensor:
        """Convert `positions` to columns of the padded batch: int64 [B, G, K], -1 where empty.

        Columns index padded `input_ids` and the result of `H2OCache.evicted_at`. The mask [B, m]
        covers the prompt. Columns after it, or all without a mask, are assumed not to be padding.
        """
        if attention_mask is None:
            return self.positions
        B, where = len(self.positions), self.positions.device
        mask = check_mask("attention_mask", attention_mask, (B, None), "that of the prompt", where)
        real = mask.sum(1)[:, None, None]
        order = (~mask).long().argsort(dim=1, stable=True)  # real columns first, in their order
        within = self.positions.clamp(min=0).minimum(real - 1).clamp(min=0)
        column = order[:, None].expand(-1, within.shape[1], -1).gather(2, within)
        column = torch.where(self.positions < real, column, mask.shape[1] + self.positions - real)
        return column.masked_fill(self.positions < 0, -1)

    def tokens(
        self,
        tokenizer: Any,
        input_ids: Any,
        *,
        row: int = 0,
        head: int | None = None,
        attention_mask: Any = None,
    ) -> list[KeptToken]:
        """Return the tokens that one row holds, in the order of the text, with their scores.

        Args:
            head: a key/value head; by default all heads together.

        Raises:
            IndexError: there is no such row or head.
            ValueError: `input_ids` does not begin with the text that the cache had seen.
        """
        held, texts = self._held(tokenizer, input_ids, row, head, attention_mask)
        return [
            KeptToken(position, texts[position], sum(by_head.values()), list(by_head))
            for position, by_head in sorted(held.items())
        ]

    def highlight(
        self,
        tokenizer: Any,
        input_ids: Any,
        *,
        row: int = 0,
        head: int | None = None,
        attention_mask: Any = None,
    ) -> Any:
        """Show the whole text in a notebook: held tokens shaded by score, others struck through.

        Arguments and errors are those of `tokens`.
        """
        from h2o.utils.draw import shade_text

        held, texts = self._held(tokenizer, input_ids, row, head, attention_mask)
        scores = [sum(held[j].values()) if j in held else 0.0 for j in range(len(texts))]
        return shade_text(
            texts,
            _cap_pinned_scores(torch.tensor(scores, dtype=torch.float32, device="cpu")).tolist(),
            [j in held for j in range(len(texts))],
        )

    def plot(self, ax: Any = None, *, row: int = 0) -> Any:
        """Plot a heat map with a line per head and a column per position. Bright keys have received
        much attention, as in `Analysis.plot("scores")`. Positions that are not held are gray.

        Draws on matplotlib axes (new ones by default) and returns them."""
        from h2o.utils.draw import axes_or_new

        scores = self._matrix(row)
        ax = axes_or_new(ax, figsize=(8, 2.5))
        from matplotlib.colors import LogNorm

        high = float(scores.nan_to_num(0).max())
        norm = LogNorm(high * 1e-4, high) if high > 0 else None
        image = ax.imshow(
            scores.numpy(), aspect="auto", norm=norm, cmap="inferno", interpolation="nearest"
        )
        ax.set_facecolor("0.8")
        ax.set(title="Keys held", xlabel="position", ylabel="key/value head")
        ax.set_yticks(range(len(scores)))
        ax.figure.colorbar(image, ax=ax, label="attention received")
        return ax

    def _repr_html_(self) -> str:
        """HTML strips for the first rows and heads: positions of held keys, shaded by score."""
        B, G, K = self.positions.shape
        if not K:
            return "<p>The layer holds no keys yet.</p>"
        parts = [f"<p>At most {K} keys in each of {B} x {G} rows and heads</p>"]
        for row in range(min(B, ROWS)):
            scores = self._matrix(row)
            for head, line in enumerate(scores[:ROWS]):
                parts.append(f"<div>row {row}, head {head} {_strip(line)}</div>")
        if B > ROWS or G > ROWS:
            parts.append(f"<p>Only the first {ROWS} rows and heads are shown.</p>")
        return '<div style="font:12px monospace">' + "".join(parts) + "</div>"

    def _held(
        self, tokenizer: Any, input_ids: Any, row: int, head: int | None, attention_mask: Any
    ) -> tuple[dict[int, dict[int, float]], list[str]]:
        """The scores of a row by position and head, and the text of each token of the row."""
        from h2o.utils.draw import pieces

        B, G, _ = self.positions.shape
        row = check_index("row", row, B, "row")
        positions, scores = self.positions[row].tolist(), self.scores[row].tolist()
        heads = range(G) if head is None else [check_index("head", head, G, "head")]
        held: dict[int, dict[int, float]] = {}
        for g in heads:
            for position, score in zip(positions[g], scores[g], strict=True):
                if position >= 0:
                    held.setdefault(position, {})[g] = score
        ids = _row_ids(B, input_ids, row, attention_mask)
        if (last := max(held, default=-1)) >= len(ids):
            raise ValueError(
                f"input_ids has {len(ids)} tokens in row {row}, but the cache holds position "
                f"{last}. Pass the ids of everything it has seen, such as generate()'s result"
            )
        if self._check_row is not None:
            self._check_row(ids, row)
        return held, pieces(tokenizer, ids.tolist())

    def _matrix(self, row: int) -> Tensor:
        """Scores by position: float32 [G, highest position + 1] on the CPU, NaN if not held."""
        row = check_index("row", row, len(self.positions), "row")
        positions, scores = self.positions[row].cpu(), _cap_pinned_scores(self.scores[row].cpu())
        n = int(positions.max()) + 1 if positions.numel() else 0
        matrix = scores.new_full((len(positions), n + 1), torch.nan)
        matrix.scatter_(1, positions % (n + 1), scores)  # empty entries go to the last column
        return matrix[:, :n]


def _row_ids(B: int, input_ids: Any, row: int, attention_mask: Any) -> Tensor:
    """The ids [n] of one of B rows on the CPU, without its padding. For the other arguments see
    `Kept.tokens`."""
    given = check_ids("input_ids", input_ids)
    if len(given) not in (1, B):
        raise ValueError(f"input_ids has {len(given)} rows; expected [n] or [{B}, n]")
    ids = given[row if len(given) == B else 0].cpu()
    if attention_mask is not None:
        if len(getattr(attention_mask, "shape", ())) == 1:
            attention_mask = attention_mask[None]
        wanted = len(given), None
        masks = check_mask("attention_mask", attention_mask, wanted, "as input_ids", "cpu")
        mask = masks[row if len(given) == B else 0]
        if len(mask) > len(ids):
            raise ValueError(
                f"attention_mask has {len(mask)} columns, more than the {len(ids)} of input_ids"
            )
        ids = torch.cat([ids[: len(mask)][mask], ids[len(mask) :]])
    return ids


def _cap_pinned_scores(scores: Tensor) -> Tensor:
    """Replace the scores of pinned keys by the highest score of the others, for drawing."""
    is_pinned = scores == PINNED
    if bool(is_pinned.all()):
        return is_pinned.float()
    return scores.masked_fill(is_pinned, float(scores[~is_pinned].nan_to_num(0).max()))


ROWS = 8
BINS = 200


def _strip(scores: Tensor) -> str:
    """Draw a line [n] of scores, NaN where not held, as a row of colored rectangles (SVG)."""
    from h2o.utils.draw import COLOR, shades

    n = len(scores)
    bins = min(n, BINS)
    cells = []
    spans = [*itertools.pairwise(n * i // bins for i in range(bins + 1))]
    held = [int((~scores[start:stop].isnan()).sum()) for start, stop in spans]
    best = shades([float(scores[start:stop].nan_to_num(0).max()) for start, stop in spans])
    for i, ((start, stop), count, shade) in enumerate(zip(spans, held, best, strict=True)):
        if count:
            where = f"{start}" if stop - start == 1 else f"{start}-{stop - 1}"
            color = f"rgb({COLOR}/{0.25 + 0.75 * shade:.2f})"
            cells.append(
                f'<rect x="{i}" width="1" height="1" style="fill:{color}">'
                f"<title>{where}: {count} held</title></rect>"
            )
    return (
        f'<svg viewBox="0 0 {bins} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="{sum(held)} of {n} keys held" '
        'style="width:100%;height:14px;background:#eee">' + "".join(cells) + "</svg>"
    )
