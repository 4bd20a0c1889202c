"""`PassGuard`: tracks the forward pass through the layers of one `H2OCache`.

The guard detects an interrupted pass, keys that never reached h2o's attention, and a second thread.
It also holds what all layers need to know about the text: the prompt's length, its pins, the state
of each row, and a digest of the token ids.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from h2o.budgets import check_prompt_length
from h2o.compat import calls_a_module
from h2o.compat_wrappers import has_transforms
from h2o.config.layer_plan import LayerPlan
from h2o.hf.cache_state.pins import Pins
from h2o.hf.cache_state.row_state import LastPass, RowState, put_rope_deltas
from h2o.hf.cache_state.seen_text import SeenText

WITHOUT_CACHE = (
    "use_cache=False with an H2OCache: generate() then feeds the whole text again for each token. "
    "Pass use_cache=True, or no cache. If you did not pass use_cache, it comes from "
    "model.generation_config or model.config, which training may have changed"
)
"""Error message when `generate()` feeds the whole text again, together with its first new token."""

NUMBER_LAYERS = (
    "number the layers (for i, layer in enumerate(model.model.layers): layer.self_attn.layer_idx = "
    "i), set config.num_hidden_layers to how many there are, and make a new H2OCache"
)
"""What to do after layers were removed from a model, whose others keep their old numbers"""

_lock = threading.Lock()
"""Guards `_thread` of all caches. They share one lock, because locks cannot be copied."""


class PassGuard:
    """The state of a cache outside its layers.

    A forward pass visits the layers in order, so a second thread would mix its tokens into some of
    them. The first layer of a pass therefore claims the cache for its thread, without waiting, and
    the last layer releases it.
    """

    def __init__(
        self,
        prompt_length: Any = None,
        kinds: Sequence[str] = ("h2o",),
        last: int = 0,
        with_states: Iterable[int] = (),
    ) -> None:
        """
        Args:
            kinds: the kind of each layer (`h2o.hf.model_traits.layer_kinds`).
            last: the last layer that attends to an earlier layer's keys, or 0.
            with_states: the layers that have states.
        """
        if prompt_length is not None:
            prompt_length = check_prompt_length(prompt_length)
        self.waiting: int | None = None
        """The layer whose new keys have not been attended to yet. An interrupt (Ctrl-C) leaves this
        set, because it is then unknown how far the layer got."""
        self.prompt_length: int | Sequence[int] | None = prompt_length
        """Number of tokens in the whole prompt, or in each row's; None if the user did not say."""
        self.prompt_counts: list[int] | None = None
        """Number of tokens per row in the pass that begins the prompt, set during that pass only"""
        self.chunked_lengths: list[int] | None = None
        """`prompt_length` from this pass on, if it is the first chunk of a prompt in `generate()`;
        set during the pass only"""
        self.pins = Pins()
        self.plans: Mapping[int, LayerPlan] = {}
        """Budgets of the H2O layers, by layer number"""
        self.kinds = kinds
        storing = [index for index, kind in enumerate(kinds) if kind != "none"]
        self.first, self.last = storing[0], max(storing[-1], last)
        """The first and the last layer that use the cache in every forward pass."""
        self.counting = [index for index in storing if kinds[index] != "states"]
        """The layers that know how many columns they have seen."""
        self.state_accesses = dict.fromkeys(with_states, 0)
        """How often each layer with states has read or replaced its states in the latest pass. All
        layers of a model do so equally often, so fewer in the last one mean that the pass was
        interrupted"""
        self.has_states = bool(self.state_accesses)
        self.has_windows = "sliding" in kinds
        """Whether some layers are transformers' own with a sliding window, which store padding"""
        self.counts_padding = self.has_states or self.has_windows
        """Whether any layer treats padding that follows a token as text"""
        self.row_states = [RowState()]
        """The state of each row, or a single one for all rows"""
        self.states_of_pass: list[RowState] | None = None
        """`row_states` from the end of this pass on; None if the pass does not change them"""
        self.records_passes = False
        """Whether `last_pass` is recorded, so that `H2OCache.crop` can take back its columns"""
        self.last_pass: LastPass | None = None
        self.drops_cache_after: float | None = None
        """See `h2o.hf.support.drops_cache_after`"""
        self.has_rope_deltas = False
        """Whether the model may keep `rope_deltas`, as models for more than text do"""
        self.text = SeenText()
        self.checked_config = 0
        """`id` of the config of the model that has been compared with the cache's"""
        self.has_independent_rows = False
        """Whether the rows are independent conversations, as in `generate_all`"""
        self.may_be_transformed = True
        """Whether tensors may belong to a torch.func transform. False in a pass that began outside
        any transform"""
        self._thread: int | None = None  # the thread with a forward pass under way

    # ---- A forward pass ------------------------------------------------------------------------

    def enter(self) -> None:
        """Claim the cache for this thread before a layer gets new keys.

        Raises:
            RuntimeError: another thread is running a forward pass, or an earlier layer's keys never
                reached its attention.
        """
        if torch.compiler.is_compiling():  # a captured graph cannot query the thread
            self.check_keys_arrived()
            return
        thread = threading.get_ident()
        if self._thread == thread:  # within a pass
            if self.waiting is not None:
                self.check_keys_arrived()
            return
        with _lock:
            self.check_thread()
            self.check_keys_arrived()
            self.may_be_transformed = has_transforms()
            self.state_accesses = dict.fromkeys(self.state_accesses, 0)
            self._thread = thread

    def enter_states(self, layer: int) -> None:
        """Do the same as `enter` before a layer's states change."""
        if layer != self.last:
            self.enter()
        elif self.kinds[layer] == "states":
            self._finish()
        self.count_state_access(layer)

    def count_state_access(self, layer: int) -> None:
        """Count that a layer reads or has replaced one of its states."""
        if not torch.compiler.is_compiling():
            self.state_accesses[layer] += 1

    def layer_done(self, layer: int) -> None:
        """Record that a layer has stored its new keys. The last layer ends the pass."""
        self.waiting = None
        if layer == self.last:
            self._finish()

    def layer_rejected(self, layer: int) -> None:
        """Record that a layer rejected its new keys and stored nothing.

        If it was the first layer, the pass ends, unless its states may have seen the tokens."""
        self.waiting = None
        if layer == self.first and layer not in self.state_accesses:
            self.end_pass()

    def end_pass(self) -> None:
        """End the pass that is under way, if any."""
        self._thread = self.prompt_counts = self.chunked_lengths = self.states_of_pass = None
        self.may_be_transformed = True

    def _finish(self) -> None:
        if self.chunked_lengths is not None:
            self.prompt_length = self.chunked_lengths
        if self.states_of_pass is not None:
            self.row_states = self.states_of_pass
        self.end_pass()
        if self.has_rope_deltas:  # the model had none, or those of an earlier text
            put_rope_deltas(self.row_states)

    @property
    def is_under_way(self) -> bool:
        """Whether a pass has begun and not ended."""
        return self._thread is not None

    # ---- Checks --------------------------------------------------------------------------------

    def check_thread(self) -> None:
        """Raise RuntimeError if another thread, still running, is within a forward pass."""
        if torch.compiler.is_compiling():
            return
        thread = self._thread
        if thread not in (None, threading.get_ident()) and calls_a_module(thread):
            self.text.mark_unknown()  # it may have recorded the ids of the rejected pass
            raise in_use_elsewhere()

    def check_keys_arrived(self) -> None:
        """Raise RuntimeError if a layer's new keys never reached its attention."""
        if self.waiting is not None:
            raise RuntimeError(
                f"layer {self.waiting} updated its H2OCache, but its keys never reached h2o's "
                "attention. If the model uses another attention, load it with "
                'attn_implementation="h2o" or call model.set_attn_implementation("h2o"). If '
                "threads generate within h2o.patched(), leave it after the last one has finished. "
                "If the last forward pass was interrupted, call cache.reset(). Otherwise the model "
                "changes keys after the cache (latent attention, repeated heads), which h2o does "
                "not support"
            )

    def check_layers_agree(self, columns: list[int]) -> None:
        """Raise RuntimeError if the last pass was interrupted between two layers.

        Then layers have seen different numbers of columns. States have no such number, so for them
        the pass must have ended, and all layers must have used theirs equally often.

        `columns`: number of columns seen by each layer in `counting`."""
        if columns != columns[:1] * len(columns):
            raise RuntimeError(_disagreement_message(columns))
        if self.has_states and (self.is_under_way or self.has_missed_states):
            raise RuntimeError(
                "the last forward pass was interrupted between two layers, and only some of the "
                "model's states have seen its tokens. Call cache.reset() and start over"
            )

    @property
    def has_missed_states(self) -> bool:
        """Whether some of the layers with states had fewer accesses to them in the last pass."""
        return len(set(self.state_accesses.values())) > 1

    def check_angles(self, seen: int, new: int) -> None:
        """Raise ValueError if `new` tokens would change the rotary angles of the `seen` tokens."""
        limit = self.drops_cache_after
        if limit is not None and 0 < seen <= limit < seen + new:
            raise ValueError(
                f"the cache has seen {seen} tokens and {new} follow. Beyond {limit} tokens this "
                "model's rotary angles change (longrope), and the whole text has to be processed "
                "again. Call model.generate() in h2o.patched(), which does this, or begin with a "
                "longer prompt"
            )

    def allow_cache_drop(self) -> None:
        """Let the model drop the cache when angles change, because a patch will make another."""
        if self.drops_cache_after != math.inf:
            self.drops_cache_after = None

    # ---- Rows ----------------------------------------------------------------------------------

    def change_rows(self, change: Callable[[Tensor], Tensor]) -> None:
        """Select or repeat the batch rows, even before the prompt.

        `change` does so with the first axis of a tensor."""

        def change_list(rows: Any) -> list[Any]:
            numbers = torch.arange(len(rows), device="cpu")
            return [rows[row] for row in change(numbers).tolist()]

        self.text.change_rows(change)
        self.pins.each_row(change_list)
        self.last_pass = None
        if len(self.row_states) > 1:
            self.row_states = change_list(self.row_states)
        if isinstance(self.prompt_length, Sequence):
            self.prompt_length = change_list(self.prompt_length)

    @property
    def ends_in_padding(self) -> bool:
        """Whether the last column was padding in some row."""
        return any(state.ends_in_padding for state in self.row_states)

    def row_state(self, row: int) -> RowState:
        """The state of one row."""
        return self.row_states[row if len(self.row_states) > 1 else 0]

    def repeat_to(self, rows: int) -> None:
        """Repeat `prompt_length` for a batch of `rows` rows.

        `generate()` repeats each prompt for beams and `num_return_sequences`."""
        given = self.prompt_length
        if isinstance(given, Sequence) and len(given) < rows and rows % len(given) == 0:
            self.prompt_length = [n for n in given for _ in range(rows // len(given))]

    def crop(self, left: int) -> None:
        """Take back what the last pass added to the rows, beyond `left` columns."""
        if self.last_pass is not None:
            self.row_states = self.last_pass.crop(left)
            self.last_pass = None

    def reset(self) -> None:
        """Start over as the guard of an empty cache without a known prompt length."""
        self.end_pass()
        self.state_accesses = dict.fromkeys(self.state_accesses, 0)
        self.text.reset()
        self.prompt_length = None
        self.row_states, self.last_pass = [RowState()], None
        self.pins.reset()


def in_use_elsewhere() -> RuntimeError:
    """Error for a cache that another thread runs a forward pass with."""
    return RuntimeError(
        "this H2OCache is in use by another thread, whose forward pass has not ended. A cache "
        "holds one conversation, so make one cache per thread, or use h2o.patched(), which makes "
        "one per call"
    )


def _disagreement_message(counts: list[int]) -> str:
    """Error message for layers that have seen different numbers of tokens."""
    seen, run = counts[0], sum(count > 0 for count in counts)
    if counts == [seen] * run + [0] * (len(counts) - run):
        return (
            f"{run} of the cache's {len(counts)} layers have seen {seen} tokens, the others none. "
            "If an earlier call raised an error, its forward pass was interrupted between two "
            "layers: call cache.reset() and start over. If none did, the model runs only "
            f"{run} layers, fewer than its config says (some were dropped, or the cache was made "
            f"for another model). Set config.num_hidden_layers = {run} and make a new H2OCache"
        )
    if set(counts) == {0, max(counts)}:  # an interrupted pass would have reached the first ones
        return (
            f"{run} of the cache's {len(counts)} layers have seen {max(counts)} tokens, but layers "
            f"before them none: those were removed from the model. For the rest, {NUMBER_LAYERS}"
        )
    return (
        "the last forward pass was interrupted between two layers, which have now seen "
        "different numbers of tokens. Call cache.reset() and start over"
    )
