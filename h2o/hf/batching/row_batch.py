"""`RowBatch`: one `H2OCache` whose rows are independent conversations, replaced one at a time.

A row has a constant size, so the next conversation reuses the slots and states of a finished row in
place. A decode step usually runs the active rows only and finds them by number. Two kinds of step
run all rows and mask the idle ones: compiled steps, whose shapes are fixed, and steps of a model
with states, which transformers updates in place.

Shape letters: n active rows, those that are not idle.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o.budgets import count_text, next_growth
from h2o.compat import with_cache
from h2o.compat_wrappers import compile_errors
from h2o.config import H2OConfig
from h2o.config.layer_plan import LayerPlan, expand_to_heads
from h2o.errors import UnsupportedError
from h2o.hf.cache.cache import H2OCache
from h2o.hf.cache_state import recurrent_states
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.model_traits.layer_kinds import has_states
from h2o.hf.model_traits.wrappers import check_passes, input_device, model_after_prompt
from h2o.hf.modes import Mode, check_modes, config_modes
from h2o.hf.prompt.prompt_budget import Growth
from h2o.hf.rotary.length_dependent_rope import LengthDependentRope
from h2o.hf.support import model_modes


class RowBatch:
    """A cache of several rows for a model. `join` copies rows of other caches into it.

    Args:
        rows: number of rows, all idle at first.
        compileable: compile decode steps with torch.compile, one graph for all steps.

    Raises:
        UnsupportedError: the model has layers with sliding windows, or it has both states and
            rotary angles that depend on the length of the text.
    """

    def __init__(self, model: Any, config: H2OConfig, rows: int, compileable: bool) -> None:
        check_passes(model, "generate_all")
        self.model = model_after_prompt(model)
        self.compiled = CompiledForward(self.model) if compileable else None
        self.cache = H2OCache(model.config, config, compileable=compileable)
        check_modes({Mode.GENERATE_ALL, *config_modes(self.cache.config), *model_modes(model)})
        self.cache.guard.separate_rows()
        self.tokens = [0] * rows
        """Number of tokens that each row has seen; 0 if the row is idle"""
        self.offsets = [0] * rows
        """Difference between each row's next position and its number of tokens. After `evict` the
        position is that of the text with the removed tokens, as in stored keys that are rotated"""
        self.growing: dict[int, GrowingRow] = {}
        """The rows whose budget follows their text"""
        self._selected_rows: list[int] = []
        self._has_states = any(map(has_states, self.cache.layers))
        self.angles = LengthDependentRope(model)
        if self.angles and self._has_states:
            raise UnsupportedError(
                "generate_all does not support a model that has states and rotary angles that "
                "depend on the length of the text: call model.generate() with an H2OCache for each "
                "prompt"
            )

    def join(
        self, rows: list[int], joining: H2OCache, source_rows: list[int], tokens: list[int]
    ) -> None:
        """Copy rows of another cache with the same settings into rows of this one.

        Args:
            joining: the other cache. For a model with states it must have a single row.
            source_rows: the row of `joining` for each of `rows`.
            tokens: number of tokens that each of them has seen, without padding.
        """
        is_rotated = self.cache.config.positions == "original"
        for row, source_row, n in zip(rows, source_rows, tokens, strict=True):
            self.tokens[row] = n
            state = joining.guard.state.row(source_row)
            self.offsets[row] = (state.offset or 0) + (state.moved_back if is_rotated else 0)
            if joining.guard.grows:
                self.cache.guard.admit_growth()
                self.growing[row] = GrowingRow(joining.guard.plans, state.counted)
        B, longest = len(self.tokens), max(self.tokens)
        for layer, other in zip(self.cache.layers, joining.layers, strict=True):
            if isinstance(layer, H2OLayer):
                layer.take_rows(rows, other, source_rows, B, longest)
            if has_states(layer):
                recurrent_states.take_row(layer, rows[0], other, B)
        guard = self.cache.guard
        guard.settle()
        columns = guard.state.columns or joining.guard.state.columns
        guard.put(guard.state._replace(columns=columns, longest=longest))

    def leave(self, row: int) -> None:
        """Make a row idle."""
        self.tokens[row] = 0
        self.growing.pop(row, None)

    @torch.no_grad()
    def step(self, ids: dict[int, int]) -> Tensor:
        """Decode one token in each active row.

        Args:
            ids: the last token of each active row.

        Returns:
            Logits [n, vocabulary], in the order of `ids`.
        """
        if any(self.tokens[row] + 1 >= x.grows_at for row, x in self.growing.items()):
            self._grow()
        groups, parts = self.angles.groups(list(ids), [n + 1 for n in self.tokens]), []
        for rows in groups:
            self.angles.forget()
            parts.append(self._step_rows(rows, ids))
        self.tokens = [n and n + 1 for n in self.tokens]
        if len(groups) == 1:
            return parts[0]
        place = {row: i for i, row in enumerate(row for rows in groups for row in rows)}
        return torch.cat(parts)[[place[row] for row in ids]]

    def _grow(self) -> None:
        """Raise the budgets of rows before a step."""
        after = {
            row: GrowingRow(plans, count_text(counted, self.tokens[row] + 1))
            for row, (plans, counted) in self.growing.items()
        }
        growth = {
            row: Growth.of([self.growing[row].counted], [x.counted]) for row, x in after.items()
        }
        for layer in h2o_layers(self.cache):
            known = layer.num_heads, layer.facts.part, layer.token_size
            gains = [[(0, 0)]] * len(self.tokens)
            for row, one in growth.items():
                (gains[row],) = one.gains(after[row].plans[layer.layer_idx], *known)
            layer.put_budget(layer.raised_budget(expand_to_heads(gains, layer.num_heads)))
        self.growing = after

    def _step_rows(self, rows: list[int], ids: dict[int, int]) -> Tensor:
        """Logits [len(rows), vocabulary] of a decode step in these rows."""
        B = len(self.tokens)
        if not self.compiled and not self._has_states:
            self._select_rows(rows if len(rows) < B else [])
            return self._forward(self.model, ids, rows)
        mask = None
        if self.compiled or len(rows) < B:  # compiled without a mask it would be another graph
            here = [[row in rows] for row in range(B)]
            mask = torch.tensor(here, dtype=torch.bool, device=input_device(self.model))
        return self._forward(self.compiled or self.model, ids, range(B), mask)[rows]

    def _forward(
        self, forward: Any, ids: dict[int, int], rows: Sequence[int], mask: Tensor | None = None
    ) -> Tensor:
        """Logits [len(rows), vocabulary]."""
        device = input_device(self.model)
        next_positions = [[self.tokens[row] + self.offsets[row]] for row in rows]
        positions = torch.tensor(next_positions, dtype=torch.long, device=device)
        tokens = [[ids.get(row, 0)] for row in rows]
        output = forward(
            input_ids=torch.tensor(tokens, dtype=torch.long, device=device),
            attention_mask=mask,
            position_ids=positions if mask is None else positions * mask,
            **with_cache(self.cache),
            use_cache=True,
        )
        logits: Tensor = output.logits[:, -1]
        return logits

    def _select_rows(self, rows: list[int]) -> None:
        """Run the following steps on these rows only; [] means all rows."""
        if rows == self._selected_rows:
            return
        self._selected_rows = rows
        for layer in h2o_layers(self.cache):
            numbers = torch.tensor(rows, dtype=torch.int32, device=layer.slots.keys.device)
            layer.select_rows(numbers if rows else None)


class GrowingRow(NamedTuple):
    """A row whose budget follows its text."""

    plans: Mapping[int, LayerPlan]
    """The budgets of its request, by layer number"""
    counted: int
    """`RowState.counted`"""

    @property
    def grows_at(self) -> int:
        """Number of tokens at which the budget grows next."""
        return next_growth(self.counted)


class CompiledForward:
    """Call a model through torch.compile, or eagerly after a warning if compiling fails."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._graph = torch.compile(model.forward, fullgraph=True)

    def __call__(self, **inputs: Any) -> Any:
        if self._graph is not None:
            try:
                return self._graph(**inputs)
            except compile_errors() as error:  # raised before anything has run
                reason = textwrap.shorten(str(error), 300, placeholder=" ...")
                warnings.warn(f"steps are not compiled: {reason}", RuntimeWarning, stacklevel=2)
                self._graph = None
        return self._model(**inputs)

    def __bool__(self) -> bool:
        """Whether a graph exists or may still be compiled."""
        return self._graph is not None


def h2o_layers(cache: H2OCache) -> list[H2OLayer]:
    return [layer for layer in cache.layers if isinstance(layer, H2OLayer)]


def row_bytes(cache: H2OCache) -> int:
    """Bytes of all tensors that one row of `cache` takes once its budget is full. The cache must
    have read a prompt."""
    keys = sum(x.row_bytes() for x in h2o_layers(cache))
    states = (recurrent_states.tensors_of(x).values() for x in cache.layers if has_states(x))
    return keys + sum(x[0].nbytes for tensors in states for x in tensors)


def row_report(cache: H2OCache, row: int) -> dict[str, int]:
    """The `Result.report` of a row."""
    layers = h2o_layers(cache)
    first = layers[0].slots.seen_tokens
    kept = [(layer.slots.positions[row] >= 0).sum().to(first.device) for layer in layers]
    seen, *kept = torch.stack([first[row], *kept]).tolist()  # synchronizes with the device once
    heads = sum(layer.num_heads for layer in layers)
    return {"seen": seen, "kept": round(sum(kept) / heads), "bytes": row_bytes(cache)}
