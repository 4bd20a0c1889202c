"""`h2o.system_span` and `h2o.next_turn` with the chat templates of many models."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoTokenizer

import h2o
from h2o import H2OCache, Request, models
from h2o.compat import with_cache
from tests.default_model import narrow_default_model
from tests.hf import chat_templates
from tests.hf.chat_templates import TOOL, TURNS, byte_tokenizer
from tests.hf.test_cross_head_budget import deep

SYSTEM = {"role": "system", "content": "Answer in one word."}
USERS = [{"role": "user", "content": x} for x in ("Where is the pier?", "And who built it?")]
CHAT = [SYSTEM, *USERS]
ANSWER = {"role": "assistant", "content": "Downtown."}

FOLDED = (
    "[INST] {% if messages[0].role == 'system' %}<<SYS>>{{ messages[0].content }}<</SYS>>"
    "{% endif %}{% for m in messages if m.role == 'user' %}{{ m.content }}{% else %}"
    "{{ raise_exception('no user') }}{% endfor %} [/INST]"
)
WITHOUT = {
    "raises": chat_templates.NO_SYSTEM,
    "left out": "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
    "in the last turn": "{% for m in messages if m.role == 'user' %}"
    "{% if loop.last and messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "{{ m.content }}{% endfor %}",
}


@pytest.fixture(scope="module")
def smollm():
    """The default model's tokenizer."""
    try:
        return AutoTokenizer.from_pretrained(models.embedded_folder())
    except models.UserError as error:
        pytest.skip(str(error))


def with_template(template, *special):
    tokenizer = byte_tokenizer(*special)
    tokenizer.chat_template = template
    return tokenizer


def prompt_of(tokenizer, messages, **how):
    """Token ids [1, n] of a chat."""
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, **how
    )
    return torch.tensor([ids])


def encode(tokenizer, text):
    """Token ids [1, n] of a text."""
    return torch.tensor([tokenizer(text, add_special_tokens=False)["input_ids"]])


# ---- system_span -------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [TURNS, FOLDED])
def test_the_system_turn(template):
    tokenizer = with_template(template)
    start, stop = h2o.system_span(tokenizer, CHAT)
    text = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert start == 0
    assert text[:stop].count(SYSTEM["content"]) == 1
    assert text[stop:].startswith(("<user>Where", "Where"))


KINDS = {
    "tools after the text": ("TOOLS_LAST", {"tools": [TOOL]}, "<|im_start|>user"),
    "tools before the text": ("TOOLS_FIRST", {"tools": [TOOL]}, "<|im_start|>user"),
    "tools in the user's turn": ("LLAMA", {"tools": [TOOL]}, "Where"),
    "a date": ("LLAMA", {"date_string": "1 Jan 2030"}, "<|start|>user"),
    "tools and no thoughts": (
        "THOUGHTS", {"tools": [TOOL], "enable_thinking": False}, "<|im_start|>user",
    ),
    "documents": ("documents", {"documents": [{"title": "Pier", "text": "Old."}]}, "<user>"),
    "another template": ("TURNS", {"chat_template": chat_templates.TOOLS_LAST}, "<|im_start|>user"),
}  # fmt: skip
DOCUMENTS = "{% for d in documents %}{{ d.title }}: {{ d.text }}\n{% endfor %}" + TURNS


@pytest.mark.parametrize("kind", KINDS)
def test_the_system_turn_with_arguments_of_the_template(kind, smollm):
    """Tools, documents and other arguments change the system turn, which must be found whole, for
    tokens of bytes and of words."""
    name, how, following = KINDS[kind]
    for tokenizer in (byte_tokenizer(), smollm):
        tokenizer.chat_template = getattr(chat_templates, name, DOCUMENTS)
        ids = prompt_of(tokenizer, CHAT, **how)
        text = tokenizer.decode(ids[0])
        for given in (None, ids, ids[0].tolist()):
            start, stop = h2o.system_span(tokenizer, CHAT, given, add_generation_prompt=True, **how)
            assert start == 0
            turn, rest = tokenizer.decode(ids[0, :stop]), tokenizer.decode(ids[0, stop:])
            assert turn + rest == text
            assert SYSTEM["content"] in turn
            assert ("get_weather" in turn) == ("tools" in how)
            assert rest.startswith((following, following[1:]))  # one of smollm's tokens is |><
        with pytest.raises(ValueError, match=r"such as tools= or enable_thinking="):
            h2o.system_span(tokenizer, CHAT, encode(tokenizer, "Hi! " + text), **how)
        if "tools" in how and name != "LLAMA":
            with pytest.raises(ValueError, match=r"such as tools= or enable_thinking="):
                h2o.system_span(tokenizer, CHAT, ids)


