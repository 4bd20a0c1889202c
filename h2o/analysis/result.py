"""What `h2o.analyze` returns: what was measured, and the ways to show it."""

from __future__ import annotations

from typing import Any

from h2o.analysis.figures import FIGURES
from h2o.analysis.measured_text import MeasuredText
from h2o.analysis.tables import as_dict, frame
from h2o.draw import shaded

__all__ = ["Analysis"]


class Analysis(MeasuredText):
    """What `h2o.analyze` measured of a text. Arrays are NumPy's.

    Letters: L analysed layers, H query heads, G key/value heads, n tokens. `layer` is the model's
    number. `per` says whose scores: "kv" (a key/value head, whose query heads are added up, as a
    cache does), "query" (a query head) or "layer" (all of a layer); `head` is a number of these.
    """

    def highlight(
        self,
        tokenizer: Any,
        layer: int,
        head: int | None = None,
        *,
        per: str = "kv",
        at: int | None = None,
    ) -> Any:
        """The text, shaded by score; what a cache no longer holds is struck through.

        Arguments as of `tokens`. Returns `h2o.draw.Html`, text that notebooks show.
        """
        tokens = sorted(self.tokens(tokenizer, layer, head, per=per, at=at))
        return shaded([x.text for x in tokens], [x.score for x in tokens], [x.held for x in tokens])

    def to_pandas(self, table: str = "layers") -> Any:
        """A pandas DataFrame; see `h2o.analysis.tables`.

        Args:
            table: "layers", "heads" (a row for each query head) or "keys" (a row for each key of
                each key/value head).
        """
        return frame(self, table)

    def as_dict(self) -> dict[str, Any]:
        """The numbers that are known by now, without those of single keys: plain, for JSON."""
        return as_dict(self)

    def plot(self, figure: str, ax: Any = None, **options: Any) -> Any:
        """One of `h2o.analysis.figures.FIGURES` on matplotlib axes (new ones by default).

        Returns the axes. `options` are those of the figure, such as `layer=` of "scores".
        """
        if figure not in FIGURES:
            raise ValueError(f"figure must be one of {', '.join(FIGURES)}, not {figure!r}")
        return FIGURES[figure](self, ax, **options)
