"""`Analysis`, the result of `h2o.analyze`: measurements and the ways to show them."""

from __future__ import annotations

from typing import Any

import numpy as np

from h2o.analysis.figures import FIGURES
from h2o.analysis.measured_text import MeasuredText
from h2o.utils.draw import axes_or_new, shade_text


class Analysis(MeasuredText):
    """The measurements of `h2o.analyze` in a text. Arrays are NumPy's.

    Letters: L analyzed layers, H query heads, G key/value heads, n tokens. `layer` is the model's
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
        """The text, shaded by score. Keys that a cache no longer holds are struck through.

        Takes the arguments of `tokens`. Returns `h2o.utils.draw.Html`, text that notebooks show.
        """
        tokens = sorted(self.tokens(tokenizer, layer, head, per=per, at=at))
        return shade_text(
            [x.text for x in tokens], [x.score for x in tokens], [x.held for x in tokens]
        )

    def plot(self, figure: str, ax: Any = None, **options: Any) -> Any:
        """Draw one of `h2o.analysis.figures.FIGURES` on matplotlib axes (new ones by default).

        Returns the axes. `options` are those of the figure, such as `layer=` of "scores".
        """
        if figure not in FIGURES:
            raise ValueError(f"figure must be one of {', '.join(FIGURES)}, not {figure!r}")
        ax = axes_or_new(ax, **({"figsize": (8, 3)} if figure == "scores" else {}))
        FIGURES[figure](self, ax, **options)
        return ax

    def table(self, by: str = "layer") -> dict[str, np.ndarray]:
        """Numbers of each layer or query head, as columns: `pandas.DataFrame(a.table("head"))`.

        `sparsity`, `slope`, `r2`, `exponential_r2`, the keys that carry shares of the attention
        (`keys_50` ...), `half_overlap` (a head has its group's), `retained_mass`, and for layers
        the correlations with frequency.
        """
        if by not in ("layer", "head"):
            raise ValueError(f"by must be layer or head, not {by!r}")
        law = self.power_law("layer" if by == "layer" else "query")
        R = self.heads // self.groups
        by_head = {
            "sparsity": self.sparsity(),
            "slope": law.slope,
            "r2": law.r2,
            "exponential_r2": law.exponential_r2,
            **{f"keys_{100 * share:g}": count for share, count in law.keys.items()},
            "half_overlap": self.overlap("half").repeat(R, axis=1),
            "retained_mass": np.stack([self.retained_mass(layer) for layer in self.layers]),
        }
        if by == "head":
            layer, head = np.meshgrid(self.layers, range(self.heads), indexing="ij")
            columns = {"layer": layer, "head": head, **by_head}
            return {name: values.ravel() for name, values in columns.items()}
        means = {name: x.mean(-1) if x.ndim > 1 else x for name, x in by_head.items()}
        frequency = {f"frequency_{name}": x for name, x in self.frequency().items()}
        return {"layer": np.array(self.layers), **means, **frequency}