@pytest.mark.parametrize("name", WITHOUT)
def test_templates_without_a_system_turn(name):
    with pytest.raises(ValueError, match="chat template"):
        h2o.system_span(with_template(WITHOUT[name]), CHAT)


def test_chats_without_a_system_message():
    with pytest.raises(ValueError, match="no system message"):
        h2o.system_span(with_template(TURNS), CHAT[1:])


@pytest.mark.parametrize("messages", ["Answer briefly.", SYSTEM, {}, None])
def test_something_else_than_a_chat(messages):
    with pytest.raises(TypeError, match=r"messages is .*; expected .* a list of messages"):
        h2o.system_span(with_template(TURNS), messages)


def test_arguments_that_are_not_for_the_template():
    for call in (h2o.system_span, lambda *x, **how: h2o.next_turn(x[0], [5], "Hi", **how)):
        with pytest.raises(TypeError, match=r"return_dict, return_tensors: not for the chat"):
            call(with_template(TURNS), CHAT, return_tensors="pt", return_dict=True)


# ---- next_turn ---------------------------------------------------------------------------------

MARKERS = ("<|im_start|>", "<|im_end|>", "<|start|>", "<|sep|>", "<|eot|>", "</s>", "<end_of_turn>")
APPENDING = {
    "TURNS": ({}, "\n"),
    "TOOLS_LAST": ({"tools": [TOOL]}, "<|im_end|>"),
    "TOOLS_FIRST": ({"tools": [TOOL]}, "<|im_end|>"),
    "LLAMA": ({"tools": [TOOL]}, "<|eot|>"),
    "THOUGHTS": ({}, "<|im_end|>"),
    "FOLDED": ({}, "</s>"),
    "NO_SYSTEM": ({}, "<end_of_turn>"),
}
"""Templates that only append: arguments for them, and how an answer ends by itself"""


@pytest.mark.parametrize("special", [(), MARKERS])
@pytest.mark.parametrize("name", APPENDING)
def test_the_next_turn_is_that_of_the_whole_chat(name, special, smollm):
    """The ids must be those of the whole chat, whether the answer was cut or has ended by itself,
    with end markers of one and of several tokens."""
    how, end = APPENDING[name]
    system = [] if name == "NO_SYSTEM" else [SYSTEM]
    for tokenizer in (byte_tokenizer(*special), *([] if special else [smollm])):
        tokenizer.chat_template = getattr(chat_templates, name)
        prompt = prompt_of(tokenizer, [*system, USERS[0]], **how)
        space = " " if name == "FOLDED" else ""
        wanted = prompt_of(tokenizer, [*system, USERS[0], ANSWER, USERS[1]], **how)
        for written in ("", end, end + "\n" * name.startswith(("TOOLS", "NO"))):
            answer = encode(tokenizer, space + ANSWER["content"] + written)
            ids = h2o.next_turn(
                tokenizer, torch.cat([prompt, answer], 1), USERS[1]["content"], **how
            )
            assert tokenizer.decode(ids[0]) == tokenizer.decode(wanted[0])
            if tokenizer is not smollm:  # whose tokens may span the answer's end
                assert ids.tolist() == wanted.tolist()


def test_the_next_turn_of_the_default_model(smollm):
    """The ids of a chat that is continued three times must begin with those that `generate()`
    returned, and be those of its template."""
    model, tokenizer = narrow_default_model(4)
    ids, chat = prompt_of(tokenizer, CHAT[:2]), CHAT[:2]
    cache = H2OCache(model, budget=64, pinned=[h2o.system_span(tokenizer, CHAT)])
    for turn in range(3):
        out = model.generate(ids, max_new_tokens=8, do_sample=False, **with_cache(cache))
        if turn == 1:  # as if the model had ended its answer
            out[0, -1] = tokenizer.eos_token_id
        said = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        chat = [*chat, {"role": "assistant", "content": said}, USERS[1]]
        ids = h2o.next_turn(tokenizer, out, USERS[1]["content"])
        assert ids[:, : out.shape[1]].tolist() == out.tolist()
        whole = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        assert tokenizer.decode(ids[0]) == whole
    assert int(cache.get_seq_length()) == out.shape[1] - 1


