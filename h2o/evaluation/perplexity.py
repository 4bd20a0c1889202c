"""`h2o eval --perplexity`: how well a model predicts a long text with an evicting cache.

The text is cut into windows that know nothing of each other. In each, the model predicts every
token but the first, evicting from the first token on. After a prompt, which is read whole and then
cut, only the tokens count whose prediction the cut can change: those after the first one that
follows the prompt. Two ways lead to the same numbers: the simulation, one forward a window, and the
real cache, token by token.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h2o import models
from h2o.borrowed import attention_name, with_cache
from h2o.errors import UserError
from h2o.evaluation import kept_bytes
from h2o.evaluation.fitting import load
from h2o.evaluation.presentation import plot_curves, table, written
from h2o.evaluation.published_masks import MASKS
from h2o.evaluation.setting import Setting, footnote
from h2o.filesystem import read_text
from h2o.hf.cache.cache import H2OCache
from h2o.hf.rotary.positions import positions_after
from h2o.hf.simulation.simulation import simulated
from h2o.processes import launched
from h2o.result_cells import Cells, fingerprint, provenance

__all__ = ["by_cache", "by_simulation", "compare"]


def compare(
    file: Path,
    settings: Sequence[Setting],
    output: Path,
    *,
    model_name: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    protocol: str = "simulate",
    window: int = 1024,
    limit: int | None = None,
    prompt_length: int = 1,
    as_json: bool = False,
) -> str:
    """Perplexity of a text file with each setting.

    Args:
        file: plain text, UTF-8.
        settings: what to compare; fractions are of the window.
        output: folder for perplexity.json, which a second run completes, and perplexity.png.
        protocol: "simulate", or "drop" for the real cache.
        window: tokens of a window; the last one may be shorter.
        limit: use only the first so many windows.
        prompt_length: tokens of each window before the first eviction; see `scored`.
        as_json: return the results as the file has them, those of this call.

    Returns:
        the table, as text.
    """
    for setting in settings:
        if protocol == "drop" and not setting.dropping:
            raise UserError(f"{setting.why_not_dropping}; use --protocol simulate")
    cells = Cells(output / "perplexity.json", "h2o eval --perplexity", launched())
    model, tokenizer = load(
        model_name, settings, dtype=dtype, device=device, full_cache=protocol == "drop"
    )
    windows, total = read_windows(file, tokenizer, model.config, window, limit, prompt_length)
    origin = provenance(model, tokenizer, model_name or models.DEFAULT_MODEL)
    work = []
    for number, ids in enumerate(windows):
        facts = origin | {
            "file": file.name,
            "window": number,
            "tokens": fingerprint({"ids": ids}),
            "protocol": protocol,
            "ratio_of": "text",
            "prompt_len": prompt_length,
        }
        if prompt_length > 1:  # before, results counted the prompt's tokens too
            facts["scored"] = "after the cut"
        ways = [
            partial(measured, model, ids, setting, protocol, prompt_length) for setting in settings
        ]
        each = zip(settings, ways, strict=True)
        work.append([(facts | setting.describe(), way) for setting, way in each])
    by_setting = map(list, zip(*cells.complete(work, "windows"), strict=True))
    results = dict(zip(settings, by_setting, strict=True))
    sizes = {x: kept_bytes.of_rows(x, model, results[x]) for x in settings}
    in_bytes = kept_bytes.by_bytes(settings)
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for setting in settings:
        share, value, error = summary(results[setting])[:3]
        share = (in_bytes and sizes[setting]) or share
        curves.setdefault(setting.curve, []).append((share, value, error))
    drawn = plot_curves(
        output / "perplexity.png", [(file.name, curves)], "perplexity", kept_bytes.axis(in_bytes)
    )
    if as_json:
        return cells.as_json(facts for row in work for facts, _ in row)
    note = "" if len(windows) == total else f", the first of {total}"
    return "\n".join(
        [
            f"{origin['model']}, {file.name} in {len(windows)} windows of {window} tokens{note}",
            f"protocol {protocol}, first eviction after {prompt_length}, fractions of the window",
            f"scored: {counted(results[settings[0]], prompt_length)}",
            "",
            as_table(results, protocol, sizes),
            "",
            written(cells.path, drawn),
        ]
    )


MASS = {"simulate": "retained_mass", "drop": "share_held"}
"""What is measured of attention, by layer. In simulation: the share of a full cache's
attention that falls on keys still held (`h2o.Simulation.retained_mass`), mean over heads. By the
real cache, which no longer has the others: the share of the attention paid that went to keys held
at the end (1 - `share_evicted` of `H2OCache.report`)."""


def measured(
    model: Any, ids: list[int], setting: Setting, protocol: str, prompt_length: int
) -> dict[str, Any]:
    """One window, as the result file has it."""
    measure = by_simulation if protocol == "simulate" else by_cache
    start = time.perf_counter()
    loss, attention = measure(
        model, torch.tensor([ids], dtype=torch.long, device=model.device), setting, prompt_length
    )
    loss = scored(loss, prompt_length)
    return {
        "loss": loss.double().sum().item(),
        "predicted": loss.numel(),
        "seen": len(ids),
        "kept": setting.config.for_model(model).held(len(ids)),
        "seconds": time.perf_counter() - start,
        MASS[protocol]: attention,
    }


def scored(loss: Tensor, prompt_length: int) -> Tensor:
    """The losses that count, of those of tokens 1 to n - 1. The prompt's last token predicts the
    next one before anything is evicted, so after a prompt those are left out that eviction cannot
    change. Without one (`prompt_length` 1) all count, as in a full cache's perplexity."""
    return loss[prompt_length:] if prompt_length > 1 else loss


