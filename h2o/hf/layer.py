"""One layer of an `H2OCache`: what it holds, and a forward pass through it.

transformers calls `cache.update(key, value, layer)` and then the attention
function, which never sees the cache. So `update` returns the new keys as a
view that carries the layer (`view.h2o_layer`), and the attention function of
h2o.hf.attention hands everything back to that layer's `attend`. A view per call
keeps two threads apart and makes no reference cycle between layer and tensor.

Shape letters: B batch rows, H query heads, G key/value heads, Q new tokens,
S slots, D head dimension, K keys held. A column is a place in the padded
batch; a position is a token's index in its own row, pads not counted.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from h2o import ops
from h2o.config import H2OConfig
from h2o.errors import Unsupported
from h2o.head_budgets import levelled
from h2o.hf import parallel, prompt
from h2o.hf import slots as store
from h2o.hf.conversation import Conversation, columns_left
from h2o.hf.kept import Kept
from h2o.hf.report import LayerReport
from h2o.hf.rollback import NO_RECORD, LastPass
from h2o.hf.state import restore, state_of
from h2o.hf.trace import Trace
from h2o.quantisation import dequantised
from h2o.slots import PER_ROW

__all__ = ["H2OLayer"]


class H2OLayer(CacheLayerMixin):
    """One layer's store: at most k = sinks + heavy + recent keys of each row and head.

    Takes a `H2OConfig` of its own, as `H2OConfig.for_layer` gives it.
    """

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(
        self,
        config: H2OConfig | None = None,
        layer_idx: int = 0,
        conversation: Conversation | None = None,
        *,
        trace: bool = False,
    ) -> None:
        super().__init__()
        self.config = config or H2OConfig()
        self.layer_idx = layer_idx
        self.conversation = conversation or Conversation()
        self.policy = self.config.policy
        self.traced = trace
        self.record_past = False  # transformers' name for it
        self.part = parallel.WHOLE  # of the model's heads; attention knows
        self.reset()

    # ---- One forward pass: update, then attend -----------------------------------------------

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """The new keys and values [B, G, Q, D], the keys as a view that carries this layer.

        Nothing is stored before attention has been through `attend`. Errors: RuntimeError when
        an earlier layer's keys never got there, ValueError for another batch size, number of heads
        or shape.
        """
        self.conversation.refuse_interrupted()
        if self.slots is None:
            if key_states.shape[0] == 0:
                raise ValueError("an H2OCache needs at least one row, not a batch of 0")
            self._refuse_shapes(key_states, value_states)
            # Under autocast keys have been rotated in float32; attention makes them as the values.
            self.row_size = value_states.shape[-1], value_states.element_size()
        elif key_states.shape[0] != self.batch_size:
            raise ValueError(
                f"this cache holds a batch of {self.batch_size} rows and was given "
                f"{key_states.shape[0]}: one cache is one batch of conversations, so use a new "
                "H2OCache, or cache.reset()"
            )
        elif key_states.shape[1] != (held := self.slots.free.shape[1]):
            raise ValueError(
                f"this cache holds keys of {held} heads in layer {self.layer_idx} and was given "
                f"those of {key_states.shape[1]}: it is of another model, or of one that was cut "
                "over another number of processes"
            )
        elif self.keys.device != key_states.device:  # of a file, or the model has moved
            restore(self, state_of(self).each(lambda x: x.to(key_states.device)))
        # A detached view is the cheapest one; where gradients are wanted the
        # graph must stay, so that attention can refuse them.
        key = key_states[:] if key_states.requires_grad else key_states.detach()
        key.h2o_layer = self
        self.conversation.waiting = self.layer_idx
        return key, value_states

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        scale: float | None = None,
        softcap: float = 0.0,
    ) -> Tensor:
        """Attention of the new queries over what is held and the new keys; then eviction.

        Args:
            query: [B, H, Q, D].
            key, value: [B, G, Q, D], as `update` returned them.
            mask: [B, Q] bool, False at a pad; None: no pads.
            scale, softcap: as in `h2o.ops.attend`.

        Returns:
            [B, Q, H, D]. When it raises, the layer is as it was before `update`.
        """
        if self.conversation.waiting != self.layer_idx:
            raise RuntimeError(
                f"attention of layer {self.layer_idx} ran twice for the same keys: an H2OCache "
                "cannot be used where forward passes are repeated (gradient checkpointing)"
            )
        given, logits = (query, key, value, mask), {"scale": scale, "softcap": softcap}
        last = LastPass(self, *given, **logits) if self.record_past else None
        try:
            out = self.forward(*given, **logits)
        except Exception:
            self.forget_update()
            raise
        self.last = last
        self.conversation.attended(self.layer_idx)
        return out

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **logits: Any
    ) -> Tensor:
        """As `attend`, whoever's turn it is."""
        many = self.slots is None or self.unscored or query.shape[2] != 1
        forward = self._attend_many if many else self._attend_one
        return forward(query, key, value, mask, **logits)

    def take_over(self, keys: Tensor, values: Tensor, mask: Tensor | None) -> None:
        """Holds keys and values [B, G, n, D] of another cache, pads (mask [B, n]) left out.

        All of them, with scores of 0, until the next forward pass has scored and cut them.
        """
        self._refuse_shapes(keys, values)
        self.row_size = keys.shape[-1], keys.element_size()
        self._hold(store.filled(keys, values, mask, value_weighted=self.config.value_weighted))
        self.unscored = True
        self._count(keys.shape[2], mask)

    def is_whole_text_again(self, Q: int) -> bool:
        """Whether Q new tokens are as many as the prompt, which is all there was, and one more."""
        return 0 < self.seen == self.prompt_columns == Q - 1

    def float_dtype(self, given: torch.dtype) -> torch.dtype:
        """Of the new keys that fit to those held: theirs, or any that is given."""
        fixed = self.slots is not None and self.config.kv_dtype is None
        return self.slots.keys.dtype if fixed else given

    def forget_update(self) -> None:
        """Takes back an `update` whose keys attention refuses; nothing was stored yet."""
        self.conversation.take_back(self.layer_idx)

    def _attend_one(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **logits: Any
    ) -> Tensor:
        """A decode step."""
        slots = self.slots
        if self.room.tokens <= self.longest:
            slots = self._with_room(self.longest + 1)
        out = self._step(
            query,
            key,
            value,
            slots,
            mask=mask,
            out=None if self._out is None else torch.empty_like(self._out),
            policy=self.policy,
            **logits,
        )
        self._out = out
        self.longest += 1
        self._count(1, mask)
        return out

    def _attend_many(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **logits: Any
    ) -> Tensor:
        """The first forward pass, or a later one of several tokens: a chunk, a chat turn."""
        B, _, Q, _ = key.shape
        stored = self.slots
        first = stored is None or self.unscored
        if first:
            lengths = prompt.counted(mask, B, Q, self.config, self.conversation)
            if stored is not None:
                lengths = [x + y for x, y in zip(lengths, stored.lengths.tolist(), strict=True)]
            longest = max(lengths)
            lengths = prompt.lengths(self.config, self.conversation.prompt_length, lengths)
            config = self.config.for_keys(*self.row_size)
            self.raised = any(map(config.is_raised, filter(None, lengths)))
            each = list(map(config.head_tokens, lengths))
            budget = levelled(each, key.shape[1], self.part)
            widest = [self.config.sinks + max(map(sum, head)) for head in zip(*budget, strict=True)]
        else:
            if self.seen == self.prompt_columns and not self.record_past:
                prompt.refuse_chunk(self.config, self.conversation, self.seen, Q)
            longest = self.longest + Q
            widest = self.room.widest
            stored = self._with_room(longest)
        scores_before = None if stored is None else stored.scores.clone()
        try:
            out, scores = self._attention(
                query, key, value, stored, mask=mask, policy=self.policy, **logits
            )
            slots, new = stored, (key, value, scores, mask)
            if first:
                slots = store.with_capacities(
                    key,
                    self._capacities(widest, longest),
                    value_weighted=self.config.value_weighted,
                    kv_dtype=self.config.kv_dtype,
                    merge=self.config.merge is not None,
                )
                slots.budget.copy_(torch.tensor(budget, dtype=torch.int32).squeeze(1))
                new = new if stored is None else store.together(stored, *new)
            ops.evict(*new[:3], slots, mask=new[3], policy=self.policy)
        except Exception:  # the scores are all that attend has touched
            if stored is not None:
                stored.scores.copy_(scores_before)
            raise
        if first:
            self._hold(slots, widest)
            self.prompt_columns = self.seen + Q
            self.unscored = False
        self.longest = longest
        self._count(Q, mask)
        return out

    def _capacities(self, widest: list[int], tokens: int) -> list[int]:
        return store.capacities(widest, tokens)

    def _step(self, *tensors: Any, **more: Any) -> Any:
        return ops.step(*tensors, **more)

    def _attention(self, *tensors: Any, **more: Any) -> Any:
        return ops.attend(*tensors, **more)

    def _count(self, Q: int, mask: Tensor | None) -> None:
        """Q more columns have been seen."""
        self.seen += Q
        if self.trace is not None:
            self.trace.record(self.slots, Q, mask)

    def _refuse_shapes(self, keys: Tensor, values: Tensor) -> None:
        if keys.shape != values.shape:
            raise Unsupported(
                f"layer {self.layer_idx} has keys of shape {tuple(keys.shape)} and values of "
                f"{tuple(values.shape)}: h2o needs one head dimension for both"
            )

    def _with_room(self, tokens: int) -> ops.Slots:
        """The slots, enlarged where rows of so many tokens and the next one might not fit."""
        if tokens > self.room.tokens:
            self._hold(store.enlarged(self.slots, self.room.larger(tokens)))
        return self.slots

    def _hold(self, slots: ops.Slots | None, widest: list[int] | None = None) -> None:
        """Takes these as the layer's slots; `widest`: the largest budget k of each head, if new.
        keys and values are named for transformers' tools."""
        self.slots = slots
        self.room = store.Room(
            widest or self.room.widest, [] if slots is None else store.sizes(slots)
        )
        self.keys = None if slots is None else slots.keys
        self.values = None if slots is None else slots.values
        self.is_initialized = slots is not None
        self.batch_size = 0 if slots is None else slots.scores.shape[0]
        self._out: Tensor | None = None  # what a decode step's output looks like

    # ---- What transformers asks --------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: slots are made when the prompt's length is known."""

    def get_seq_length(self) -> int:
        """Columns seen, pads and evicted tokens included: positions go on counting from here."""
        return self.seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(length, offset) of the mask: the new tokens alone; what is held is always visible."""
        return query_length, self.get_seq_length()

    def get_max_length(self) -> int:
        """-1: unbounded."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.16

    def reset(self) -> None:
        """As new. Keeps no memory."""
        self._hold(None, [0])
        self.seen = 0
        self.longest = 0  # at least the tokens of the longest row
        self.prompt_columns = 0
        self.row_size = (0, 0)  # D, and bytes of an element as the model gives it
        self.unscored = False  # whether all was taken over, and no forward pass has been since
        self.raised = False  # whether a fraction came to less than one token
        self.trace = Trace() if self.traced else None
        self.last: LastPass | None = None  # where passes are recorded
        self.conversation.waiting = None

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what row beam_idx[i] was: keys, scores, positions and budgets."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps these rows, in this order."""
        self._each(lambda x: x[indices.to(x.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row becomes `repeats` rows."""
        self._each(lambda x: x.repeat_interleave(repeats, dim=0))

    def _each(self, change: Any) -> None:
        if self.slots is not None:
            rows = {name: getattr(self.slots, name) for name in PER_ROW}
            changed = {name: None if x is None else change(x) for name, x in rows.items()}
            self._hold(self.slots._replace(**changed))
            self.last = None  # of other rows
            if self.trace is not None:
                self.trace.each(change)

    def crop(self, tokens: int) -> None:
        """See `H2OCache.crop`."""
        left, last = columns_left(tokens, self.seen), self.last
        if left == 0:
            self.reset()
        elif left < self.seen:
            self.refuse_crop(left)
            last.again(self, left)
        self.last = None

    def refuse_crop(self, left: int) -> None:
        """Errors: NotImplementedError where so few columns cannot be left."""
        if self.last is None:
            raise NotImplementedError(NO_RECORD)
        self.last.refuse(left, self.seen)

    def activate_past_recording(self) -> None:
        """See `H2OCache.activate_past_recording`."""
        self.record_past = True

    def offload(self) -> None:
        """Errors: NotImplementedError."""
        raise NotImplementedError("an H2O layer cannot be offloaded; it is small by its budget")

    prefetch = offload

    # ---- What users ask ----------------------------------------------------------------------

    def kept(self) -> Kept:
        """What is held: see `H2OCache.kept`."""
        if self.slots is None:
            return Kept(torch.zeros(0, 0, 0, dtype=torch.int64), torch.zeros(0, 0, 0))
        return Kept(*store.held(self.slots, positions=-1, scores=0))

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, K, D] in the order of `kept`; 0 where fewer are held."""
        if self.slots is None:
            return torch.zeros(0, 0, 0, 0), torch.zeros(0, 0, 0, 0)
        keys, values = store.held(self.slots, keys=0, values=0)
        return dequantised(keys, self.row_size[0]), dequantised(values, self.row_size[0])

    def report(self) -> LayerReport:
        """Numbers of this layer; see `h2o.hf.report`."""
        if self.slots is None:
            return LayerReport(self.layer_idx, "h2o")
        return LayerReport(
            layer=self.layer_idx,
            kind="h2o",
            bytes_full=2 * self.seen * self.slots.free.numel() * math.prod(self.row_size),
            raised=self.raised,
            unscored=self.unscored,
            **store.figures(self.slots, self.config.sinks),
        )
