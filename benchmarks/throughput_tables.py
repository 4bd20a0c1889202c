"""R1 to R3: tokens per second at a fixed number of bytes for keys and values, as in the paper
(Zhang et al., H2O, NeurIPS 2023, section 5.3), on SmolLM2 with bfloat16 weights.

Every engine gets the same prompts, and answers each greedily with the requested number of tokens.
It may hold as many requests at a time as fit into the bytes with their keys and values. Engines
that evict are judged by the loss of the full model on their answers.
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from transformers import DynamicCache, GenerationConfig

import h2o
from h2o import models
from h2o.hf.batching.row_batch import row_bytes

from .model_tables import load, prompt
from .options import Options
from .peers.environments import Peer, PeerMissing
from .peers.unquantized_weights import unquantized_weights
from .timing import Row, Times

BUDGET = 256
CONFIG = h2o.H2OConfig(
    heavy=189, recent=63, sinks=4, score_by="mean", value_weighted=True, kv_dtype="int8-int4"
)
"""`H2OConfig.robust(256)`, with keys in eight bits and values in four"""

BLOCK = 32
"""Tokens in a block of OpenVINO's and vLLM's paged caches"""

JUDGED = 4
"""Number of requests whose answers are judged"""

SOME = 4
"""Requests of R1 for an engine with memory for one at a time. Each further one takes as long."""

SHORT_ROUNDS = 3
"""Rounds of R2, which takes seconds"""

MB = 1_000_000


class Work(NamedTuple):
    """Requests to answer, and the memory for them."""

    row: str
    prompts: list[list[int]]
    new: list[int]
    """tokens of each answer"""
    bytes: int | None
    """bytes for keys and values; None: no limit"""

    @property
    def longest(self) -> int:
        return max(len(ids) + n for ids, n in zip(self.prompts, self.new, strict=True))

    def first(self, requests: int) -> Work:
        return self._replace(prompts=self.prompts[:requests], new=self.new[:requests])

    def case(self) -> str:
        lengths, new = sorted(map(len, self.prompts)), sorted(self.new)
        shape = f"{_span(lengths)} + {_span(new)}"
        limit = "memory for all" if self.bytes is None else f"{self.bytes // MB} MB"
        return f"bfloat16, {len(lengths)} x ({shape}), {limit}"


Answers = list[list[int]]
Engine = Callable[[Work], tuple[float, Answers]]
"""Answers all requests. Returns the seconds, and the new tokens of each request."""


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if numbers[0] == numbers[-1] else f"{numbers[0]}..{numbers[-1]}"


def passages(text: list[int], count: int, tokens: int) -> list[list[int]]:
    """Cut `count` passages of `tokens` tokens each, which begin at different words."""
    starts = [(97 * i) % (len(text) - tokens) for i in range(count)]
    return [text[n : n + tokens] for n in starts]


def works(tokenizer: Any, quick: bool) -> list[Work]:
    """The works of R1, R2 and R3. Prompts are passages of one text from different words on."""
    text = prompt(tokenizer, 8192)[0].tolist()
    draw = random.Random(0)

    def passage(tokens: int) -> list[int]:
        start = draw.randrange(len(text) - tokens)
        return text[start : start + tokens]

    mixed = [(draw.randrange(200, 1500), draw.randrange(32, 256)) for _ in range(32)]
    sizes = {"R2": [(500, 64)] * 16, "R3": mixed, "R1": [(2048, 256)] * 64}
    if quick:
        sizes = {"R2": [(20, 4)] * 2, "R3": [(20, 4), (40, 2), (9, 3)], "R1": [(40, 6)] * 4}
    limits = {"R1": 4 * MB if quick else 64 * MB, "R2": None, "R3": 4 * MB if quick else 64 * MB}
    return [
        Work(row, [passage(n) for n, _ in size], [new for _, new in size], limits[row])
        for row, size in sizes.items()
    ]


def throughput(options: Options) -> Iterator[Row]:
    """R1, R2, R3: `h2o.generate_all` and vLLM with h2o, against engines that keep every key and
    OpenVINO's own eviction. A work takes minutes, so it is timed once. The short one of R2 is timed
    a few times in turn."""
    model, tokenizer = load("bfloat16")
    for work in works(tokenizer, options.quick):
        torch._dynamo.reset()  # discards graphs of another number of rows
        with contextlib.ExitStack() as stack:
            ways = engines(model, work, stack)
            short = [ids[:8] for ids in work.prompts]  # steps are compiled for this number
            warm_up = work._replace(prompts=short, new=[2] * len(short))
            for name, engine in list(ways.items()):  # loads everything before the first is timed
                try:
                    engine(warm_up)
                except PeerMissing as problem:
                    print(f"{name}: left out: {problem}", file=sys.stderr)
                    del ways[name]
            times = {name: Times(name, []) for name in ways}
            answers = {}
            for _ in range(SHORT_ROUNDS if work.row == "R2" else 1):
                for name, engine in ways.items():
                    part = work.first(SOME) if work.row == "R1" and name in ONE_AT_A_TIME else work
                    seconds, answers[name] = engine(part)
                    new = sum(part.new)
                    times[name].samples.append(seconds / new)
                    print(f"{work.row} {name}: {new / seconds:.1f} tokens/s", file=sys.stderr)
        expected = alone(model, work)
        nats = {name: loss(model, work, answers[name]) for name in answers}
        nats["alone"] = loss(model, work, expected)
        for name in list(times)[1:]:
            yield Row(
                work.row, f"SmolLM2, a token of many requests / {name}", work.case(),
                ours=times[OURS], peer=times[name],
                error=f"{agreement(answers[OURS], expected):.0%} of the tokens of generate()",
                facts={
                    "tokens a second": 1 / times[OURS].median,
                    "of the peer": 1 / times[name].median,
                    "nats per token by the full model": nats[OURS],
                    "of the peer's texts": nats[name],
                    "of generate() with an H2OCache": nats["alone"],
                },
            )  # fmt: skip


# ---- Engines ----

OURS = "generate_all"
COMPILED = "generate_all, compiled"
"""With frozen weights. They are packed once, and those with the same input are joined, as in other
engines."""
STATIC = "DynamicCache, static batches"
CONTINUOUS = "transformers' continuous batching"
ONE_AT_A_TIME = (STATIC, CONTINUOUS, "vLLM", "OpenVINO", "OpenVINO, evicting", "llama.cpp")


def engines(model: Any, work: Work, stack: contextlib.ExitStack) -> dict[str, Engine]:
    """The engines by name. A peer that cannot be installed is reported and left out."""
    ways: dict[str, Engine] = {
        OURS: partial(generate_all, model, False),
        COMPILED: partial(generate_all, model, True),
        STATIC: partial(static_batches, model),
        CONTINUOUS: partial(continuous_batching, model),
    }
    every = work._replace(bytes=None)
    peers: dict[str, Callable[[], Engine]] = {
        "vLLM": partial(vllm, stack, work),
        "vLLM with h2o": partial(vllm, stack, work, H2O_ENTRY),
        "OpenVINO": partial(openvino, stack, model, 0),
        "OpenVINO, evicting": partial(openvino, stack, model, BUDGET),
        "llama.cpp": partial(llama_cpp, stack, model),
    }
    if work.bytes is not None:
        peers["vLLM, memory for all"] = partial(vllm, stack, every)
    for name, start in peers.items():
        try:
            ways[name] = start()
        except PeerMissing as problem:
            print(f"{name}: left out: {problem}", file=sys.stderr)
    return ways


def greedy(tokens: int | None = None) -> GenerationConfig:
    return GenerationConfig(
        max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )


def generate_all(model: Any, compileable: bool, work: Work) -> tuple[float, Answers]:
    model.set_attn_implementation("h2o")
    requests = [
        h2o.Request(ids, generation_config=greedy(new))
        for ids, new in zip(work.prompts, work.new, strict=True)
    ]
    rows = len(requests)
    if work.bytes is not None:
        rows = work.bytes // bytes_of_a_row(model, CONFIG, torch.tensor(work.prompts[:1]))
    with torch._inductor.config.patch(
        {"freezing": compileable, "cpp.enable_concat_linear": compileable}
    ):
        start = time.perf_counter()
        results = list(
            h2o.generate_all(model, requests, CONFIG, rows=rows, compileable=compileable)
        )
        return time.perf_counter() - start, [result.ids for result in results]


def bytes_of_a_row(model: Any, config: h2o.H2OConfig, ids: torch.Tensor) -> int:
    """Bytes of the cache of one request with this prompt, [1, n]."""
    model.set_attn_implementation("h2o")
    cache = h2o.H2OCache(model.config, config)
    model(ids, cache=cache, logits_to_keep=1)
    return row_bytes(cache)


def token_bytes(model: Any) -> int:
    """Bytes of a token's keys and values in 16 bits."""
    config = model.config
    return 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def static_batches(model: Any, work: Work) -> tuple[float, Answers]:
    """generate() on batches of requests sorted by length. A batch has as many rows as fit if all
    are as long as its longest."""
    model.set_attn_implementation("sdpa")

    def fits(batch: list[int]) -> bool:
        held = len(batch) * _widest(work, batch) * token_bytes(model)
        return work.bytes is None or held <= work.bytes

    order = sorted(range(len(work.prompts)), key=lambda i: len(work.prompts[i]) + work.new[i])
    answers: Answers = [[] for _ in order]
    start = time.perf_counter()
    while order:
        rows = 1
        while rows < len(order) and fits(order[-rows - 1 :]):
            rows += 1
        order, batch = order[:-rows], order[-rows:]
        cache = DynamicCache(config=model.config)
        for i, ids in zip(batch, answer_batch(model, work, batch, cache), strict=True):
            answers[i] = ids
    return time.perf_counter() - start, answers


