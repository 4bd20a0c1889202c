"""`H2OCache`: a cache of Hugging Face transformers that evicts keys as H2O does.

A cache is a list of layers. A full-attention layer is an `H2OLayer`, which keeps only as many keys
as its budget allows. All other layers are transformers' own. This file creates, copies and
saves a cache. cache_inspection.py has its read-only methods, and cache_removal.py those that remove
tokens.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache
from typing_extensions import Unpack

from h2o import packages
from h2o.arguments.plain_values import check_count
from h2o.arguments.torch_values import check_device, check_rows
from h2o.config import H2OConfig, resolve_config
from h2o.config.fields import CacheFields, ConfigFields, Pinned, PromptLength
from h2o.hf.cache import cache_file
from h2o.hf.cache.cache_inspection import checks_config
from h2o.hf.cache.cache_plan import get_plan
from h2o.hf.cache.cache_removal import CacheRemoval
from h2o.hf.cache.continuation import no_new_tokens, plan_pass, plan_unannounced
from h2o.hf.cache.from_dynamic_cache import import_dynamic_cache
from h2o.hf.cache.many_graphs import outside_graphs, warn_of_many_graphs
from h2o.hf.cache_state import recurrent_states
from h2o.hf.conversation.forward_pass import NUMBER_LAYERS, ForwardPass
from h2o.hf.conversation.pass_guard import PassGuard
from h2o.hf.conversation.pins import Pins
from h2o.hf.conversation.rope_deltas import put_rope_deltas
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.model_traits.layer_kinds import (
    free_keys_before_window,
    has_states,
    kind_of,
    warn_of_windows,
    without_gradients,
)
from h2o.hf.model_traits.wrappers import check_pins, unwrap
from h2o.hf.modes import Mode, check_modes, config_modes
from h2o.hf.support import split_modes, text_config_of


class H2OCache(CacheRemoval):
    """A KV cache that keeps only as many keys per layer, row and head as its budget allows.

    ```python
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="h2o")
    cache = h2o.H2OCache(model, budget=0.2)  # a fifth of the bytes; budget=512 means tokens
    model.generate(**inputs, cache=cache)
    print(cache.report())
    ```

    One cache holds one conversation, or one batch of conversations. Reusing the cache continues
    the conversation. Call `reset()` before another one, and when the weights or an adapter change,
    which the cache does not notice. For a pipeline or a loop over prompts use `h2o.patched()`. It
    creates a cache for each call. Sliding windows, states and keys of images stay in transformers'
    own cache layers.

    Args:
        config: a model, or its config (`model.config`). Pass the model if you use a profile,
            because a config cannot distinguish a fine-tuned model from the original.
        h2o_config: an `H2OConfig`. Its fields may be passed as keyword arguments instead: `budget`,
            or `heavy`, `recent`, `sinks`, `min_tokens`, `score_by`, `decay`, `value_weighted`,
            `positions`, `head_shares`, `kv_dtype`, `budget_unit`, `ratio_of`. The default is 0.2.
        prompt_length: number of tokens in the prompt, not counting padding: an int, or one int per
            row. Needed only if your own loop prefills the prompt in several forward passes, and the
            budget is a fraction of it or `pinned` is `"prompt"`. Otherwise the first forward pass
            is the prompt, or `generate(prefill_chunk_size=...)` knows its length. `reset()`
            discards the length.
        pinned: keys that are never evicted but count toward the budget: spans `[(start, stop),
            ...]` of token positions, not counting padding; a list of such spans for each row;
            `"prompt"` for the whole first prompt; or a bool mask [B, n] over the n columns of the
            padded prompt. Spans may lie beyond the prompt: those tokens are pinned as they arrive.
            `reset()` keeps these pins.
        trace: record when each key is evicted; see `evicted_at`.
        compileable: let torch.compile capture all decode steps in one graph. Slots for the whole
            budget are allocated at once, so a fraction needs `ratio_of="prompt"`. The pairs of
            modes that cannot be combined (docs/reference/models.md) raise an error.

    Raises:
        UnsupportedError: (a ValueError) h2o does not support the model. The message says why.
        ValueError: malformed pins, or pins with `decay=0`. The first forward pass also raises it
            if the budget is too small for the sinks, pinned and recent keys.
    """

    def __init__(
        self,
        config: Any,
        h2o_config: H2OConfig | None = None,
        *,
        prompt_length: PromptLength = None,
        pinned: Pinned = None,
        trace: bool = False,
        compileable: bool = False,
        **parameters: Unpack[ConfigFields],
    ) -> None:
        packages.warn_without_core()
        h2o_config = resolve_config(h2o_config, parameters, H2OCache.__init__)
        unwrap(config)  # raises for prefix tuning
        check_pins(config, pinned)
        model, config = config, text_config_of(config)
        plan = get_plan(model, config, h2o_config)
        pins = Pins.of(pinned, plan.h2o_config.decay)
        guard = PassGuard(
            prompt_length, plan.kinds, plan.last, plan.number_of_states, pins, plans=plan.plans,
            makes_pool=plan.makes_pool, drops_cache_after=plan.drops_cache_after, config=config,
        )  # fmt: skip
        split = split_modes(model)
        layers = plan.layers(guard, split, trace=trace, compileable=compileable)
        Cache.__init__(self, layers=layers)  # a model's own cache class may accept no arguments
        self.guard = guard
        self.echo_replacement, self.model_shape = plan.echo_replacement, plan.model_shape
        self.model_settings = plan.model_settings
        self.modes, self.rotaries = plan.modes | split, plan.rotaries
        self.config = plan.h2o_config
        if not plan.plans:
            warn_of_windows(config, stacklevel=3)

    @classmethod
    @checks_config
    def from_dynamic_cache(
        cls,
        cache: DynamicCache,
        config: Any,
        h2o_config: H2OConfig | None = None,
        *,
        attention_mask: Any = None,
        **parameters: Unpack[CacheFields],
    ) -> H2OCache:
        """Make a cache that continues from a filled DynamicCache.

        ```python
        full = DynamicCache(config=model.config)
        model(**text, cache=full)  # under any attention, for example sdpa
        cache = h2o.H2OCache.from_dynamic_cache(full, model.config, heavy=256, recent=256)
        model.generate(**text_and_question, cache=cache)  # now under "h2o"
        ```

        A DynamicCache has no scores, so every key is kept until the next forward pass. Its
        attention scores converted and new tokens together, like one prompt, and the cache then
        evicts down to its budget. Use a whole question for this pass, because a single token scores
        the keys poorly.

        Keys and values are copied. Until the next pass this takes as much memory as the full cache,
        or twice as much if you keep the DynamicCache.

        A fractional budget counts the converted tokens and those of the next forward pass, unless
        `prompt_length` is given. With `score_by="mean"` a key's score is divided by the number of
        all later tokens, including those that gave no scores.

        Args:
            cache: a filled DynamicCache, created with or without `config`.
            config, h2o_config, parameters: as for `H2OCache`, with `prompt_length` and `trace`.
            attention_mask: [B, n] for the n columns that the DynamicCache has seen, 0 at a pad.
                Needed if rows are padded, because padding keys cannot be told from real ones.

        Raises:
            TypeError: `cache` is not a DynamicCache, or its dtype is not supported.
            ValueError: as for `H2OCache`; the DynamicCache is empty or belongs to another model;
                `attention_mask` has another shape, or values other than 0 and 1.
        """
        converted = cls(config, h2o_config, **parameters)
        check_modes({Mode.FROM_DYNAMIC, *config_modes(converted.config)})
        import_dynamic_cache(cache, converted.layers, converted.guard, attention_mask)
        return converted

    def fork(self, rows: int = 1) -> H2OCache:
        """Return an independent copy, for example to ask many questions about one document.

        ```python
        model(**document, cache=cache)
        for question in questions:  # each question starts with the document's ids
            model.generate(question, cache=cache.fork())
        ```

        `copy.copy(cache)` and `copy.deepcopy(cache)` do the same.

        Args:
            rows: copies of each batch row, at least 1, for asking several questions in one batch.

        Raises:
            RuntimeError: a forward pass was interrupted, or another thread is still running one.
            TypeError, ValueError: `rows` is not an integer of at least 1.
        """
        rows = check_count("rows", rows)
        with self._copying():
            fork = copy.deepcopy(self)
        if rows != 1:
            fork.batch_repeat_interleave(rows)
        return fork

    def __copy__(self) -> H2OCache:
        """Return a fork, because copies that share layers would read each other's text."""
        return self.fork()

    def __getstate__(self) -> dict[str, Any]:
        """What deepcopy and pickle copy. Copies have no gradients of states and sliding windows, as
        h2o's own layers never have."""
        return {**self.__dict__, "layers": [without_gradients(layer) for layer in self.layers]}

    def save(self, path: str | os.PathLike[str], model: Any = None) -> None:
        """Write the cache to a safetensors file. Generation after `load` gives identical tokens.

        Args:
            path: file to write. An existing file is replaced atomically.
            model: the model that processed the text. If given, the file records a digest of its
                weights, and `load` raises an error for other weights of the same shape.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: another thread is running a forward pass, or the last one was interrupted.
            ValueError: the cache was made for another model. Or no model is given, and the cache
                was converted from a DynamicCache of a tensor-parallel model and does not know yet
                which heads it holds.
        """
        cache_file.write(Path(path), self, model)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any, *, device: Any = None) -> H2OCache:
        """Load a cache that `save` wrote, including its settings.

        ```python
        cache = h2o.H2OCache.load("document.safetensors", model)
        model.generate(document_and_question, cache=cache)
        ```

        Args:
            model: the model that will use the cache, or its config. Weights can be compared only
                with a model.
            device: device to load to, by default the model's. If the model's layers are on several
                devices or offloaded, the next forward pass moves each layer's tensors.

        Raises:
            ValueError: the file is truncated, edited, from a later version, from another model, or
                holds other heads of a tensor-parallel model than this process. The message says
                which.
            OSError: the file does not exist or cannot be read.
        """
        device = None if device is None else check_device("device", device)
        return cache_file.read(cls, Path(path), model, device)

    def get_seq_length(self, layer_idx: int = 0) -> Any:
        """Number of columns seen.

        Models with `rope_deltas` call this before they use them, so it also sets them to those of
        this cache."""
        guard = self.guard
        if guard.has_rope_deltas:
            put_rope_deltas(guard.state)
        return guard.columns

    @property
    def is_compileable(self) -> bool:
        """Whether `generate()` may compile the decode steps."""
        return self.guard.counter is not None and super().is_compileable

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Check that the last forward pass was complete and that the new one continues it.

        transformers calls this method before each forward pass, once for each kind of mask.
        """
        if torch.compiler.is_compiling():
            if not self.is_compileable:
                warn_of_many_graphs()
            return super().get_mask_sizes(query_length, layer_idx)
        guard = self.guard
        if guard.counter is not None:
            guard.settle()
        if guard.has_states:
            for layer in filter(has_states, self.layers):
                recurrent_states.make_writable(layer)
        if guard.current is not None or guard.has_states:
            guard.check_complete()
        if query_length == 0:
            raise no_new_tokens(guard.state.columns)
        sizes = query_length, guard.columns  # before another thread changes it
        if guard.kinds[layer_idx] != "h2o":
            sizes = super().get_mask_sizes(query_length, layer_idx)
        guard.announce(plan_pass(self, query_length))
        if query_length > 1 and guard.state.columns:
            self._warn_of_growth(guard.state.columns, query_length)
        return sizes

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass new keys and values to a layer. Each attention layer of the model calls this.

        Raises: as `H2OLayer.update` and `PassGuard.enter`, and ValueError for a layer too many.
        """
        if torch.compiler.is_compiling() and not self.is_compileable:
            return outside_graphs(self.update, key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"layer {layer_idx} of the model was given a cache of {len(self.layers)} layers. "
                "Make the H2OCache from the config of the model that uses it. If you removed "
                f"layers from the model, {NUMBER_LAYERS}"
            )
        guard, layer = self.guard, self.layers[layer_idx]
        guard.enter(layer_idx, key_states.shape[2], self._plan_unannounced)
        columns = getattr(layer, "cumulative_length", None)
        try:
            keys_and_values = layer.update(key_states, value_states, *args, **kwargs)
        except Exception:
            guard.layer_rejected()
            if columns is not None:  # which transformers' layer counts before it fails
                layer.cumulative_length = columns
            raise
        if not isinstance(layer, H2OLayer):  # transformers' own layer has stored its keys by now
            free_keys_before_window(layer)
            guard.layer_done(layer_idx, stores=True)
        return keys_and_values

    def _plan_unannounced(self, Q: int) -> ForwardPass:
        """See `plan_unannounced`."""
        return plan_unannounced(self, Q)

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return a convolution state. Each layer with states calls this before changing them."""
        self.guard.enter_states(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def update_conv_state(self, states: Tensor, layer_idx: int, *args: Any, **more: Any) -> Tensor:
        """Replace a convolution state, and count this."""
        updated: Tensor = super().update_conv_state(states, layer_idx, *args, **more)
        self.guard.count_state_access(layer_idx)
        return updated

    def update_recurrent_state(
        self, states: Tensor, layer_idx: int, *args: Any, **more: Any
    ) -> Tensor:
        """Replace a recurrent state, and count this."""
        updated: Tensor = super().update_recurrent_state(states, layer_idx, *args, **more)
        self.guard.count_state_access(layer_idx)
        return updated

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each batch row i with row beam_idx[i], in every layer."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep only these rows, in this order. `indices`: integers [n] or a bool mask [B]. Raises
        TypeError and ValueError for anything else, before anything has changed."""
        rows = check_rows("indices", indices)
        self._change_rows(lambda x: x[rows.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row `repeats` times, in every layer."""
        repeats = check_count("repeats", repeats)
        self._change_rows(lambda x: x.repeat_interleave(repeats, dim=0))

    def _change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat the rows [B, ...] of every tensor, including recurrent states."""
        self.guard.check_complete()
        self.guard.change_rows(change)
        for layer in self.layers:
            if isinstance(layer, H2OLayer):
                layer.change_rows(change)
            elif kind_of(layer) == "sliding" and layer.is_initialized:
                layer.keys, layer.values = change(layer.keys), change(layer.values)
            if has_states(layer):
                recurrent_states.each(layer, change)
