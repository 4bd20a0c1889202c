"""`h2o.simulated(model)`: a model's outputs with an H2O cache, from one pass over a whole text.

Log-likelihoods and perplexities need the output at every token. A real cache computes them token by
token. `simulated` gives the same outputs in a single forward pass, in which each token attends to
the keys that the cache would hold at that token (`h2o.ops.simulate`). This is possible because an
evicted key never returns. A simulation saves no memory; it is for measurements.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from h2o import ops
from h2o.arguments.plain_values import check_flag, check_integer
from h2o.config import H2OConfig, resolve_config
from h2o.config.fields import FieldsOfTexts, Pinned
from h2o.config.layer_plan import LayerPlan, expand_to_heads
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_call import AttentionCall, NewTokens
from h2o.hf.attention.attention_hook import replace_attention
from h2o.hf.conversation.pins import PinnedRows, Pins
from h2o.hf.model_traits import tensor_parallel
from h2o.hf.model_traits.latent_attention import to_absorbed_form, trace_latents
from h2o.hf.model_traits.layer_kinds import kind_of, warn_of_windows
from h2o.hf.model_traits.shared_keys import shared_key_layers
from h2o.hf.model_traits.wrappers import input_device, unwrap
from h2o.hf.modes import Mode, check_modes, config_modes
from h2o.hf.prompt import prompt_budget
from h2o.hf.prompt.echo_scorer import PromptEcho, adapt_config
from h2o.hf.rotary.model_rotary import ModelRotary
from h2o.hf.simulation.checks import check
from h2o.hf.simulation.masks import Masks, attend_rows
from h2o.hf.simulation.random_eviction import simulate_random
from h2o.hf.simulation.removals import Removals, check_layers, check_pins, check_removals
from h2o.hf.simulation.simulated_layer import (
    SimulatedBudgets,
    VisibleKeys,
    prompt_smoothing,
    real_columns,
    retained_by_token,
    simulate_tokenwise,
)
from h2o.hf.support import model_modes, transformers_layers
from h2o.slots import should_center
from h2o.utils.user_warning import warn_user
from h2o.utils.with_block import with_block


@with_block
def simulated(
    model: Any,
    h2o_config: H2OConfig | None = None,
    *,
    masks: Masks | None = None,
    prompt_length: int | Sequence[int] = 1,
    ratio_of: str = "text",
    pinned: Pinned = None,
    trace: bool = False,
    mass: bool = False,
    evict: Mapping[int, Any] | None = None,
    **parameters: Unpack[FieldsOfTexts],
) -> Iterator[Simulation]:
    """Within the block `model(input_ids, attention_mask)` answers as it would with an H2O cache.

    ```python
    with h2o.simulated(model, heavy=0.1, recent=0.1), torch.no_grad():
        logits = model(**inputs, use_cache=False).logits
    ```

    Each call must contain the whole text. Batches may be padded on either side. The output equals
    that of a model with an `H2OCache` that is fed the first `prompt_length` tokens at once and the
    others one by one. With a fraction (`budget=0.2`) this needs the cache's own `ratio_of`. After
    the block, also after an error, the model is as before.

    With pins, echo after a prompt (`budget=` with `prompt_length`), fractions of the text so far,
    or `evict`, each layer processes the text token by token, which takes 5 to 15 times as long.

    Args:
        model: a model that `H2OCache` supports. Layers without full attention are not changed.
        h2o_config: an `H2OConfig`, or instead of it its fields as keywords: `heavy`, `recent`,
            `sinks`, `score_by`, `decay`, `value_weighted`, `kv_dtype`, `head_shares`,
            `min_tokens`, or one `budget`. If keywords without `min_tokens` give fractions of a text
            so short that the lower limit of 128 keys decides, a UserWarning says so.
        masks: a rule that replaces the cache's policy and uses only `heavy` and `recent`, one of
            which must be given, without `min_tokens`. `h2o.evaluation.published_masks.MASKS` has
            the rules with which the authors of H2O measured.
        prompt_length: number of tokens before the first eviction, without padding, for all rows or
            one number per row. 1 evicts from the very beginning (Zhang et al., NeurIPS 2023,
            Algorithm 1). Not with masks that have no prompt.
        ratio_of: what fractions are fractions of, whatever a config says. "text": each row's whole
            text. "seen": the text so far, as in `H2OCache`. "prompt": the row's prompt.
        pinned: as for `H2OCache`. "prompt" pins the first `prompt_length` tokens. Not with `masks`.
        trace: record evictions and scores of the last forward pass, see `Simulation`.
        mass: record the retained attention mass of the last forward pass. About doubles the cost.
        evict: named tokens that leave, by the number of tokens that a row has read by then, as with
            `H2OCache.evict`. {768: [(120, 480)]} removes the tokens 120 to 479 after 768 tokens.
            All spans are positions in the whole text, not counting padding. Not with `masks`.

    Several threads may simulate with their own models, or call one model within one block. If two
    threads enter blocks of one model at the same time, the second gets a RuntimeError.

    Raises:
        UnsupportedError: h2o does not support the model.
        ValueError, TypeError: invalid arguments, or in `model(...)` a call that is not a whole
            text.
    """
    config = resolve_config(h2o_config, parameters, simulated).for_model(unwrap(model))
    trace, mass = check_flag("trace", trace), check_flag("mass", mass)
    input_device(model)  # raises for a model without weights
    config, rotary, _ = adapt_config(model.config, config)
    pins = Pins.of(pinned, config.decay)
    prompt_length = check(config, masks, prompt_length, ratio_of, pins)
    removals = check_removals(evict, prompt_length)
    layers = transformers_layers(model.config)
    named = {Mode.NAMED_SPANS} if removals else set()
    check_modes({Mode.SIMULATED, *named, *config_modes(config), *model_modes(model)})
    if removals:
        check_layers(removals, model.config, layers)
        if masks is not None:
            raise ValueError(f"masks {masks.name!r} remove no named tokens: leave out evict")
    budgets = dataclasses.replace(config, ratio_of="seen" if ratio_of == "seen" else "prompt")
    plans = {
        i: LayerPlan.of(budgets, i, len(layers))
        for i, layer in enumerate(layers)
        if kind_of(layer) == "h2o"
    }
    if not plans:
        warn_of_windows(model.config, stacklevel=4)
    shared = shared_key_layers(model.config)
    if shared and masks is not None:
        raise UnsupportedError(
            f"masks {masks.name!r} do not support models whose layers reuse others' keys"
        )
    simulation = Simulation(
        plans, masks, prompt_length, ratio_of, trace, mass, shared, rotary, pins, removals
    )
    simulation.explains_floor = h2o_config is None and "min_tokens" not in parameters
    attended = [*plans, *itertools.chain(*shared.values())]
    inner = unwrap(model)
    with (
        replace_attention(inner, attended, simulation.attend),
        trace_latents(inner),
        simulation.budget_pass(inner),
    ):
        yield simulation


class Simulation:
    """Records of the last forward pass within a `simulated` block, with `trace` or `mass`.

    The methods raise ValueError for a record that was not requested and for a layer that has not
    run. While several threads call the model, their records are mixed.
    """

    def __init__(
        self,
        plans: dict[int, LayerPlan],
        masks: Masks | None,
        prompt_length: int | Sequence[int],
        ratio_of: str,
        trace: bool,
        mass: bool,
        shared: dict[int, tuple[int, ...]],
        rotary: ModelRotary | None,
        pins: Pins,
        removals: Removals,
    ) -> None:
        self._removals = removals
        self._plans, self._masks = plans, masks
        self.explains_floor = False
        """Whether to warn, once, if `min_tokens` and not the fraction decides the budget."""
        self._prompt_length, self._ratio_of = prompt_length, ratio_of
        self._evicted_at: dict[int, Tensor] | None = {} if trace else None
        self._scores: dict[int, Tensor] | None = {} if trace else None
        self._mass: dict[int, Tensor] | None = {} if mass else None
        self._key_sources = {layer: of for of, layers in shared.items() for layer in layers}
        self._pins = pins
        self._thread_local = threading.local()  # VisibleKeys of layers whose keys others reuse
        longest = prompt_length if isinstance(prompt_length, int) else max(prompt_length)
        self._echoes: dict[int, PromptEcho] = {}
        if rotary is not None:
            self._echoes = {
                layer: PromptEcho(rotary, layer, plan.policy)
                for layer, plan in plans.items()
                if longest > max(1, plan.sinks)  # otherwise echo has nothing to choose from
            }
        self._budgets = None
        if self._echoes and any(plan.config.shares_by_echo for plan in plans.values()):
            self._budgets = SimulatedBudgets(plans, self._echoes)

    def budget_pass(self, model: Any) -> AbstractContextManager[None]:
        """Context within which a pass that divides the budget among heads precedes each pass."""
        return nullcontext() if self._budgets is None else self._budgets.budget_pass(model)

    def layers(self) -> list[int]:
        """The layers that are simulated: those with full attention."""
        return list(self._plans)

    def evicted_at(self, layer: int) -> Tensor:
        """int32 [B, G, N]: the first column that no longer sees the key; N if none, 0 for padding.

        Columns include padding on either side. The token that evicts a key still sees it, so the
        number is the next column after this token, even if that column is padding. In a row padded
        on the right, a key that the last token evicts therefore has the column of the first pad,
        and keys held at the end have N. Without padding on the right both have N.
        `H2OCache.evicted_at` is the same if each forward pass had one column.

        With `masks` the shape is [B, H, N], one number per query head, and a key that the last
        token evicts has N, whatever the padding.
        """
        return _get_record(self._evicted_at, "trace", layer)

    def scores(self, layer: int) -> Tensor:
        """float32 [B, G, N]: each key's score at the end or at its eviction. Not with `masks`."""
        return _get_record(self._scores, "trace", layer)

    def retained_mass(self, layer: int, *, per_token: bool = False) -> Tensor:
        """float32 [B, H]: the share of a full cache's attention that falls on keys still held.

        For each token the softmax weights of a full cache are summed over the keys that the token
        still sees (`h2o.attention_blocks.retained_mass`). The result is the mean over the row's
        tokens, or with `per_token` each token's own sum, [B, H, N], NaN for padding.
        """
        per_token = check_flag("per_token", per_token)
        mass = _get_record(self._mass, "mass", layer)
        return mass if per_token else mass.nanmean(-1)

    def attend(self, call: AttentionCall) -> Tensor:
        """The attention output [B, N, H, D] with an H2O cache; see `replace_attention`."""
        if (of := self._key_sources.get(call.layer)) is not None:
            if self._budgets is not None and self._budgets.is_collecting:
                return call.full()
            visible: VisibleKeys = vars(self._thread_local)[str(of)]
            _check_call(call, visible.evicted_at.shape[2])
            return _without_backward(visible.attend(call), call)
        if (latent := getattr(call.key, "latent", None)) is not None:
            call, expansion = to_absorbed_form(call, latent)
            return expansion.expand_output(self._attend(call, shared=True))
        return self._attend(call)

    def _attend(self, call: AttentionCall, *, shared: bool = False) -> Tensor:
        """Attention and records of a layer. `shared`: whether the keys are also the values."""
        plan, mask = self._plans[call.layer], call.mask
        B, _, N, D = call.key.shape
        _check_call(call, call.query.shape[2])
        lengths = [N] * B
        if mask is not None and (plan.needs_prompt_length or mask.is_cpu):  # else without effect
            lengths = mask.sum(1).tolist()
        row_size = D, call.key.element_size(), 1 if shared else 2
        plan = plan.for_keys(*row_size)
        prompts = self._prompt_lengths(B)
        in_text = [min(*each) for each in zip(prompts, lengths, strict=True)]
        bases = lengths if self._ratio_of == "text" else in_text
        q, k, v = call.query.detach(), call.key.detach(), call.value.detach()
        text = NewTokens(
            q, k, None if shared else v, mask, call.scale, call.softcap, call.sink_logits
        )
        if self._masks is not None:
            out, evicted_at = self._through_masks(self._masks, text, prompts, bases, plan)
        else:
            pins = self._pins.resolve(in_text, mask, N)
            check_pins(self._removals, pins.rows)
            ends = lengths if self._ratio_of == "seen" else bases
            if self.explains_floor and (explained := plan.explain_floor(min(ends))):
                self.explains_floor = False
                warn_user(explained)
            pinned, part = pins.counts(B, plan.sinks), tensor_parallel.part(call.module)
            budgets = prompt_budget.budgets_by_row(plan, bases, pinned)
            by_row = expand_to_heads(budgets, k.shape[1], part)
            if self._budgets is not None:
                if self._budgets.is_collecting:
                    self._budgets.take(call.layer, text, prompts, by_row, pins)
                    return call.full()
                by_row = self._budgets.budgets(call.layer)
            of_layer = plan, k.shape[1], part, row_size
            growth = prompt_budget.schedule_growth(*of_layer, bases, lengths) if plan.grows else []
            known = prompts, by_row, plan, part, pins, growth
            out, evicted_at, scores = self._through_cache(text, *known)
            if self._scores is not None:
                self._scores[call.layer] = scores
            if call.layer in self._key_sources.values():
                kv_dtype = plan.config.kv_dtype
                smoothing = prompt_smoothing(text, prompts, kv_dtype)
                visible = VisibleKeys(evicted_at, prompts, kv_dtype, smoothing)
                vars(self._thread_local)[str(call.layer)] = visible
        if self._evicted_at is not None:
            self._evicted_at[call.layer] = evicted_at
        if self._mass is not None:
            self._mass[call.layer] = retained_by_token(text, evicted_at)
        return _without_backward(out, call)

    def _prompt_lengths(self, rows: int) -> list[int]:
        prompts = self._prompt_length
        if isinstance(prompts, int):
            return [prompts] * rows
        if len(prompts) != rows:
            raise ValueError(f"prompt_length has {len(prompts)} entries for a batch of {rows} rows")
        return list(prompts)

    def _through_cache(
        self, text: NewTokens, prompts: list[int], by_row: list[list[tuple[int, int]]],
        plan: LayerPlan, part: tuple[int, int], pins: PinnedRows, growth: list[Any],
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Simulate a layer, by `h2o.ops.simulate` unless its scores need more than attention."""
        config, known = plan.config, (text, prompts, by_row, plan, pins)
        if config.score_by == "random":
            return simulate_random(*known, part)
        if self._echoes or pins or any(growth) or self._removals:
            echo = self._echoes.get(plan.layer)
            return simulate_tokenwise(*known, echo, growth, self._removals)
        device = text.query.device
        simulated: tuple[Tensor, Tensor, Tensor] = ops.simulate(
            *text[:3],
            torch.tensor(prompts, dtype=torch.int32, device=device),
            torch.tensor(by_row, dtype=torch.int32, device=device).squeeze(1),
            kv_dtype=config.kv_dtype,
            offsets=should_center(text.key, text.softcap, text.sink_logits),
            smoothing=prompt_smoothing(text, prompts, config.kv_dtype),
            policy=config.policy,
            **text.options,
        )
        return simulated

    @staticmethod
    def _through_masks(
        masks: Masks, text: NewTokens, prompts: list[int], bases: list[int], plan: LayerPlan
    ) -> tuple[Tensor, Tensor]:
        """Attend under masks. Budgets are fractions of `bases`, the tokens of each row."""
        budgets = [plan.truncate_tokens(n) for n in bases]
        if masks.has_prompt and (0, 0) in budgets and min(bases) > 0:
            raise ValueError(
                f"masks {masks.name!r}: with heavy={plan.heavy} and recent={plan.recent} "
                f"{min(bases)} tokens have a budget of 0 tokens"
            )
        if text.softcap:
            raise UnsupportedError(f"masks {masks.name!r} do not support logit softcapping")
        if text.sink_logits is not None:
            raise UnsupportedError(f"masks {masks.name!r} do not support learned sinks")
        B, _, N, _ = text.key.shape
        real = real_columns(text.mask, B, N, text.key.device)
        values = text.key if text.value is None else text.value
        return attend_rows(masks, text.query, text.key, values, real, prompts, budgets, text.scale)


def _check_call(call: AttentionCall, tokens: int) -> None:
    """Raise if a call does not have all `tokens` of a text, or if the model is in training."""
    if call.cached or call.key.shape[2] != tokens:
        raise ValueError(
            "simulated() supports whole texts only: call model(input_ids, attention_mask, "
            "use_cache=False). To generate, or to continue a cache, use an H2OCache"
        )
    if call.module.training or call.dropout:
        raise RuntimeError("simulated() is for inference: call model.eval()")


def _without_backward(out: Tensor, call: AttentionCall) -> Tensor:
    return call.without_backward(out, _NO_GRADIENT) if call.requires_grad else out


_NO_GRADIENT = (
    "attention within h2o.simulated() has no gradient, since eviction is not differentiable: call "
    "the model under torch.no_grad(), or train outside of the block"
)


def _get_record(values: dict[int, Tensor] | None, argument: str, layer: int) -> Tensor:
    if values is None:
        raise ValueError(f"this was not recorded: call simulated(..., {argument}=True)")
    layer = check_integer("layer", layer)
    if layer not in values:
        raise ValueError(
            f"nothing was recorded for layer {layer}: "
            + (f"only for {sorted(values)}" if values else "call the model within the block first")
        )
    return values[layer]