def answer_batch(model: Any, work: Work, batch: list[int], cache: Any) -> Answers:
    """Answer a left-padded batch of requests. All rows run until the longest answer is complete."""
    width = max(len(work.prompts[i]) for i in batch)
    pads = [width - len(work.prompts[i]) for i in batch]
    out = model.generate(
        torch.tensor([[0] * n + work.prompts[i] for i, n in zip(batch, pads, strict=True)]),
        attention_mask=torch.tensor([[0] * n + [1] * (width - n) for n in pads]),
        cache=cache,
        generation_config=greedy(max(work.new[i] for i in batch)),
    )
    return [row[: work.new[i]] for i, row in zip(batch, out[:, width:].tolist(), strict=True)]


def _widest(work: Work, batch: list[int]) -> int:
    """Row length of a padded batch at its end."""
    return max(len(work.prompts[i]) for i in batch) + max(work.new[i] for i in batch)


def continuous_batching(model: Any, work: Work) -> tuple[float, Answers]:
    """transformers' continuous batching, with its paged cache."""
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    model.set_attn_implementation("sdpa")
    page = BLOCK
    tokens = sum(map(len, work.prompts)) + sum(work.new)
    if work.bytes is not None:
        tokens = work.bytes // token_bytes(model)
    config = ContinuousBatchingConfig(
        page_size=page, num_blocks=tokens // page + len(work.new), max_batch_tokens=2048,
        allow_block_sharing=False,
    )  # fmt: skip
    start = time.perf_counter()
    with torch.inference_mode(False):  # its thread writes to tensors that are created here
        done = model.generate_batch(
            work.prompts, generation_config=greedy(max(work.new)), continuous_batching_config=config
        )
    seconds = time.perf_counter() - start
    outs = [done[key].generated_tokens for key in sorted(done, key=lambda x: int(x.split("_")[-1]))]
    if len(outs) < len(work.new) or not all(outs):
        raise PeerMissing("it leaves some requests without an answer")
    return seconds, [ids[:n] for ids, n in zip(outs, work.new, strict=True)]


