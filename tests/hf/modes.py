"""The ways to generate, as one table that tests cross with families and policies.

A mode takes a model, prompts as a padded batch, and a function that returns a new cache (or None,
so that the model makes its own). It returns tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import TextStreamer

from h2o import H2OCache, H2OConfig
from h2o.compat import CACHE, with_cache
from h2o.hf.layers.layer import H2OLayer

TOKENS = 9
MakeCache = Callable[[], Any]
Mode = Callable[[Any, dict[str, Tensor], MakeCache], Tensor]


def _generate(model: Any, inputs: dict[str, Any], cache: Any, **kwargs: Any) -> Tensor:
    torch.manual_seed(0)
    settings = {"max_new_tokens": TOKENS, "do_sample": False, CACHE: cache} | kwargs
    return model.generate(**inputs, **settings)


def _with(**kwargs: Any) -> Mode:
    return lambda model, inputs, make: _generate(model, inputs, make(), **kwargs)


def _inputs_embeds(model: Any, inputs: dict[str, Tensor], make: MakeCache) -> Tensor:
    embeds = model.get_input_embeddings()(inputs["input_ids"]).detach()
    return _generate(
        model, {"inputs_embeds": embeds, "attention_mask": inputs["attention_mask"]}, make()
    )


def _chat(model: Any, inputs: dict[str, Tensor], make: MakeCache) -> Tensor:
    """Two turns on one cache; the second is given the whole conversation so far."""
    cache = make()
    first = _generate(model, inputs, cache, max_new_tokens=5)
    B = first.shape[0]
    more = torch.arange(3 * B, device=first.device).reshape(B, 3) + 7
    mask = inputs["attention_mask"]
    ids = torch.cat([first, more], dim=1)
    mask = torch.cat([mask, mask.new_ones(B, ids.shape[1] - mask.shape[1])], dim=1)
    turn = {"input_ids": ids, "attention_mask": mask}
    if cache is None:  # the second call prefills everything again, images too
        turn |= {key: value for key, value in inputs.items() if key not in turn}
        if "mm_token_type_ids" in turn:
            kinds = turn["mm_token_type_ids"]
            text = kinds.new_zeros(B, ids.shape[1] - kinds.shape[1])
            turn["mm_token_type_ids"] = torch.cat([kinds, text], dim=1)
    return _generate(model, turn, cache, max_new_tokens=8)


def _finished_early(model: Any, inputs: dict[str, Tensor], make: MakeCache) -> Tensor:
    """Rows stop at different tokens. A finished row is fed padding until the last row stops."""
    plain = _generate(model, inputs, make())[:, -TOKENS:]
    return _generate(model, inputs, make(), eos_token_id=plain[:, 4].unique().tolist())


def _streamed(model: Any, inputs: dict[str, Tensor], make: MakeCache) -> Tensor:
    """Row 0 alone, because a streamer supports one row. Streamed and returned tokens are equal."""

    class Tokens(TextStreamer):
        def __init__(self) -> None:
            self.seen: list[int] = []

        def put(self, value: Tensor) -> None:
            self.seen += value.flatten().tolist()

        def end(self) -> None: ...

    row = {"input_ids": inputs["input_ids"][:1], "attention_mask": inputs["attention_mask"][:1]}
    streamer = Tokens()
    out = _generate(model, row, make(), streamer=streamer)
    assert streamer.seen == out[0].tolist()
    return out


def _step_by_step(model: Any, inputs: dict[str, Tensor], make: MakeCache) -> Tensor:
    """Call the model in a loop, without generate()."""
    cache, ids, mask = make(), inputs["input_ids"], inputs["attention_mask"]
    position = (mask.cumsum(1) - 1).clamp(min=0)
    new = []
    with torch.no_grad():
        for _ in range(TOKENS):
            out = model(ids, attention_mask=mask, position_ids=position, **with_cache(cache))
            cache = out[CACHE]
            ids = out.logits[:, -1:].argmax(-1)
            new.append(ids)
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            position = position[:, -1:] + 1
    return torch.cat(new, dim=1)


MODES: dict[str, Mode] = {
    "greedy": _with(),
    "sampling": _with(do_sample=True, top_k=20),
    "several samples": _with(do_sample=True, num_return_sequences=3),
    "repetition penalty": _with(repetition_penalty=1.5),
    "guidance": _with(guidance_scale=1.5),
    "beam search": _with(num_beams=4),
    "beam sampling": _with(num_beams=3, do_sample=True),
    "several beams": _with(num_beams=4, num_return_sequences=3),
    "chunked prompt": _with(prefill_chunk_size=7),
    "prompt token by token": _with(prefill_chunk_size=1),
    "inputs_embeds": _inputs_embeds,
    "streamer": _streamed,
    "chat turns": _chat,
    "rows finished early": _finished_early,
    "model(...) by hand": _step_by_step,
}

POLICIES: dict[str, H2OConfig] = {
    "h2o": H2OConfig(heavy=6, recent=6),
    "fractions": H2OConfig(heavy=0.3, recent=0.3, min_tokens=0),
    "local": H2OConfig.local(9),
    "heavy-only": H2OConfig.heavy_only(9),
    "streaming": H2OConfig.streaming(5),
    "sinks, mean": H2OConfig(heavy=4, recent=3, sinks=2, score_by="mean"),
    "decayed": H2OConfig(heavy=5, recent=4, decay=0.8),
    "value-weighted": H2OConfig(heavy=5, recent=4, value_weighted=True),
    "per layer": H2OConfig(heavy=lambda layer, layers: 2 * (layers - layer), recent=4),
    "head_shares": H2OConfig(heavy=6, recent=4, sinks=1, head_shares=[[1.0]]),
    "int8": H2OConfig(heavy=5, recent=4, sinks=1, score_by="mean", kv_dtype="int8"),
    "max": H2OConfig(heavy=6, recent=4, sinks=1, score_by="max"),
}
"""Small budgets, under which every prompt of more than 12 tokens loses keys."""


def policy(name: str, model: Any) -> H2OConfig:
    """One of `POLICIES`, with head shares for the layers and heads of this model."""
    config = POLICIES[name]
    return config if config.head_shares is None else replace(config, head_shares=uneven(model))


def uneven(model: Any) -> list[list[float]]:
    """Shares [layers, key/value heads] from 0.4 to 2.6, different for any two neighbors."""
    layers, heads = layers_and_heads(model)
    return [[0.4 + (5 * row + 7 * head) % 12 / 5 for head in range(heads)] for row in range(layers)]


def layers_and_heads(model: Any) -> tuple[int, int]:
    """Number of layers and of key/value heads, read from a cache after a pass. Configs have many
    names for the number of heads, and not all are right."""
    before = model.config._attn_implementation
    model.set_attn_implementation("h2o")
    cache = H2OCache(model.config, H2OConfig.full())
    with torch.no_grad():
        model(torch.tensor([[5, 6]], device=model.device), **with_cache(cache))
    model.set_attn_implementation(before)
    heads = {layer.keys.shape[1] for layer in cache.layers if isinstance(layer, H2OLayer)}
    assert len(heads) == 1
    return len(cache.layers), heads.pop()