def counted(windows: list[dict[str, Any]], prompt_length: int) -> str:
    """Which tokens count, for the head of a table."""
    tokens = sum(window["predicted"] for window in windows)
    if prompt_length == 1:
        return f"all {tokens} predicted tokens"
    return (
        f"the {tokens} tokens that a cut after {prompt_length} can change; the prompt, and the "
        "token that it predicts itself, are left out"
    )


def by_simulation(
    model: Any, ids: Tensor, setting: Setting, prompt_length: int = 1
) -> tuple[Tensor, dict[int, float]]:
    """(loss of tokens 1 to n-1 of ids [1, n], retained mass by layer) from one forward."""
    if setting.variant == "full":
        with torch.no_grad():
            return _loss(model(ids, use_cache=False).logits, ids), {}
    policy = {"masks": MASKS.get(setting.variant), "prompt_length": prompt_length, "mass": True}
    with simulated(model, setting.config, **policy) as simulation, torch.no_grad():
        loss = _loss(model(ids, use_cache=False).logits, ids)
    layers = simulation.layers()
    return loss, {layer: simulation.retained_mass(layer).mean().item() for layer in layers}


def by_cache(
    model: Any, ids: Tensor, setting: Setting, prompt_length: int = 1
) -> tuple[Tensor, dict[int, float]]:
    """(loss of tokens 1 to n-1 of ids [1, n], share held by layer), token by token."""
    config = setting.config.for_model(model)
    cache = H2OCache(model.config, config, prompt_length=ids.shape[1])
    logits = [
        *read(model, cache, ids[:, :prompt_length]),
        *read(model, cache, ids[:, prompt_length:], 1),
    ]
    evicting = [layer for layer in cache.report().layers if layer.kind == "h2o"]
    shares = {layer.layer: 1 - layer.share_evicted for layer in evicting}
    held = {layer: x for layer, x in shares.items() if not math.isnan(x)}  # score_by="random"
    return _loss(torch.cat(logits, dim=1), ids), held


def read(model: Any, cache: H2OCache, ids: Tensor, tokens: int | None = None) -> list[Tensor]:
    """Logits [1, n, vocabulary] of ids [1, N], all in one pass or so many tokens in each."""
    before = attention_name(model.config)
    model.set_attn_implementation("h2o")
    try:
        logits = []
        with torch.no_grad():
            for chunk in ids.split(tokens or ids.shape[1], dim=1):
                where = positions_after(model, int(cache.get_seq_length()), chunk)
                logits.append(model(chunk, use_cache=True, **with_cache(cache), **where).logits)
        return logits
    finally:
        model.set_attn_implementation(before)


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    """-log p of each token but the first, [n - 1]."""
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")


