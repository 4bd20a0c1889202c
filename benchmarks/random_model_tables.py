"""G5, G6: models of real sizes with random weights, with the decode step as a CUDA graph."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, OPTConfig

import h2o

from .correctness import WrongResult
from .model_tables import Decoding
from .options import Options
from .peers.environments import PeerMissing
from .targets import Cpu
from .timing import Contender, Row, Times, race


def random_model(config: Any, device: Cpu, dtype: torch.dtype) -> Any:
    with torch.device(device.type):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    return model.eval()


def fifth_of_keys(model: Any) -> Any:
    """An empty cache that keeps a fifth of a prompt's keys."""
    return h2o.H2OCache(model.config, heavy=0.1, recent=0.1)


def graph(options: Options) -> Iterator[Row]:
    """G5: one CUDA graph for all tokens of a generation, against steps without a graph."""
    device = options.target()
    n, small = (40, {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
                     "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 97,
                     "head_dim": 16})  # fmt: skip
    usual = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
             "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000}  # fmt: skip
    n, sizes = (n, small) if options.quick else (4096, usual)
    for name, dtype in options.wanted("bfloat16"):
        model = random_model(LlamaConfig(**sizes, attn_implementation="h2o"), device, dtype)
        ids = torch.randint(2, sizes["vocab_size"], (1, n), device=device.type)
        captured, eager = (Decoding(model, ids, fifth_of_keys(model)) for _ in range(2))
        replay, error = check_graph(captured, eager, device)
        model.set_attn_implementation("sdpa")
        full = Decoding(model, ids, DynamicCache(config=model.config))
        model.set_attn_implementation("h2o")
        contenders = [
            Contender("one graph", replay),
            Contender("H2OCache", eager.step),
            Contender(
                "DynamicCache, SDPA", full.step,
                before=lambda model=model, full=full: set_full(model, full, n),
            ),
        ]  # fmt: skip
        contenders[0].before = contenders[1].before = lambda model=model: (
            model.set_attn_implementation("h2o")
        )
        times = race(contenders, options.rounds, device)
        for peer in ("H2OCache", "DynamicCache, SDPA"):
            yield Row(
                "G5", f"a decoded token in one graph / {peer}, no graph",
                f"{name}, a Llama of {sum(x.numel() for x in model.parameters()) / 1e9:.2g}e9 "
                f"weights, {n} tokens, keys kept 20%",
                ours=times["one graph"], peer=times[peer], error=error,
            )  # fmt: skip


def set_full(model: Any, decoding: Decoding, n: int) -> None:
    """Prepare a step of the full cache, which has the same length at each step."""
    model.set_attn_implementation("sdpa")
    if decoding.cache.get_seq_length() > n:
        decoding.cache.crop(n - decoding.cache.get_seq_length())
    decoding.position.fill_(n)


def check_graph(captured: Decoding, eager: Decoding, device: Cpu) -> tuple[Callable[[], Any], str]:
    """Capture a step and check that it gives the same next token as an eager one.

    Also returns for how many tokens both agree. They may differ later, since libraries may multiply
    in another way in a graph, and after a different token the texts differ.
    """
    captured.step()
    eager.step()
    replay = device.captured(captured.step)
    while int(eager.position[0]) < int(captured.position[0]):  # capturing ran a step to warm up
        eager.step()
    same = []
    for _ in range(4):
        replay()
        eager.step()
        same.append(torch.equal(captured.token, eager.token))
    if not same[0]:
        raise WrongResult("a captured step gives another token than the same step without a graph")
    return replay, f"{sum(same)} of 4 tokens as without a graph"


AUTHORS = {"authors' tokens/s on an A100": 995.0, "authors' bytes": 36.4e9}


def flexgen(options: Options) -> Iterator[Row]:
    """G6: the authors' row for FlexGen, OPT-6.7B with 24 texts of 2048 + 2048 tokens and 20% of the
    keys."""
    device = options.target()
    B, n, new = (2, 40, 8) if options.quick else (24, 2048, 2048)
    sizes = {"max_position_embeddings": n + new + 2, "attn_implementation": "h2o"}
    if options.quick:
        sizes |= {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
                  "ffn_dim": 64, "word_embed_proj_dim": 64, "vocab_size": 97}  # fmt: skip
    else:
        sizes |= {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
                  "ffn_dim": 16384, "word_embed_proj_dim": 4096}  # fmt: skip
        if device.describe().get("bytes", 0) < 40e9:
            raise PeerMissing("OPT-6.7B with 24 texts needs 40 GB of GPU memory")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = random_model(OPTConfig(**sizes), device, dtype)
    ids = torch.randint(5, model.config.vocab_size, (B, n), device=device.type)
    taken = device.peak_bytes(lambda: Decoding(model, ids, fifth_of_keys(model)))
    decoding = Decoding(model, ids, fifth_of_keys(model))
    token = device.captured(decoding.step)
    contenders = [
        Contender("prompt", lambda: Decoding(model, ids, fifth_of_keys(model))),
        Contender("token", token),
    ]
    times = race(contenders, options.rounds, device)
    samples = [
        prompt + (new - 1) * one
        for prompt, one in zip(times["prompt"].samples, times["token"].samples, strict=True)
    ]
    weights = sum(x.nbytes for x in model.parameters())
    yield Row(
        "G6", "a batch generated, from its prompt and the time of a token",
        f"{str(dtype)[6:]}, OPT-6.7B, {B} texts of {n} + {new} tokens, keys kept 20%",
        ours=Times("h2o", samples),
        facts={
            "tokens/s": B * new / statistics.median(samples), "bytes": weights + taken, **AUTHORS
        },
    )  # fmt: skip
