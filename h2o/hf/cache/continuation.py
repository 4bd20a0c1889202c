"""Checks that new tokens continue what a cache has seen, by their positions and attention mask.

`generate()` drops as many input_ids as the cache has seen, without comparing them. A prompt that is
given again, or another text, would therefore lose its beginning in silence, and its rest would be
read as a continuation of the old text. The positions and the mask of a forward pass reveal this, or
else the dropped ids (`h2o.hf.store.seen_text`).

Shape letters: B batch rows, Q new tokens, n padded columns.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from h2o.compat import NewText, new_text
from h2o.errors import UnsupportedError
from h2o.hf.cache.padding import check_padding
from h2o.hf.store.pass_guard import WITHOUT_CACHE
from h2o.hf.store.seen_text import SeenText


def check_text(cache: Any, seen: int, new: int) -> None:
    """Check the mask and positions of a forward pass with `new` tokens for each row.

    Called before any layer stores them. Of a first pass, record how it counts positions.

    Raises:
        UnsupportedError: a wrapper puts embeddings before each decode step.
        ValueError: the tokens begin before the end of what the cache has seen, or change the rotary
            angles of earlier ones, or follow other ids than it has read; or the mask disagrees
            about which columns were padding; or windows or states would count padding as text.
    """
    guard = cache.guard
    if guard.by_row:
        return
    if guard.rereads_after is not None:
        guard.check_angles(seen, new)
    text = new_text()
    if text is None:
        guard.text.lose()
        return
    if seen:
        _check_continuation(cache, seen, text, new)
    else:
        guard.skips_pads = _skips_pads(text, new)
    if guard.counts_padding and not (seen and _would_wait(text, new) and not guard.ends_in_padding):
        check_padding(guard, text.mask, seen, new)
    guard.text.read(text.ids, text.mask, seen)


def check_ids(text: SeenText, ids: Tensor, mask: Tensor | None = None) -> None:
    """Check that token ids [B, n] are those that a cache of n columns has read.

    Raises:
        ValueError: with the first row that has others.
    """
    if rows := text.other_rows(ids, mask):
        raise ValueError(
            f"the first {ids.shape[1]} tokens of row {rows[0]} are not those that the cache has "
            "read. input_ids must be everything seen so far, followed by new tokens. Append the "
            "ids of the new turn to the ids that generate() returned: a chat template that drops "
            "earlier thoughts, and answers that are tokenized again, give others. After a beam "
            "search the cache has the beams that were searched last, not the sequences that were "
            "returned. To ask something else call cache.reset(), or use a new H2OCache or "
            "h2o.patched()"
        )


def _check_continuation(cache: Any, seen: int, text: NewText, new: int) -> None:
    if text.is_injected:
        raise UnsupportedError(
            "a wrapper puts embeddings before every decode step: from transformers 5.24 on PEFT's "
            "prompt tuning takes each step for a prompt, since the cache has another name. Use "
            "h2o.generate_all, or transformers before 5.24"
        )
    if _would_wait(text, new):
        return
    lengths = _lengths(cache)
    if lengths is not None:
        if text.mask is not None and text.mask.shape == (len(lengths), seen + new):
            _check_padding(text.mask[:, :seen].bool().sum(1).tolist(), lengths, seen)
        elif text.mask is None and cache.guard.skips_pads:
            _check_padding([seen] * len(lengths), lengths, seen)
    elif text.mask is None or bool(text.mask.all()):  # no row has pads
        lengths = torch.tensor([seen], dtype=torch.long, device="cpu")
    is_whole = text.mask is None or text.mask.shape[1] == seen + new
    if is_whole and text.dropped is not None and text.dropped.shape[1] == seen:
        check_ids(cache.guard.text, text.dropped, text.mask)
    if lengths is not None and text.positions is not None and text.positions.shape[1] == new:
        if len({len(lengths), len(text.positions)} - {1}) > 1:
            return  # another batch: the first layer says which one it holds
        least = lengths + cache.guard.rope_deltas.least
        is_rolled = cache.config.positions == "cache_relative"
        _check_positions(text, least, seen, new, zero_is_free=is_rolled)


def _skips_pads(text: NewText, new: int) -> bool:
    """Whether positions of a first pass over `new` columns are counted without its padding."""
    if text.mask is None or text.positions is None or bool(text.mask.all()):
        return False
    return bool((text.positions.max(1).values < new - 1).any())


def _lengths(cache: Any) -> Tensor | None:
    """Tokens [B] of each row; None where all layers have a sliding window and do not know them."""
    first = next(iter(cache.guard.plans), None)
    slots = None if first is None else cache.layers[first].slots
    return None if slots is None else slots.seen_tokens


def _would_wait(text: NewText, new: int) -> bool:
    """Whether looking at a decode step's tensors would make every step wait for a GPU."""
    mask, positions = text.mask, text.positions
    is_elsewhere = mask is not None and not mask.is_cpu
    return new == 1 and (is_elsewhere or (positions is not None and not positions.is_cpu))


