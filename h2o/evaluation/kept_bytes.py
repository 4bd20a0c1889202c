"""What a setting takes of a full cache's bytes, beside the keys that it keeps of a text."""

from __future__ import annotations

from typing import Any

from h2o.evaluation.setting import Setting
from h2o.kv_dtype import FIXED, per_token
from h2o.model_identity import key_size

__all__ = ["bytes_share", "shown"]


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


def shown(share: float | None) -> str:
    """The cell of a table."""
    return "" if share is None else f"{share:.1f}%"
