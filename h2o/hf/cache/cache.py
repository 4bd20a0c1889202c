"""`H2OCache`: H2O as a cache of Hugging Face transformers.

A cache is a list of layers. A full-attention layer is an `H2OLayer`, which keeps only the keys that
its budget has room for; all others are transformers' own. This file makes, copies, saves and crops
a cache; readable_cache.py has the read-only methods.

Shape letters: B batch rows, G key/value heads, K keys held, N columns seen. A column is an index in
the padded batch; a position is a token's index in its own row, pads not counted.
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
from h2o.config import H2OConfig, one_config
from h2o.config.fields import CacheFields, ConfigFields, Pinned, PromptLength
from h2o.hf.cache import cache_file
from h2o.hf.cache.cache_plan import get_plan
from h2o.hf.cache.continuation import check_text, warn_of_many_graphs
from h2o.hf.cache.from_dynamic_cache import take_over
from h2o.hf.cache.readable_cache import ReadableCache
from h2o.hf.families.layer_kinds import has_states, kind_of, warn_of_windows
from h2o.hf.families.wrappers import check_pins, unwrap
from h2o.hf.layers import crop
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.store import states
from h2o.hf.store.pass_guard import PassGuard
from h2o.hf.store.pins import Pins
from h2o.hf.support import text_config_of


class H2OCache(ReadableCache):
    """A KV cache that keeps, per layer, row and key/value head, only what its budget allows.

    ```python
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="h2o")
    cache = h2o.H2OCache(model, budget=0.2)  # a fifth of the bytes; budget=512: tokens
    model.generate(**inputs, cache=cache)
    print(cache.report())
    ```

    One cache is one conversation, or one batch of them. Reusing the cache continues it; call
    `reset()` to start another. For a pipeline or a loop over prompts use `h2o.patched()`, which
    makes a fresh cache each time. Layers with a sliding window, with states, or for images keep
    transformers' own cache.

    Args:
        config: a model, or its config (`model.config`). Give the model where a profile is used,
            because a config does not tell a fine-tuned model from the original.
        h2o_config: an `H2OConfig`, or instead of it its fields as keywords: `budget`, or `heavy`,
            `recent`, `sinks`, `min_tokens`, `score_by`, `decay`, `value_weighted`,
            `positions`, `head_shares`, `kv_dtype`, `budget_unit`.
        prompt_length: tokens of the prompt, pads not counted, an int or one per row. Only needed
            for fractions of a prompt that is read in chunks (`generate(prefill_chunk_size=...)`).
            Otherwise the first forward pass is the prompt. `reset()` discards it.
        pinned: keys that are never evicted and count in the budget: spans `[(start, stop), ...]` of
            token positions in a row, pads not counted, or such a list for each row; `"prompt"`, the
            whole first prompt; or a bool mask [B, K] of the padded prompt's columns. A position
            that is yet to come is pinned when it comes. `reset()` keeps what was given here.
        trace: remember when each key was evicted; see `evicted_at`.
        compileable: give torch.compile one graph for all decode steps, with slots for the whole
            budget at once. Not with sliding windows, cache-relative positions or trace.

    Raises:
        UnsupportedError: (a ValueError) h2o does not support the model, with the reason.
        ValueError: malformed pins, or pins with `decay=0`. In the first forward pass: a budget too
            small for sinks, pinned and recent keys.
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
        h2o_config = one_config(h2o_config, parameters)
        unwrap(config)  # which may refuse
        check_pins(config, pinned)
        model, config = config, text_config_of(config)
        plan = get_plan(model, config, h2o_config)
        guard = PassGuard(prompt_length, plan.kinds, plan.last, bool(plan.number_of_states))
        layers = plan.layers(guard, trace=trace, compileable=compileable)
        guard.pins = Pins.of(pinned, plan.h2o_config.decay)
        guard.plans = plan.plans
        guard.rereads_after = plan.rereads_after
        guard.rope_deltas.may_be = config.get_text_config(decoder=True) is not config
        Cache.__init__(self, layers=layers)  # a class of a model's own may take no arguments
        self.guard = guard
        self.not_dealt, self.model_shape = plan.not_dealt, plan.model_shape
        self.config = plan.h2o_config
        if not plan.plans:
            warn_of_windows(config, stacklevel=3)

    @classmethod
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

        A DynamicCache has no scores, so every key is kept until the next forward pass. Converted
        and new tokens are then pruned together, like one prompt, by the attention of that pass. Let
        the pass be a whole question instead of a single token.

        Keys and values are copied. Until the next pass the memory is that of the full cache, and
        twice that if you keep the DynamicCache.

        Args:
            cache: a filled DynamicCache, made with `config` or without.
            config, h2o_config, parameters: as for `H2OCache`, also `prompt_length` and `trace`. A
                fraction is a fraction of the converted tokens and those of the next forward pass,
                unless `prompt_length` is given. With `score_by="mean"` a key's score is divided by
                the number of all later tokens, also of those that gave no scores.
            attention_mask: [B, n] for the n columns that the DynamicCache has seen, 0 at a pad.
                Needed where rows are padded, because the keys of padding look like any others.

        Raises:
            TypeError: another cache, or float64.
            ValueError: as `H2OCache`; a DynamicCache that is empty or another model's; a mask of
                another shape.
        """
        converted = cls(config, h2o_config, **parameters)
        take_over(cache, converted.layers, converted.guard, attention_mask)
        converted.guard.rope_deltas.is_known = False
        return converted

    def fork(self, rows: int = 1) -> H2OCache:
        """Make an independent copy: read a document once, then ask a fork each question.

        ```python
        model(**document, cache=cache)
        for question in questions:  # each with the document's ids before it
            model.generate(question, cache=cache.fork())
        ```

        `copy.deepcopy(cache)` does the same. Fractions stay those of the document.

        Args:
            rows: what each row becomes, for questions in one batch; at least 1.

        Raises:
            RuntimeError: a forward pass was interrupted, or another thread's is still running.
        """
        if rows < 1:
            raise ValueError(f"rows: is {rows}, wanted at least 1")
        self._check_complete()
        fork = copy.deepcopy(self)
        if rows != 1:
            fork.batch_repeat_interleave(rows)
        return fork

    def save(self, path: str | os.PathLike[str], model: Any = None) -> None:
        """Write a safetensors file. A cache that `load` restores from it gives identical tokens.

        Args:
            path: replaced as a whole or not at all.
            model: the model that has read the text. If it is given, the file records a few numbers
                of its weights, and `load` raises an error for other weights of the same shape.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: another thread's forward pass is running, or the last one was interrupted.
            ValueError: the model is not the cache's. Or no model is given, and the cache holds only
                some of its heads, from a DynamicCache, without knowing which.
        """
        self._check_complete()
        cache_file.write(Path(path), self, model)

    @classmethod
    def load(cls, path: str | os.PathLike[str], model: Any, *, device: Any = None) -> H2OCache:
        """Restore a cache that `save` wrote, with its settings.

        ```python
        cache = h2o.H2OCache.load("document.safetensors", model)
        model.generate(document_and_question, cache=cache)
        ```

        Args:
            model: the model that will use the cache, or its config, which has a shape but no
                weights to compare.
            device: device of the tensors, by default the model's. If the layers of a model are on
                several devices or offloaded, the next forward pass moves each layer's tensors.

        Raises:
            ValueError: with the reason: a file that is truncated, edited, of a later version, of
                another model, or of other heads of a tensor parallel model than are here.
            OSError: there is no file.
        """
        content, tensors = cache_file.read(Path(path), model)
        loaded = cls(model, **cache_file.arguments(content))
        where = cache_file.target_device(model) if device is None else device
        cache_file.fill(loaded.layers, content, {name: x.to(where) for name, x in tensors.items()})
        try:
            loaded._check_complete()
        except RuntimeError as error:
            raise ValueError(f"{path}: {error}") from error
        cache_file.restore_guard(loaded.guard, content)
        loaded.not_dealt = content["settings"].get("not_dealt", "")
        return loaded

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Check that the last forward pass was complete and the new one continues it.

        transformers calls this before each forward pass, once for each kind of mask.
        """
        if torch.compiler.is_compiling():
            if not self.is_compileable:
                warn_of_many_graphs()
            return super().get_mask_sizes(query_length, layer_idx)
        self.guard.check_thread()
        if self.guard.has_states:
            for layer in filter(has_states, self.layers):
                states.make_writable(layer)
        if not self.is_compileable or self.guard.under_way:
            self._check_layers_agree()
        seen = int(self.get_seq_length())
        if query_length == 0:
            raise ValueError(
                f"no new tokens: the cache has seen {seen}, and input_ids adds none. Pass "
                "the earlier tokens followed by new ones, or call cache.reset() for another text"
            )
        sizes = super().get_mask_sizes(query_length, layer_idx)  # before another thread's change
        check_text(self, seen, query_length)
        return sizes

    def reset(self) -> None:
        """Empty the cache. The next forward pass is a new prompt.

        Raises:
            RuntimeError: another thread's forward pass uses the cache.
        """
        if self.guard.waiting is not None:
            self.guard.check_thread()
        super().reset()
        for layer in self.layers:  # transformers' own may keep zeros
            if kind_of(layer) in ("sliding", "cross"):
                layer.keys = layer.values = None
                layer.is_initialized = False
            if has_states(layer):
                states.forget(layer)
        self.guard.reset()

    def crop(self, tokens: int) -> None:
        """Take back the last tokens. To take back all of them is `reset()`.

        `tokens` means what it means in this version of transformers: minus the number of tokens
        to remove, and before 5.16 the number to keep. Some of the tokens can be taken back if
        passes are recorded (`activate_past_recording`) and the tokens are of the last forward pass.
        The cache then attends once more to the rest of that pass, as if the others had never come.

        Raises:
            NotImplementedError: tokens of earlier passes, because evicted keys cannot come back.
            RuntimeError: a forward pass was interrupted. Call `reset()`, or take back all tokens.

        After an error all layers are as they were before.
        """
        self.guard.check_thread()
        left = crop.columns_left(tokens, seen := int(self.get_seq_length()))
        if left == 0:
            self.reset()
            return
        self._check_complete()
        crop.crop(self.layers, tokens, seen, left)
        self.guard.end_pass()  # the one that was run again

    def activate_past_recording(self) -> None:
        """Let `crop` take back the last forward pass from now on.

        Assisted decoding and prompt lookup need it; from transformers 5.16 on they call it
        themselves. Each layer then keeps a copy of its state before the last pass, and the queries,
        keys and values of that pass. Set `record_past = False` of each layer to stop recording.
        """
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Pass new keys and values to a layer. Called by each attention layer of the model.

        Raises: as `H2OLayer.update`; ValueError for a layer that the cache does not have.
        """
        if layer_idx >= len(self.layers):
            raise ValueError(
                f"layer {layer_idx} was given a cache of {len(self.layers)} layers: "
                "make the H2OCache from the config of the model that it is used with"
            )
        guard, layer = self.guard, self.layers[layer_idx]
        if guard.kinds[layer_idx] == "cross":  # which comes amid the others, and not in every pass
            image: tuple[Tensor, Tensor] = layer.update(key_states, value_states)
            return image
        guard.enter()
        try:
            keys_and_values = layer.update(key_states, value_states, *args, **kwargs)
        except Exception:
            if layer_idx == guard.first and guard.waiting is None:
                guard.end_pass()  # nothing has begun
            raise
        if not isinstance(layer, H2OLayer):  # which has stored them by now
            guard.layer_done(layer_idx)
        return keys_and_values

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return a layer's state. Called by each layer with states, before it changes them."""
        self.guard.enter_states(layer_idx)
        state: Tensor | None = super().get_conv_state(layer_idx, *args, **kwargs)
        return state

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Replace each row i by row beam_idx[i], in every layer."""
        self.guard.check_thread()
        self.guard.select(beam_idx)
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keep these rows, in this order, in every layer: row numbers [n], or a mask [B] bool."""
        rows = indices if isinstance(indices, Tensor) else torch.as_tensor(indices, device="cpu")
        rows = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows.long()
        self.guard.select(rows)
        self._each_layer("batch_select_indices", rows, lambda x: x[rows.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times, in every layer."""
        self.guard.repeat(repeats)
        self._each_layer(
            "batch_repeat_interleave", repeats, lambda x: x.repeat_interleave(repeats, dim=0)
        )

    def _each_layer(self, method: str, argument: Any, change: Callable[[Tensor], Tensor]) -> None:
        """Change the rows of all layers, and of states, which transformers leaves unchanged."""
        self.guard.rope_deltas.change_rows(change)
        for layer in self.layers:
            if kind_of(layer) != "states":
                getattr(layer, method)(argument)
            if has_states(layer):
                states.each(layer, change)
