"""Thoughts and tool results are found in token ids, and the next turn reads only what is new."""

from __future__ import annotations

import pytest
import torch
from tokenizers import AddedToken

import h2o
from h2o.compat import with_cache
from h2o.hf.chat import chat_spans
from tests.hf.chat_templates import LLAMA, NO_SYSTEM, PLAIN, THOUGHTS, byte_tokenizer
from tests.hf.tiny import llama

QWEN = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}\n"
    "<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
)
"""The way of Qwen: results in a user's turn, several of them in one"""
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'tool' %}[TOOL_RESULTS] {\"content\": {{ m.content }}}[/TOOL_RESULTS]"
    "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
QUOTED = LLAMA.replace("{{ m.content | trim }}<|eot|>", (
    "{% if m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
    "<|eot|>"
))  # fmt: skip
"""The way of Llama 3.1: results are JSON"""


def tokenizer_of(template, *special):
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>", *special)
    tokenizer.chat_template = template
    return tokenizer


def ids_of(tokenizer, text):
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])


def texts(tokenizer, ids, spans):
    return [tokenizer.decode(ids[0, start:stop].tolist()) for start, stop in spans]


@pytest.mark.parametrize("special", [(), ("<think>", "</think>")])
def test_thoughts(special):
    """Whether the markers are tokens or spelled, a span has them, and the white space after it."""
    tokenizer = tokenizer_of(THOUGHTS, *special)
    text = "<|im_start|>Ä<think>\nÄ 1?\n</think>\n\nÄ.<|im_end|><think>2</think>No<think>3"
    ids = ids_of(tokenizer, text)
    spans = h2o.thought_spans(tokenizer, ids)
    assert texts(tokenizer, ids, spans) == ["<think>\nÄ 1?\n</think>\n\n", "<think>2</think>"]
    left = h2o.without_spans(ids, spans)
    assert tokenizer.decode(left[0].tolist()) == "<|im_start|>ÄÄ.<|im_end|>No<think>3"
    assert h2o.thought_spans(tokenizer, left) == []


def test_other_markers_of_thoughts():
    tokenizer = tokenizer_of(THOUGHTS)
    thought = "<|channel|>analysis<|message|>c<|end|><|start|>assistant"
    ids = ids_of(tokenizer, f"[THINK]a[/THINK]b<|start|>assistant{thought}<|channel|>final")
    spans = h2o.thought_spans(tokenizer, ids[0].tolist())
    assert texts(tokenizer, ids, spans) == ["[THINK]a[/THINK]", thought]
    left = h2o.without_spans(ids, spans)  # the header of the answer stands there once
    assert tokenizer.decode(left[0].tolist()) == "b<|start|>assistant<|channel|>final"


@pytest.mark.parametrize(("begin", "end"), [("<think>", "</think>"), chat_spans.THOUGHTS[-1]])
def test_a_thought_that_was_cut(begin, end):
    """A user's message between a thought without an end and the next thought must stay."""
    tokenizer = tokenizer_of(THOUGHTS)
    whole = f"{begin}2{end}"
    ids = ids_of(tokenizer, f"{begin}1<|im_end|>Is <b> gone?{whole}No.{begin}3")
    assert texts(tokenizer, ids, h2o.thought_spans(tokenizer, ids)) == [whole]
    new = ids_of(tokenizer, f"{begin}1<|im_end|>Is <b> gone?No.{begin}3 And?")
    assert texts(tokenizer, ids, h2o.dropped_spans(tokenizer, ids, new)) == [whole]


def test_a_marker_in_a_message_begins_no_tool_result():
    """What the user says of the marker must stay, with all that follows it."""
    tokenizer = tokenizer_of(QWEN)
    chat = [{"role": "user", "content": "What is <tool_response>\n for?"}, *CHAT[1:]]
    ids = ids_of(tokenizer, tokenizer.apply_chat_template(chat, tokenize=False))
    spans = h2o.tool_spans(tokenizer, ids, 0)
    assert texts(tokenizer, ids, spans) == ["first", "second", "third"]