def test_end_tokens_that_the_template_does_not_write():
    """They must be replaced by the template's own end: the cache has not seen them."""
    tokenizer = with_template(TURNS, "<|return|>", "<|stop|>", "<user>")
    tokenizer.eos_token = "<|return|>"
    prompt, wanted = prompt_of(tokenizer, USERS[:1]), [USERS[0], ANSWER, USERS[1]]
    wanted = tokenizer.decode(prompt_of(tokenizer, wanted)[0])
    stop = tokenizer.convert_tokens_to_ids("<|stop|>")
    for end, how in (
        ("<|return|>", {}),
        ("\n<|return|>", {}),
        ("<|stop|>", {"eos_token_id": stop}),
        ("<|stop|>", {"eos_token_id": [7, stop]}),
    ):
        held = torch.cat([prompt, encode(tokenizer, ANSWER["content"] + end)], 1)
        ids = h2o.next_turn(tokenizer, held, USERS[1]["content"], **how)
        assert tokenizer.decode(ids[0]) == wanted, end
    kept = h2o.next_turn(tokenizer, torch.cat([prompt, torch.tensor([[stop]])], 1), "Hi")
    assert "<|stop|>\n<user>Hi" in tokenizer.decode(kept[0])


def test_an_answer_that_ends_with_the_next_header():
    """GLM's models end their turn with the header of the user's, which must not be there twice."""
    template = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}" + ASSISTANT
    tokenizer = with_template(template, "<|user|>", "<|assistant|>")
    held = encode(tokenizer, "<|user|>Where?<|assistant|>There.<|user|>")
    ids = h2o.next_turn(tokenizer, held, "When?")
    wanted = "<|user|>Where?<|assistant|>There.<|user|>When?<|assistant|>"
    assert tokenizer.decode(ids[0]) == wanted


ASSISTANT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"


def test_thoughts_stay_where_they_are():
    """A template that drops earlier thoughts would change ids that the cache has seen."""
    tokenizer = with_template(chat_templates.THOUGHTS, "<|im_end|>")
    out = torch.cat(
        [prompt_of(tokenizer, CHAT[:2]), encode(tokenizer, "<think>A pier?</think>\nThere.")], 1
    )
    ids = h2o.next_turn(tokenizer, out, "When?", enable_thinking=False)
    assert ids[:, : out.shape[1]].tolist() == out.tolist()
    assert tokenizer.decode(ids[0, out.shape[1] :]) == (
        "<|im_end|>\n<|im_start|>user\nWhen?<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_messages_that_are_no_text():
    tokenizer = with_template(TURNS)
    out = encode(tokenizer, "<user>Where?\n<assistant>get_weather\n")[0].tolist()
    tool = {"role": "tool", "content": "Rain."}
    for message in (tool, [tool]):
        ids = h2o.next_turn(tokenizer, out, message)
        assert tokenizer.decode(ids[0, len(out) :]) == "<tool>Rain.\n<assistant>"
    tokenizer.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}{{ part.text }}"
        "{% endfor %}{{ '\n' }}{% endfor %}" + chat_templates.ASKS
    )
    with pytest.raises(ValueError, match="content as a list"):
        h2o.next_turn(tokenizer, out, "Hi")
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    ids = h2o.next_turn(tokenizer, out, parts)
    assert tokenizer.decode(ids[0, len(out) :]) == "<user>Hi\n<assistant>"


def test_a_misspelt_argument_of_the_template():
    """A template silently ignores what it does not read, so the turn would have no tools."""
    tokenizer = with_template(chat_templates.THOUGHTS)
    for name, meant in (("tool", "tools"), ("enable_thinkin", "enable_thinking")):
        words = f"{name}: the chat template does not read it. Did you mean {meant}?"
        for call in (
            lambda **more: h2o.system_span(tokenizer, CHAT, **more),
            lambda **more: h2o.next_turn(tokenizer, [5, 6], "Hi", **more),
        ):
            with pytest.raises(TypeError, match=re.escape(words)):
                call(**{name: None})
    plain = with_template(TURNS)
    assert h2o.system_span(plain, CHAT, enable_thinking=False) == h2o.system_span(plain, CHAT)
    named = with_template({"default": TURNS, "tool_use": chat_templates.THOUGHTS})
    assert h2o.system_span(named, CHAT, tools=[TOOL], enable_thinking=False)


