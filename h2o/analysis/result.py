"""`Analysis`, the result of `h2o.analyze`: measures one text, and summarizes and plots it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import Tensor

from h2o.analysis import measures, removal
from h2o.analysis.collect import Attention, attend, forward, sparsity, watch
from h2o.analysis.figures import FIGURES
from h2o.analysis.given_config import resolve_for_text
from h2o.arguments import plain_values
from h2o.config import H2OConfig
from h2o.config.layer_plan import LayerPlan
from h2o.hf.rotary.length_dependent_rope import LengthDependentRope
from h2o.hf.simulation.simulation import simulated
from h2o.utils.draw import axes_or_new, pieces, shade_text

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from h2o.config.fields import ConfigFields

KINDS = "kv", "query", "layer"
THRESHOLD = 0.01
"""The H2O paper's threshold: attention weights below this share of their row's maximum are tiny."""


@dataclasses.dataclass(frozen=True)
class Cached:
    """Measurements of one layer with a cache."""

    evicted_at: np.ndarray
    """[G, n] int32, the first token that no longer sees the key, n if none"""
    retained: np.ndarray
    """[H, n] float32, the share of a full cache's attention that each token keeps"""


class Token(NamedTuple):
    """One key of a layer."""

    position: int
    text: str
    score: float
    """Attention received, with nothing evicted"""
    held: float
    """1 if a cache still holds the key, else 0; for a whole layer the share of heads that do"""


