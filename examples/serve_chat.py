"""Serve chats over HTTP, with a cache of a fixed size for each user.

    python examples/serve_chat.py --port 8000 --keys 512
    curl -N localhost:8000/chat -d '{"user": "anna", "message": "What is a lighthouse?"}'
    curl localhost:8000/stop -d '{"user": "anna"}'
    curl localhost:8000/forget -d '{"user": "anna"}'
    curl localhost:8000/report

An answer is streamed as server-sent events, one line `data: {"text": ...}` for each piece. A client
that disconnects in the middle of an answer cancels it, and the turn is forgotten, as is a turn in
which an error occurs: the user can send the message again. /stop also ends an answer early, but the
conversation keeps what has been written. The server trusts the names that clients give. Put it
behind something that knows its users.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextIteratorStreamer

import h2o

SYSTEM = "You are a helpful assistant. Keep every answer short."


class StopWhen(StoppingCriteria):
    """Ends `generate()` before the next token once an event is set."""

    def __init__(self, event: threading.Event) -> None:
        self.event = event

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        is_done = self.event.is_set()
        return torch.full((len(input_ids),), is_done, device=input_ids.device)


class Conversation:
    """The chat of one user. Its turns run one after another.

    Args:
        pool: runs `generate()`. Its size is the number of answers that are written at a time.
        keys: keys per head. The system turn is pinned within them.
    """

    def __init__(
        self, model: Any, tokenizer: Any, pool: ThreadPoolExecutor, keys: int, system: str = SYSTEM
    ) -> None:
        self.model, self.tokenizer, self.pool = model, tokenizer, pool
        self.opening = [{"role": "system", "content": system}]
        example = [*self.opening, {"role": "user", "content": "x"}]
        # Cache-relative positions: the chat may become longer than the model's context.
        self.cache = h2o.H2OCache(
            model, budget=keys, positions="cache_relative",
            pinned=[h2o.system_span(tokenizer, example)],
        )  # fmt: skip
        self.ids: torch.Tensor | None = None  # everything that was said, as tokens
        self.turn = threading.Lock()
        self.stop = threading.Event()

    def reply(self, message: str, max_new_tokens: int, streamer: Any = None) -> Iterator[str]:
        """Yield the answer to a message, piece by piece.

        The turn counts once the last piece has been taken. If the caller closes the iterator
        before, or an error occurs, the conversation stays as it was before the turn.
        """
        with self.turn:
            self.stop.clear()
            streamer = streamer or TextIteratorStreamer(
                self.tokenizer, skip_prompt=True, skip_special_tokens=True
            )
            answer = self.pool.submit(self._generate, message, max_new_tokens, streamer)
            try:
                yield from streamer
                self.ids, self.cache = answer.result()
            finally:
                self.stop.set()  # a turn that is over does not mind
                if not answer.cancel():  # it has begun
                    wait([answer])

    def _generate(
        self, message: str, max_new_tokens: int, streamer: Any
    ) -> tuple[torch.Tensor, h2o.H2OCache]:
        """The ids and the cache after a turn, which runs on a copy of the cache."""
        try:
            cache = self.cache.fork()
            ids = self.next_ids(message).to(self.model.device)
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                cache=cache,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                streamer=streamer,
                stopping_criteria=StoppingCriteriaList([StopWhen(self.stop)]),
            )
        finally:
            streamer.end()  # generate() does not end it after an error
        return out, cache

    def next_ids(self, message: str) -> torch.Tensor:
        """The ids of the conversation with a new message: int [1, n]."""
        if self.ids is not None:
            ends = self.model.generation_config.eos_token_id
            return h2o.next_turn(self.tokenizer, self.ids, message, eos_token_id=ends)
        chat = [*self.opening, {"role": "user", "content": message}]
        inputs = self.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        return inputs["input_ids"]

    def report(self) -> dict[str, int]:
        """Tokens that were said, and bytes of the cache."""
        total = self.cache.report().total
        return {"tokens": int(self.cache.get_seq_length()), "bytes": total.bytes_held}


class Server(ThreadingHTTPServer):
    """Has the conversations of all users. Each request runs in a thread of its own."""

    daemon_threads = True

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__((options.host, options.port), Handler)
        self.options = options
        self.model, self.tokenizer = h2o.load_model(options.model)
        self.pool = ThreadPoolExecutor(options.at_a_time)
        self.users: dict[str, Conversation] = {}
        self.lock = threading.Lock()

    def conversation(self, user: str) -> Conversation | None:
        """The conversation of a user, who may be new; None if there are too many users."""
        with self.lock:
            if user not in self.users and len(self.users) < self.options.users:
                self.users[user] = Conversation(
                    self.model, self.tokenizer, self.pool, self.options.keys
                )
            return self.users.get(user)


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_GET(self) -> None:
        if self.path != "/report":
            return self.send_error(404)
        with self.server.lock:
            users = dict(self.server.users)
        self.answer({name: each.report() for name, each in users.items()})

    def do_POST(self) -> None:
        actions = {"/chat": self.chat, "/stop": self.stop, "/forget": self.forget}
        if self.path not in actions:
            return self.send_error(404)
        try:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
            user = body["user"]
            if not (isinstance(user, str) and isinstance(body.get("message", ""), str)):
                raise TypeError
            if self.path == "/chat":
                body["max_new_tokens"] = int(body.get("max_new_tokens", 10**9))
                body["message"]
        except (ValueError, KeyError, TypeError):
            return self.send_error(400, 'expected {"user": "...", "message": "..."}')
        actions[self.path](user, body)

    def chat(self, user: str, body: dict[str, Any]) -> None:
        most = self.server.options.max_new_tokens
        message, limit = body["message"], min(most, max(1, body["max_new_tokens"]))
        conversation = self.server.conversation(user)
        if conversation is None:
            return self.send_error(503, "too many users: post one to /forget")
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        try:  # a client that has gone leaves the block, and closing the iterator cancels the answer
            with contextlib.closing(conversation.reply(message, limit)) as pieces:
                for piece in pieces:
                    self.send_event({"text": piece})
            self.send_event({"done": True, **conversation.report()})
        except ConnectionError:
            self.log_message("%s has disconnected", user)
        except Exception as error:
            self.log_error("%s: %r", user, error)
            with contextlib.suppress(ConnectionError):
                self.send_event({"error": str(error)})

    def stop(self, user: str, _: dict[str, Any]) -> None:
        if user in self.server.users:
            self.server.users[user].stop.set()
        self.answer({})

    def forget(self, user: str, _: dict[str, Any]) -> None:
        with self.server.lock:
            conversation = self.server.users.pop(user, None)
        if conversation is not None:
            conversation.stop.set()
        self.answer({})

    def send_event(self, content: dict[str, Any]) -> None:
        if content.get("text") != "":  # the streamer waits for whole words
            self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def answer(self, content: Any) -> None:
        body = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000, help="0: any free one (%(default)s)")
    parser.add_argument("--keys", type=int, default=512, help="keys per head (%(default)s)")
    parser.add_argument("--users", type=int, default=100, help="most users (%(default)s)")
    parser.add_argument("--at-a-time", type=int, default=2, help="answers (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="limit of an answer")
    options = parser.parse_args()
    server = Server(options)
    print(f"serving http://{options.host}:{server.server_port}/chat", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever()


if __name__ == "__main__":
    main()