CHAT = [
    {"role": "user", "content": "Look at [1] and <b>."},
    {"role": "assistant", "content": "I look."},
    {"role": "tool", "content": "first"},
    {"role": "tool", "content": "second"},
    {"role": "assistant", "content": "And again."},
    {"role": "tool", "content": "third"},
    {"role": "assistant", "content": "Done."},
]


@pytest.mark.parametrize("template", [QWEN, MISTRAL, LLAMA, QUOTED, NO_SYSTEM])
def test_tool_results(template):
    tokenizer = tokenizer_of(template)
    ids = ids_of(tokenizer, tokenizer.apply_chat_template(CHAT, tokenize=False))
    for keep_last, expected in ((0, ["first", "second", "third"]), (2, ["first"]), (3, [])):
        spans = h2o.tool_spans(tokenizer, ids, keep_last)
        assert texts(tokenizer, ids, spans) == expected
    assert len(h2o.tool_spans(tokenizer, ids, keep_last=9)) == 0


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "nothing around tool results"),
        ("{% for m in messages if m.role != 'tool' %}<{{ m.content }}>{% endfor %}", "as they are"),
        (PLAIN.replace("}}\n", "}}"), "nothing around tool results"),
    ],
)
def test_templates_without_markers(template, message):
    tokenizer = tokenizer_of(template)
    with pytest.raises(ValueError, match=message):
        h2o.tool_spans(tokenizer, [1, 2])


def test_spans_beyond_the_ids():
    with pytest.raises(ValueError, match="spans end at 4, but ids has 3 tokens"):
        h2o.without_spans([1, 2, 3], [(1, 4)])
    assert h2o.without_spans([1, 2, 3], []).tolist() == [[1, 2, 3]]


