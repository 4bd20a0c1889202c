"""P23: a decode step of multi-head latent attention, projections included, against transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

import h2o

from .correctness import WrongResult
from .machine import roofline
from .options import Options
from .timing import HOST, Contender, Row, race

ROTATED, LATENT = 64, 512
SHAPES = {
    "V2-Lite": ("deepseek_v2", 2048, 16, None),
    "V3": ("deepseek_v3", 7168, 128, 1536),
}
"""DeepSeek's models: model type, hidden size, query heads, rank of the queries"""

LENGTHS = (2048, 4096, 8192)

STEPS = 8
"""Steps of h2o in each round, since one alone takes only milliseconds"""

BOUND = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
"""Limit of the difference to transformers' answer, relative to its largest element"""


def latents(options: Options) -> Iterator[Row]:
    """P23: one layer over `LENGTHS` latents. Each step of h2o evicts a key; transformers keeps all.

    The roofline is the time of reading the attention's weights."""
    for name, shape in SHAPES.items():
        for spelled, dtype in options.wanted("bfloat16"):
            model = _one_layer(*shape, options.quick, dtype)
            for n in (40,) if options.quick else LENGTHS:
                with torch.no_grad():
                    yield _row(model, name, spelled, n, options.rounds)


def _one_layer(
    model_type: str, hidden: int, heads: int, rank: int | None, quick: bool, dtype: torch.dtype
) -> Any:
    """A model of one layer, with almost nothing around its attention."""
    config = AutoConfig.for_model(
        model_type,
        num_hidden_layers=1, vocab_size=97, intermediate_size=64, first_k_dense_replace=1,
        max_position_embeddings=2 * LENGTHS[-1], kv_lora_rank=LATENT, qk_rope_head_dim=ROTATED,
        qk_nope_head_dim=128, v_head_dim=128, q_lora_rank=rank,
        hidden_size=64 if quick else hidden, num_attention_heads=4 if quick else heads,
    )  # fmt: skip
    config.num_key_value_heads = config.num_attention_heads
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _filled(config: Any, n: int, dtype: torch.dtype) -> DynamicCache:
    """A cache as after a prompt of n tokens."""
    cache = DynamicCache(config=config)
    generator = torch.Generator().manual_seed(1)
    widths = LATENT, ROTATED
    rows = (torch.randn(1, 1, n, width, generator=generator).to(dtype) for width in widths)
    cache.update(*rows, 0)
    return cache


def _row(model: Any, name: str, dtype: str, n: int, rounds: int) -> Row:
    full = _filled(model.config, n, model.dtype)
    cache = h2o.H2OCache.from_dynamic_cache(full, model.config, heavy=n // 2, recent=n - n // 2)
    token = torch.tensor([[5]])

    def step(attention: str, past: Any) -> Tensor:
        if model.config._attn_implementation != attention:
            model.set_attn_implementation(attention)
        position = torch.tensor([[int(past.get_seq_length())]])
        answer: Tensor = model.base_model(
            token, cache=past, position_ids=position
        ).last_hidden_state
        return answer

    def in_a_row() -> float:  # as in decoding; the first finds the peer's data in the CPU's caches
        step("h2o", cache)
        return HOST.seconds(lambda: step("h2o", cache), STEPS)[0] / STEPS

    def forget(layer: Any, keys: Tensor, values: Tensor) -> None:
        layer.keys, layer.values = keys, values

    layer = full.layers[0]
    held = layer.keys, layer.values
    ours, theirs = step("h2o", cache), step("sdpa", full)
    difference = float((ours - theirs).abs().max() / theirs.abs().max())
    if difference > BOUND[model.dtype]:
        raise WrongResult(f"{name}: the answer differs from transformers' by {difference:.1e}")
    attention = model.base_model.layers[0].self_attn
    weights = sum(x.nbytes for x in attention.parameters() if x.ndim == 2)
    contenders = [
        Contender("h2o", in_a_row, work=weights, own_clock=True),
        Contender("transformers", lambda: step("sdpa", full), before=lambda: forget(layer, *held)),
    ]
    if (loops := roofline()) is not None:  # the time of reading the weights alone
        read, size = loops.reads([torch.zeros(weights, dtype=torch.uint8)])
        contenders.append(Contender("read", read, work=size))
    times = race(contenders, rounds)
    heads = model.config.num_attention_heads
    return Row(
        "P23", "step of latent attention with projections / transformers' (sdpa)",
        f"{dtype}, {name}: H={heads}, {n} latents",
        ours=times["h2o"], peer=times["transformers"], error=f"{difference:.1e}",
        bound="read", peak=times.get("read"),
    )  # fmt: skip
