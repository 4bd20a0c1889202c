"""Simulation of a layer where `h2o.ops.simulate` is not enough.

With `score_by="mean-echo"` a prompt's scores are not its sums of attention, and pinned keys have a
special score. Prompts are then processed at once and later tokens one by one, with the operations
that a layer uses. In some models (h2o.hf.model_traits.shared_keys) later layers attend with their
own queries to the keys that another layer stores (`VisibleKeys`).

Shape letters as in `h2o.hf`, and P queries (of the last P columns).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from h2o import ops
from h2o.attention_blocks import retained_mass
from h2o.config.layer_plan import LayerPlan
from h2o.hf.attention.attention import ROWS, softmax_attention
from h2o.hf.attention.attention_call import (
    AttentionCall,
    NewTokens,
    as_stored,
    attention,
)
from h2o.hf.cache_state import slot_layout
from h2o.hf.cache_state.slot_layout import Budgets, positions_in
from h2o.hf.cache_state.trace import by_column
from h2o.hf.conversation.pins import PinnedRows
from h2o.hf.prompt.cross_head_budget import CrossHeadBudget, Prompt
from h2o.hf.prompt.echo_scorer import PromptEcho
from h2o.hf.prompt.prompt_budget import PromptBudget
from h2o.hf.simulation.removals import Remaining, Removals
from h2o.kv_dtype import has_four_bit_keys, stored_bytes
from h2o.policy import Policy
from h2o.quantization import offsets_of, round_to_bytes, smoothing_of
from h2o.slots import should_center


def simulate_tokenwise(
    text: NewTokens,
    prompts: Sequence[int],
    by_row: Budgets,
    plan: LayerPlan,
    pins: PinnedRows,
    echo: PromptEcho | None,
    growth: Sequence[Mapping[int, list[tuple[int, int]]]] = (),
    removals: Removals | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Simulate a layer token by token, with pins, with prompts that are scored by echo, with
    budgets that grow, or with named tokens that leave.

    Args:
        text: N tokens.
        prompts: number of tokens of each row before the first eviction, at least 1.
        by_row: budgets of each row, for each head or one for all heads.
        pins: the pins of these prompts.
        echo: the scorer of prompts; None if attention scores them.
        growth: as returned by `schedule_growth`; empty if budgets are constant.
        removals: spans that leave, by the number of tokens that a row has by then.

    Returns:
        Output [B, N, H, D], evicted_at int32 [B, G, N], scores float32 [B, G, N].
    """
    policy = plan.policy
    B, _, N, _ = text.query.shape
    G, device = text.key.shape[1], text.key.device
    prompt, out, scores, _ = score_prompts(text, prompts, policy, pins, echo)
    early = prompt.mask
    real = _find_real(text)
    order = real.cumsum(1) - 1
    positions = order.masked_fill(~real, -1)[:, None]
    sizes = slot_layout.Capacity.of(_last_budgets(by_row, growth), policy.sinks, N).sizes
    slots = slot_layout.create_slots(
        text.key, sizes, by_row, value_weighted=policy.value_weighted,
        kv_dtype=plan.config.kv_dtype, shared=text.value is None,
        offsets=should_center(text.key, text.softcap, text.sink_logits),
    )  # fmt: skip
    removals = removals or {}
    remaining = Remaining(removals, B, N, device)
    evicted_after = torch.full((B, G, N), -1, dtype=torch.int32, device=device)
    last = torch.zeros(B, G, N + 1, dtype=torch.float32, device=device)  # by position; N: no key

    def note(positions: Tensor, scores: Tensor) -> None:
        last.scatter_(2, positions.expand_as(scores) % (N + 1), scores)

    def note_held_scores() -> None:
        scores = slot_layout.by_head(slots, sizes, "scores", -1)
        note(remaining.orders(slots, sizes), scores)

    def record(seen: Tensor) -> None:
        """Record which keys are gone now that rows [B] have seen `seen` columns."""
        evicted = remaining.evicted(slots, sizes) & (evicted_after < 0)
        evicted_after.copy_(torch.where(evicted, seen[:, None, None].int(), evicted_after))

    note(order.masked_fill(~early, N)[:, None], scores)
    if slots.smoothing is not None:
        slots.smoothing.copy_(smoothing_of(text.query, text.key, early))
    ops.evict(text.key, text.value, scores, slots, mask=early, policy=policy)
    columns = torch.arange(1, N + 1, device=device)
    seen = (early * columns).amax(1)
    record(seen)
    stored = as_stored(text, slots)  # each later token attends after it was stored
    late = real & ~early
    counts = real.cumsum(1).tolist() if growth or removals else []
    most = [0] * B  # a text that has become shorter does not grow again up to that length
    for i in late.any(0).nonzero()[:, 0].tolist():
        is_new = late[:, i].tolist()
        before = [counts[row][i] - 1 if is_new[row] else -1 for row in range(B)] if removals else []
        if any(n in removals for n in before):
            note_held_scores()
            slots = remaining.remove(slots, sizes, before, policy)
            record(seen.fill_(i))
        one = text.columns(i, i + 1)._replace(mask=late[:, i : i + 1])
        attends = stored.columns(i, i + 1)._replace(mask=one.mask)
        answer, score = attention(attends, slots, policy)
        score = pins.score(score, positions[..., i : i + 1])
        note_held_scores()
        note(order[:, i : i + 1].masked_fill(~late[:, i : i + 1], N)[:, None], score)
        for row, gains in enumerate(growth):
            length = remaining.length(row, counts[row][i])
            if not is_new[row] or length <= most[row]:
                continue
            most[row] = length
            if more := gains.get(length):
                slots.budget[row] += slots.budget.new_tensor(more).view(-1, 2).squeeze(0)
        ops.evict(one.key, one.value, score, slots, mask=one.mask, policy=policy)
        out[:, i : i + 1] += answer  # 0 in rows where column i is masked
        record(seen.fill_(i + 1))
    position = order.clamp(min=0)[:, None].expand(B, G, N)
    return out, by_column(evicted_after, real), last.gather(2, position) * real[:, None]


