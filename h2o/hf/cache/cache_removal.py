"""`CacheRemoval`: the methods of `H2OCache` that remove tokens of the text.

Shape letters as in `h2o.hf`, and n columns.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

from h2o.arguments.torch_values import check_ids, check_mask
from h2o.hf.cache.cache_inspection import CacheInspection
from h2o.hf.cache.continuation import plan_again, tokens_seen
from h2o.hf.cache_state import recurrent_states
from h2o.hf.conversation.named_removal import Removal
from h2o.hf.conversation.state import UNKNOWN_TEXT
from h2o.hf.layers import crop, named_eviction
from h2o.hf.layers.named_eviction import Rotaries
from h2o.hf.model_traits.layer_kinds import has_states, kind_of
from h2o.hf.modes import Mode, check_modes
from h2o.spans import check_rows_of_spans


class CacheRemoval(CacheInspection):
    """Methods of `H2OCache` that remove tokens of the text: all, the last ones, or named ones."""

    modes: frozenset[Mode]
    """The modes of the model and of the settings"""
    rotaries: Rotaries

    def reset(self) -> None:
        """Empty the cache. The next forward pass is a new prompt.

        Raises:
            RuntimeError: another thread is running a forward pass with the cache.
        """
        self.guard.check_thread()
        super().reset()
        for layer in self.layers:  # transformers may zero these tensors instead of dropping them
            if kind_of(layer) == "sliding":
                layer.keys = layer.values = None
                layer.is_initialized = False
            if has_states(layer):
                recurrent_states.forget(layer)
        self.guard.reset()

    def crop(self, tokens: int) -> None:
        """Remove the last tokens. Removing all tokens is the same as `reset()`.

        `tokens` is minus the number of tokens to remove, as in transformers. Tokens can be removed
        if they came in the last forward pass and that pass was recorded
        (`activate_past_recording`). The cache then repeats the pass without them.

        Raises:
            NotImplementedError: the pass was not recorded, or the tokens came in an earlier pass.
                Evicted keys cannot be restored.
            RuntimeError: a forward pass was interrupted. Call `reset()`, or remove all tokens.

        After an error all layers are unchanged.
        """
        guard = self.guard
        guard.check_thread()
        left = crop.columns_left(tokens, seen := guard.state.columns)
        if left == 0:
            self.reset()
            return
        guard.check_complete()
        plan = functools.partial(plan_again, self)
        crop.crop(self.layers, guard, tokens, seen, left, plan)

    def activate_past_recording(self) -> None:
        """Record each forward pass from now on, so that `crop` can remove its tokens.

        Assisted decoding and prompt lookup need this, and `generate()` calls it for them. Each
        layer then keeps a copy of its state before the last pass, and the queries, keys and values
        of that pass. To stop recording, set `record_past = False` on each layer.
        """
        self.guard.record_passes()
        for layer in self.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()

    def evict(self, spans: Any, *, ids: Any = None, attention_mask: Any = None) -> None:
        """Remove named tokens, such as thoughts or old tool results, from all layers and heads.

        ```python
        out = model.generate(ids, cache=cache, max_new_tokens=500)
        spans = h2o.thought_spans(tokenizer, out)
        cache.evict(spans, ids=out)
        ids = h2o.next_turn(tokenizer, h2o.without_spans(out, spans), "And then?")
        out = model.generate(ids, cache=cache, max_new_tokens=500)  # reads only the new turn
        ```

        The cache is then one of the text without the spans. `get_seq_length()`, `kept()`, masks and
        the ids that `generate()` gets are those of that text, and a later call counts its spans in
        it. The keys that stay were computed with the removed tokens before them, and keep their
        distances to all later tokens, as if the removed tokens were hidden from these. The freed
        slots are used again. With `positions="cache_relative"` the distances close up, as they do
        where the policy evicts.

        In a batch, rows may lose different numbers of tokens. The text then has as many columns
        less as the row that loses fewest, and the other rows have more padding on their left.

        Args:
            spans: token positions [(start, stop), ...], not counting padding; a list of such spans
                for each row; or a bool mask [B, n] over the n columns of the padded text. Without
                any span nothing happens.
            ids: [B, n] or [n], the ids of everything that the cache has seen, with or without more,
                such as the result of `generate()`. They are compared with the text that the cache
                has seen, so that no span names other tokens than you mean. If you leave them out,
                neither they nor the ids of later turns are compared.
            attention_mask: [B, n], 0 at padding. Needed with `ids` or a mask of spans if rows are
                padded.

        Raises:
            TypeError: `spans` has none of the accepted forms.
            ValueError: a span is empty, ends beyond the text, covers a pinned token, or names
                tokens that a sliding window still holds. The spans leave nothing of a row. `ids`
                are not the text that the cache has seen.
            UnsupportedError: (a ValueError) the model or a setting does not support it, such as
                recurrent states and learned positions. The message says why.
            RuntimeError: a forward pass was interrupted, or another thread is running one.

        After an error nothing has changed.
        """
        given = check_rows_of_spans("spans", spans)
        guard = self.guard
        guard.check_thread()
        guard.check_complete()
        if not any(given.spans):
            return
        traced = any(getattr(layer, "trace", None) is not None for layer in self.layers)
        asked = {Mode.TRACE: traced, Mode.COMPILED: guard.counter is not None}
        check_modes({Mode.NAMED_SPANS, *self.modes, *(mode for mode in asked if asked[mode])})
        state = guard.state
        mask = self._check_mask(attention_mask)
        tokens = tokens_seen(self, state.columns, mask)
        if tokens is None or (mask is None and ids is not None and {*tokens} != {state.columns}):
            raise ValueError(
                "evict: rows are padded. Pass attention_mask, 0 at padding, for all "
                f"{state.columns} columns that the cache has seen"
            )
        if mask is not None and (said := mask.sum(1).tolist()) != tokens:
            raise ValueError(
                f"attention_mask has {said} tokens per row, but the cache counted {tokens}. Pass "
                "the mask of the text that the cache has seen"
            )
        removal, text = Removal.of(given, state, tokens, mask), UNKNOWN_TEXT
        if ids is not None:
            text = removal.remaining_text(state, tokens, check_ids("ids", ids), mask)
        named_eviction.check_windows(self.layers, removal, tokens)
        new = removal.without(state, tokens, text)
        named_eviction.remove(self.layers, self.rotaries, removal, new.longest)
        guard.put(new)

    def _check_mask(self, mask: Any) -> Tensor | None:
        """The mask [B, n] of the n columns that the cache has seen; None if none is given."""
        if mask is None:
            return None
        n = self.guard.state.columns
        checked = check_mask("attention_mask", mask, (None, None), "that of the text")
        if checked.shape[1] < n:
            raise ValueError(
                f"attention_mask has {checked.shape[1]} columns; expected at least the {n} that "
                "the cache has seen"
            )
        return checked[:, :n]