_NAMES = ("heavy", "recent", "sinks", "score_by", "value_weighted", "kv_dtype")
H2O_ENTRY = {"additional_config": {"h2o": {name: getattr(CONFIG, name) for name in _NAMES}}}
"""Option of vLLM's engine that enables h2o"""


def vllm_peer(stack: contextlib.ExitStack, work: Work, options: dict[str, Any]) -> Peer:
    """Start vLLM with room for the requests of a work, and with these options of its engine."""
    engine = {
        "max_model_len": work.longest,
        "max_num_batched_tokens": max(2048, work.longest),
        "max_num_seqs": len(work.prompts),
        "kv_cache_memory_bytes": work.bytes or 2000 * MB,
    }
    folder, threads = str(models.embedded_folder()), str(torch.get_num_threads())
    return stack.enter_context(Peer("vllm", folder, threads, json.dumps(engine | options)))


def vllm(stack: contextlib.ExitStack, work: Work, options: dict[str, Any] | None = None) -> Engine:
    peer = vllm_peer(stack, work, options or {})

    def answer(work: Work) -> tuple[float, Answers]:
        told = peer.ask(ids=work.prompts, tokens=work.new)
        return told["seconds"], told["ids"]

    return answer


def openvino(stack: contextlib.ExitStack, model: Any, kept: int) -> Engine:
    threads = str(torch.get_num_threads())
    peer = stack.enter_context(Peer("openvino", str(unquantized_weights("float16")), threads))

    def answer(work: Work) -> tuple[float, Answers]:
        blocks = (work.bytes or 2000 * MB) // (BLOCK * token_bytes(model))
        told = peer.ask(dtype="bf16", kept=kept, blocks=blocks, ids=work.prompts, tokens=work.new)
        return told["seconds"], told["ids"]

    return answer


