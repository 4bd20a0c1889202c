"""An analysis as plain numbers and as DataFrames."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any

import numpy as np

from h2o.draw import need

if TYPE_CHECKING:
    from h2o.analysis.measured_text import MeasuredText

__all__ = ["as_dict", "frame"]

TABLES = ("layers", "heads", "keys")


def frame(a: MeasuredText, table: str) -> Any:
    """A DataFrame of an analysis, one of TABLES.

    "layers" and "heads" (query heads) have `sparsity`, `slope`, `r2`, `exponential_r2`, the keys
    that carry shares of the attention (`keys_50` ...), `retained_mass`, and heads
    `half_overlap` of their group; layers have `frequency`'s columns. "keys" has a row for each
    key of each key/value head: `layer`, `head`, `position`, `token`, `score`, `evicted_at`.
    """
    if table not in TABLES:
        raise ValueError(f"table must be one of {', '.join(TABLES)}, not {table!r}")
    pandas = need("pandas")
    if table != "keys":
        return pandas.DataFrame(rows(a, table))
    L, G, n = len(a.layers), a.groups, len(a)
    return pandas.DataFrame(
        {
            "layer": np.repeat(a.layers, G * n),
            "head": np.tile(np.repeat(np.arange(G), n), L),
            "position": np.tile(np.arange(n), L * G),
            "token": np.tile(a.ids, L * G),
            "score": np.concatenate([a.scores(layer).ravel() for layer in a.layers]),
            "evicted_at": np.concatenate([a.evicted_at(layer).ravel() for layer in a.layers]),
        }
    )


def rows(a: MeasuredText, table: str) -> dict[str, np.ndarray]:
    """The columns of "layers" or "heads"."""
    by_layer = table == "layers"
    law = a.power_law("layer" if by_layer else "query")
    retained = np.stack([a.retained_mass(layer) for layer in a.layers])
    half = a.overlap("half")
    if by_layer:
        numbers = {"layer": np.array(a.layers)}
    else:
        L, H = retained.shape
        numbers = {"layer": np.repeat(a.layers, H), "head": np.tile(np.arange(H), L)}
        half = half.repeat(H // a.groups, axis=1)
    arrays = {
        "sparsity": a.sparsity(),
        "slope": law.slope,
        "r2": law.r2,
        "exponential_r2": law.exponential_r2,
        **{f"keys_{100 * share:g}": count for share, count in law.keys.items()},
        "half_overlap": half,
        "retained_mass": retained,
        **(a.frequency() if by_layer else {}),
    }
    for name, values in arrays.items():
        numbers[name] = (
            (values.mean(-1) if values.ndim > 1 else values) if by_layer else values.ravel()
        )
    return numbers


def as_dict(a: MeasuredText) -> dict[str, Any]:
    """See `Analysis.as_dict`."""
    retained = [
        {
            "config": dataclasses.asdict(config),
            "by_layer": [cached[layer].retained.mean() for layer in a.layers],
        }
        for config, cached in a.caches.items()
    ]
    return plain(
        {
            "tokens": len(a),
            "layers": a.layers,
            "query_heads": a.heads,
            "kv_heads": a.groups,
            "config": dataclasses.asdict(a.config),
            "prompt_len": a.prompt_length,
            "by_layer": rows(a, "layers"),
            "by_head": rows(a, "heads"),
            "overlap_of_layers": a.overlap("layer"),
            "overlap_of_heads": a.overlap("head"),
            "retained_mass": retained,
            "removal": [
                {"kind": kind, "share": share, "tokens": tokens, "seed": seed, "perplexity": value}
                for (kind, share, tokens, seed), value in a.removals.items()
            ],
        }
    )


def plain(value: Any) -> Any:
    """As JSON can say it: lists, strings as keys, None for NaN, floats with six digits."""
    if isinstance(value, dict):
        return {
            f"{key:g}" if isinstance(key, float) else str(key): plain(x) for key, x in value.items()
        }
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(x) for x in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return repr(value) if callable(value) else value
