"""`CacheInspection`: the read-only methods of `H2OCache`, about settings, held and evicted keys.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar, cast

from torch import Tensor
from transformers.cache_utils import Cache
from typing_extensions import Self

from h2o.arguments.plain_values import check_index
from h2o.compat import window_of
from h2o.config import PARAMETERS, H2OConfig
from h2o.hf.cache_state import recurrent_states
from h2o.hf.cache_state.kept_keys import Kept, KeptToken
from h2o.hf.cache_state.report import LayerReport, Report, explain_growth, has_outgrown
from h2o.hf.conversation.forward_pass import in_use_elsewhere
from h2o.hf.conversation.pass_guard import PassGuard
from h2o.hf.conversation.state import SeenText
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.model_traits.layer_kinds import CROSS_ATTENTION, has_states, kind_of
from h2o.utils.user_warning import warn_user

Method = TypeVar("Method", bound=Callable[..., Any])

_OTHERS = {
    "sliding": "has a sliding window and keeps transformers' own cache",
    "states": "has states, which transformers stores, but no keys",
    "none": "stores nothing",
}


class CacheInspection(Cache):
    """Read-only methods of `H2OCache`."""

    guard: PassGuard
    config: H2OConfig
    """The settings as resolved for the model. A cache made with them has the same budgets."""
    _has_warned_of_growth = False

    def __new__(cls, *given: Any, **parameters: Any) -> Self:
        """Raise TypeError for H2OCache(model, config=...), for which Python's message misleads."""
        if given and "config" in parameters:
            raise _model_config_again("H2OCache(model, config=...)")
        return super().__new__(cls)

    def __bool__(self) -> bool:
        """False for Phi-3 and similar models, True for all others.

        For those models `generate()` silently drops a truthy cache once the text is longer than
        `original_max_position_embeddings`."""
        return self.guard.drops_cache_after is None

    def __repr__(self) -> str:
        idle = "" if self.guard.plans else ", nothing is evicted: no layer has full attention"
        return f"H2OCache({_brief(self.config)}, layers={len(self.layers)}{idle})"

    @property
    def is_initialized(self) -> bool:
        """Whether every layer that stores keys of the text holds keys."""
        storing = [x for x in self.layers if kind_of(x) in ("h2o", "sliding")]
        return bool(storing) and all(layer.is_initialized for layer in storing)

    @property
    def max_cache_len(self) -> int:
        """Raise AttributeError. PEFT reads this attribute of caches other than DynamicCache."""
        raise AttributeError(
            "an H2OCache has no max_cache_len, because texts may have any length. PEFT reads it in "
            "prefix tuning, which fills its own cache and is not supported by h2o"
        )

    @property
    def is_updated(self) -> Any:
        """Not there. A decoder with cross attention asks its cache for it, as if the cache were an
        EncoderDecoderCache."""
        raise AttributeError(f"an H2OCache has no keys of another text. {CROSS_ATTENTION}")

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Any]]:
        """Yield (keys, values, sliding window or None) per layer, like a DynamicCache.

        An H2O layer yields the keys and values that it holds, [B, G, K, D] in the order of `kept`.
        """
        for layer in self.layers:
            held = getattr(layer, "keys", None), getattr(layer, "values", None)
            if isinstance(layer, H2OLayer):
                held = layer.kept_rows()
            yield *held, window_of(layer)

    def kept(self, layer: int) -> Kept:
        """Return the positions and scores of the keys that a layer holds now.

        Returns:
            (positions, scores), int64 and float32 [B, G, K], by ascending position. K is the
            largest number of keys that any row and head holds. Smaller ones are padded with
            position -1 and score 0. A position is a token's index in its row, not counting padding.
            Before the prompt both tensors are empty. The result
            (`h2o.hf.cache_state.kept_keys.Kept`) also has methods that show text and plots, and
            notebooks show it as a heat map.

        Raises:
            IndexError: the cache has no such layer.
            ValueError: the layer has no full attention.
        """
        kept = self._h2o_layer(layer).kept()
        kept._check_row = functools.partial(_check_row, self.guard.state.text)
        return kept

    def tokens(
        self,
        tokenizer: Any,
        input_ids: Any,
        layer: int,
        *,
        row: int = 0,
        head: int | None = None,
        attention_mask: Any = None,
    ) -> list[KeptToken]:
        """Return the tokens that a layer holds as text, with positions and scores.

        ```python
        out = model.generate(**inputs, cache=cache)
        for token in cache.tokens(tokenizer, out, layer=5):
            print(token.position, repr(token.text), token.score)
        ```

        `input_ids` must begin with everything that the cache has seen, which is checked. For the
        keyword arguments see `h2o.hf.cache_state.kept_keys.Kept.tokens`.

        Raises: the errors of that method and of `kept`. ValueError if the row has seen other
        tokens.
        """
        return self.kept(layer).tokens(
            tokenizer, input_ids, row=row, head=head, attention_mask=attention_mask
        )

    def evicted_at(self, layer: int) -> Tensor:
        """Return when each key of a layer was evicted. Requires `H2OCache(..., trace=True)`.

        Returns:
            int32 [B, G, N] for the N columns seen, including padding. The entry of a key is the
            number of columns seen after the forward pass that evicted it, including all columns of
            that pass. It is N for a key that is still held or that the last pass evicted, and 0 for
            padding. The token in column i saw the key in column j if and only if
            j <= i < evicted_at[j] and j is not padding.

        Raises:
            IndexError: as `kept`.
            ValueError: as `kept`; or the cache was made without `trace=True`.
        """
        trace = self._h2o_layer(layer).trace
        if trace is None:
            raise ValueError("evictions were not recorded. Make the cache with trace=True")
        return trace.evicted_at()

    def report(self) -> Report:
        """Report tokens seen, kept and evicted, and bytes held, per layer and in total."""
        reports = []
        for index, layer in enumerate(self.layers):
            report = layer.report() if isinstance(layer, H2OLayer) else _report_other(index, layer)
            if has_states(layer):
                report = replace(report, bytes_states=recurrent_states.bytes_of(layer))
            reports.append(report)
        return Report(
            reports,
            broken=self.guard.is_broken,
            echo_replacement=self.echo_replacement,
            budget=self.config.described_budget,
            budget_tokens=self._budget_tokens(),
            kv_dtype=self.config.kv_dtype,
        )

    def _budget_tokens(self) -> int:
        """Tokens of the longest row that the budget is a fraction of; 0 for a budget in tokens and
        before the prompt."""
        if not self.guard.needs_prompt_length:
            return 0
        return max(row.counted for row in self.guard.state.rows)

    def _warn_of_growth(self, seen: int, new_tokens: int) -> None:
        """Warn once if a turn or a chunk of `new_tokens` tokens, after `seen` others, is evicted
        down to a fraction of a much shorter prompt."""
        if self._has_warned_of_growth or self.config.grows:
            return
        total, budget_tokens = seen + new_tokens, self._budget_tokens()
        if has_outgrown(total, budget_tokens) and any(
            total > max(layer.capacity.widest, default=0)
            for layer in self.layers
            if isinstance(layer, H2OLayer)
        ):
            self._has_warned_of_growth = True
            warn_user(explain_growth(self.config.described_budget, budget_tokens, total))

    def is_prompt_only(self) -> bool:
        """Whether the cache has seen a single forward pass."""
        state = self.guard.state
        return 0 < state.columns == state.prompt_columns

    @contextmanager
    def _copying(self) -> Iterator[None]:
        """Raise RuntimeError, before the block, for a cache whose last pass was interrupted, and
        after it, if another thread has begun a forward pass meanwhile. The block may then have
        copied some tensors from before the pass and others from after it."""
        guard = self.guard
        guard.check_thread()
        guard.check_complete()
        guard.settle()
        before = guard.state
        yield
        guard.check_thread()
        if guard.state is not before:
            raise in_use_elsewhere()

    def _h2o_layer(self, layer: int) -> H2OLayer:
        layer = check_index("layer", layer, len(self.layers), "layer")
        found = self.layers[layer]
        if not isinstance(found, H2OLayer):
            raise ValueError(
                f"layer {layer} {_OTHERS[str(kind_of(found))]}. The layers of h2o are "
                f"{[x.layer_idx for x in self.layers if hasattr(x, 'slots')]}"
            )
        return found


