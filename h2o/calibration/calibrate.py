"""`h2o.calibrate`: measure on texts which share of a budget each head should have."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from h2o.analysis.collect import analyzable_layers
from h2o.arguments.plain_values import (
    check_count,
    check_fraction,
    check_fractions,
    check_seed,
    wrong,
)
from h2o.arguments.torch_values import check_ids
from h2o.calibration.allocate import allocate
from h2o.calibration.head_costs import HEAVY, SINKS, measure_costs, watch_gradients
from h2o.calibration.refine import measure_worth, move_budgets, surround
from h2o.config.head_budgets import LEAST
from h2o.config.profile import Profile
from h2o.hf.model_traits import tensor_parallel
from h2o.hf.rotary.length_dependent_rope import LengthDependentRope
from h2o.hf.support import transformers_layers
from h2o.model_identity import describe, sample, vocabulary_of
from h2o.result_file import ResultFile, provenance

FRACTIONS = (0.04, 0.1, 0.2, 0.4, 0.7)
"""The budgets for which a profile has shares, as fractions of a text."""

REFINED = 0.2
"""The largest budget whose shares are refined. At smaller budgets the interaction of heads matters
as much as the cost of each head alone."""

STEPS, STEP_WINDOWS = 2, 16
"""Number of refinement steps at each of these budgets, and number of windows in a step."""


@dataclasses.dataclass(frozen=True)
class Window:
    """A window of a text."""

    text: str
    ids: Tensor
    """int64 [n]"""


def calibrate(
    model: Any,
    input_ids: Any,
    *,
    window: int = 1024,
    windows: int | None = None,
    fractions: Sequence[float] = FRACTIONS,
    refine: float = REFINED,
    draws: int = 2,
    seed: int = 0,
    resume: str | os.PathLike[str] | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Profile:
    """Measure which heads of a model need more of a cache than others.

    ```python
    profile = h2o.calibrate(model, tokenizer(text, return_tensors="pt")["input_ids"])
    profile.save("model.json")
    ```

    For each key/value head and each budget of a grid, only this head evicts, from the first token
    on, with keys ranked as by `H2OConfig.robust`. The cost is estimated to second order from the
    change of the head's output and the gradient of the log-likelihood of tokens drawn from the
    model's own predictions (`h2o.calibration.head_costs`). A total budget is then divided so that
    one more key would save the same in every head (`h2o.calibration.allocate`). For the same idea
    in pruning see Theis et al., "Faster gaze prediction with dense networks and Fisher pruning",
    arXiv:1801.05787.

    Args:
        model: a causal language model that an `H2OCache` supports, in eval mode. Use bfloat16 or
            float32, whichever is faster on the machine.
        input_ids: int64 [n] or [1, n], one text without padding, or a list of texts, or a mapping
            from names to texts, preferably of different kinds. Texts are cut into independent
            windows. The rest at the end of a text is not used.
        window: tokens of a window.
        windows: number of windows to use, spread over the texts. By default all are used. 16 are
            enough, more are better.
        fractions: budgets for which the profile has shares, as fractions of a window, in (0, 1].
        refine: largest budget whose shares are refined, with eviction in all heads at once, by
            steps that reduce the divergence of the evicting model's predictions from the full
            model's (`h2o.calibration.refine`). 0 refines none and takes a third of the time.
        draws: number of continuations drawn for each window.
        seed: seed of these draws.
        resume: file for the results of finished windows. A later call with the same model, window,
            draws and seed reuses them. The file is not removed.
        progress: called with (passes done, passes in total). Passes found in `resume` are skipped.

    Raises: `UnsupportedError` for a model that h2o does not support, TypeError and ValueError for
    invalid arguments, ValueError for costs that are not finite, as with weights that overflow
    float16, UserError (`h2o.errors`) for a `resume` file of another kind.
    """
    full = analyzable_layers(model)
    LengthDependentRope(model).forget()
    draws, seed = check_count("draws", draws), check_seed(seed)
    fractions = sorted({*check_fractions("fractions", fractions, zero=False)})
    refine = check_fraction("refine", refine)
    window = check_count("window", window, 2 * LEAST + 1)
    windows = None if windows is None else check_count("windows", windows)
    texts = list(_texts(input_ids, vocabulary_of(model.config)))
    chosen = list(iterate_windows(texts, window, windows))
    grid = budget_grid(window)
    settings = {
        "tokens": window, "draws": draws, "seed": seed, "grid": grid, "sinks": SINKS,
        "heavy": HEAVY, "score_by": "mean", "value_weighted": True,
    }  # fmt: skip
    origin = provenance(model, None, str(getattr(model.config, "model_type", "")))
    origin = _gather(model, origin)[0]  # the fingerprint must be the same in all processes
    rank, _ = tensor_parallel.part(model)
    cells = ResultFile(Path(resume)) if resume is not None and rank == 0 else None
    low = [x for x in fractions if x <= refine]
    total = len(chosen) + len(low) * STEPS * min(STEP_WINDOWS, len(chosen))
    count = itertools.count()

    def once(piece: Window, measure: Callable[[], dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Measure on a window, or return the result of an earlier run."""
        done = next(count)
        facts = {"window": _sha256(piece.ids), "settings": settings, "origin": origin, **more}
        result = _gather(model, cells.find(facts) if cells else None)[0]
        if result is None:
            progress(done, total)
            result = measure()
            if not all(np.isfinite(numbers).all() for numbers in result.values()):
                raise ValueError(
                    f"the costs of a window of {piece.text} are not finite, so nothing can be "
                    "calibrated: load the model in bfloat16 or float32 if it is in float16, and "
                    "check its weights"
                )
            if cells:
                cells.put(facts, result)
        return result

    alone = [
        once(piece, lambda piece=piece: {"costs": _costs(model, piece, grid, draws, seed).tolist()})
        for piece in chosen
    ]
    table = np.mean([x["costs"] for x in alone], axis=0)
    tables: dict[float, np.ndarray] = {}
    in_order = itertools.cycle(chosen)
    for fraction in reversed(fractions):
        if fraction not in low or fraction == low[-1]:
            shares = _shares(table, grid, fraction, window)
        if fraction in low:  # starts from the refined shares of the next larger budget, if any
            for _ in range(STEPS):
                pieces = list(itertools.islice(in_order, min(STEP_WINDOWS, len(chosen))))
                shares = _step(model, shares, fraction, window, pieces, once)
        tables[fraction] = shares
    progress(total, total)
    return Profile(
        fractions=tuple(fractions),
        shares=tuple(_expand_to_layers(tables[fraction], full, model) for fraction in fractions),
        window=window,
        model=describe(model.config),
        weights=sample(model),
        texts=tuple(_describe_texts(texts, chosen)),
        settings={
            **settings, "windows": len(chosen), "refine": refine, "steps": STEPS,
            "read": STEP_WINDOWS, "dtype": origin["dtype"],
        },
        versions={x: origin["versions"][x] for x in ("h2o-kv", "torch", "transformers")},
    )  # fmt: skip


