"""The entry `h2o` of `--additional-config`: what all requests keep, and how prompts are cut."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

from h2o.config import PARAMETERS, H2OConfig, one_config
from h2o.config.profile import Profile

PLACES = 2
"""Prompts that are kept whole at a time. vLLM reads one prompt in chunks after the other, unless
`--long-prefill-token-threshold` says otherwise."""


def served_budget_config(
    entry: Any, model: Any = None, *, can_deal: Callable[[], bool] = lambda: False
) -> H2OConfig:
    """The config that the entry `h2o` of `--additional-config` says: fields of `H2OConfig`, or
    {"preset": "robust", "budget": 256}, with "budget_unit" if wanted, and other fields; beside
    what `entry_places` reads. {"budget": 0.2} alone is what is recommended for the model.

    Args:
        model: a config of transformers, for whose model it is.
        can_deal: tells whether the places of a prompt can be dealt over all layers, whose pages are
            then one; asked where the entry wants that.

    Raises: TypeError, ValueError for what is no such thing, or is not served here.
    """
    if not isinstance(entry, Mapping):
        raise TypeError(
            f'additional_config["h2o"] must be an object such as {{"heavy": 64, "recent": 64}}, '
            f"not {json.dumps(entry, default=str)}"
        )
    places = entry_places(entry)
    config = _config(entry)
    if model is not None:
        config = _of_pages(config.for_model(model), model, can_deal, places)
    refused = {
        'positions="cache_relative"': (config.positions == "cache_relative", "keys come rotated"),
        'score_by="mean-echo" with prompts that are cut after each chunk': (
            config.score_by == "mean-echo" and places == 0,
            'a prompt\'s echo is known at its end; give score_by="mean"',
        ),
        'score_by="random"': (config.score_by == "random", "it is a baseline of h2o eval"),
    }
    for what, (present, reason) in refused.items():
        if present:
            raise ValueError(f"{what} is not served by h2o in vLLM: {reason}")
    return config


def _config(entry: Mapping[str, Any]) -> H2OConfig:
    """The config of an entry, before anything is refused."""
    fields = {name: x for name, x in entry.items() if name not in ("cut", "whole_prompts")}
    if "preset" not in fields:
        return one_config(None, fields)
    preset = {name: fields.pop(name) for name in ("budget", "budget_unit") if name in fields}
    config = H2OConfig.preset(fields.pop("preset"), **preset)
    if unknown := sorted({*fields} - {*PARAMETERS}):
        raise TypeError(f"unknown parameter {unknown[0]!r}; there are {', '.join(PARAMETERS)}")
    return dataclasses.replace(config, **fields)


def _of_pages(
    config: H2OConfig, model: Any, can_deal: Callable[[], bool], places: int
) -> H2OConfig:
    """The config as pages can serve it. Where each layer has its own, equal for all, places cannot
    be dealt over these: heads share as the model's shipped profile says, or alike, and echo ranks
    within a head."""
    if config.head_shares != "echo" or (places and can_deal()):
        return config
    score_by = "mean-echo" if places else "mean"
    return dataclasses.replace(config, head_shares=Profile.shipped(model), score_by=score_by)


def entry_places(entry: Mapping[str, Any]) -> int:
    """How many prompts that are read in chunks are kept whole at a time until their end, where they
    are cut to their budget ("whole_prompts"); 0 for "cut": "chunk". Then nothing but pages is held,
    and each chunk is cut to the budget; but what is evicted depends on where vLLM cuts a prompt,
    hence on other requests.

    Raises: ValueError for other values.
    """
    cut = entry.get("cut", "prompt")
    if cut not in ("prompt", "chunk"):
        raise ValueError(f'cut is "prompt" or "chunk", not {json.dumps(cut, default=str)}')
    places = entry.get("whole_prompts", PLACES)
    if isinstance(places, bool) or not isinstance(places, int) or places < 1:
        raise ValueError(
            f"whole_prompts is {json.dumps(places, default=str)}, wanted a number from 1 on; "
            '"cut": "chunk" keeps none whole'
        )
    return 0 if cut == "chunk" else places