@pytest.mark.parametrize("compares", [False, True])
def test_a_turn_without_the_thoughts_of_the_last(compares):
    """What the template renders without thoughts is what the cache answers for."""
    tokenizer = tokenizer_of(THOUGHTS, "<think>", "</think>")
    ours = llama(2, vocab_size=len(tokenizer))
    cache = h2o.H2OCache(ours, budget=40, min_tokens=0)
    chat = [{"role": "user", "content": "Why?"}]
    answer = "<think>\nHm.\n</think>\n\nBecause.<|im_end|>\n"
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) + answer
    ids = ids_of(tokenizer, text)
    ours(ids, **with_cache(cache))
    chat += [{"role": "assistant", "content": answer.removesuffix("<|im_end|>\n")}]
    chat += [{"role": "user", "content": "Really?"}]
    again = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    shorter = ids_of(tokenizer, again)
    spans = h2o.thought_spans(tokenizer, ids)
    if compares:
        with pytest.raises(ValueError, match=r"cache.evict\(h2o.dropped_spans\("):
            ours.generate(shorter, max_new_tokens=2, **with_cache(cache))
        spans = h2o.dropped_spans(tokenizer, ids, shorter)
    cache.evict(spans, ids=ids)
    seen, read = cache.get_seq_length(), []
    hook = ours.register_forward_pre_hook(
        lambda _module, _args, given: read.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    ours.generate(shorter, max_new_tokens=2, eos_token_id=None, **with_cache(cache))
    hook.remove()
    assert read == [shorter.shape[1] - seen, 1]


# ---- What a newly rendered chat no longer has ----------------------------------------------------

HEADER = "<|im_start|>assistant\n"
ANSWERED = f"<think>\n1\n</think>\n\nA<|im_end|>\n{HEADER}<think>\n2\n</think>\n\nB<|im_end|>\n"


@pytest.mark.parametrize(
    ("text", "again", "expected"),
    [
        (ANSWERED, ANSWERED + "C", []),
        (ANSWERED, ANSWERED.replace("<think>\n1\n</think>\n\n", "") + "C", [(0, 7)]),
        (ANSWERED, ANSWERED.replace("<think>\n2\n</think>\n\n", "") + "C", [(21, 28)]),
        (ANSWERED, ANSWERED.replace("<think>\n1\n</think>", "") + "C", [(0, 5)]),  # as DeepSeek R1
        (ANSWERED, ANSWERED.replace("<think>\n1\n</think>\n", "") + "C", [(0, 6)]),
        ("<think>Ä</think>\n\nÄ.", "Ä.<|im_end|>", [(0, 6)]),  # of several bytes
        ("a<think>1</think>\n\n", "a<|im_end|>", [(1, 5)]),  # the cache has not seen the last \n
        ("a<think>cut sho", "a<|im_end|>", [(1, 8)]),
        ("a<think>1</think>b<think>cut", "ab<|im_end|>", [(1, 4), (5, 8)]),
        ("a<think>1</think>", "a<think>2</think>", [(1, 3)]),
        ("a<", "a<|im_end|>", []),
    ],
)
def test_a_chat_that_was_rendered_again(text, again, expected):
    tokenizer = tokenizer_of(THOUGHTS, "<think>", "</think>")
    ids, new = ids_of(tokenizer, text), ids_of(tokenizer, again)
    spans = h2o.dropped_spans(tokenizer, ids, new[0].tolist())
    assert spans == expected
    left = h2o.without_spans(ids[:, :-1], spans)
    assert torch.equal(left, new[:, : left.shape[1]])


def test_a_chat_without_old_tool_results():
    """A program that empties old results, which a template writes between their markers."""
    tokenizer = tokenizer_of(QWEN)
    emptied = [{**x, "content": ""} if x["content"] == "first" else x for x in CHAT]
    ids, new = (
        ids_of(tokenizer, tokenizer.apply_chat_template(x, tokenize=False)) for x in (CHAT, emptied)
    )
    spans = h2o.dropped_spans(tokenizer, ids, new)
    assert texts(tokenizer, ids, spans) == ["first"]
    assert torch.equal(h2o.without_spans(ids, spans), new)


def turns(*contents):
    """Text of a chat whose messages have these contents, and the header of the next answer."""
    chat = [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(contents)]
    return tokenizer_of(THOUGHTS).apply_chat_template(
        chat, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("again", "gone"),
    [
        (("a", "b", "e", "f", "g"), ["c", "d"]),
        (("e", "f", "g"), ["a", "b", "c", "d"]),
        (("a", "f", "g"), ["b", "c", "d", "e"]),
        (("a", "b", "c", "d", "e", "f", "g"), []),
    ],
)
def test_a_chat_without_old_turns(again, gone):
    """A program that renders only some of the earlier turns."""
    tokenizer = tokenizer_of(THOUGHTS, "<think>", "</think>")
    ids = ids_of(tokenizer, turns("a", "b", "c", "d", "e") + "f<|im_end|>\n")
    new = ids_of(tokenizer, turns(*again))
    spans = h2o.dropped_spans(tokenizer, ids, new)
    assert len(spans) == bool(gone)
    removed = "".join(texts(tokenizer, ids, spans))
    assert [x for x in "abcdef" if f"\n{x}<" in removed] == gone
    left = h2o.without_spans(ids[:, :-1], spans)
    assert torch.equal(left, new[:, : left.shape[1]])


def test_a_chat_without_old_turns_and_the_last_thought():
    tokenizer = tokenizer_of(THOUGHTS, "<think>", "</think>")
    thought = "<think>\n1\n</think>\n\n"
    ids = ids_of(tokenizer, turns("a", "b", "c", "d", "e") + f"{thought}f<|im_end|>\n")
    new = ids_of(tokenizer, turns("a", "b", "e", "f", "g"))
    spans = h2o.dropped_spans(tokenizer, ids, new)
    assert len(spans) == 2
    assert texts(tokenizer, ids, spans)[1] == thought
    left = h2o.without_spans(ids[:, :-1], spans)
    assert torch.equal(left, new[:, : left.shape[1]])


def test_a_turn_that_was_changed():
    """Only whole turns may be missing, and one that stayed must follow them."""
    tokenizer = tokenizer_of(THOUGHTS)
    ids = ids_of(tokenizer, turns("a", "b1", "c", "d", "e") + "f<|im_end|>\n")
    for again in (
        ("a", "b1", "c", "x", "e"), ("x",), ("a", "b1", "c", "d", "x"), ("a", "x", "e"),
        ("a", "b1", "c", "d", "e", "g"), ("a", "b2", "c", "d", "e"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="tool result or turn is there"):
            h2o.dropped_spans(tokenizer, ids, ids_of(tokenizer, turns(*again)))


def test_special_tokens_without_a_name():
    """Most tokenizers mark the headers of turns as special, but give them no name."""
    tokenizer = tokenizer_of(LLAMA)
    tokenizer.add_tokens([AddedToken(x, special=True) for x in ("<|start|>", "<|sep|>", "<|eot|>")])
    chats = [
        [{"role": ("user", "assistant")[i % 2], "content": x} for i, x in enumerate(contents)]
        for contents in ("abcd", "cd")
    ]
    ids, new = (ids_of(tokenizer, tokenizer.apply_chat_template(x, tokenize=False)) for x in chats)
    spans = h2o.dropped_spans(tokenizer, ids, new)
    assert len(spans) == 1
    left = h2o.without_spans(ids[:, :-1], spans)
    assert torch.equal(left, new[:, : left.shape[1]])


def test_a_tokenizer_that_does_not_list_its_tokens(monkeypatch):
    """mistral-common's tokenizers raise here, and must find thoughts and say what differs."""
    tokenizer = tokenizer_of(THOUGHTS)

    def raises(_):
        raise NotImplementedError

    monkeypatch.setattr(type(tokenizer), "added_tokens_decoder", property(raises))
    ids, again = (ids_of(tokenizer, x) for x in ("<think>1</think>b.", "b.c"))
    assert h2o.dropped_spans(tokenizer, ids, again) == [(0, ids.shape[1] - 2)]
    with pytest.raises(ValueError, match="no thought, tool result or turn is there"):
        h2o.dropped_spans(tokenizer, ids, ids_of(tokenizer, "<think>1</think>c."))


def test_turns_with_pictures():
    """Placeholders of two pictures are alike, so that the first might be taken for the second."""
    tokenizer = tokenizer_of(THOUGHTS, "<|image|>")
    picture = "<|image|>" * 4
    ids = ids_of(tokenizer, turns(f"{picture}what?", "cat", f"{picture}what?") + "dog<|im_end|>\n")
    new = ids_of(tokenizer, turns(f"{picture}what?", "dog", "sure?"))
    with pytest.raises(ValueError, match="tool result or turn is there"):
        h2o.dropped_spans(tokenizer, ids, new)


@pytest.mark.parametrize(
    ("text", "again", "message"),
    [
        (
            "abc.",
            "abd.",
            r"token 2 of ids is 'c', where new_ids has 'd' \(token 2\), and no thought",
        ),
        ("abc.", "ac.", "token 1 of ids is 'b', where new_ids has 'c'"),
        ("abc.", "ab", r"token 2 of ids is 'c', where new_ids ends before it, with 2 tokens"),
        (
            "<think>1</think>b.",
            "<think></think>b.",
            "token 3 of ids is 'b', where new_ids has '<th",
        ),
        ("<think>1</think>b.", "1</think>b.", "token 3 of ids is 'b', where new_ids has '1'"),
    ],
)
def test_other_differences(text, again, message):
    """Text outside of marked spans, and parts of such spans, are not removed."""
    tokenizer = tokenizer_of(THOUGHTS, "<think>", "</think>")
    ids, new = ids_of(tokenizer, text), ids_of(tokenizer, again)
    with pytest.raises(ValueError, match=message):
        h2o.dropped_spans(tokenizer, ids, new)
