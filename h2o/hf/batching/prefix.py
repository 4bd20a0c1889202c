"""`generate_all(prefix=...)`: checks of the cache that has read the beginning of all prompts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from h2o.config import PARAMETERS, H2OConfig
from h2o.errors import UnsupportedError
from h2o.hf.batching.row_batch import h2o_layers
from h2o.hf.cache.cache import H2OCache
from h2o.spans import Row


class PrefixError(ValueError):
    """A prompt does not begin with the tokens of the prefix, or has no others."""


def check_prefix(prefix: Any, config: H2OConfig) -> H2OCache:
    """Return a prefix of one row and with the settings of the call.

    Raises:
        TypeError: it is not an H2OCache.
        ValueError: it has several rows or other settings.
    """
    if not isinstance(prefix, H2OCache):
        raise TypeError(
            f"prefix is a {type(prefix).__name__}; expected the H2OCache that has read the document"
        )
    if (rows := h2o_layers(prefix)[0].batch_size) > 1:
        raise ValueError(f"prefix must be a cache of one row; this one has {rows} rows")
    for name in PARAMETERS:
        read, wanted = getattr(prefix.config, name), getattr(config, name)
        if read != wanted and name != "budget":  # its parts are compared
            raise ValueError(
                f"the prefix was made with {name}={read!r}, but this call has {wanted!r}: pass "
                "h2o_config=prefix.config"
            )
    return prefix


def copy_of_prefix(prefix: H2OCache) -> H2OCache:
    """A fork of a prefix, which counts no padding. The row may come from a padded batch, but
    prompts are token ids without padding."""
    copy = prefix.fork()
    slots, state = h2o_layers(copy)[0].slots, copy.guard.state
    if slots is not None and (tokens := int(slots.seen_tokens[0])) < state.columns:
        in_prompt = min(tokens, state.prompt_columns)
        state = state._replace(columns=tokens, prompt_columns=in_prompt)
        copy.guard.put(state.with_rows(row._replace(padding=0) for row in state.rows))
    return copy


def check_prompt(prefix: H2OCache, tokens: int, ids: Tensor) -> None:
    """Raise PrefixError unless a prompt, ids [1, n], has the `tokens` tokens of a prefix and
    more."""
    if ids.shape[1] <= tokens:
        what = f"the prompt has {ids.shape[1]} tokens and the prefix {tokens}"
    elif prefix.guard.state.text.differing_rows(ids[:, :tokens], None):
        what = f"the first {tokens} tokens of the prompt are not those that the prefix has read"
    else:
        return
    raise PrefixError(
        f"{what}. A prompt must contain the prefix and more tokens: pass the document and the "
        "question as one prompt, or leave out prefix="
    )


def check_removal(spans: Row, tokens: int, virtual: int) -> None:
    """Check that a request's copy of a prefix of `tokens` tokens can forget these spans.

    Raises:
        UnsupportedError: the prefix has virtual tokens.
        ValueError: there is no prefix, or a span ends beyond it.
    """
    if not tokens:
        raise ValueError(
            "evict names tokens of prefix=, and this call has no prefix: leave them out of the "
            "prompt"
        )
    if virtual:
        raise UnsupportedError(
            "evict does not support prompt tuning, whose virtual tokens come before the prompt: "
            "leave out prefix= and evict, and pass prompts without the spans"
        )
    if (last := spans[-1][1]) > tokens:
        raise ValueError(f"evict ends at token {last}, but the prefix has {tokens}")
