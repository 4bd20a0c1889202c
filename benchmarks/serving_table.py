"""S1 to S4: vLLM with h2o against the same vLLM with every key, on SmolLM2 with bfloat16 weights.
The tables time many requests at once at a fixed number of bytes for keys and values, a decode step
with memory for all, and prompts that begin alike."""

from __future__ import annotations

import contextlib
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from .model_tables import load, prompt
from .options import Options
from .peers.environments import Peer, PeerMissing
from .throughput_tables import H2O_ENTRY, MB, Work, passages, vllm_peer
from .timing import Row, Times

REQUESTS = (1, 8, 64, 256)
SHAPE = (512, 64)
"""Tokens of a prompt and of its answer"""

PROMPTS = (512, 1024, 2048)
PREFIX, OWN = 1024, 64
"""S4: tokens of a prompt that all requests share, and further ones"""

ROWS = 16
"""S3: requests at once, for each prompt length"""

OURS = "vLLM with h2o"


def serving(options: Options) -> Iterator[Row]:
    """S1 (64 MB) and S2 (256 MB): all requests arrive together. S3: the tokens of the last request,
    which are decoded after all prompts have been prefilled. S4 (64 MB): each engine prefills the
    shared prefix once, vLLM by its own prefix caching."""
    _, tokenizer = load("bfloat16")
    text = prompt(tokenizer, 8192)[0].tolist()

    def work(row: str, requests: int, tokens: int, new: int, bytes: int | None) -> Work:
        return Work(row, passages(text, requests, tokens), [new] * requests, bytes)

    counts, shape, lengths, prefix = REQUESTS, SHAPE, PROMPTS, PREFIX
    if options.quick:
        counts, shape, lengths, prefix = (1, 3), (20, 4), (20,), 32
    for row, bytes in (("S1", 64 * MB), ("S2", 256 * MB)):
        whole = work(row, counts[-1], *shape, bytes)
        with contextlib.ExitStack() as stack:
            peers = started(stack, whole)
            for count in counts:
                yield from compared(peers, whole.first(count), "seconds")
    with contextlib.ExitStack() as stack:
        peers = started(stack, work("S3", ROWS, lengths[-1], shape[1], None))
        for tokens in lengths:
            yield from compared(peers, work("S3", ROWS, tokens, shape[1], None), "last")
    alike = work("S4", counts[-2], OWN, shape[1], 64 * MB)
    alike = alike._replace(prompts=[text[-prefix:] + ids for ids in alike.prompts])
    with contextlib.ExitStack() as stack:
        peers = started(stack, alike, enable_prefix_caching=True)
        yield from compared(peers, alike, "seconds", h2o_prefix=prefix)


def started(stack: contextlib.ExitStack, work: Work, **options: Any) -> dict[str, Peer]:
    """Start and warm up each engine. An engine that does not start is reported and left out."""
    entries: dict[str, dict[str, Any]] = {
        OURS: H2O_ENTRY,
        "vLLM": {},
        "vLLM, fp8": {"kv_cache_dtype": "fp8"},
    }
    peers = {}
    for name, engine in entries.items():
        try:
            peer = vllm_peer(stack, work, engine | options)
            peer.ask(ids=[ids[:8] for ids in work.prompts[:4]], tokens=2)
        except PeerMissing as problem:
            print(f"{name}: left out: {problem}", file=sys.stderr)
        else:
            peers[name] = peer
    return peers


def compared(peers: dict[str, Peer], work: Work, measure: str, **arguments: int) -> Iterator[Row]:
    """Yield rows that compare our engine with each other one.

    Args:
        measure: "seconds" of all tokens, or "last", the time per token of the last request.
        arguments: `vllm_xargs` of each request.
    """
    if OURS not in peers:
        return
    new = sum(work.new)
    times, facts = {}, {}
    for name, peer in peers.items():
        told = peer.ask(ids=work.prompts, tokens=work.new, arguments=arguments)
        second = told["seconds"] / new if measure == "seconds" else told["each_token_s"][-1]
        times[name] = Times(name, [second])
        facts[name] = {
            "tokens a second": new / told["seconds"],
            "first token, s": statistics.median(told["each_first_s"]),
            "ms per token": 1000 * statistics.median(told["each_token_s"]),
            "held": told["held"],
        }
        figures = ", ".join(f"{value:.3g} {fact}" for fact, value in facts[name].items())
        print(f"{work.row} {work.case()} {name}: {figures}", file=sys.stderr)
    for name in times:
        if name != OURS:
            yield Row(
                work.row, f"SmolLM2, a token of many requests, {OURS} / {name}", work.case(),
                ours=times[OURS], peer=times[name],
                facts={f"{fact}, {engine}": value for engine in (OURS, name)
                       for fact, value in facts[engine].items()},
            )  # fmt: skip
