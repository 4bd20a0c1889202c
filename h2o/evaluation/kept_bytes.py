"""What a setting takes of a full cache's bytes, beside the keys that it keeps of a text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from h2o.evaluation.setting import Setting
from h2o.kv_dtype import FIXED, per_token
from h2o.model_identity import key_size

__all__ = ["axis", "by_bytes", "bytes_share", "of_rows", "shown"]


def by_bytes(settings: Iterable[Setting]) -> bool:
    """Whether these are to be compared by bytes: where any budget is in bytes, or keys are stored
    in fewer bits."""
    configs = [x.config for x in settings]
    return any(
        x.budget_unit == "bytes" or x.kv_dtype is not None or isinstance(x.budget, float)
        for x in configs
    )


def axis(in_bytes: bool) -> str:
    """What the axis of a plot says."""
    return "bytes kept, % of a full cache" if in_bytes else "keys kept, % of the text"


def bytes_share(setting: Setting, model: Any, kept: int, seen: int, texts: int = 1) -> float | None:
    """Per cent of a full cache's bytes that these keys take, scores and free slots counted.

    None for a model whose config does not tell how large a key is.

    kept, seen: sums over so many texts, each with a cache of its own.
    """
    if setting.variant == "full" or not seen:
        return 100.0
    config = setting.holding.for_model(model)
    try:
        size = key_size(getattr(model, "config", model))
    except ValueError:
        return None
    full, slot = per_token(*size, config.kv_dtype, config.value_weighted)
    return 100 * (FIXED * texts + (kept + texts) * slot) / (seen * full)


def of_rows(setting: Setting, model: Any, rows: Sequence[dict[str, Any]]) -> float | None:
    """The same of results that have each "kept" and "seen", or "prompt_tokens"."""
    kept = sum(row["kept"] for row in rows)
    seen = sum(row.get("seen", row.get("prompt_tokens", 0)) for row in rows)
    return bytes_share(setting, model, kept, seen, len(rows))


def shown(share: float | None) -> str:
    """The cell of a table."""
    return "" if share is None else f"{share:.1f}%"
