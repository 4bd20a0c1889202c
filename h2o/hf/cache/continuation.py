"""Checks that new tokens continue the text that a cache has seen.

`generate()` drops as many input_ids as the cache has seen, without comparing them. If the caller
passes the prompt again, or another text, its beginning is therefore silently lost and the rest is
taken for a continuation of the old text. The positions, the attention mask or the dropped ids
(`h2o.hf.conversation.text_digest`) of the forward pass reveal such a mistake.

Shape letters as in `h2o.hf`, and n padded columns.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from h2o.compat_calls import ModelCall, chunks_of_prompt, find_call
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention import mask_length_error
from h2o.hf.conversation.forward_pass import ForwardPass
from h2o.hf.conversation.pass_guard import WITHOUT_CACHE, PassGuard
from h2o.hf.conversation.state import CacheState, LastPass, NewColumns, SeenText, broadcast
from h2o.hf.prompt.prompt_budget import EarlierBudgets, check_late_rows, grow_budgets
from h2o.model_identity import difference, rotary_difference


def plan_pass(cache: Any, new: int) -> ForwardPass:
    """Check the mask, positions and ids of a forward pass with `new` columns, which is about to
    begin, and compute the state of the cache after it. Budgets that follow the text are raised.

    Raises:
        UnsupportedError: a wrapper inserts embeddings before each decode step.
        ValueError: the cache was made for another model. Or the new tokens overlap the text that
            the cache has seen, follow a different text, or change the rotary angles of earlier
            tokens. Or the mask disagrees with the cache about earlier padding, or sliding windows
            or states would count padding as text.
    """
    guard = cache.guard
    before = guard.state
    seen = before.columns
    if guard.has_independent_rows:
        return ForwardPass(before, NewColumns(new).advance(before, None, is_step=True), new)
    if guard.drops_cache_after is not None:
        guard.check_angles(seen, new)
    text = guard.told
    if text is None or text.ids.shape[1] != new:  # a wrapper inserts embeddings
        text = find_call(cache)
    columns, tokens, is_step = NewColumns(new), None, False
    if text is not None:
        if text.config is not guard.checked_config:
            _check_model(cache, text.config)
        tokens, is_read = [0], True
        if seen:
            tokens, is_step, is_read = _check_continuation(cache, seen, text, new)
        columns = _new_columns(guard, text, seen, new)
        if columns.mask is not None and tokens and 0 in tokens and seen and not before.unscored:
            check_late_rows(guard, tokens, columns.mask)
        if guard.counts_padding and (is_read or before.ends_in_padding):
            columns = columns._replace(whole_mask=_padding_mask(guard, text.mask, seen, new))
        if guard.only_scores:
            return ForwardPass(before, before, new)
    then = columns.advance(before, tokens, guard.records_passes, is_step)
    if then.columns < before.grows_at:
        return ForwardPass(before, then, new)
    return _plan_growth(cache, columns, tokens, then, is_step)


def plan_unannounced(cache: Any, new: int) -> ForwardPass:
    """A forward pass with `new` columns, without padding as far as is known."""
    return _plan(cache, NewColumns(new), None, cache.guard.records_passes)


def plan_again(cache: Any, last: LastPass, left: int) -> ForwardPass:
    """The first columns of the last pass, up to `left` in all, for a cache that was restored to the
    state before it."""
    return _plan(cache, last.columns.cut(left - last.before.columns), last.tokens, records=False)


def _plan(cache: Any, columns: NewColumns, tokens: list[int] | None, records: bool) -> ForwardPass:
    """A forward pass of columns that are known. For the arguments see `NewColumns.advance`."""
    before = cache.guard.state
    then = columns.advance(before, tokens, records)
    if then.columns < before.grows_at:
        return ForwardPass(before, then, columns.Q)
    return _plan_growth(cache, columns, tokens, then)


def _plan_growth(
    cache: Any,
    columns: NewColumns,
    tokens: list[int] | None,
    then: CacheState,
    is_step: bool = False,
) -> ForwardPass:
    """A forward pass in which budgets grow. For the arguments see `NewColumns.advance`. `then` is
    the state after the pass with the budgets of before."""
    before, new, mask = cache.guard.state, columns.Q, columns.mask
    counts = tokens_seen(cache, before.columns, mask) or [before.columns]
    grown = before.grown(counts, [new] if mask is None else mask.bool().sum(1).tolist())
    then = columns.advance(grown, tokens, is_step=is_step)._replace(last_pass=then.last_pass)
    return ForwardPass(before, then, new, None, functools.partial(_grow, cache, before, grown))


def _grow(cache: Any, before: CacheState, grown: CacheState) -> EarlierBudgets:
    """Raise the budgets of the layers from those of one state to those of another. Return what
    lowers them again."""
    layers = [cache.layers[index] for index in cache.guard.plans]
    rows = broadcast(before.rows, grown.rows)
    if len(rows) not in (1, layers[0].batch_size):
        layers = []  # wrong batch size, which the first layer reports
    return grow_budgets(layers, *([row[i].counted for row in rows] for i in (0, 1)))


def _new_columns(guard: PassGuard, text: ModelCall, seen: int, new: int) -> NewColumns:
    """The new columns of a pass.

    Raises:
        ValueError: the mask covers neither all columns nor, without sliding windows, the new ones.
    """
    mask, positions = text.mask, text.positions
    if mask is not None:
        if mask.shape[1] not in (seen + new, seen + new if guard.has_windows else new):
            raise mask_length_error(mask.shape[1], seen, new)
        mask = mask[:, mask.shape[1] - new :]
    if positions is not None and (positions.shape[-1] != new or positions.is_meta):
        positions = None
    return NewColumns(new, mask, positions, text.ids)


def _check_model(cache: Any, config: Any) -> None:
    """Raise ValueError if a cache was made for another model than the one with this config."""
    if not isinstance(config, PreTrainedConfig):
        return
    reason = difference(config, cache.model_shape, {})
    reason = reason or rotary_difference(config, json.loads(cache.model_settings))
    if reason:
        raise ValueError(
            f"this cache was made for another model: {reason}. Make the H2OCache from the config "
            "of the model that uses it"
        )
    cache.guard.accept_config(config)


def check_ids(text: SeenText, ids: Tensor, mask: Tensor | None = None) -> None:
    """Check that the token ids [B, n] are those of the n columns that a cache has seen.

    Raises:
        ValueError: a row has different ids.
    """
    if rows := text.differing_rows(ids, mask):
        raise ValueError(
            f"the first {ids.shape[1]} tokens of row {rows[0]} are not the ones that the cache has "
            "seen. input_ids must be everything seen so far, followed by new tokens. Append the "
            "ids of the new turn to the ids that generate() returned, as h2o.next_turn does: "
            f"tokenizing an answer again gives different ids. {_DROPPED}. {_LOST_TURN}. After a "
            "beam search the cache holds the beams that were searched last, not the returned "
            "sequences. To start another text call cache.reset(), or use a new H2OCache or "
            "h2o.patched()"
        )


def no_new_tokens(seen: int) -> ValueError:
    return ValueError(
        f"no new tokens: the cache has seen {seen} tokens, and input_ids has no more than these. "
        "Pass all earlier tokens followed by new ones, as h2o.next_turn(tokenizer, out, message) "
        f"does, or call cache.reset() for another text. {_DROPPED}. {_LOST_TURN}"
    )


_DROPPED = (
    "If a chat template has dropped earlier reasoning, remove it from the cache before generate(): "
    "cache.evict(h2o.dropped_spans(tokenizer, out, input_ids), ids=out), where out is what the "
    "last call returned"
)
"""Advice for a chat that was rendered again"""

_LOST_TURN = (
    "If an error ended generate() before it returned, the cache has seen its prompt and the ids "
    "that were streamed: append to these. To be able to repeat a turn, run it on a copy (turn = "
    "cache.fork()), and keep the copy once the turn is done"
)
"""Advice for a server whose client has disconnected, or whose streamer raised an error"""


def tokens_seen(cache: Any, seen: int, mask: Tensor | None) -> list[int] | None:
    """Number of tokens in each row [B], or a single one for all rows; None if unknown."""
    guard = cache.guard
    slots = cache.layers[guard.first].slots if guard.plans else None
    if slots is not None:
        counts: list[int] = slots.seen_tokens.tolist()
        return counts
    known = guard.state.text.counts()
    if known is None and (mask is None or bool(mask.all())):  # no row has padding
        return [seen]
    return known


def _check_continuation(
    cache: Any, seen: int, text: ModelCall, new: int
) -> tuple[list[int] | None, bool, bool]:
    """Check mask, ids and positions of a pass that follows `seen` columns.

    Returns:
        The number of tokens in each row before it, as `tokens_seen`. Whether it is a decode step
        that has the next position of each row. Whether mask and positions were read: those of a
        decode step on a GPU are not, since the host would wait for them.
    """
    mask, positions = text.mask, text.positions
    if positions is not None and positions.numel() == 0:
        # With prefill_chunk_size generate() prefills ids of the text seen again if none are left.
        raise no_new_tokens(seen)
    if text.is_injected:
        raise UnsupportedError(
            "a wrapper inserts embeddings before every decode step. With transformers 5.24 or "
            "later PEFT's prompt tuning mistakes each step for a prompt, because it does not find "
            "the cache under its new name. Use h2o.generate_all, or transformers before 5.24"
        )
    is_on_cpu = mask is None or mask.is_cpu
    if new == 1 and not (is_on_cpu and (positions is None or positions.is_cpu)):
        return None, True, False
    tokens, guard = tokens_seen(cache, seen, mask), cache.guard
    ends: list[int | None] = []
    if tokens is not None:
        for n, row in broadcast(tokens, guard.state.rows):
            ends.append(None if row.offset is None else n + row.offset)
        if mask is not None and mask.shape == (len(tokens), seen + new):
            _check_counts(mask[:, :seen].bool().sum(1).tolist(), tokens, seen)
        elif mask is None:
            # Sliding windows would attend to padding, and a model that numbers columns would count
            # it, unless it has done so before.
            numbers_columns = text.positions is not None and not text.is_chosen
            if guard.has_windows or (numbers_columns and ends != [seen] * len(ends)):
                _check_counts([seen] * len(tokens), tokens, seen)
    is_whole = mask is None or mask.shape[1] == seen + new
    if is_whole and text.dropped is not None and text.dropped.shape[1] == seen:
        check_ids(guard.state.text, text.dropped, mask)
    if tokens is None or positions is None or positions.shape[-1] != new:
        return tokens, False, True
    if len({len(tokens), positions.shape[1]} - {1}) > 1:
        return tokens, False, True  # wrong batch size, which the first layer reports
    if len(positions) > 1 and chunks_of_prompt() is not None:
        return tokens, False, True  # computed for the whole prompt, whose images a chunk may cut
    is_relative = cache.config.positions == "cache_relative"  # the cache computes its own
    if is_relative and not positions.any():
        return tokens, False, True
    if new == 1 and 0 not in tokens:
        next_ones = (positions[0] if len(positions) == 1 else positions.amin(0)).flatten().tolist()
        B = max(len(next_ones), len(ends))
        if next_ones * (B // len(next_ones)) == ends * (B // len(ends)):
            return tokens, True, True
    _check_positions(guard, seen, text, new, tokens, ends, is_relative=is_relative)
    return tokens, False, True


def _check_counts(said: list[int], tokens: list[int], seen: int) -> None:
    """`said`: tokens per row according to the attention mask; without a mask, all columns."""
    if said != tokens:
        raise ValueError(
            f"attention_mask has {said} tokens per row in the {seen} columns that the cache has "
            f"seen, but the cache counted {tokens}. Pass the earlier mask unchanged, followed by "
            "the mask of the new columns"
        )


def _check_positions(
    guard: PassGuard,
    seen: int,
    text: ModelCall,
    new: int,
    tokens: list[int],
    ends: list[int | None],
    *,
    is_relative: bool,
) -> None:
    """Check that no new token has the position of an earlier one. If the model or `generate()`
    computed the positions, also check that they continue the row's numbering.

    Args:
        tokens, ends: number of tokens in each row, or in all, before the pass, and the position of
            the row's next token; None: unknown.
        is_relative: positions are relative to the cache, so that numbering may have gaps.
    """
    assert text.positions is not None
    positions = text.positions.amin(0)
    B = max(len(ends), len(positions))
    positions, expected = positions.expand(B, -1), ends * (B // len(ends))
    mask = None if text.mask is None else text.mask[:, -new:].bool()
    at_least = [_UNBOUNDED if guard.has_rope_deltas else n for n in tokens * (B // len(tokens))]
    least = torch.tensor(
        [n if x is None else x for n, x in zip(at_least, expected, strict=True)],
        dtype=torch.long,
        device=positions.device,
    )
    late = positions >= least[:, None]
    # Tokens of an image that a pass has cut have positions that differ by dimension, and so have
    # those that generate() adds to a prompt that ends in an image.
    in_image = text.positions.amax(0) != text.positions.amin(0)
    late |= in_image
    if not late.all() and mask is not None:
        late |= ~mask.to(late.device)
    if not late.all():
        raise _overlap(guard, seen, text, new, late, least)
    if text.is_chosen or is_relative:
        return
    for row, end in enumerate(expected):
        real = positions[row] if mask is None else positions[row][mask[row % len(mask)]]
        first = int(positions[row, 0])
        counts_columns = first == seen and guard.state.row(row).counts_columns
        if not end or not len(real) or bool(in_image[row % len(in_image)].any()):
            continue  # unknown, no tokens before, no tokens now, or an image
        if end in (first, int(real[0])) or counts_columns:
            continue
        raise ValueError(
            f"the model numbers the new tokens of row {row} from position {int(real[0])}, but "
            f"earlier ones end before {end}. Pass position_ids that continue there"
        )


_UNBOUNDED = -(2**30)
"""Least position of a token whose predecessors may have been images that the cache has not seen"""


def _overlap(
    guard: PassGuard, seen: int, text: ModelCall, new: int, late: Tensor, least: Tensor
) -> ValueError:
    """Error for positions that overlap those of earlier tokens: not `late` [B, Q]."""
    assert text.positions is not None
    positions = text.positions.amin(0).expand(len(late), -1)
    if new == seen + 1 and not positions[:, 0].any():
        return ValueError(WITHOUT_CACHE)
    if text.is_assisted and not positions[:, 0].any():
        return ValueError(
            f"assisted decoding (prompt_lookup_num_tokens, a draft model) starts with a pass over "
            f"the whole text, and the cache has already seen {seen} tokens of it. Generate later "
            "turns without it, or use a new H2OCache for each turn"
        )
    row = int((~late).any(1).nonzero()[0])
    mask = text.mask
    if mask is not None and mask.shape[1] == seen + new and not mask[row % len(mask), seen - 1]:
        return ValueError(
            f"row {row} is padded on the right, and generate() counts that padding in the "
            'positions of new tokens. Pad on the left (tokenizer.padding_side = "left"), or pass '
            f"position_ids that continue at {int(least[row])}"
        )
    if mask is not None and (guard.state.row(row).offset or 0) > 0:
        return ValueError(
            f"the earlier tokens of row {row} have positions that count padding, because the model "
            "was given an attention_mask without position_ids, and generate() does not count it. "
            "Give the model position_ids=(attention_mask.cumsum(1) - 1).clamp(min=0) with the "
            f"prompt, or here position_ids that continue at {int(least[row])}"
        )
    return ValueError(
        f"the cache has seen {seen} tokens, and the new ones begin at position "
        f"{int(positions[row][~late[row]][0])} of row {row}, where at least {int(least[row])} was "
        "expected. input_ids must be everything seen so far, followed by new tokens, as "
        "h2o.next_turn(tokenizer, out, message) returns them. If the tokens "
        f"of a forward pass are all new, pass position_ids that continue there. {_LOST_TURN}. To "
        "start another text call cache.reset(), or use a new H2OCache or h2o.patched()"
    )


def _padding_mask(guard: PassGuard, mask: Tensor | None, seen: int, new: int) -> Tensor | None:
    """The mask [B, seen + new] of a forward pass with `new` columns, for a model whose sliding
    windows or states count padding after a token as text. States also count padding in a forward
    pass of one column.

    Args:
        mask: as the pass was given it, 0 at padding.

    Returns:
        None if neither the last column nor the new ones are padding.

    Raises:
        ValueError: a pass of one column has padding, or no mask says what follows padding.
    """
    was_padded = seen and guard.state.ends_in_padding
    if mask is None or mask.shape[1] != seen + new:
        if was_padded:
            raise ValueError(
                "the last column that the cache has seen is padding in some row, and no "
                "attention_mask says what follows. Pass the earlier mask unchanged, followed by "
                "the mask of the new columns"
            )
        return None
    if not was_padded and bool(mask[:, -new:].all()):
        return None
    if guard.has_states and new == 1 and not bool(mask.any(1).all()):
        raise ValueError(
            "a forward pass has a single column, and it is padding in some row. This model's "
            "states would count it as text. Prefill the prompt in one pass, or in larger chunks"
        )
    return mask
