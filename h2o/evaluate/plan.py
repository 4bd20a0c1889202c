"""How many requests fit, and how fast they can be, before anything is loaded or rented.

A roofline over a whole batch: a prompt takes what its products take at the device's rate, a decode
step what its products take or what it takes to read weights and caches once, whichever is longer;
on a GPU attention as h2o computes it takes what its kernels do by their counts, if that is longer.
Launches, samplers and Python take more. So the figures are bounds: the authors' own logs, of
OPT-6.7B on an A100 (FlexGen; 24 rows, 2048 + 2048 tokens), reach about half of them with the full
cache and with H2O alike, and their ratio is nearer to what is measured than each of them.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, NamedTuple

from h2o.borrowed import model_class
from h2o.errors import UserError
from h2o.evaluate.devices import Device
from h2o.evaluate.setting import Setting
from h2o.hf.support import supports
from h2o.kv_dtype import FIXED
from h2o.model_identity import describe, key_size, latent_row

__all__ = ["Model", "Plan", "model_of", "plan", "row_bytes"]


LARGEST_HEAD = 256
"""Elements of a head that h2o's kernels for GPUs serve; of latents none are served."""
RESERVED = 0.1
"""Of a device's memory, for activations and what libraries take."""


class Model(NamedTuple):
    """What a config says of size."""

    weights: int
    """bytes"""
    active: float
    """parameters that a token is multiplied with; of experts those that it is sent to"""
    layers: tuple[str, ...]
    """"h2o", "sliding", "states" or "none" (`h2o.hf.support`); states are not counted"""
    heads: int
    """key/value heads of a layer, 1 for latents"""
    queries: int
    """query heads times their dimension"""
    window: int
    """tokens that a sliding layer holds"""
    config: Any


class Plan(NamedTuple):
    """Of one setting; every figure of speed is a bound."""

    setting: str
    row_bytes: int
    """of the caches of one request, at its end"""
    rows: int
    prompt_seconds: float
    """of one prompt"""
    step_seconds: float
    """of one token for all rows, on average"""
    tokens_per_second: float
    """new ones, prompts included"""
    bound: str
    """what takes longest: prompts, weights, caches or products"""


def model_of(config: Any) -> Model:
    """Counts the parameters of a model without making it.

    Raises: UserError for a model that h2o does not serve, or that tells no head dimension.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    support = supports(config)
    if not support:
        raise UserError(str(support))
    both = (AutoModelForCausalLM, AutoModelForImageTextToText)
    kind = next((x for x in both if model_class(x, config)), AutoModelForCausalLM)
    with torch.device("meta"):
        parameters = dict(kind.from_config(config).named_parameters())
    try:
        D, element, _ = key_size(config)
    except ValueError as error:
        raise UserError(str(error)) from error
    text, shape = config.get_text_config(decoder=True), describe(config)
    total = sum(x.numel() for x in parameters.values())
    experts = sum(x.numel() for name, x in parameters.items() if re.search(r"\bexperts\b", name))
    number = getattr(text, "num_local_experts", None) or getattr(text, "num_experts", None)
    chosen = getattr(text, "num_experts_per_tok", None)
    share = chosen / number if chosen and number else 1.0
    return Model(
        weights=total * element,
        active=total - experts * (1 - share),
        layers=support.layers,
        heads=1 if latent_row(config) else shape["num_key_value_heads"],
        queries=shape["num_attention_heads"] * D,
        window=getattr(text, "sliding_window", None) or 0,
        config=config,
    )


def plan(
    model: Model,
    device: Device,
    setting: Setting,
    prompt: int,
    new: int,
    memory: float | None = None,
    rows: int | None = None,
) -> Plan:
    """Requests of `prompt` tokens that get `new` ones each.

    Args:
        memory: bytes for caches; None: what the weights leave of nine tenths of the device's.
        rows: at a time; None: as many as fit.

    Raises: UserError if not one row fits.
    """
    if memory is None:
        if device.memory is None:
            raise UserError("this system does not tell its memory: give --bytes")
        memory = (1 - RESERVED) * device.memory * 1e9 - model.weights
    ends = row_bytes(model, setting, prompt, prompt + new)
    fitting = int(memory // ends)
    if fitting < (rows or 1):
        raise UserError(
            f"{setting.name}: {rows or 1} x {ends:,} bytes do not fit into the "
            f"{max(0, int(memory)):,} for caches"
        )
    rows = rows or fitting
    rate = device.products * 1e12
    attention, kernels = _attention(model, device, setting, prompt, prompt + new // 2, rows)
    prompt_seconds = 2 * model.active * prompt / rate + attention
    cached = rows * row_bytes(model, setting, prompt, prompt + new // 2)
    read = {
        "weights": model.weights / (device.bandwidth * 1e9),
        "caches": max(cached / (device.bandwidth * 1e9), kernels),
    }
    products = 2 * model.active * rows / rate
    step = max(sum(read.values()), products)
    seconds = {"prompts": rows * prompt_seconds, "steps": new * step}
    bound = max(seconds, key=lambda x: seconds[x])
    if bound == "steps":
        bound = "products" if step == products else max(read, key=lambda x: read[x])
    total = rows * new / sum(seconds.values())
    return Plan(setting.name, ends, rows, prompt_seconds, step, total, bound)


def _attention(
    model: Model, device: Device, setting: Setting, prompt: int, tokens: int, rows: int
) -> tuple[float, float]:
    """Seconds of attention: of one prompt; of a step of all rows of so many tokens, 0 where h2o's
    kernels do not serve it, or nothing is known of them."""
    layers = model.layers.count("h2o")
    seconds = 2 * prompt**2 * model.queries * layers / (device.products * 1e12)
    D, element, _ = key_size(model.config)
    if device.kernels is None or setting.variant == "full" or element != 2 or D > LARGEST_HEAD:
        return seconds, 0.0
    config = setting.holding.for_model(model.config)
    step = device.kernels.step(
        config.held(tokens, prompt) + 1, rows * model.heads, D, config.kv_dtype
    )
    return max(seconds, layers * device.kernels.prompt(prompt, model.queries / D, D)), layers * step


def row_bytes(model: Model, setting: Setting, prompt: int, tokens: int) -> int:
    """Of a request whose prompt has been cut, when it has so many tokens."""
    config = setting.holding.for_model(model.config)
    # Bytes as a budget in bytes counts them.
    in_bytes = replace(config, heavy=0.5, recent=0.5, shares=None, of="bytes")
    slot = in_bytes.for_model(model.config).slot
    assert slot is not None
    full, held = slot
    head = tokens * full
    if setting.variant != "full":
        head = FIXED + (config.held(tokens, prompt) + 1) * held
    sliding = min(tokens, model.window) * full
    return model.heads * (
        model.layers.count("h2o") * head + model.layers.count("sliding") * sliding
    )
