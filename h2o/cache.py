"""H2O as a cache of Hugging Face transformers.

`H2OCache` is a list of layers. A full-attention layer is an `H2OLayer`, which
holds only the keys that its budget has room for, with their scores and
positions; a sliding-window layer stays what transformers makes it.

Shape letters: B batch rows, G key/value heads, K keys held, N columns seen. A
column is a place in the padded batch; a position is a token's index in its own
row, pads not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

from h2o.config import H2OConfig
from h2o.layer import NO_ROLLBACK, Conversation, H2OLayer
from h2o.report import LayerReport, Report
from h2o.support import Unsupported, refusal

__all__ = ["H2OCache", "H2OLayer", "Unsupported", "one_config", "transformers_layers"]


class H2OCache(Cache):
    """A KV cache that keeps, per layer, row and key/value head, only what its budget allows.

    ```python
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="h2o")
    cache = h2o.H2OCache(model.config, heavy=256, recent=256)
    model.generate(**inputs, past_key_values=cache)
    print(cache.report())
    ```

    One cache is one conversation, or one batch of them: used again it goes on, `reset()`
    starts anew. A pipeline or a loop over prompts would therefore go on with the first prompt:
    use `h2o.patched()` there, which makes a fresh cache each time. Layers with a sliding window
    keep transformers' own cache, all others are H2O.

    Args:
        config: the model's (`model.config`).
        h2o_config: an `H2OConfig`, or instead of it its fields as keywords: `heavy`, `recent`,
            `sinks`, `rank_by`, `decay`, `value_weighted`.
        prompt_length: tokens of the prompt, pads not counted, an int or one per row. Only
            needed where fractions meet a prompt that is fed in chunks
            (`generate(prefill_chunk_size=...)`). Forgotten by `reset()`.
        trace: remember when each key was evicted; see `evicted_at`.

    Errors: `Unsupported` (a ValueError) for a model that h2o cannot serve, naming the reason.
    """

    def __init__(
        self,
        config: Any,
        h2o_config: H2OConfig | None = None,
        *,
        prompt_length: int | Sequence[int] | None = None,
        trace: bool = False,
        **parameters: Any,
    ) -> None:
        h2o_config = one_config(h2o_config, parameters)
        conversation = Conversation(prompt_length)
        layers = list(transformers_layers(config))
        for index, layer in enumerate(layers):
            if type(layer) is DynamicLayer:
                own = h2o_config.for_layer(index, len(layers))
                layers[index] = H2OLayer(own, index, conversation, trace=trace)
        super().__init__(layers=layers)
        self.conversation = conversation

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Called once before a forward pass: the place to notice that the last one broke off."""
        seen = self.layers[0].get_seq_length()
        if any(layer.get_seq_length() != seen for layer in self.layers):
            raise RuntimeError(
                "the last forward pass broke off between two layers, which now have seen "
                "different numbers of tokens: call cache.reset() and start anew"
            )
        if query_length == 0:
            raise ValueError(
                f"no new tokens: the cache has seen {seen}, and generate() needs input_ids with "
                "these and more. For another conversation make a new H2OCache, or reset() this one"
            )
        return super().get_mask_sizes(query_length, layer_idx)

    def kept(self, layer_idx: int) -> tuple[Tensor, Tensor]:
        """What a layer holds now.

        Returns:
            (positions, scores): int64 and float32 [B, G, K], by ascending position; K is the
            largest number held in any row, shorter ones are padded with -1 and 0. A position
            is a token's index in its row, pads not counted. Before the prompt all are 0.

        Errors: IndexError for no such layer, ValueError for a sliding-window layer.
        """
        return self._h2o_layer(layer_idx).kept()

    def evicted_at(self, layer_idx: int) -> Tensor:
        """When each key of a layer was evicted; needs `H2OCache(..., trace=True)`.

        Returns:
            int32 [B, G, N] for the N columns seen, pads included: how many there were after the
            forward pass that evicted the key, all columns of this pass counted, also pads on the
            right; N for a key that is still held, and for one that the last pass evicted; 0 for
            a pad. The token in column i saw key j exactly when j <= i < evicted_at[j] and j is
            no pad.

        Errors: as `kept`; ValueError without trace.
        """
        layer = self._h2o_layer(layer_idx)
        if layer.trace is None:
            raise ValueError("evictions were not recorded: make the cache with trace=True")
        return layer.trace.evicted_at()

    def report(self) -> Report:
        """What was seen, kept, evicted and held, per layer and in total, as text or dict."""
        reports = []
        for index, layer in enumerate(self.layers):
            if isinstance(layer, H2OLayer):
                reports.append(layer.report())
            else:
                held = sum(
                    x.numel() * x.element_size()
                    for x in (layer.keys, layer.values)
                    if x is not None
                )
                columns = layer.keys.shape[2] if held else 1
                full = held // columns * layer.get_seq_length()
                reports.append(LayerReport(index, "sliding", bytes_held=held, bytes_full=full))
        return Report(reports)

    def reset(self) -> None:
        """Forgets everything: the next forward pass is a new prompt."""
        super().reset()
        self.conversation.waiting = None
        self.conversation.prompt_length = None

    def crop(self, tokens_to_remove: int) -> None:
        """Errors: NotImplementedError, except for 0: what was evicted cannot come back."""
        if tokens_to_remove != 0:
            raise NotImplementedError(NO_ROLLBACK)

    def activate_past_recording(self) -> None:
        """Errors: NotImplementedError; transformers asks before assisted decoding."""
        raise NotImplementedError(NO_ROLLBACK)

    def _h2o_layer(self, layer_idx: int) -> H2OLayer:
        layer = self.layers[layer_idx]
        if not isinstance(layer, H2OLayer):
            raise ValueError(
                f"layer {layer_idx} has a sliding window and keeps transformers' own cache; "
                f"the layers of h2o are {[x.layer_idx for x in self.layers if hasattr(x, 'slots')]}"
            )
        return layer


def one_config(h2o_config: H2OConfig | None, parameters: dict[str, Any]) -> H2OConfig:
    """The config that was given whole, or as keywords."""
    if h2o_config is None:
        known = [field.name for field in dataclasses.fields(H2OConfig)]
        if unknown := sorted(set(parameters) - set(known)):
            raise TypeError(f"unknown parameter {unknown[0]!r}; there are {', '.join(known)}")
        return H2OConfig(**parameters)
    if not isinstance(h2o_config, H2OConfig):
        raise TypeError(f"expected an H2OConfig, not {h2o_config!r}; or give heavy=, recent=, ...")
    if parameters:
        raise TypeError(f"give an H2OConfig or keywords, not both: {', '.join(parameters)}")
    return h2o_config


def transformers_layers(config: Any) -> list[CacheLayerMixin]:
    """The layers that transformers' own cache has for a model; checked that h2o can serve them.

    Errors: TypeError for a thing that is no config, `Unsupported`.
    """
    if not hasattr(config, "get_text_config"):
        hint = "its .config" if hasattr(config, "config") else "a model's config"
        raise TypeError(f"H2OCache needs {hint} as first argument, not {type(config).__name__}")
    text_config = config.get_text_config(decoder=True)
    if reason := refusal(config):
        raise Unsupported(f"h2o cannot serve {text_config.model_type}: {reason}")
    layers = DynamicCache(config=text_config).layers
    for index, layer in enumerate(layers):
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise Unsupported(
                f"h2o cannot serve {text_config.model_type}: layer {index} is cached as "
                f"{type(layer).__name__}, which is neither full nor sliding-window attention"
            )
    return layers