def llama_cpp(stack: contextlib.ExitStack, model: Any) -> Engine:
    weights, threads = str(unquantized_weights("bfloat16")), str(torch.get_num_threads())
    peer = stack.enter_context(Peer("llama_cpp", weights, threads))

    def answer(work: Work) -> tuple[float, Answers]:
        cells = (work.bytes or 0) // token_bytes(model)
        told = peer.ask(cells=cells, ids=work.prompts, tokens=work.new)
        return told["seconds"], told["ids"]

    return answer


# ---- Texts ----


def alone(model: Any, work: Work) -> Answers:
    """Answer each of the judged requests by generate() with an H2OCache."""
    model.set_attn_implementation("h2o")
    answers = []
    for ids, new in zip(work.prompts[:JUDGED], work.new, strict=False):
        cache = h2o.H2OCache(model.config, CONFIG)
        out = model.generate(torch.tensor([ids]), cache=cache, generation_config=greedy(new))
        answers.append(out[0, len(ids) :].tolist())
    return answers


def agreement(answers: Answers, expected: Answers) -> float:
    """Share of the tokens that come before the first difference in each answer."""
    same = total = 0
    for answer, other in zip(answers, expected, strict=False):
        total += len(other)
        for a, b in zip(answer, other, strict=True):
            if a != b:
                break
            same += 1
    return same / total


@torch.no_grad()
def loss(model: Any, work: Work, answers: Answers) -> float:
    """Loss of the model with all keys on the judged answers, in nats per token."""
    model.set_attn_implementation("sdpa")
    total = 0.0
    count = 0
    for ids, answer in zip(work.prompts[:JUDGED], answers, strict=False):
        logits = model(torch.tensor([ids + answer]), logits_to_keep=len(answer) + 1).logits
        chosen = torch.tensor(answer)[:, None]
        total -= logits[0, :-1].float().log_softmax(-1).gather(1, chosen).sum().item()
        count += len(answer)
    return total / count
