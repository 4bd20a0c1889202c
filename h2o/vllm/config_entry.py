"""The entry `h2o` in `--additional-config`: which keys requests keep, and how prompts are cut."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from h2o.arguments.plain_values import check_choice, check_count
from h2o.config import H2OConfig
from h2o.config.profile import Profile
from h2o.hf.modes import Mode, check_modes, config_modes

WHOLE_PROMPTS = 2
"""Default number of prompts that are kept whole at a time. vLLM prefills one prompt in chunks after
another, unless `--long-prefill-token-threshold` is set."""


def config_of_entry(
    entry: Any, model: Any = None, *, can_divide_budget: Callable[[], bool] = lambda: False
) -> H2OConfig:
    """The config that the entry `h2o` in `--additional-config` describes.

    The entry has fields of `H2OConfig`, or a preset such as {"preset": "robust", "budget": 256},
    optionally with "budget_unit" and other fields. {"budget": 0.2} alone is the policy recommended
    for the model. The entry may also have the keys of `whole_prompts_of`.

    Args:
        model: the model's transformers config.
        can_divide_budget: returns whether the budget of a prompt can be divided across all
            layers, which then share one page. Called only if the entry asks for it.

    Raises: TypeError, ValueError for an entry that is malformed or not supported in vLLM.
    """
    if not isinstance(entry, Mapping):
        raise TypeError(
            f'additional_config["h2o"] must be an object such as {{"heavy": 64, "recent": 64}}, '
            f"not {json.dumps(entry, default=str)}"
        )
    buffers = whole_prompts_of(entry)
    config = _config(entry)
    if model is not None:
        config = _adapt_to_pages(config.for_model(model), model, can_divide_budget, buffers)
    check_modes({Mode.VLLM, *config_modes(config)})
    if config.score_by == "mean-echo" and buffers == 0:
        raise ValueError(
            'score_by="mean-echo" with prompts that are cut after each chunk is not supported by '
            'h2o in vLLM: a prompt\'s echo is known only at its end; use score_by="mean"'
        )
    return config


def _config(entry: Mapping[str, Any]) -> H2OConfig:
    """The config of an entry, not yet checked for vLLM. Fractions are of the prompt."""
    given = {name: x for name, x in entry.items() if name not in ("cut", "whole_prompts")}
    fields = {"ratio_of": "prompt"} | given
    if "preset" not in fields:
        return H2OConfig(**fields)
    preset = {name: fields.pop(name) for name in ("budget", "budget_unit") if name in fields}
    config = H2OConfig.preset(fields.pop("preset"), **preset)
    return dataclasses.replace(config, **fields)


def _adapt_to_pages(
    config: H2OConfig, model: Any, can_divide_budget: Callable[[], bool], buffers: int
) -> H2OConfig:
    """The config adapted to what pages support. If each layer has its own page, budgets cannot be
    divided across layers. Heads then share by the model's shipped profile, or equally without one,
    and echo ranks within a head."""
    if config.head_shares != "echo" or (buffers and can_divide_budget()):
        return config
    score_by = "mean-echo" if buffers else "mean"
    return dataclasses.replace(config, head_shares=Profile.shipped(model), score_by=score_by)


def whole_prompts_of(entry: Mapping[str, Any]) -> int:
    """Number of prompts that are kept whole at a time while they are prefilled in chunks
    ("whole_prompts"). At its end each is cut to its budget.

    The number is 0 for "cut": "chunk". Then each chunk is cut to the budget, and no memory is
    needed besides the pages, but evictions depend on where vLLM divides a prompt, and so on other
    requests.

    Raises: TypeError, ValueError for other values of "cut" and "whole_prompts".
    """
    cut = check_choice("cut", entry.get("cut", "prompt"), ("prompt", "chunk"))
    hint = '"cut": "chunk" keeps no prompt whole'
    buffers = check_count("whole_prompts", entry.get("whole_prompts", WHOLE_PROMPTS), hint=hint)
    return 0 if cut == "chunk" else buffers