def read_windows(
    file: Path, tokenizer: Any, config: Any, window: int, limit: int | None, prompt_length: int = 1
) -> tuple[list[list[int]], int]:
    """(windows of token ids that have tokens to score, how many of these the whole text has)."""
    text = read_text(file)
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) < 2:
        raise UserError(f"{file} has {len(ids)} tokens: nothing to predict")
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if window < 2 or (longest and window > longest):
        raise UserError(f"--window {window}: from 2 to the model's {longest} positions")
    windows = [ids[start : start + window] for start in range(0, len(ids), window)]
    fewest = 2 if prompt_length == 1 else prompt_length + 2
    if len(windows[0]) < fewest:
        raise UserError(
            f"--prompt-length {prompt_length}: a window of {len(windows[0])} tokens has none whose "
            f"prediction the cut can change. Use at most --prompt-length {len(windows[0]) - 2}"
        )
    if len(windows[-1]) < fewest:
        windows.pop()
    return windows[:limit], len(windows)


def summary(windows: list[dict[str, Any]]) -> tuple[float, float, float, dict[str, float]]:
    """(% kept, perplexity, its standard error over windows, attention by layer)."""
    predicted = sum(window["predicted"] for window in windows)
    mean = sum(window["loss"] for window in windows) / predicted
    deviation = 0.0
    if len(windows) > 1:
        means = torch.tensor(
            [w["loss"] / w["predicted"] for w in windows], dtype=torch.float64, device="cpu"
        )
        deviation = means.std().item() / math.sqrt(len(windows))
    share = 100 * sum(w["kept"] for w in windows) / sum(w["seen"] for w in windows)
    shares = [next(iter(w[key] for key in MASS.values() if key in w)) for w in windows]
    layers = {layer: sum(s[layer] for s in shares) / len(shares) for layer in shares[0]}
    return share, math.exp(mean), math.exp(mean) * deviation, layers


def lost(windows: list[dict[str, Any]], full: list[dict[str, Any]]) -> tuple[float, float]:
    """(nats lost to the full cache for each token that counts, their standard error over windows,
    which are the same ones in both)."""
    each = [
        (here["loss"] - there["loss"]) / here["predicted"]
        for here, there in zip(windows, full, strict=True)
    ]
    mean = sum(here["loss"] - there["loss"] for here, there in zip(windows, full, strict=True))
    mean /= sum(window["predicted"] for window in windows)
    return mean, statistics.stdev(each) / math.sqrt(len(each)) if len(each) > 1 else 0.0


def as_table(
    results: dict[Setting, list[dict[str, Any]]], protocol: str, sizes: dict[Setting, float | None]
) -> str:
    name = MASS[protocol].replace("_", " ")
    full = next((w for setting, w in results.items() if setting.variant == "full"), None)
    rows = []
    for setting, windows in results.items():
        share, perplexity, error, layers = summary(windows)
        lowest = min(layers, key=layers.__getitem__, default="")
        rows.append(
            [
                setting.name + setting.star,
                f"{share:.1f}%",
                kept_bytes.shown(sizes[setting]),
                f"{sum(w['kept'] for w in windows) / len(windows):.0f}",
                f"{perplexity:.2f} ±{error:.2f}",
                "{:.3f} ±{:.3f}".format(*lost(windows, full)) if full else "",
                f"{sum(layers.values()) / len(layers):.1%}" if layers else "",
                f"{layers[lowest]:.1%} (layer {lowest})" if layers else "",
                f"{sum(w['seconds'] for w in windows):.0f} s",
            ]
        )
    header = ["setting", "kept", "bytes", "tokens", "perplexity", "nats lost", name]
    header += ["lowest layer", "time"]
    return "\n".join([table(header, rows), *footnote(results)])