def test_turns_that_cannot_be_appended():
    tokenizer = with_template(TURNS)
    ids = torch.tensor([[5, 6]])
    for wrong, kind, word in [
        (torch.tensor([[5], [6]]), ValueError, "for one chat"),
        ([], ValueError, "has 0 tokens"),
        (torch.tensor([[0.5]]), TypeError, "float"),
        ("a text", TypeError, "ids is 'a text'"),
        ({"input_ids": ids}, TypeError, r"out\.sequences"),
    ]:
        with pytest.raises(kind, match=word):
            h2o.next_turn(tokenizer, wrong, "Hi")
    for wrong in (5, ["Hi"], []):
        with pytest.raises(TypeError, match="message must be a text"):
            h2o.next_turn(tokenizer, ids, wrong)
    whole = [{"role": role, "content": "Hi"} for role in ("user", "assistant", "user")]
    with pytest.raises(ValueError, match="already hold all earlier turns"):
        h2o.next_turn(tokenizer, ids, whole)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        h2o.next_turn(tokenizer, ids, "Hi")
    for template, word in [
        (
            "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}",
            "earlier answer",
        ),
        ("{% for m in messages[:2] %}{{ m.content }}{% endfor %}", "leaves out the message 'Hi'"),
        ("{{ raise_exception('no chats') }}", "cannot render this chat: no chats"),
    ]:
        with pytest.raises(ValueError, match=word):
            h2o.next_turn(tokenizer, ids, "Hi", chat_template=template)


# ---- Turns that are lost -----------------------------------------------------------------------


class LeavingClient:
    """A streamer that raises after some tokens."""

    def __init__(self, tokens):
        self.tokens, self.ids = tokens, []

    def put(self, ids):
        """`ids`: first those of the prompt, then each new token."""
        self.ids += ids.flatten().tolist()
        self.tokens -= 1
        if self.tokens < 0:
            raise ConnectionError("the client has gone")

    def end(self):
        pass


def test_a_turn_whose_client_goes_away(smollm):
    """The next turn must raise an error that names what helps, and both remedies must help: a copy
    of the cache for each turn, or the ids that were streamed."""
    model, tokenizer = narrow_default_model(4)
    greedy = {"max_new_tokens": 8, "do_sample": False}
    cache = H2OCache(model, budget=64)
    out = model.generate(prompt_of(tokenizer, CHAT[:2]), **greedy, **with_cache(cache))
    ids, before = h2o.next_turn(tokenizer, out, "And who built it?"), cache.fork()
    wanted = model.generate(ids, **greedy, **with_cache(cache.fork()))
    streamer = LeavingClient(4)
    with pytest.raises(ConnectionError):
        model.generate(ids, streamer=streamer, **greedy, **with_cache(cache))
    other = h2o.next_turn(tokenizer, out, "Of what stone is the tower, and how high is it?")
    remedies = r"ids that were streamed: append to these.*turn = cache\.fork\(\)"
    with pytest.raises(ValueError, match=remedies):
        model.generate(other, **greedy, **with_cache(cache))
    assert model.generate(ids, **greedy, **with_cache(before)).tolist() == wanted.tolist()
    assert len(streamer.ids) == ids.shape[1] + 4
    streamed = h2o.next_turn(tokenizer, streamer.ids, "When?")
    model.generate(streamed, **greedy, **with_cache(cache))
    assert int(cache.get_seq_length()) == streamed.shape[1] + 7


# ---- generate_all ------------------------------------------------------------------------------


def test_requests_with_arguments_of_the_template():
    """A chat's tokens and its pinned system turn must be those with the arguments of the call, or
    with the request's own."""
    tokenizer = with_template(chat_templates.TOOLS_FIRST)
    ours = deep(vocab_size=256)
    how = {"rows": 2, "max_new_tokens": 2, "tokenizer": tokenizer, "budget": 400}
    requests = [
        CHAT,
        Request(CHAT, chat_template_kwargs={}),
        Request("Hi", chat_template_kwargs={}),
    ]
    results = [
        *h2o.generate_all(
            ours, requests, pinned="system", chat_template_kwargs={"tools": [TOOL]}, **how
        )
    ]
    wanted = [prompt_of(tokenizer, CHAT, **x).shape[1] for x in ({"tools": [TOOL]}, {})]
    assert [x.prompt_tokens for x in results[:2]] == wanted
    assert [x.finish_reason for x in results] == ["length", "length", "error"]
    assert "needs a chat" in str(results[2].error)
    for wrong in ({"tokenize": False}, ["tools"]):
        with pytest.raises(TypeError, match="chat template"):
            h2o.generate_all(ours, [CHAT], chat_template_kwargs=wrong, **how)
