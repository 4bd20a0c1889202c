"""Spans of a chat's token ids that may be forgotten: thoughts, tool results and old turns.

`H2OCache.evict` removes spans from a cache. They are found in the ids themselves, since an answer
that is decoded and tokenized again may have other tokens. A span has whole tokens only: one that
holds a part of a marker and other text stays.
"""

from __future__ import annotations

import re
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o.arguments.plain_values import check_count
from h2o.arguments.torch_values import check_ids
from h2o.hf.chat.chat_template import common_beginning, render
from h2o.spans import Row, check_spans
from h2o.utils.draw import pieces

THOUGHTS = (
    ("<think>", "</think>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
)
"""What models write before and after a thought"""

_HINT = "pass the ids of one chat without padding, such as generate()'s result"


def thought_spans(tokenizer: Any, ids: Any) -> Row:
    """Find the thoughts of a chat: spans [(start, stop), ...] of token positions.

    ```python
    cache.evict(h2o.thought_spans(tokenizer, out), ids=out)
    ```

    A span begins with the marker of a thought, such as <think>, and ends with the end marker and
    the white space after it, which is what chat templates leave out of earlier answers. A thought
    without an end is not among them, since the model may still be writing it.

    Args:
        tokenizer: the tokenizer of the model.
        ids: int [n] or [1, n], the ids of everything that the cache has seen.
    """
    texts = _texts(tokenizer, ids)
    return texts.whole_tokens(sorted(x.span() for x in _thoughts(texts.joined)))


def tool_spans(tokenizer: Any, ids: Any, keep_last: int = 3, **template_kwargs: Any) -> Row:
    """Find the results of tools in a chat, except the last ones.

    ```python
    cache.evict(h2o.tool_spans(tokenizer, out, keep_last=3), ids=out)
    ```

    The markers before and after a result are found by rendering the chat template. They stay, so
    that the chat still says that a tool answered.

    Args:
        tokenizer: a tokenizer whose chat template writes messages of the role "tool".
        ids: int [n] or [1, n], the ids of everything that the cache has seen.
        keep_last: number of results that are not among the spans, counted from the end.
        template_kwargs: arguments of the chat template, as for the chat.

    Returns:
        Spans [(start, stop), ...] of token positions. A result without tokens has none.

    Raises:
        ValueError: the template writes no tool results, or the same markers around them as around
            a user's message.
    """
    keep_last = check_count("keep_last", keep_last, 0)
    markers = _tool_markers(tokenizer, template_kwargs)
    texts = _texts(tokenizer, ids)
    found = [x.span(1) for x in _between(*markers, texts.joined)]
    return texts.whole_tokens(found[: len(found) - keep_last] if keep_last else found)


def dropped_spans(tokenizer: Any, ids: Any, new_ids: Any, **template_kwargs: Any) -> Row:
    """Find the thoughts, tool results and turns that a newly rendered chat no longer has.

    ```python
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, ...)["input_ids"]
    cache.evict(h2o.dropped_spans(tokenizer, out, ids), ids=out)
    out = model.generate(ids, cache=cache)  # reads only the new turn
    ```

    The new ids must be the earlier ones without some thoughts, tool results and turns, followed by
    new tokens. The white space after a thought may stay. Turns are parts from one special token,
    such as the first of a message, to another like it, with which a turn begins that stayed. In
    chats with pictures or sounds no turn may be missing. Nothing is guessed: any other difference
    is an error, since the cache has read other text than the new ids have.

    Args:
        tokenizer: the tokenizer of the model.
        ids: int [n] or [1, n], what `generate()` returned. The last id is not compared and is in no
            span, because `generate()` returns it before the cache has seen it.
        new_ids: int [m] or [1, m], the ids of the chat with its next turn.
        template_kwargs: arguments of the chat template, as for the chat.

    Returns:
        Spans [(start, stop), ...] of positions in `ids`. None if the new ids begin with all others.

    Raises:
        ValueError: the new ids lack other text, or have other tokens. The message says where.
    """
    old, new = (
        check_ids(name, x, one_row=True, hint=_HINT)[0].tolist()
        for name, x in (("ids", ids), ("new_ids", new_ids))
    )
    texts, seen = _Texts.of(pieces(tokenizer, old)), len(old) - 1
    marked = {x.start: x for x in _droppable(tokenizer, texts, template_kwargs)}
    kept: list[tuple[int, int]] = []  # where old and new have the same token
    spans, i, j = [], 0, 0
    while i < seen:
        span = marked.get(i)
        stop = seen if span is None else min(span.stop, seen)
        if span is not None and not _agree(old[i:stop], new[j:]):
            stops = range(min(span.first, stop), stop + 1)
            stop = next(x for x in stops if _agree(old[x:stop], new[j:]))
            spans.append((i, stop))
            i = stop
        elif new[j : j + 1] == old[i : i + 1]:
            kept.append((i, j))
            i, j = i + 1, j + 1
        elif (turns := _dropped_turns(tokenizer, old[:seen], new, i, j, kept)) is not None:
            start, i, j = turns
            spans = [*(span for span in spans if span[0] < start), (start, i)]
            kept = [pair for pair in kept if pair[0] < start]
        else:
            raise _differ(tokenizer, old, new, i, j)
    return spans


def without_spans(ids: Any, spans: Any) -> Tensor:
    """The ids of one chat, [1, n - m] for ids [n] or [1, n], without spans of m tokens.

    After `cache.evict(spans)` the next turn is appended to these ids.

    Raises: ValueError if a span ends beyond the ids.
    """
    given, row = check_ids("ids", ids, one_row=True, hint=_HINT), check_spans("spans", spans)
    n = given.shape[1]
    if row and row[-1][1] > n:
        raise ValueError(f"spans end at {row[-1][1]}, but ids has {n} tokens")
    stays = torch.ones(n, dtype=torch.bool, device=given.device)
    for start, stop in row:
        stays[start:stop] = False
    return given[:, stays]


class _Marked(NamedTuple):
    """Tokens that a chat template may leave out."""

    start: int
    first: int
    """The end of the last marker. White space follows, up to `stop`"""
    stop: int


def _droppable(tokenizer: Any, texts: _Texts, template_kwargs: dict[str, Any]) -> Iterator[_Marked]:
    """All thoughts, even one that was cut, and all tool results."""
    text = texts.joined
    try:
        results = [x.span(1) for x in _between(*_tool_markers(tokenizer, template_kwargs), text)]
    except ValueError:  # a template without markers
        results = []
    thoughts = [(x.start(), x.end(1), x.end()) for x in _thoughts(text)]
    for begin, end in THOUGHTS:
        cut = text.find(begin, text.rfind(end) + 1)
        thoughts += [(cut, len(text), len(text))] if cut >= 0 else []
    for begin, marker, end in (*((a, b, b) for a, b in results), *thoughts):
        for start, stop in texts.whole_tokens([(begin, end)]):
            yield _Marked(start, min(bisect_left(texts.ends, marker) + 1, stop), stop)


def _turn_tokens(tokenizer: Any, ids: list[int]) -> set[int]:
    """Special tokens, with which turns may begin. None of them if the ids have placeholders of a
    picture or a sound, whose equal ids do not mean that they stand for the same one."""
    try:
        added = tokenizer.added_tokens_decoder
    except NotImplementedError:  # of mistral-common's tokenizers, which name all special tokens
        added = {}
    special = {*tokenizer.all_special_ids, *(i for i, x in added.items() if x.special)}
    has_placeholders = any(x == y and x in special for x, y in pairwise(ids))
    return set() if has_placeholders else special


def _dropped_turns(
    tokenizer: Any, old: list[int], new: list[int], i: int, j: int, kept: list[tuple[int, int]]
) -> tuple[int, int, int] | None:
    """The turns that the new ids lack if they differ from the old ones at old[i] and new[j].

    Args:
        kept: positions in the old and the new ids of the tokens before, which stayed.

    Returns:
        Where the turns begin and end in the old ids, and where the new ids go on. None unless a
        later turn of the old ids, up to its next special token, has new[j] where the new ids have
        it.
    """
    special = _turn_tokens(tokenizer, old)
    for start, then in reversed([pair for pair in kept if old[pair[0]] in special]):
        stops = [k for k in range(i, len(old)) if old[k] == old[start]]
        for stop, following in zip(stops, [*stops, len(old)][1:], strict=True):
            if following - stop > j - then and _agree(old[stop:following], new[then:]):
                return start, stop, then
    return None


def _agree(tokens: list[int], new: list[int]) -> bool:
    """Whether `new` begins with these tokens."""
    return new[: len(tokens)] == tokens


def _differ(tokenizer: Any, old: list[int], new: list[int], i: int, j: int) -> ValueError:
    """Error for new ids that differ from the earlier ones other than by marked spans."""
    wanted, *found = (repr(tokenizer.decode(x[:1])) for x in (old[i:], new[j:]) if x)
    what = f"has {found[0]}" if found else f"ends before it, with {len(new)} tokens"
    return ValueError(
        f"token {i} of ids is {wanted}, where new_ids {what} (token {j}), and no thought, tool "
        "result or turn is there that new_ids could lack. An answer that is decoded and tokenized "
        "again may have other tokens. To go on with the same tokens, append the turn to the ids: "
        "spans = h2o.thought_spans(tokenizer, ids); cache.evict(spans, ids=ids); new_ids = "
        "h2o.next_turn(tokenizer, h2o.without_spans(ids, spans), message). To remove other spans, "
        "name them: cache.evict([(start, stop)], ids=ids)"
    )


def _thoughts(text: str) -> Iterator[re.Match[str]]:
    """Thoughts in a text, with the white space after them. Group 1 is without it."""
    for begin, end in THOUGHTS:
        pattern = f"({re.escape(begin)}{_up_to(end, begin)}{re.escape(end)})\\s*"
        yield from re.finditer(pattern, text, re.S)


def _between(begin: str, end: str, text: str) -> Iterator[re.Match[str]]:
    """What is between two markers in a text, as group 1."""
    pattern = f"{re.escape(begin)}({_up_to(end, begin)}){re.escape(end)}"
    return re.finditer(pattern, text, re.S)


def _up_to(end: str, begin: str) -> str:
    """Pattern of what ends before `end` and has no other `begin`. Otherwise a marker without an
    end, such as that of a thought that was cut, would reach to the end of a later one."""
    return f"(?:(?!{re.escape(begin)}|{re.escape(end)}).)*"


class _Texts(NamedTuple):
    """The texts of the tokens of a chat, and where they are in its whole text."""

    joined: str
    begins: list[int]
    """Tokens after the first of a character, which have no text, begin where the first does"""
    ends: list[int]

    @classmethod
    def of(cls, texts: list[str]) -> _Texts:
        ends = [*accumulate(map(len, texts))]
        begins = [end - len(text) for end, text in zip(ends, texts, strict=True)]
        for i, text in enumerate(texts):
            begins[i] = begins[i] if text or not i else begins[i - 1]
        return cls("".join(texts), begins, ends)

    def whole_tokens(self, characters: Iterable[tuple[int, int]]) -> Row:
        """Spans of the tokens that lie within spans of characters."""
        spans = (
            (bisect_left(self.begins, first), bisect_right(self.ends, last))
            for first, last in characters
        )
        return [(start, stop) for start, stop in spans if start < stop]


def _texts(tokenizer: Any, ids: Any) -> _Texts:
    """The texts of the tokens of one chat."""
    return _Texts.of(pieces(tokenizer, check_ids("ids", ids, one_row=True, hint=_HINT)[0].tolist()))


def _tool_markers(tokenizer: Any, template_kwargs: dict[str, Any]) -> tuple[str, str]:
    """What a chat template writes right before and after the result of a tool."""
    said, *results = (uuid.uuid4().hex for _ in range(3))  # which occur nowhere else
    chat: list[dict[str, Any]] = [{"role": "user", "content": said}]
    for result, call in zip(results, ("callAAAA1", "callAAAA2"), strict=True):  # as Mistral's ids
        function = {"name": "look", "arguments": {"at": call}}
        calls = [{"type": "function", "id": call, "function": function}]
        chat += [
            {"role": "assistant", "content": "", "tool_calls": calls},
            {"role": "tool", "content": result, "name": "look", "tool_call_id": call},
        ]
    text = render(tokenizer, chat, **{**template_kwargs, "add_generation_prompt": False})
    if any(text.count(x) != 1 for x in (said, *results)):
        raise ValueError(
            "the chat template does not write tool results as they are, so their markers are "
            "unknown. Pass cache.evict the spans of the results yourself"
        )
    before_user = text.partition(said)[0]
    (before, _, after), (_, _, end) = (text.partition(result) for result in results)
    alike = common_beginning(before[::-1], before_user[::-1])[::-1]
    # A marker begins with a bracket: <tool_response>, [TOOL_RESULTS], <|start|>tool<|sep|>.
    differs = before[: len(before) - len(alike)]
    start = max(differs.rfind("<"), differs.rfind("["))
    # Not the header of the next turn, which differs.
    closing = re.match(r".*?[>\]]", common_beginning(after, end), re.S)
    if start < 0 or closing is None:
        raise ValueError(
            "the chat template writes nothing around tool results that it does not write around "
            "a user's messages. Pass cache.evict the spans of the results yourself"
        )
    return before[start:], closing[0]
