"""Perplexity after a compressed prompt, for h2o, kvpress and transformers' QuantizedCache.

    python -m benchmarks.equal_bytes wikitext2_test.txt --skip 4 --limit 16

The first tokens of each window are the prompt. After its prefill every method compresses it in its
own way. The tokens after the prompt are scored, except the first, which is predicted before the
compression. Budgets are shares of the bytes that a full cache holds of the whole window. The bytes
in the table are those that each method then holds, including all bookkeeping of h2o's slots.
`authors`, whose shares are of keys, therefore has a little more than its name says.

h2o keeps to its budget after the prompt. A press of kvpress only compresses the prompt, and the
cache then grows with every token; it may also be quantized. With "cut" it has the budget when the
prompt is compressed, and more at the end. With "end" it is compressed further, so that it has the
budget at the end. The peers run in a separate environment under h2o's cache folder.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from h2o import H2OCache, models
from h2o.compat import with_cache
from h2o.evaluation import windows
from h2o.evaluation.setting import Setting, parse_all
from h2o.evaluation.text_table import table
from h2o.result_file import ResultFile, fingerprint, provenance
from h2o.utils.progress import print_line

from . import text_windows
from .peers.environments import Peer

OURS = ("authors", "robust-bytes", "calibrated-bytes")
PRESSES = ("ObservedAttention", "SnapKV", "KeyDiff", "ExpectedAttention", "AdaKV")
BUDGETS = (0.04, 0.1, 0.2)
PACKED = 4.5 / 16
"""Share of bfloat16's bytes that a number takes in 4 bits, with 16 bits each of scale and shift for
64 numbers"""


def rows(window: int, rest: int, ours: Sequence[str] = OURS) -> list[tuple[str, dict]]:
    """List (name, request): a setting for h2o, or a peer's request."""
    listed = [("full", {"setting": "full"})]
    for kind in ours:
        listed += [(f"{kind}:{part}", {"setting": f"{kind}:{part}"}) for part in BUDGETS]
    for method, bits in [*((press, 16) for press in PRESSES), ("ObservedAttention", 4)]:
        for count in ("cut", "end"):
            for part in BUDGETS:
                kept = int(part * window) - (rest if count == "end" else 0)
                if kept > 0:
                    request = {"method": method, "kept": kept}
                    name = f"{method}:{part} {count}"
                    if bits == 4:
                        request |= {"kept": int(kept / PACKED), "bits": bits}
                        name = f"{method}, {bits} bits:{part} {count}"
                    listed.append((name, request))
    for bits in (2, 4):
        listed.append((f"QuantizedCache, {bits} bits", {"method": "QuantizedCache", "bits": bits}))
    for kind in ours[1:]:  # the bytes of these two caches at the end
        listed += [(f"{kind}:{part}", {"setting": f"{kind}:{part}"}) for part in (0.21, 0.33)]
    return listed


def bytes_held(model: Any, ids: list[int], setting: Setting, prompt: int) -> tuple[int, int]:
    """Bytes of a real cache after the prompt and at the end, including all bookkeeping."""
    cache = H2OCache(model.config, setting.config, prompt_length=len(ids))
    tokens, sizes = torch.tensor([ids]), []
    model.set_attn_implementation("h2o")
    with torch.no_grad():
        for start, stop in [(0, prompt), *((i, i + 1) for i in range(prompt, len(ids)))]:
            model(tokens[:, start:stop], use_cache=True, **with_cache(cache))
            if stop in (prompt, len(ids)):
                total = cache.report().total
                sizes.append(total.bytes_held + total.bytes_bookkeeping)
    model.set_attn_implementation("sdpa")
    return sizes[0], sizes[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    text_windows.add_arguments(parser, limit=16)
    parser.add_argument("--rest", type=int, default=64, help="tokens after the prompt (64)")
    parser.add_argument("--model", help="a folder; default: the embedded SmolLM2-135M")
    parser.add_argument("--ours", nargs="+", default=OURS, help="settings in bytes, or authors")
    parser.add_argument("--output-path", type=Path, default=Path("h2o-eval"))
    options = parser.parse_args()
    prompt = options.window - options.rest

    model, tokenizer = models.load_model(
        options.model, attn_implementation=None, dtype="bfloat16", log=print_line
    )
    parts = text_windows.read(options, tokenizer)
    origin = provenance(model, tokenizer, options.model or models.DEFAULT_MODEL)
    config = model.config
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    full = 4 * config.num_hidden_layers * config.num_key_value_heads * size
    cells = ResultFile(options.output_path / "peers.jsonl")
    wanted = rows(options.window, options.rest, options.ours)
    losses: dict[str, list[float]] = {name: [] for name, _ in wanted}
    sizes: dict[str, list[str]] = {}
    folder = options.model or str(models.embedded_folder())
    threads = str(torch.get_num_threads())
    with Peer("quality", folder, threads) as peer, tqdm(total=len(wanted) * options.limit) as bar:
        for ids in parts:
            for name, request in wanted:
                facts = origin | {"ids": fingerprint({"ids": ids}), "prompt": prompt, **request}
                result = cells.find(facts)
                if result is None:
                    if "setting" in request:
                        (setting,) = parse_all(request["setting"])
                        tokens = torch.tensor([ids])
                        loss = windows.by_simulation(model, tokens, setting, prompt)
                        result = {"loss": loss[prompt:].tolist()}
                    else:
                        result = peer.ask(ids=ids, prompt=prompt, **request)
                    result = cells.put(facts, result)
                losses[name].append(sum(result["loss"]) / len(result["loss"]))
                if name not in sizes:  # all windows have the same size
                    if name == "full":
                        measured = full * prompt, full * options.window
                    elif "setting" in request:
                        (setting,) = parse_all(request["setting"])
                        measured = bytes_held(model, ids, setting, prompt)
                    else:
                        measured = result["bytes"].values()
                    sizes[name] = [f"{x / (full * options.window):.1%}" for x in measured]
                bar.update()
    base = torch.tensor(losses["full"], dtype=torch.float64)
    lines = []
    for name, _ in wanted:
        loss = torch.tensor(losses[name], dtype=torch.float64)
        lost = loss - base
        error = lost.std().item() / math.sqrt(len(lost)) if len(lost) > 1 else 0.0
        lines.append(
            [
                name,
                *sizes[name],
                f"{loss.mean().exp().item():.2f}",
                f"{lost.mean():.3f} ±{error:.3f}",
            ]
        )
    print(table(["setting", "bytes at the cut", "at the end", "perplexity", "loss"], lines))


if __name__ == "__main__":
    main()
