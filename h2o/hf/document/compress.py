"""`h2o.compress_document`: reads a document into a cache, for questions that come later."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from h2o.config import H2OConfig, resolve_config
from h2o.config.fields import ConfigFields, Pinned
from h2o.hf.cache.cache import H2OCache
from h2o.hf.document.kvzip import REPEAT, forward, read_twice
from h2o.hf.model_traits.layer_kinds import counts_padding
from h2o.hf.model_traits.wrappers import check_no_tuned_prompt, input_device
from h2o.hf.support import transformers_layers
from h2o.number_checks import is_integer


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
    policy is echo: it keeps the keys that the document's own queries would look up again. With two
    readings the model also repeats the document while every key is held. The cache is then cut to
    its budget once, by the attention of the repetition (KVzip). At about a tenth of the bytes two
    readings find more facts. They take more than twice the time and hold all keys in the model's
    dtype until then.

    With two readings, a fraction `by_attention` of each head's budget goes to the keys that the
    config's policy ranks highest after the first reading. Heads have equal budgets, or those of
    `head_shares`. The rest of all budgets goes to the keys, across all layers and heads, that
    received the most attention from any single query of the repetition. This cut protects up to 4
    of the config's recent keys in each head, later eviction up to 8. From then on the cache ranks
    keys by the largest attention.

    Args:
        model: a causal language model of transformers with attn_implementation="h2o".
        input_ids: token ids of the document, [B, N]. Later prompts must begin with the same ids, so
            include the beginning of the chat template if the prompts use one.
        h2o_config, parameters: as for `H2OCache`. Fractions are fractions of the document.
        readings: 1 or 2.
        tokenizer: encodes `repeat`. Needed for two readings unless `repeat` is token ids.
        attention_mask: [B, N], 0 at padding.
        repeat: the request to repeat the document in the second reading, a string or token ids
            [n]. None: the request of the KVzip paper.
        by_attention: fraction of the budget, in [0, 1], that goes by the config's own policy if
            there is a second reading (None: 0.5). A smaller fraction finds more facts but predicts
            the next words worse. At 4% of the bytes, 0.5, 0.25 and 0 found 58%, 65% and 69%
            of 26 facts, and lost 0.32, 0.35 and 0.46 nats per token in the continuations of other
            texts.
        pinned: as for `H2OCache`, in positions of the document.
        progress: called with the number of columns read so far and the total.

    Returns:
        A cache that can be saved, forked and continued like any other.

    Raises:
        TypeError: `input_ids` is not a tensor.
        UnsupportedError: h2o does not support the model, or the model uses prompt tuning or aLoRA.
            With two readings also if positions are cache-relative, or the model is cut over several
            processes.
        ValueError: `readings` is neither 1 nor 2. The document is empty. The mask has another
            shape, or padding after a token in a model with sliding windows or states.
            `by_attention` is out of range. A second reading has no tokenizer, or the document
            leaves no positions of the model for its repetition. `repeat` or `by_attention` is given
            for a single reading.
    """
    if not is_integer(readings) or readings not in (1, 2):
        raise ValueError(f"readings must be 1 or 2, not {readings!r}")
    for name, value in (("repeat", repeat), ("by_attention", by_attention)):
        if readings == 1 and value is not None:
            raise ValueError(f"{name} needs a second reading: pass readings=2, or leave out {name}")
    check_no_tuned_prompt(model, "h2o.compress_document")
    config = resolve_config(h2o_config, parameters, compress_document).for_model(model)
    if not isinstance(input_ids, Tensor):
        raise TypeError(
            f"input_ids must be a tensor [B, N], not {type(input_ids).__name__}: pass "
            'tokenizer(document, return_tensors="pt").input_ids'
        )
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    if mask.shape != input_ids.shape or input_ids.ndim != 2:
        raise ValueError(
            "input_ids and attention_mask must both have the shape [B, N], not "
            f"{list(input_ids.shape)} and {list(mask.shape)}"
        )
    if input_ids.shape[1] == 0:
        raise ValueError("input_ids has no tokens: the document is empty")
    device = input_device(model)
    ids, mask = input_ids.to(device), mask.bool().to(device)
    follows = bool((mask[:, :-1] & ~mask[:, 1:]).any())
    if follows and counts_padding(transformers_layers(model.config)):
        raise ValueError(
            "attention_mask has padding after a token, and this model's sliding windows and states "
            'would count it as text: pad on the left (tokenizer.padding_side = "left")'
        )
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
