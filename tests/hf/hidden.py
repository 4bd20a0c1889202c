"""Plain transformers over a text whose later tokens do not see some earlier ones: the oracle for
`H2OCache.evict`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def logits_without(
    model: Any, ids: Tensor, hidden: Iterable[tuple[int, int, int]], **inputs: Any
) -> Tensor:
    """Logits [n, vocabulary] of a text, ids [1, n], with its true positions. (first, start, stop)
    hides the tokens `start` to `stop` - 1 from those from `first` on. `model`: with attention
    "eager"."""
    n = ids.shape[1]
    order = torch.arange(n, device=ids.device)
    sees = order[:, None] >= order
    for first, start, stop in hidden:
        sees[first:, start:stop] = False
    config = model.config.get_text_config()
    near = sees & (order[:, None] - order < (getattr(config, "sliding_window", None) or n))
    full, sliding = (
        torch.zeros(1, 1, n, n, device=ids.device).masked_fill(~seen, torch.finfo().min)
        for seen in (sees, near)
    )
    types = {*(getattr(config, "layer_types", None) or ())}
    mask: Any = sliding if config.model_type == "mistral" else full
    if "sliding_attention" in types:
        mask = {"full_attention": full, "sliding_attention": sliding}
    given = {"attention_mask": mask, "position_ids": order[None], "use_cache": False}
    logits: Tensor = model(ids, **given, **inputs).logits[0]
    return logits
