"""Read-only methods of `H2OCache`: settings, the keys that are held, reports on evicted ones.

Shape letters as in cache.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache

from h2o.compat import window_of
from h2o.config import H2OConfig
from h2o.hf.cache import cache_file
from h2o.hf.families.layer_kinds import has_states, kind_of
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.store import states
from h2o.hf.store.kept import Kept, KeptToken
from h2o.hf.store.pass_guard import PassGuard
from h2o.hf.store.report import LayerReport, Report

_OTHERS = {
    "sliding": "has a sliding window and keeps transformers' own cache",
    "states": "has states, which transformers keeps, and no keys",
    "cross": "attends to images, whose keys all stay",
    "none": "stores nothing",
}


class ReadableCache(Cache):
    """Read-only methods of `H2OCache`."""

    guard: PassGuard
    config: H2OConfig
    """The settings, made for the model: a cache of the same config keeps the same."""

    def __bool__(self) -> bool:
        """Whether `generate()` keeps the cache; False for Phi-3 and similar models.

        For these models `generate()` silently drops a cache that is true as soon as the text is
        longer than `original_max_position_embeddings`."""
        return self.guard.rereads_after is None

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Number of columns seen. Models with `rope_deltas` ask for it before they use these."""
        seen = super().get_seq_length(layer_idx)
        if self.guard.rope_deltas.may_be:
            self.guard.rope_deltas.begin(seen)
        return seen

    def __repr__(self) -> str:
        idle = "" if self.guard.plans else ", nothing is evicted: all have a sliding window"
        return f"H2OCache({cache_file.brief(self.config)}, layers={len(self.layers)}{idle})"

    @property
    def is_initialized(self) -> bool:
        """Whether every layer that stores keys of the text has some."""
        storing = [x for x in self.layers if kind_of(x) in ("h2o", "sliding")]
        return bool(storing) and all(layer.is_initialized for layer in storing)

    @property
    def max_cache_len(self) -> int:
        """Raise AttributeError. PEFT asks caches other than DynamicCache for this attribute."""
        raise AttributeError(
            "an H2OCache has no max_cache_len, because texts may have any length. PEFT asks for it "
            "in prefix tuning, which fills a cache of its own and is not supported by h2o"
        )

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Any]]:
        """(keys, values, sliding window or None) of each layer, as of a DynamicCache; of H2O layers
        what they hold, [B, G, K, D] in the order of `kept`."""
        for layer in self.layers:
            held = layer.kept_rows() if isinstance(layer, H2OLayer) else _keys_of(layer)
            yield *held, window_of(layer)

    def kept(self, layer_idx: int) -> Kept:
        """The keys that a layer holds now.

        Returns:
            (positions, scores), which notebooks show as a heat map and `h2o.hf.store.kept.Kept` as
            text or on matplotlib axes: int64 and float32 [B, G, K], by ascending position; K is the
            largest number held in any row, shorter ones are padded with -1 and 0. A position
            is a token's index in its row, pads not counted. Before the prompt all are 0.

        Raises:
            IndexError: no such layer.
            ValueError: a layer without full attention.
        """
        return self._h2o_layer(layer_idx).kept()

    def tokens(
        self, tokenizer: Any, input_ids: Any, layer_idx: int, **which: Any
    ) -> list[KeptToken]:
        """The kept tokens of a layer as text, with positions and scores.

        ```python
        out = model.generate(**inputs, cache=cache)
        for token in cache.tokens(tokenizer, out, layer_idx=5):
            print(token.position, repr(token.text), token.score)
        ```

        `input_ids` is everything that the cache has seen. Keywords `row`, `head`,
        `attention_mask` and errors as of `h2o.hf.store.kept.Kept.tokens`, and as `kept`.
        """
        return self.kept(layer_idx).tokens(tokenizer, input_ids, **which)

    def evicted_at(self, layer_idx: int) -> Tensor:
        """When each key of a layer was evicted; needs `H2OCache(..., trace=True)`.

        Returns:
            int32 [B, G, N] for the N columns seen, pads included: how many there were after the
            forward pass that evicted the key, all columns of this pass counted, also pads on the
            right; N for a key that is still held, and for one that the last pass evicted; 0 for
            a pad. The token in column i saw key j exactly when j <= i < evicted_at[j] and j is
            no pad.

        Raises:
            IndexError, ValueError: as `kept`; without trace.
        """
        layer = self._h2o_layer(layer_idx)
        if layer.trace is None:
            raise ValueError("evictions were not recorded: make the cache with trace=True")
        return layer.trace.evicted_at()

    def report(self) -> Report:
        """Tokens seen, kept and evicted and bytes held, per layer and in total, as text or dict."""
        reports = []
        for index, layer in enumerate(self.layers):
            report = layer.report() if isinstance(layer, H2OLayer) else _of_other(index, layer)
            if has_states(layer):
                report = replace(report, bytes_states=states.bytes_of(layer))
            reports.append(report)
        return Report(reports, broken=self._is_broken(), not_dealt=self.not_dealt)

    def is_prompt_only(self) -> bool:
        """Whether the cache has seen a single forward pass."""
        h2o_layers = (layer for layer in self.layers if isinstance(layer, H2OLayer))
        return any(0 < layer.seen == layer.prompt_columns for layer in h2o_layers)

    def _check_complete(self) -> None:
        """Raise RuntimeError if a forward pass was interrupted or another thread's is running."""
        self.guard.check_thread()
        self.guard.check_keys_arrived()
        self._check_layers_agree()

    def _check_layers_agree(self) -> None:
        self.guard.check_layers_agree(self._columns_seen())

    def _columns_seen(self) -> list[int]:
        """Columns that each layer with keys of the text has seen."""
        return [int(self.layers[index].get_seq_length()) for index in self.guard.counting]

    def _is_broken(self) -> bool:
        """Whether a forward pass has not ended: it was interrupted, or it is still running."""
        state = self.guard
        return state.waiting is not None or state.under_way or len(set(self._columns_seen())) > 1

    def _h2o_layer(self, layer_idx: int) -> H2OLayer:
        layer = self.layers[layer_idx]
        if not isinstance(layer, H2OLayer):
            raise ValueError(
                f"layer {layer_idx} {_OTHERS[str(kind_of(layer))]}; "
                f"the layers of h2o are {[x.layer_idx for x in self.layers if hasattr(x, 'slots')]}"
            )
        return layer


def _of_other(index: int, layer: Any) -> LayerReport:
    """The report of transformers' own layer."""
    kind = str(kind_of(layer))
    if kind not in ("sliding", "cross"):
        return LayerReport(index, kind)
    held = sum(x.numel() * x.element_size() for x in (layer.keys, layer.values) if x is not None)
    columns = layer.keys.shape[2] if held else 1
    full = held // columns * layer.get_seq_length()
    return LayerReport(index, kind, bytes_held=held, bytes_full=full)


def _keys_of(layer: Any) -> tuple[Tensor | None, Tensor | None]:
    """Keys and values of transformers' own layer; None without."""
    return getattr(layer, "keys", None), getattr(layer, "values", None)