class Analysis:
    """The measurements of `h2o.analyze` on one text. Arrays are NumPy arrays.

    Shape letters: L analyzed layers, H query heads, G key/value heads, n tokens. `layer` is the
    layer's number in the model. `per` selects scores: "kv" (of a key/value head, summed over its
    query heads as in a cache), "query" (of a query head) or "layer". `head` is a number of these.
    The methods raise ValueError for a layer that was not analyzed and for other wrong arguments.
    """

    def __init__(self, model: Any, ids: Tensor, config: H2OConfig, prompt_length: int) -> None:
        """Measure a text [n] without padding."""
        self.model, self.config, self.prompt_length = model, config, prompt_length
        self.ids: np.ndarray = ids.cpu().numpy()
        """int64 [n], the text without padding"""
        self._tensor = ids
        scores: dict[int, np.ndarray] = {}
        small: dict[int, np.ndarray] = {}

        def visit(layer: int, seen: Attention) -> Tensor:
            out, received = attend(seen)
            if not received.isfinite().all():
                raise ValueError(
                    f"the attention of layer {layer} is not finite, so nothing can be measured: "
                    "load the model in bfloat16 or float32 if it is in float16, and check its "
                    "weights"
                )
            scores[layer] = received.cpu().numpy()
            small[layer] = sparsity(seen, THRESHOLD).cpu().numpy()
            return out

        watch(model, ids, visit)
        self._scores_at, self._small = {len(ids) - 1: scores}, {THRESHOLD: small}
        self.layers = sorted(small)
        """Numbers of the layers with full attention"""
        self.caches: dict[H2OConfig, dict[int, Cached]] = {}
        """Results of `simulate_cache` so far, by config and layer"""
        self.removals: dict[tuple[str, float, int, int], float] = {}
        """Results of `removal` so far: perplexity by (kind, share, tokens, seed)"""
        self.groups = len(self.evicted_at(self.layers[0]))
        """G"""
        self.heads = len(self._small[THRESHOLD][self.layers[0]])
        """H"""

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self.ids)

    def __repr__(self) -> str:
        shape = f"{len(self.layers)} layers, {self.heads} query and {self.groups} key/value heads"
        return f"<Analysis of {len(self)} tokens: {shape}>"

    # ---- scores, and the keys with the highest ---------------------------------------------------

    def scores(self, layer: int, per: str = "kv", *, at: int | None = None) -> np.ndarray:
        """Attention that each key receives, with nothing evicted: float32 [G, n], [H, n] or [n].

        With `at` only the tokens up to `at` count, and the last axis is at + 1. All scores of a
        layer add up to the number of queries times the number of query heads, or to less if learned
        sinks take a share.
        """
        per, scores = (
            plain_values.check_choice("per", per, KINDS),
            self._scores_up_to(at)[self._check_layer(layer)],
        )
        if per == "kv":
            return scores.reshape(self.groups, -1, scores.shape[-1]).sum(1)
        return scores if per == "query" else scores.sum(0)

    def heavy(self, layer: int) -> int:
        """Number of keys of a layer that count as heavy hitters: `heavy` of the config."""
        layers = self.model.config.get_text_config(decoder=True).num_hidden_layers
        plan = LayerPlan.of(self.config, self._check_layer(layer), layers)
        number, _ = plan.tokens(len(self))
        if not number:
            raise ValueError("this config has no heavy hitters: set heavy above 0")
        return min(number, len(self))

    def evicted_at(self, layer: int) -> np.ndarray:
        """The first token that would no longer see each key, n if none: int32 [G, n]."""
        return self.simulate_cache()[self._check_layer(layer)].evicted_at

    def tokens(
        self,
        tokenizer: Any,
        layer: int,
        head: int | None = None,
        *,
        per: str = "kv",
        at: int | None = None,
    ) -> list[Token]:
        """All keys of a layer, evicted ones included, by decreasing score.

        Args:
            head: number of a head of kind `per`. By default the whole layer is used.
            at: the token that sees the keys, by default the last one. Scores count the tokens up to
                it, and `held` says whether a cache would have the key or it is the token's own.
        """
        at, per = self._check_step(at), plain_values.check_choice("per", per, KINDS)
        scores = self.scores(layer, "layer" if head is None else per, at=at)
        held = (self.evicted_at(layer)[:, : at + 1] > at).astype(float)
        if head is None:
            held = held.mean(0)
        else:
            head = plain_values.check_integer("head", head)
            if per == "layer" or not 0 <= head < len(scores):
                raise ValueError(
                    f'there is no head {head} with per="{per}": kv has {self.groups} heads, query '
                    f"{self.heads}"
                )
            held = held[head * self.groups // len(scores)]
            scores = scores[head]
        texts = pieces(tokenizer, self.ids[: at + 1])
        return [
            Token(int(j), texts[j], float(scores[j]), float(held[j]))
            for j in np.argsort(-scores, kind="stable")
        ]

    # ---- the paper's observations --------------------------------------------------------------

    def sparsity(self, threshold: float = THRESHOLD) -> np.ndarray:
        """Share of attention entries below `threshold` times their row's maximum: float64 [L, H].

        A head has n (n + 1) / 2 causal entries. See figure 2a of the paper. A threshold other than
        0.01 takes another forward pass.
        """
        threshold = plain_values.check_fraction("threshold", threshold, zero=False)
        if threshold not in self._small:
            small: dict[int, np.ndarray] = {}

            def visit(layer: int, seen: Attention) -> Tensor:
                small[layer] = sparsity(seen, threshold).cpu().numpy()
                return attend(seen)[0]

            watch(self.model, self._tensor, visit)
            self._small[threshold] = small
        return np.stack([self._small[threshold][layer] for layer in self.layers])

    def power_law(self, per: str = "layer") -> measures.PowerLaw:
        """Decrease of the scores with rank, and number of keys that carry most of the attention.

        Arrays are [L], or [L, G] or [L, H] with `per` "kv" or "query". See figure 2b of the paper.
        """
        return measures.power_law(self._all_scores(per))

    def overlap(self, by: str = "layer", per: str = "kv") -> np.ndarray:
        """Jaccard index of pairs of sets of heavy hitters: the common ones over all.

        Args:
            by: "layer" compares each pair of layers, with heads added up: [L, L]. "head" compares
                each pair of heads of a layer: [L, G, G] or [L, H, H]. "half" compares two choices
                among the keys of the text's first half, by the queries of the first half and of
                the second half: [L, G] or [L, H].
        """
        by = plain_values.check_choice("by", by, ("layer", "head", "half"))
        per = plain_values.check_choice("per", per, KINDS)
        if by == "head" and per == "layer":
            raise ValueError('overlap(by="head") compares heads: per must be "kv" or "query"')
        if by == "half":
            return np.stack([self._overlap_of_halves(layer, per) for layer in self.layers])
        per = "layer" if by == "layer" else per
        sets = [measures.top(self.scores(x, per), self.heavy(x)) for x in self.layers]
        return measures.jaccard(np.stack(sets))

    def _overlap_of_halves(self, layer: int, per: str) -> np.ndarray:
        half = len(self) // 2
        early = self.scores(layer, per, at=half - 1)
        late = self.scores(layer, per)[..., :half] - early
        k = min(self.heavy(layer), max(half // 2, 1))
        first, second = measures.top(early, k), measures.top(late, k)
        return (first & second).sum(-1) / (first | second).sum(-1)

    def frequency(self) -> dict[str, np.ndarray]:
        """Spearman's rank correlation of attention with a token's count in the text, each [L].

        Each distinct token is one observation. Its attention is that of all its occurrences
        ("sum") or the mean per occurrence ("mean"). Figure 2c of the paper shows sums. Of two
        tokens with equal means the more frequent one has the higher sum.
        """
        counts, sums = measures.per_type(self.ids, self._all_scores("layer"))
        attention = {"sum": sums, "mean": sums / counts}
        return {
            name: np.array([measures.spearman(row, counts) for row in rows])
            for name, rows in attention.items()
        }

    def removal(
        self,
        shares: Sequence[float] = (0.05, 0.1, 0.2),
        *,
        limit: int | None = None,
        seed: int = 0,
    ) -> dict[str, dict[float, float]]:
        """Perplexity without the heaviest keys, without random keys and without the newest keys.

        `h2o.analysis.removal` says how they are removed. Each share takes three forward passes, in
        blocks of rows. See figure 2d of the paper.

        Args:
            shares: shares of the keys before each token.
            limit: use only the first `limit` tokens.
            seed: seed of the random keys.

        Returns:
            `{"full": {0.0: perplexity}, "heavy": {share: perplexity}}`, and "random" and "recent".
        """
        listed, seed = plain_values.check_fractions("shares", shares), plain_values.check_seed(seed)
        ids = self._tensor[: None if limit is None else plain_values.check_count("limit", limit, 2)]

        def cell(kind: str, share: float) -> float:
            key = kind, share, len(ids), seed if kind == "random" else 0
            if key not in self.removals:
                self.removals[key] = (
                    removal.perplexity(forward(self.model, ids, logits=True), ids)
                    if kind == "full"
                    else removal.perplexity_without(self.model, ids, kind, share, seed)
                )
            return self.removals[key]

        table = {kind: {share: cell(kind, share) for share in listed} for kind in removal.KINDS}
        return {"full": {0.0: cell("full", 0.0)}, **table}

    # ---- what a cache would do -----------------------------------------------------------------

    def retained_mass(
        self,
        layer: int,
        *,
        per_token: bool = False,
        h2o_config: H2OConfig | None = None,
        **parameters: Unpack[ConfigFields],
    ) -> np.ndarray:
        """Share of a full cache's attention that is kept: float32 [H], with `per_token` [H, n].

        For a token this is the softmax over all keys, summed over those that a cache with the
        config would hold when it comes. Another config, as for `analyze`, takes another pass.
        """
        per_token = plain_values.check_flag("per_token", per_token)
        chosen, given = self.config, (h2o_config, parameters, self.retained_mass)
        if h2o_config is not None or parameters:
            chosen = resolve_for_text(*given, self.model, len(self))
        mass = self.simulate_cache(chosen)[self._check_layer(layer)].retained
        return mass if per_token else mass.mean(-1)

    def simulate_cache(self, config: H2OConfig | None = None) -> dict[int, Cached]:
        """Each layer's evictions and retained mass with a cache of this or another config."""
        config = self.config if config is None else config
        if config not in self.caches:
            with simulated(
                self.model, config, prompt_length=self.prompt_length, trace=True, mass=True
            ) as simulation:
                forward(self.model, self._tensor)
            self.caches[config] = {
                layer: Cached(
                    simulation.evicted_at(layer)[0].cpu().numpy(),
                    simulation.retained_mass(layer, per_token=True)[0].cpu().numpy(),
                )
                for layer in self.layers
            }
        return self.caches[config]

    # ---- ways to show it -------------------------------------------------------------------------

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
        _, texts, scores, held = zip(*tokens, strict=True)
        return shade_text(texts, scores, held)

    def plot(self, figure: str, ax: Any = None, **options: Any) -> Any:
        """Draw one of `h2o.analysis.figures.FIGURES` on matplotlib axes (new ones by default).

        Returns the axes. `options` are those of the figure, such as `layer=` of "scores".
        """
        figure = plain_values.check_choice("figure", figure, tuple(FIGURES))
        ax = axes_or_new(ax, **({"figsize": (8, 3)} if figure == "scores" else {}))
        FIGURES[figure](self, ax, **options)
        return ax

    def table(self, by: str = "layer") -> dict[str, np.ndarray]:
        """Numbers of each layer or query head, as columns: `pandas.DataFrame(a.table("head"))`.

        The columns are `sparsity`, `slope`, `r2`, `exponential_r2`, the numbers of keys that carry
        shares of the attention (`keys_50` ...), `half_overlap` (a query head has the value of its
        group), `retained_mass`, and for layers the correlations with frequency.
        """
        by = plain_values.check_choice("by", by, ("layer", "head"))
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

    def _check_layer(self, layer: int) -> int:
        layer = plain_values.check_integer("layer", layer)
        if layer not in self.layers:
            raise ValueError(f"layer {layer} was not analyzed; choose from {self.layers}")
        return layer

    def _check_step(self, at: int | None) -> int:
        last = len(self) - 1
        return last if at is None else plain_values.check_count("at", at, 0, last)

    def _scores_up_to(self, at: int | None) -> dict[int, np.ndarray]:
        """Scores [H, at + 1] by layer."""
        at = self._check_step(at)
        if at not in self._scores_at:
            rope, n = LengthDependentRope(self.model), at + 1
            is_whole = rope.regime(n) != rope.regime(len(self))  # n tokens alone have other angles
            scores: dict[int, np.ndarray] = {}

            def visit(layer: int, seen: Attention) -> Tensor:
                out, received = attend(seen.first(n))
                scores[layer] = received.cpu().numpy()
                return attend(seen)[0] if is_whole else out

            watch(self.model, self._tensor if is_whole else self._tensor[:n], visit)
            last = len(self) - 1
            self._scores_at = {last: self._scores_at[last], at: scores}
        return self._scores_at[at]

    def _all_scores(self, per: str) -> np.ndarray:
        return np.stack([self.scores(layer, per) for layer in self.layers])
