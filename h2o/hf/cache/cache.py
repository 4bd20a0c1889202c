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
from h2o.hf.families.wrappers import check_pins
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
        config: a model, or its config (`model.config`), by which a fine-tuned model cannot be told
            from the one that it was.
        h2o_config: an `H2OConfig`, or instead of it its fields as keywords: `budget`, or `heavy`,
            `recent`, `sinks`, `min_tokens`, `score_by`, `decay`, `value_weighted`,
            `positions`, `head_shares`, `kv_dtype`, `budget_unit`.
        prompt_length: tokens of the prompt, pads not counted, an int or one per row. Only needed
            for fractions of a prompt that is fed in chunks (`generate(prefill_chunk_size=...)`).
            Otherwise the first forward pass is the prompt. Forgotten by `reset()`.
        pinned: keys that are never evicted and count in the budget: spans `[(start, stop), ...]` of
            token positions in a row, pads not counted, or such a list for each row; `"prompt"`, the
            whole first prompt; or a bool mask [B, K] of the padded prompt's columns. A position
            that is yet to come is pinned when it comes. `reset()` keeps what was given here.
        trace: remember when each key was evicted; see `evicted_at`.
        compileable: give torch.compile one graph for all decode steps, with slots for the whole
            budget at once. Not with sliding windows, cache-relative positions or trace.

    Raises:
        UnsupportedError: (a ValueError) a model that h2o cannot serve, naming the reason.
        ValueError: pins that are none, or with `decay=0`. In the first forward pass: a budget too
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
        """A cache that goes on where a filled DynamicCache has got to.

        ```python
        full = DynamicCache(config=model.config)
        model(**text, cache=full)  # under any attention, for example sdpa
        cache = h2o.H2OCache.from_dynamic_cache(full, model.config, heavy=256, recent=256)
        model.generate(**text_and_question, cache=cache)  # now under "h2o"
        ```

        A DynamicCache has no scores, so every key is kept until the next forward pass. The
        attention of that pass is the score by which converted and new tokens are pruned together,
        as one prompt would be. Let it be a whole question instead of a single token.

        Keys and values are copied. Until that pass memory is that of the full cache, twice if you
        keep the DynamicCache.

        Args:
            cache: a filled DynamicCache, made with `config` or without.
            config, h2o_config, parameters: as of `H2OCache`, also `prompt_length` and `trace`. A
                fraction is one of the converted tokens and those of the next forward pass, unless
                `prompt_length` says otherwise. With `score_by="mean"` all that came after a key
                counts, whether it gave scores or not.
            attention_mask: [B, n] for the n columns that the DynamicCache has seen, 0 at a pad;
                needed where rows are padded, since a pad's keys look like a token's.

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
        """An independent copy: read a document once, then ask a fork each question.

        ```python
        model(**document, cache=cache)
        for question in questions:  # each with the document's ids before it
            model.generate(question, cache=cache.fork())
        ```

        `copy.deepcopy(cache)` does the same. Fractions stay those of the document.

        Args:
            rows: what each row becomes, for questions in one batch; at least 1.

        Raises:
            RuntimeError: a forward pass broke off, or another thread's is under way.
        """
        if rows < 1:
            raise ValueError(f"rows: is {rows}, wanted at least 1")
        self._check_complete()
        fork = copy.deepcopy(self)
        if rows != 1:
            fork.batch_repeat_interleave(rows)
        return fork

    def save(self, path: str | os.PathLike[str], model: Any = None) -> None:
        """Writes a safetensors file from which `load` goes on with identical tokens.

        Args:
            path: replaced as a whole or not at all.
            model: the model that has read the text. With it the file knows a few numbers of its
                weights, and `load` refuses another one of the same shape.

        Raises:
            OSError: the file cannot be written.
            RuntimeError: another thread's forward pass is under way, or the last one broke off.
            ValueError: a model that is not the cache's; no model, where some of its heads were
                converted from a DynamicCache and it is not known which.
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
            model: the model that goes on, or its config, which has a shape but no weights.
            device: where the tensors go; by default where the model is. In a forward pass they
                follow each layer to where it computes, for a model that is spread or offloaded.

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
        """Called once before a forward pass: the place to notice that the last one broke off."""
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
                f"no new tokens: the cache has seen {seen}. generate() needs input_ids with these "
                "and more; for another conversation reset() the cache"
            )
        check_text(self, seen, query_length)
        return super().get_mask_sizes(query_length, layer_idx)

    def reset(self) -> None:
        """Forgets everything: the next forward pass is a new prompt.

        Raises:
            RuntimeError: another thread's layer is at work on it.
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
        """Takes back the last tokens; all of them is `reset()`.

        `tokens` means what it means in this version of transformers: minus the number of tokens
        to remove, and before 5.16 the number to keep. A part of them can be taken back where
        passes are recorded (`activate_past_recording`), and of the last forward pass only. Then
        the cache is as if they had never come: the rest of that pass is attended to once more.

        Raises:
            NotImplementedError: other tokens: what was evicted cannot come back.
            RuntimeError: a forward pass broke off; then `reset()`, or all tokens, remains.

        Whatever the error, all layers are what they were before.
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

        Assisted decoding and prompt lookup ask for it, from transformers 5.16 on by themselves.
        Each layer then keeps a copy of its state before the last pass, and the pass' queries, keys
        and values. `layer.record_past = False` of each layer ends it.
        """
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer. Raises as `H2OLayer.update`, and for a layer too many."""
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
        """Called by each layer that has states, before it changes them."""
        self.guard.enter_states(layer_idx)
        state: Tensor | None = super().get_conv_state(layer_idx, *args, **kwargs)
        return state

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was, in every layer."""
        self.guard.check_thread()
        self.guard.select(beam_idx)
        super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """Keeps these rows, in this order, in every layer: numbers [n], or [B] bool."""
        rows = indices if isinstance(indices, Tensor) else torch.as_tensor(indices, device="cpu")
        rows = rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows.long()
        self.guard.select(rows)
        self._each_layer("batch_select_indices", rows, lambda x: x[rows.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows, in every layer."""
        self.guard.repeat(repeats)
        self._each_layer(
            "batch_repeat_interleave", repeats, lambda x: x.repeat_interleave(repeats, dim=0)
        )

    def _each_layer(self, method: str, argument: Any, change: Callable[[Tensor], Tensor]) -> None:
        """Changes the rows, of states too, which transformers forgets."""
        self.guard.rope_deltas.change_rows(change)
        for layer in self.layers:
            if kind_of(layer) != "states":
                getattr(layer, method)(argument)
            if has_states(layer):
                states.each(layer, change)