def _check_padding(said: list[int], lengths: Tensor, seen: int) -> None:
    """`said`: tokens of each row by the attention mask, all columns without one."""
    if said != lengths.tolist():
        raise ValueError(
            f"attention_mask counts {said} tokens per row among the {seen} columns that the cache "
            f"has seen, but the cache has read {lengths.tolist()}. Pass the earlier mask as it "
            "was, followed by the mask of the new columns"
        )


def _check_positions(
    text: NewText, least: Tensor, seen: int, new: int, *, zero_is_free: bool
) -> None:
    """`least`: [B or 1], lowest position of new tokens. `zero_is_free`: whether positions that are
    all 0 are accepted, because the cache computes them."""
    B = max(len(least), len(text.positions))
    positions, least = text.positions.expand(B, -1).to(least.device), least.expand(B)
    late = positions >= least[:, None]
    if bool(late.all()):
        return
    if text.mask is not None:
        late |= ~text.mask[:, -new:].bool().to(late.device)
    if bool(late.all()) or (zero_is_free and not positions.any()):
        return
    if new == seen + 1 and not positions[:, 0].any():
        raise ValueError(WITHOUT_CACHE)
    if text.is_assisted and not positions[:, 0].any():
        raise ValueError(
            f"assisted decoding (prompt_lookup_num_tokens, a draft model) begins with a pass over "
            f"the whole text, and the cache has seen {seen} tokens of it. Take later turns without "
            "it, or give each turn a new H2OCache"
        )
    row = int((~late).any(1).nonzero()[0])
    before = None if text.mask is None else text.mask.expand(B, -1)[row, :-new]
    if before is not None and len(before) and not before[-1]:
        raise ValueError(
            f"row {row} is padded on the right, after which generate() numbers new tokens by the "
            'padding: pad on the left (tokenizer.padding_side = "left"), or pass position_ids that '
            f"go on at {int(least[row])}"
        )
    raise ValueError(
        f"the cache has seen {seen} tokens, and the new ones begin at position "
        f"{int(positions[row][~late[row]][0])} of row {row}, where {int(least[row])} were "
        "expected at least. input_ids must be everything seen so far, followed by new tokens. To "
        "ask something else call cache.reset(), or use a new H2OCache or h2o.patched()."
    )


@torch.compiler.disable
@functools.cache
def warn_of_many_graphs() -> None:
    """Warn once in a process that a cache breaks a compiled model into many graphs."""
    warnings.warn(
        "torch.compile(model) cannot capture this H2OCache: the model falls into several graphs "
        "for each layer, which are compiled anew as its slots grow. Make the cache with "
        "H2OCache(..., compileable=True), or call the model without torch.compile",
        RuntimeWarning,
        stacklevel=2,
    )
