"""Checks of the arguments of `h2o.simulated`."""

from __future__ import annotations

from collections.abc import Sequence

from h2o.arguments.plain_values import check_choice
from h2o.budgets import check_prompt_length
from h2o.config import H2OConfig
from h2o.hf.conversation.pins import Pins
from h2o.hf.modes import Mode, check_modes, config_modes
from h2o.hf.simulation.masks import Masks, check_masks
from h2o.policy import Policy


def check(
    config: H2OConfig,
    masks: Masks | None,
    prompt_length: int | Sequence[int],
    ratio_of: str,
    pins: Pins | None = None,
) -> int | list[int]:
    """Check the arguments of `simulated` that do not depend on the model, and return
    `prompt_length` as plain numbers."""
    check_modes({Mode.SIMULATED, *config_modes(config)})
    if masks is not None:
        check_masks(masks)
    plain = (config.policy, config.head_shares, config.kv_dtype) == (Policy(), None, None)
    if masks is not None and (pins or not plain):
        raise ValueError(
            f"masks {masks.name!r} support heavy and recent only, such as heavy=0.1, recent=0.1, "
            "not budget, sinks, score_by, decay, value_weighted, head_shares, kv_dtype or pinned"
        )
    prompts = check_prompt_length(prompt_length)
    check_choice("ratio_of", ratio_of, ("text", "seen", "prompt"))
    if ratio_of == "seen" and (masks is not None or config.score_by == "random"):
        raise ValueError('ratio_of="seen" needs the policy of a cache: leave it at "text"')
    no_prompt = masks is not None and not masks.has_prompt
    lengths = {prompts} if isinstance(prompts, int) else set(prompts)
    if no_prompt and (lengths != {1} or ratio_of == "prompt"):
        raise ValueError(
            f'masks {masks.name!r} have no prompt: leave prompt_length at 1 and ratio_of at "text"'
        )
    return prompts