def _last_budgets(
    by_row: Budgets, growth: Sequence[Mapping[int, list[tuple[int, int]]]]
) -> Budgets:
    """The budgets of each row and head at the end of the texts."""
    if not growth:
        return by_row
    last = []
    for row, gains in zip(by_row, growth, strict=True):
        for more in gains.values():
            more = more * (len(row) // len(more))
            row = [(h + x, r + y) for (h, r), (x, y) in zip(row, more, strict=True)]
        last.append(row)
    return last


def score_prompts(
    text: NewTokens,
    prompts: Sequence[int],
    policy: Policy,
    pins: PinnedRows,
    echo: PromptEcho | None,
) -> tuple[NewTokens, Tensor, Tensor, Tensor | None]:
    """Process the prompts of a text and score their keys. For the arguments see
    `simulate_tokenwise`.

    Returns:
        The text with all tokens after the prompts masked; the output [B, N, H, D]; scores and echo
        [B, G, N], or None instead of echo.
    """
    real = _find_real(text)
    lengths = torch.tensor(prompts, dtype=torch.long, device=real.device)[:, None]
    prompt = text._replace(mask=real & (real.cumsum(1) <= lengths))
    out, scores = attention(prompt, None, policy)
    found = None
    if echo is not None:
        scores, found = echo.scores(prompt, scores)
    positions, _ = positions_in(prompt.mask, scores)
    return prompt, out, pins.score(scores, positions), found


def prompt_smoothing(
    text: NewTokens, prompts: Sequence[int], kv_dtype: str | None
) -> Tensor | None:
    """`Slots.smoothing` [B, G, D] of an `H2OCache` that reads these prompts first; None: its slots
    have none."""
    is_centered = should_center(text.key, text.softcap, text.sink_logits)
    if not has_four_bit_keys(kv_dtype) or text.value is None or not is_centered:
        return None
    real = _find_real(text)
    lengths = torch.tensor(prompts, dtype=torch.long, device=real.device)[:, None]
    return smoothing_of(text.query, text.key, real & (real.cumsum(1) <= lengths))


def _find_real(text: NewTokens) -> Tensor:
    """[B, N] bool, False at padding."""
    if text.mask is not None:
        return text.mask.bool()
    B, _, N, _ = text.key.shape
    return torch.ones(B, N, dtype=torch.bool, device=text.key.device)


class SimulatedBudgets:
    """Budgets of each layer, row and head with `head_shares="echo"`, for the text that each thread
    simulates.

    A layer's budgets depend on the echo of all layers, including later ones. Each forward pass is
    therefore preceded by a pass that evicts nothing. This first pass collects the echo of the
    prompts' keys and divides the budget as an `H2OCache` does (`h2o.hf.prompt.cross_head_budget`).
    """

    def __init__(self, plans: dict[int, LayerPlan], echoes: dict[int, PromptEcho]) -> None:
        """`plans` and `echoes` of the simulated layers, by layer number."""
        self._plans, self._echoes = plans, echoes
        self._thread_local = threading.local()
        self._is_open = False

    @property
    def is_collecting(self) -> bool:
        """Whether this thread is in the pass that collects echo and evicts nothing."""
        return getattr(self._thread_local, "cross_head", None) is not None

    @contextmanager
    def budget_pass(self, model: nn.Module) -> Iterator[None]:
        """Within the block, run a pass that divides the budget before each forward pass of
        the model."""

        def collect_echo(model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            if self.is_collecting or not self._is_open:  # a copy of the model keeps the hook
                return
            self._thread_local.budgets = {}
            self._thread_local.cross_head = CrossHeadBudget(self._plans, alike=False)
            try:
                with torch.no_grad():
                    model(*args, **kwargs)
            finally:
                self._thread_local.cross_head = None

        self._is_open = True
        try:
            with model.register_forward_pre_hook(collect_echo, with_kwargs=True):
                yield
        finally:
            self._is_open = False

    def take(
        self, layer: int, text: NewTokens, prompts: list[int], by_row: Budgets, pins: PinnedRows
    ) -> None:
        """Collect the echo of the prompts' keys in a layer, whose heads have the budgets `by_row`
        so far."""
        plan, echo = self._plans[layer], self._echoes[layer]
        tokens, _, scores, found = score_prompts(text, prompts, plan.policy, pins, echo)
        budget = PromptBudget(by_row, pins.counts(len(prompts), plan.sinks))
        mask = tokens.mask
        prompt = Prompt(
            tokens.key, tokens.value, mask, scores, found, mask.sum(1).tolist(), mask.shape[1],
            mask, budget,
        )  # fmt: skip
        divided = self._thread_local.cross_head.take(layer, prompt, layer)
        self._thread_local.budgets.update((index, by_row) for index, _, by_row in divided)

    def budgets(self, layer: int) -> Budgets:
        """(heavy, recent) of each row and head in a layer, as the last pass divided them."""
        return self._thread_local.budgets[layer]  # type: ignore[no-any-return]


class VisibleKeys(NamedTuple):
    """The keys that each token of a text sees, given by when each key is evicted."""

    evicted_at: Tensor
    """[B, G, N] int32, the first column that no longer sees the key"""
    prompts: Sequence[int]
    """Prompt length of each row. A prompt's tokens see keys as computed, not as stored"""
    kv_dtype: str | None
    smoothing: Tensor | None
    """`prompt_smoothing` of the layer whose keys these are"""

    def attend(self, call: AttentionCall | NewTokens) -> Tensor:
        """A layer's attention [B, P, H, D] to the visible keys."""
        P, N = call.query.shape[2], call.key.shape[2]
        key, value = call.key.detach().float(), call.value.detach().float()
        stored = None
        if self.kv_dtype is not None:
            in_prompt = self._in_prompt(call, N)
            offsets = None
            if should_center(key, call.softcap, call.sink_logits):
                first = in_prompt if call.mask is None else in_prompt & call.mask.bool()
                offsets = offsets_of(key, first.expand(len(key), -1))
            sizes = stored_bytes(self.kv_dtype, key.shape[-1])
            stored = round_to_bytes(key, value, sizes, offsets, self.smoothing)
        parts = []
        for first in range(0, P, ROWS):
            rows = slice(first, min(first + ROWS, P))
            columns = torch.arange(N - P + rows.start, N - P + rows.stop, device=key.device)
            part = call._replace(query=call.query[:, :, rows])
            out = self._rows(part, key, value, columns)
            if stored is not None:
                later = self._rows(part, *stored, columns)
                out = torch.where(in_prompt[:, columns, None, None], out, later)
            parts.append(out)
        return torch.cat(parts, dim=1).to(call.query.dtype)

    def _rows(
        self, call: AttentionCall | NewTokens, key: Tensor, value: Tensor, columns: Tensor
    ) -> Tensor:
        """Attention of the queries in some columns."""
        seen = torch.arange(key.shape[2], device=key.device) <= columns[:, None]  # [n, N]
        seen = seen & (columns[:, None] < self.evicted_at[:, :, None])  # [B, G, n, N]
        query, sinks = call.query.detach().float(), call.sink_logits
        sinks = None if sinks is None else sinks.detach()
        return softmax_attention(query, key, value, seen, call.scale, call.softcap, sinks)

    def _in_prompt(self, call: AttentionCall | NewTokens, N: int) -> Tensor:
        """[B, N] bool, whether each column's token is in its row's prompt."""
        device = call.key.device
        prompts = torch.tensor(self.prompts, dtype=torch.long, device=device).clamp(min=1)[:, None]
        order = torch.arange(N, device=device)[None]
        return (order if call.mask is None else call.mask.cumsum(1) - 1) < prompts


def retained_by_token(text: NewTokens, evicted_at: Tensor) -> Tensor:
    """[B, H, N]: the share of a full cache's attention that each token retains, NaN for padding."""
    query, key = text.query, text.key
    B, H, N, _ = query.shape
    mass = torch.full((B, H, N), torch.nan, dtype=torch.float32, device=query.device)
    for b, real in enumerate(real_columns(text.mask, B, N, query.device)):
        left = torch.searchsorted(real, evicted_at[b, :, real].long())
        mass[b, :, real] = retained_mass(
            query[b, :, real], key[b, :, real], left, scale=text.scale, softcap=text.softcap
        )
    return mass


def real_columns(mask: Tensor | None, B: int, N: int, device: torch.device) -> list[Tensor]:
    """The columns of each row that are not padding."""
    if mask is None:
        return [torch.arange(N, device=device)] * B
    return [row.nonzero()[:, 0] for row in mask]
