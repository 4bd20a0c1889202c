"""`ForwardPass`: one forward pass through the layers of an `H2OCache`, from its plan to its end."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from h2o.hf.conversation.state import CacheState

NUMBER_LAYERS = (
    "number the layers (for i, layer in enumerate(model.model.layers): layer.self_attn.layer_idx = "
    "i), set config.num_hidden_layers to how many there are, and make a new H2OCache"
)
"""What to do after layers were removed from a model, whose others keep their old numbers"""


@dataclasses.dataclass(slots=True, eq=False)
class ForwardPass:
    """One forward pass through the layers of a cache."""

    before: CacheState
    after: CacheState
    columns: int | None
    """Number of its columns. None: not known yet, so that `after` is not known either"""
    chunked_lengths: list[int] | None = None
    """Length of each row's prompt, if the pass is its first chunk"""
    raise_budgets: Callable[[], Any] | None = None
    """Raises the budgets that grow in this pass, and returns what lowers them again. None: none of
    them grows"""
    take_back: Any = None
    """What lowers them again (`EarlierBudgets` of h2o.hf.prompt.prompt_budget), if no layer stores
    anything"""
    thread: int = dataclasses.field(default_factory=threading.get_ident)
    stored: set[int] = dataclasses.field(default_factory=set)
    """The layers that have stored their new keys"""
    waiting: int | None = None
    """The layer whose new keys have not been attended to yet. An interrupt (Ctrl-C) leaves this
    set, because it is then unknown how far the layer got."""
    accesses: dict[int, int] = dataclasses.field(default_factory=dict)
    """How often each layer with states has read or replaced its states. All layers of a model do so
    equally often, so fewer in the last one mean that the pass was interrupted"""
    may_be_transformed: bool = True
    """Whether tensors may belong to a torch.func transform. False in a pass that began outside any
    transform"""
    prompt: Any = None
    """`PromptRows` (`h2o.hf.prompt.prompt_budget`), set by the first layer of a prompt"""
    pool: Any = None
    """The `CrossHeadBudget` of a prompt whose layers share one budget"""

    @property
    def has_changed(self) -> bool:
        """Whether some layer has stored new keys or states, or may have."""
        changed = bool(self.stored) or self.waiting is not None
        return changed or any(self.accesses.values())

    @property
    def has_missed_states(self) -> bool:
        """Whether some of the layers with states had fewer accesses to them."""
        return len(set(self.accesses.values())) > 1

    def begin_unannounced(self, planned: ForwardPass) -> None:
        """Go on as planned, now that the number of columns is known. No layer has stored a key."""
        self.after = planned.after
        if planned.raise_budgets is not None:
            self.take_back = planned.raise_budgets()

    def check_pins(self, tokens: Tensor) -> None:
        """Note whether pinned tokens are still to arrive, now that rows have seen `tokens` [B]."""
        if not self.after.pinned.has_pending(tokens.tolist()):
            self.after = self.after._replace(waits_for_pins=False)


def interruption(
    current: ForwardPass | None, finished: ForwardPass | None, counting: Sequence[int]
) -> str:
    """Error message for a pass that only some layers have stored; "" if there is none.

    Args:
        current: the pass that has not ended; None if the last one has.
        finished: the last pass of a model with states, if it has ended.
        counting: the layers that store keys.
    """
    last = current or finished
    if current is not None and current.waiting is not None:
        return waiting_message(current.waiting)
    if current is not None and 0 < len(current.stored) < len(counting):
        return disagreement_message(current, counting)
    if last is None or not last.accesses:  # no layer has states
        return ""
    if last.has_missed_states or (current is not None and current.has_changed):
        return (
            "the last forward pass was interrupted between two layers, and only some of the "
            "model's states have seen its tokens. Call cache.reset() and start over"
        )
    return ""


def in_use_elsewhere() -> RuntimeError:
    """Error for a cache that another thread runs a forward pass with."""
    return RuntimeError(
        "this H2OCache is in use by another thread, whose forward pass has not ended. A cache "
        "holds one conversation, so make one cache per thread, or use h2o.patched(), which makes "
        "one per call"
    )


def waiting_message(layer: int) -> str:
    """Error message for a layer whose new keys never reached its attention."""
    return (
        f"layer {layer} updated its H2OCache, but its keys never reached h2o's attention. If the "
        'model uses another attention, load it with attn_implementation="h2o" or call '
        'model.set_attn_implementation("h2o"). If threads generate within h2o.patched(), leave it '
        "after the last one has finished. If the last forward pass was interrupted, call "
        "cache.reset(). Otherwise the model changes keys after the cache (latent attention, "
        "repeated heads), which h2o does not support"
    )


def disagreement_message(the_pass: ForwardPass, counting: Sequence[int]) -> str:
    """Error message for a pass that was interrupted between two of the layers that store keys."""
    stored, seen = sorted(the_pass.stored), the_pass.after.columns
    if the_pass.before.columns:
        return (
            "the last forward pass was interrupted between two layers, which have now seen "
            "different numbers of tokens. Call cache.reset() and start over"
        )
    run = len(stored)
    if stored == list(counting[:run]):
        return (
            f"{run} of the cache's {len(counting)} layers have seen {seen} tokens, the others "
            "none. If an earlier call raised an error, its forward pass was interrupted between "
            "two layers: call cache.reset() and start over. If none did, the model runs only "
            f"{run} layers, fewer than its config says (some were dropped, or the cache was made "
            f"for another model). Set config.num_hidden_layers = {run} and make a new H2OCache"
        )
    return (  # an interrupted pass would have reached the first layers
        f"{run} of the cache's {len(counting)} layers have seen {seen} tokens, but layers before "
        f"them none: those were removed from the model. For the rest, {NUMBER_LAYERS}"
    )
