"""`h2o.compress_document`: makes the cache of a document for questions that come later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from h2o.config import H2OConfig, one_config
from h2o.config.fields import ConfigFields, Pinned
from h2o.hf.cache.cache import H2OCache
from h2o.hf.document.second_reading import REPEAT, forward, read_twice
from h2o.hf.families.layer_kinds import counts_padding
from h2o.hf.families.wrappers import check_no_tuned_prompt, input_device
from h2o.hf.support import transformers_layers


@torch.no_grad()
def compress_document(
    model: Any,
    input_ids: Tensor,
    h2o_config: H2OConfig | None = None,
    *,
    readings: int = 1,
    tokenizer: Any = None,
    attention_mask: Tensor | None = None,
    repeat: str | Tensor | None = None,
    by_attention: float | None = None,
    pinned: Pinned = None,
    progress: Callable[[int, int], Any] | None = None,
    **parameters: Unpack[ConfigFields],
) -> H2OCache:
    """Read a document into a cache of a fixed budget, before its questions are known.

    ```python
    ids = tokenizer(document, return_tensors="pt").input_ids
    cache = h2o.compress_document(model, ids, budget=0.1)
    for question in questions:  # each with the document's ids before it
        model.generate(question, cache=cache.fork())
    ```

    One reading is one forward pass, after which the config's policy evicts. With `budget=` the
    policy is echo: it keeps what the document's own queries would look up again. With two readings
    the model also repeats the document while every key is held, and the cache is then cut once, by
    the attention of the repetition (KVzip). At about a tenth of the bytes two readings find more
    facts. They take more than twice the time, and hold all keys in the model's dtype until the cut.

    With two readings the part `by_attention` of the budget goes to the keys that the config's
    policy ranks highest after the first reading, in each head, by equal shares or `head_shares`.
    The rest goes to the keys, of all layers and heads together, that received the most attention
    from any one query and head of the repetition. At the cut each head keeps at most 4 of the
    config's recent keys, and later at most 8. From then on the cache ranks by the largest
    attention.

    Args:
        model: a causal language model of transformers with attn_implementation="h2o".
        input_ids: [B, N] of the document. Later prompts must begin with the same ids, so include
            the beginning of the chat template if they have one.
        h2o_config, parameters: as for `H2OCache`; fractions are of the document.
        readings: 1 or 2.
        tokenizer: for `repeat`, where that is a text.
        attention_mask: [B, N], 0 at a pad.
        repeat: request for the repetition in a second reading: a text, or token ids [n]. None:
            the words of the paper.
        by_attention: part of the budget, in [0, 1], for the config's own policy in a second reading
            (None: 0.5). A smaller part finds more facts, and loses more of the next words. At 4%
            of the bytes 0.5, 0.25 and 0 found 58%, 65% and 69% of 26 facts, and lost 0.32, 0.35
            and 0.46 nats per token after other texts.
        pinned: as for `H2OCache`, of the document.
        progress: called with the columns read so far and the columns to read.

    Returns:
        The cache, which can be saved, forked and asked like any other.

    Raises:
        TypeError: `input_ids` that is no tensor.
        UnsupportedError: prompt tuning; with two readings cache-relative positions and a model that
            is cut over several processes.
        ValueError: an empty document; a mask of another shape, or with padding after a token where
            layers have sliding windows or states; `by_attention` out of range; a
            second reading without a tokenizer, or of a document that leaves none of the model's
            positions for its repetition; arguments of a second reading where there is one.
    """
    if readings not in (1, 2):
        raise ValueError(f"readings must be 1 or 2, not {readings!r}")
    for name, value in (("repeat", repeat), ("by_attention", by_attention)):
        if readings == 1 and value is not None:
            raise ValueError(f"{name} needs a second reading: give readings=2, or leave {name} out")
    check_no_tuned_prompt(model, "h2o.compress_document")
    config = one_config(h2o_config, parameters).for_model(model)
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"input_ids is a {type(input_ids).__name__}, wanted a tensor [B, N]: "
            'tokenizer(document, return_tensors="pt").input_ids'
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape or input_ids.ndim != 2:
        raise ValueError(
            f"input_ids {list(input_ids.shape)} and attention_mask {list(mask.shape)} must both be "
            "[B, N]"
        )
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids has no tokens: the document is empty")
    device = input_device(model)
    ids, mask = input_ids.to(device), mask.bool().to(device)
    _check_padding(model.config, mask)
    progress = progress or (lambda done, columns: None)
    if readings == 2:
        return read_twice(
            model, ids, mask, config, tokenizer=tokenizer, pinned=pinned, progress=progress,
            repeat=REPEAT if repeat is None else repeat,
            by_attention=0.5 if by_attention is None else by_attention,
        )  # fmt: skip
    cache = H2OCache(model.config, config, pinned=pinned)
    forward(model, cache, ids, mask, mask[:, :0])
    progress(ids.shape[1], ids.shape[1])
    return cache


def _check_padding(config: Any, mask: Tensor) -> None:
    """Raises ValueError for padding that layers of transformers' own would count as text."""
    follows = bool((mask[:, :-1] & ~mask[:, 1:]).any())
    if follows and counts_padding(transformers_layers(config)):
        raise ValueError(
            "attention_mask has padding after a token, which this model's sliding windows and "
            'states would count as text: pad on the left (tokenizer.padding_side = "left")'
        )