def checks_config(method: Method) -> Method:
    """Decorator of `H2OCache.from_dynamic_cache`. It raises TypeError for
    from_dynamic_cache(full, model, config=...), for which Python's message misleads."""

    @functools.wraps(method)
    def checked(cls: Any, *given: Any, **parameters: Any) -> Any:
        if len(given) > 1 and "config" in parameters:
            raise _model_config_again("from_dynamic_cache(full, model, config=...)")
        return method(cls, *given, **parameters)

    return cast(Method, checked)


def _model_config_again(call: str) -> TypeError:
    """Error for a call with an H2OConfig as `config`."""
    return TypeError(
        f"{call}: `config` is the model's config, which was given already. Write h2o_config=... "
        "for an H2OConfig"
    )


def _check_row(text: SeenText, ids: Tensor, row: int) -> None:
    """Raise ValueError unless the ids [n] of a row begin with the text that a cache has seen."""
    seen = text.change_rows(lambda x: x[row : row + 1])
    (count,) = seen.counts() or [0]
    if seen.differing_rows(ids[None, :count], None):
        raise ValueError(
            f"input_ids of row {row} are not the text that the cache has seen. Pass all of it, "
            "without the spans that evict() removed, and attention_mask if rows are padded. "
            "After a beam search the cache holds the beams that were searched last"
        )


def _report_other(index: int, layer: Any) -> LayerReport:
    """Report on a layer of transformers' own."""
    tensors = (getattr(layer, name, None) for name in ("keys", "values"))
    held = sum(x.nbytes for x in tensors if x is not None)
    return LayerReport(index, str(kind_of(layer)), bytes_held=held, bytes_full=held)


def _brief(config: H2OConfig) -> str:
    """Format the budget and all fields that differ from their defaults as keyword arguments.

    The defaults are those of a config with the same budget. A table or profile in `head_shares` is
    abbreviated to "...".
    """
    default, shown = config.with_defaults, []
    for name in PARAMETERS:
        value = getattr(config, name)
        if isinstance(value, float):
            value = round(value, 6)
        is_shares = name == "head_shares" and not isinstance(value, str | None)
        is_amount = name == "budget" or (config.budget is None and name in ("heavy", "recent"))
        if (is_amount and value is not None) or value != getattr(default, name):
            shown.append((name, "..." if is_shares else repr(value)))
    return ", ".join(f"{name}={value}" for name, value in shown)