def budget_grid(window: int) -> list[int]:
    """The budgets to measure: 8, 12, 16, 24, 32, 48, ... below the window."""
    steps = itertools.chain.from_iterable((2**i, 3 * 2 ** (i - 1)) for i in itertools.count(3))
    return list(itertools.takewhile(lambda budget: budget < window, steps))


def iterate_windows(
    texts: Iterable[tuple[str, Tensor]], window: int, limit: int | None
) -> Iterator[Window]:
    """Yield the windows to use, taking turns between the texts (name and token ids of each).

    Raises: ValueError for a text that is shorter than a window.
    """
    pieces = []
    for name, ids in texts:
        if len(ids) < window:
            raise ValueError(
                f"input_ids: {name} has {len(ids)} tokens, fewer than a window of {window}: give "
                "more text or a smaller window"
            )
        pieces.append([Window(name, piece) for piece in ids.split(window) if len(piece) == window])
    rounds = itertools.zip_longest(*([i] * len(of_text) for i, of_text in enumerate(pieces)))
    turns = [i for texts in rounds for i in texts if i is not None][:limit]
    done = [0] * len(pieces)
    for i in turns:  # the windows of a text are spread over it
        yield pieces[i][done[i] * len(pieces[i]) // turns.count(i)]
        done[i] += 1


def _texts(input_ids: Any, vocabulary: float = math.inf) -> Iterator[tuple[str, Tensor]]:
    """Name and token ids int64 [n] of each text.

    Raises: as `h2o.arguments.torch_values.check_ids`.
    """
    hint = 'write h2o.calibrate(model, tokenizer(text, return_tensors="pt")["input_ids"])'
    if isinstance(input_ids, Mapping):
        if "attention_mask" in input_ids:  # its ones would be read as a text
            expected = "token ids, not everything that a tokenizer returns"
            raise TypeError(wrong("input_ids", input_ids, expected, hint))
        named = [(str(name), ids) for name, ids in input_ids.items()]
    elif isinstance(input_ids, Sequence) and not isinstance(input_ids, str | bytes):
        named = [(f"text {number}", ids) for number, ids in enumerate(input_ids)]
    else:
        named = [("text", input_ids)]
    if not named:
        raise ValueError("input_ids: there is no text")
    for name, ids in named:
        row = check_ids(f"input_ids: {name}", ids, one_row=True, vocabulary=vocabulary, hint=hint)
        yield name, row[0].cpu()


def _costs(model: Any, piece: Window, grid: Sequence[int], draws: int, seed: int) -> np.ndarray:
    """Costs [full layers, G, grid] of a window."""
    generator = torch.Generator("cpu").manual_seed(int(_sha256(piece.ids)[:12], 16) + seed)
    layers = watch_gradients(model, piece.ids, generator, draws)
    by_layer = [measure_costs(*layers.pop(layer), grid) for layer in sorted(layers)]
    return _gather_heads(torch.stack(by_layer).numpy(), model)


def _gather_heads(local: np.ndarray, model: Any) -> np.ndarray:
    """Combine the results [full layers, heads, ...] of all processes into [full layers, G, ...]."""
    if local.shape[1] == describe(model.config).get("num_key_value_heads"):
        return local
    return np.concatenate(_gather(model, local), axis=1)


def _gather(model: Any, value: Any) -> list[Any]:
    """The value of each process over which the model is cut. All of them must call this."""
    mesh = tensor_parallel.mesh_of(model)
    if mesh is None:
        return [value]
    values = [None] * mesh.size()
    torch.distributed.all_gather_object(values, value, group=mesh.get_group())
    return values


def _shares(costs: np.ndarray, grid: Sequence[int], fraction: float, window: int) -> np.ndarray:
    """Shares [full layers, G] with mean 1, from costs [full layers, G, grid]."""
    layers, G, _ = costs.shape
    table = np.pad(costs.reshape(layers * G, -1), ((0, 0), (0, 1)))  # a full window costs nothing
    total = layers * G * max(fraction * window, LEAST)
    keys = allocate([*grid, window], table, total).reshape(layers, G)
    return keys / keys.mean()


def _step(
    model: Any,
    shares: np.ndarray,
    fraction: float,
    window: int,
    pieces: Sequence[Window],
    once: Callable[..., dict[str, Any]],
) -> np.ndarray:
    """The shares after one step of refinement."""
    budgets = surround(scale_keys(shares, fraction * window, window), LEAST, window)

    def measure(piece: Window) -> dict[str, Any]:
        local, _ = measure_worth(model, piece.ids, budgets)
        return {"worth": _gather_heads(local, model).tolist()}

    results = [
        once(piece, functools.partial(measure, piece), budgets=budgets.tolist()) for piece in pieces
    ]
    worths = np.mean([x["worth"] for x in results], axis=0)
    keys = move_budgets(budgets[0], budgets[1] - budgets[2], worths)
    keys = scale_keys(keys, fraction * window, window)
    return keys / keys.mean()


def scale_keys(shares: np.ndarray, mean: float, most: int) -> np.ndarray:
    """Number of keys for each head: `mean` on average, at least LEAST and at most `most`."""
    # The mean is linear in the factor, except where a head reaches a bound.
    factors = np.sort([LEAST / shares, most / shares], axis=None)
    means = [np.clip(factor * shares, LEAST, most).mean() for factor in factors]
    return np.clip(np.interp(mean, means, factors) * shares, LEAST, most)


def _expand_to_layers(
    shares: np.ndarray, full: Sequence[int], model: Any
) -> tuple[tuple[float, ...], ...]:
    """Shares for every layer of the model, 1 for layers with a sliding window."""
    table = np.ones((len(transformers_layers(model.config)), shares.shape[1]))
    table[list(full)] = shares
    return tuple(tuple(float(f"{x:.5g}") for x in row) for row in table)


def _describe_texts(
    texts: Iterable[tuple[str, Tensor]], chosen: Sequence[Window]
) -> Iterator[dict[str, Any]]:
    """Name, digest, length and number of windows of each text."""
    for name, ids in texts:
        number = sum(piece.text == name for piece in chosen)
        yield {"name": name, "sha256": _sha256(ids), "tokens": len(ids), "windows": number}


def _sha256(ids: Tensor) -> str:
    return hashlib.sha256(ids.numpy().astype("<i8").tobytes()).hexdigest()
