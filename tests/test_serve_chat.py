"""The chat server of the examples, as a process of its own that two users talk to at once."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoTokenizer

from h2o import models
from tests.default_model import narrow_default_model
from tests.examples import EXAMPLES
from tests.hf.chat_templates import TURNS
from tests.launch import start
from tests.test_cli import tiny  # noqa: F401

if not EXAMPLES.is_dir():
    pytest.skip("the examples are not here", allow_module_level=True)
pytestmark = pytest.mark.timeout(600)

SAID = ["Hello, who are you?", "What is a lighthouse?", "Tell me a long story.", "And the end?"]


@contextlib.contextmanager
def serving(*options):
    """Run the server. Yields the port that it has chosen."""
    program = [EXAMPLES / "serve_chat.py", "--port", "0", "--keys", "96", *options]
    process = start(program, launcher=())
    try:
        line = process.stdout.readline()
        assert line.startswith("serving http://127.0.0.1:"), process.stderr.read()
        yield int(line.split(":")[2].split("/")[0])
    finally:
        process.kill()
        process.communicate()


def post(port, path, body):
    """An open connection and its response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("POST", path, json.dumps(body))
    return connection, connection.getresponse()


def events(response):
    """Yield the events of a stream."""
    for line in response:
        if line.strip():
            yield json.loads(line.removeprefix(b"data: "))


def ask(port, user, message, tokens=12):
    """(text, last event) of an answer."""
    connection, response = post(
        port, "/chat", {"user": user, "message": message, "max_new_tokens": tokens}
    )
    with contextlib.closing(connection):
        assert response.status == 200
        *pieces, last = events(response)
    return "".join(piece["text"] for piece in pieces), last


def leave(port, user, message):
    """Disconnect after the first piece of a long answer."""
    body = {"user": user, "message": message, "max_new_tokens": 5000}
    connection, response = post(port, "/chat", body)
    assert next(events(response))["text"]
    response.close()
    connection.close()


def report(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    connection.request("GET", "/report")
    with contextlib.closing(connection):
        return json.loads(connection.getresponse().read())


def talk(port, user, leaves=False):
    """Answers and last events of a chat. One that `leaves` disconnects in the middle of the third
    answer and then sends that message again."""
    turns = []
    for turn, message in enumerate(SAID):
        if leaves and turn == 2:
            before = report(port)[user]
            leave(port, user, message)
            # The user's next request waits until the answer has been cancelled.
            turns.append(ask(port, user, message))
            assert turns[-1][1]["tokens"] < before["tokens"] + 200, "and not the 5000 of before"
        else:
            turns.append(ask(port, user, message))
    return turns


@pytest.fixture
def folder(request, tiny, tmp_path):  # noqa: F811
    """Options that name a model with a chat template: a tiny one, or (slow) the default model."""
    if request.param == "default":
        try:
            models.find_weights()
        except models.UserError as error:
            pytest.skip(str(error))
        return []
    folder = shutil.copytree(tiny, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = TURNS
    tokenizer.save_pretrained(folder)
    return ["--model", folder]


@pytest.mark.parametrize(
    "folder", ["tiny", pytest.param("default", marks=pytest.mark.slow)], indirect=True
)
def test_users_talk_at_once_and_disconnect(folder):
    """A chat whose client disconnects in the middle of an answer must go on as if it had not, while
    another one runs, and the caches must not grow."""
    with serving(*folder, "--users", "3", "--max-new-tokens", "5000") as port:
        with ThreadPoolExecutor(2) as pool:
            both = [pool.submit(talk, port, *x) for x in (("anna",), ("boris", True))]
            anna, boris = (each.result() for each in both)
        assert [text for text, _ in anna] == [text for text, _ in boris]
        assert all(last["done"] for _, last in anna + boris)
        assert anna == boris, "tokens and bytes too"
        sizes = [last["bytes"] for _, last in anna]
        more = [ask(port, "anna", "Go on, please. " * 3)[1] for _ in range(3)]
        assert {last["bytes"] for last in more} == {sizes[-1]} == {sizes[-2]}
        assert more[-1]["tokens"] > 3 * 96 / 2, "more than the budget"
        assert set(report(port)) == {"anna", "boris"}

        connection, response = post(
            port, "/chat", {"user": "carl", "message": SAID[2], "max_new_tokens": 5000}
        )
        with contextlib.closing(connection):
            streamed = events(response)
            first = next(streamed)["text"]
            post(port, "/stop", {"user": "carl"})[0].close()
            *_, last = streamed
        assert last["done"]
        assert last["tokens"] < 4000
        assert first
        assert ask(port, "carl", "And?")[1]["tokens"] > last["tokens"], "what was written is kept"
        assert post(port, "/chat", {"user": "dora", "message": "Hi"})[1].status == 503
        for body in ([], {}, {"user": 5, "message": "Hi"}, {"user": "anna"}):
            connection, response = post(port, "/chat", body)
            with contextlib.closing(connection):
                assert response.status == 400
                assert b"expected" in response.read()
        post(port, "/forget", {"user": "carl"})[1].read()
        assert ask(port, "dora", SAID[0]) == anna[0]


class Failing:
    """A streamer that raises after two tokens."""

    def __init__(self):
        self.left = 3

    def put(self, ids):
        self.left -= 1
        if self.left < 0:
            raise ConnectionError("gone")

    def end(self):
        pass

    def __iter__(self):
        return iter(())


def test_an_error_in_the_middle_of_an_answer(monkeypatch):
    """The turn must be forgotten, and the conversation go on."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    serve_chat = __import__("serve_chat")
    model, tokenizer = narrow_default_model(2)
    with ThreadPoolExecutor(1) as pool:
        chats = [serve_chat.Conversation(model, tokenizer, pool, 96) for _ in range(2)]
        answers = []
        for chat in chats:
            "".join(chat.reply(SAID[0], 8))
            if chat is chats[1]:
                held = chat.cache, chat.ids
                with pytest.raises(ConnectionError):
                    list(chat.reply("Lost.", 8, Failing()))
                assert (chat.cache, chat.ids) == held
                pieces = chat.reply("Lost.", 8)
                next(pieces)
                pieces.close()
                assert (chat.cache, chat.ids) == held
            answers.append("".join(chat.reply(SAID[1], 8)))
    assert answers[0] == answers[1]
