"""`PassGuard`: progress of the forward pass through the layers of one `H2OCache`.

With it a cache detects an interrupted pass, keys that never reached h2o's attention, and a second
thread. It also holds what all layers need to know about the prompt: its length, its pins, and the
`rope_deltas` that models with images keep outside of the cache; and a digest of the text.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from h2o.budgets import check_prompt_length
from h2o.compat import calls_a_module
from h2o.compat_wrappers import has_transforms
from h2o.config.layer_plan import LayerPlan
from h2o.hf.rotary.rope_deltas import RopeDeltas
from h2o.hf.store.pins import Pins
from h2o.hf.store.seen_text import SeenText

WITHOUT_CACHE = (
    "use_cache=False with an H2OCache: generate() then feeds the whole text again for each token. "
    "Pass use_cache=True, or no cache. Where the call has no use_cache, it is that of "
    "model.generation_config or model.config, as training leaves it"
)
"""The error where `generate()` feeds the whole text again, with its first new token."""

_lock = threading.Lock()
"""Guards `_thread` of all caches; one lock for all, since locks cannot be copied."""


class PassGuard:
    """The state of a cache outside its layers.

    A forward pass goes through the layers in order, so a second thread in between would mix its
    tokens into some of them. The first layer of a pass therefore takes the cache for its thread,
    without waiting, and the last one gives it back.
    """

    def __init__(
        self,
        prompt_length: Any = None,
        kinds: Sequence[str] = ("h2o",),
        last: int = 0,
        has_states: bool = False,
    ) -> None:
        """
        Args:
            kinds: of the layers (`h2o.hf.families.layer_kinds`).
            last: the last layer that attends to keys of an earlier one, if any does.
            has_states: whether some layers have states.
        """
        if prompt_length is not None:
            prompt_length = check_prompt_length(prompt_length)
        self.waiting: int | None = None
        """The layer whose new keys have not been through attention yet. An interrupt (Ctrl-C)
        leaves it set, since how far the layer got is then unknown."""
        self.prompt_length: int | Sequence[int] | None = prompt_length
        """Tokens of the whole prompt, where it is known to come in chunks."""
        self.prompt_counts: list[int] | None = None
        """Tokens of each row's prompt, from the first layer to the last of the forward pass that
        reads its beginning"""
        self.pins = Pins()
        self.plans: Mapping[int, LayerPlan] = {}
        """Budgets of the H2O layers, by their number"""
        self.kinds = kinds
        storing = [index for index, kind in enumerate(kinds) if kind not in ("none", "cross")]
        self.first, self.last = storing[0], max(storing[-1], last)
        """The layers that come first and last to the cache in every forward pass."""
        self.counting = [index for index in storing if kinds[index] != "states"]
        """The layers that know how many columns they have seen."""
        self.has_states = has_states
        self.counts_padding = has_states or "sliding" in kinds
        """Whether some layers take padding that follows a token for text"""
        self.ends_in_padding: list[bool] = []
        """Rows whose last column was padding, where layers count it; empty: none"""
        self._ends_in_states = kinds[self.last] == "states"
        self.rereads_after: float | None = None
        """See `h2o.hf.support.rereads_after`"""
        self.rope_deltas = RopeDeltas()
        self.text = SeenText()
        self.skips_pads = False
        """Whether the model counted the positions of the prompt without its padding"""
        self.by_row = False
        """Whether rows are conversations of their own, as in `generate_all`"""
        self.may_be_transformed = True
        """Whether tensors may be those of a transform of torch.func: False in a pass that began
        where none was at work"""
        self._thread: int | None = None  # the one with a forward pass under way

    # ---- A forward pass ------------------------------------------------------------------------

    def enter(self) -> None:
        """Take the cache for this thread before a layer gets new keys.

        Raises:
            RuntimeError: another thread's forward pass is under way; an earlier layer's keys never
                got to its attention.
        """
        if torch.compiler.is_compiling():  # a captured graph cannot ask for the thread
            self.check_keys_arrived()
            return
        thread = threading.get_ident()
        if self._thread == thread:  # amid a pass
            if self.waiting is not None:
                self.check_keys_arrived()
            return
        with _lock:
            self.check_thread()
            self.check_keys_arrived()
            self.may_be_transformed = has_transforms()
            self._thread = thread

    def enter_states(self, layer: int) -> None:
        """Do what `enter` does, before a layer's states change."""
        if layer != self.last:
            self.enter()
        elif self._ends_in_states:
            self._finish()

    def layer_done(self, layer: int) -> None:
        """Note that a layer has stored its new keys; after the last one the pass is over."""
        self.waiting = None
        if layer == self.last:
            self._finish()

    def take_back(self, layer: int, *, has_states: bool) -> None:
        """Note that a layer's new keys were refused, and nothing of them stored. The pass goes on
        where its states may have seen the tokens."""
        self.waiting = None
        if layer == self.first and not has_states:
            self.end_pass()

    def end_pass(self) -> None:
        """End the pass that is under way, if any."""
        self._thread = self.prompt_counts = None
        self.may_be_transformed = True

    def _finish(self) -> None:
        self.end_pass()
        if self.rope_deltas.may_be:
            self.rope_deltas.end()

    @property
    def under_way(self) -> bool:
        """Whether a pass has begun and did not come to its end."""
        return self._thread is not None

    # ---- Checks --------------------------------------------------------------------------------

    def check_thread(self) -> None:
        """Raises RuntimeError while another thread that still runs is amid a forward pass."""
        if torch.compiler.is_compiling():
            return
        thread = self._thread
        if thread not in (None, threading.get_ident()) and calls_a_module(thread):
            self.text.lose()  # which may have noted the ids of the refused pass
            raise RuntimeError(
                "this H2OCache is in use by another thread, whose forward pass has not come to "
                "its end: a cache is one conversation, so make one cache per thread (or "
                "h2o.patched(), which makes one for each call)"
            )

    def check_keys_arrived(self) -> None:
        """Raises RuntimeError where a layer's new keys never got to its attention."""
        if self.waiting is not None:
            raise RuntimeError(
                f"layer {self.waiting} updated its H2OCache, but its keys never reached h2o's "
                'attention. Either the model runs another one: load it with attn_implementation="'
                'h2o", or call model.set_attn_implementation("h2o"), or leave h2o.patched() after '
                "the last thread that generates in it has ended. Or it changes the keys after "
                "the cache (latent attention, repeated heads), which h2o cannot serve. Or the last "
                "forward pass was interrupted: call cache.reset()"
            )

    def check_layers_agree(self, columns: list[int]) -> None:
        """Raises RuntimeError between two passes where the last one did not come to its end: layers
        have seen different numbers of `columns`, or states, which tell no number, may have.

        Args:
            columns: of the layers that know how many they have seen.
        """
        if columns != columns[:1] * len(columns):
            raise RuntimeError(_parted(columns))
        if self.has_states and self.under_way:
            raise RuntimeError(
                "the last forward pass broke off between two layers, and some of the model's "
                "states have seen its tokens, others not: call cache.reset() and start anew"
            )

    def check_angles(self, seen: int, new: int) -> None:
        """Raises ValueError where `new` tokens would change the angles of those `seen` before."""
        limit = self.rereads_after
        if limit is not None and 0 < seen <= limit < seen + new:
            raise ValueError(
                f"{seen} tokens were read and {new} follow: beyond {limit} this model's rotary "
                "angles change (longrope), and it would have to read the whole text again. Call "
                "model.generate() in h2o.patched(), which does, or begin with a longer prompt"
            )

    def allow_rereading(self) -> None:
        """Let the model leave out the cache where angles change: a patch then makes another."""
        if self.rereads_after != math.inf:
            self.rereads_after = None

    # ---- Rows ----------------------------------------------------------------------------------

    def repeat(self, rows: int) -> None:
        """Repeat each row of the batch, also of a prompt that is still to come."""
        self.pins.each_row(lambda pinned: [row for row in pinned for _ in range(rows)])
        self.text.change_rows(lambda x: x.repeat_interleave(rows, -1))
        self.ends_in_padding = [row for row in self.ends_in_padding for _ in range(rows)]
        self._repeat_lengths(rows)

    def repeat_to(self, rows: int) -> None:
        """Follow `generate()`, which repeats each prompt for beams and `num_return_sequences`, to a
        batch of so many rows."""
        given = self.prompt_length
        if isinstance(given, Sequence) and len(given) < rows and rows % len(given) == 0:
            self._repeat_lengths(rows // len(given))

    def _repeat_lengths(self, rows: int) -> None:
        if isinstance(self.prompt_length, Sequence):
            self.prompt_length = [n for n in self.prompt_length for _ in range(rows)]

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order."""
        self.pins.each_row(lambda pinned: [pinned[row] for row in rows.tolist()])
        self.text.change_rows(lambda x: x[:, rows.to(x.device)])
        if self.ends_in_padding:
            self.ends_in_padding = [self.ends_in_padding[row] for row in rows.tolist()]
        if isinstance(self.prompt_length, Sequence):
            self.repeat_to(int(rows.max()) + 1)
            self.prompt_length = [self.prompt_length[row] for row in rows.tolist()]

    def reset(self) -> None:
        """Become the guard of a new cache whose prompt may have any length."""
        self.end_pass()
        self.rope_deltas.reset()
        self.text.reset()
        self.prompt_length = None
        self.ends_in_padding = []
        self.pins.reset()


def _parted(counts: list[int]) -> str:
    """The error for layers that have seen different numbers of tokens."""
    seen, run = counts[0], sum(count > 0 for count in counts)
    if counts == [seen] * run + [0] * (len(counts) - run):
        return (
            f"the last forward pass broke off: {run} of the cache's {len(counts)} layers have seen "
            f"{seen} tokens, the others none. Call cache.reset() and start anew. If no pass has "
            f"raised an error before this one, the model has fewer layers than its config says "
            f"(some were dropped, or the cache is another model's): set config.num_hidden_layers = "
            f"{run} and make a new H2OCache from that config"
        )
    return (
        "the last forward pass broke off between two layers, which now have seen "
        "different numbers of tokens: call cache.reset() and start anew"
    )
