"""A chat that forgets the thoughts of each turn.

    python examples/thinking_chat.py --turns 30

The thoughts are scripted, because the small model has none of its own. The program leaves them out
of earlier turns, as the chat templates of thinking models do, and renders the chat anew for each
turn. `h2o.dropped_spans` finds what is gone. One cache forgets it and reads only what is new.
Without that, a full cache has to prefill the chat again.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import h2o

TURNS = (
    ("The ferry to Skerra leaves at nine. How long is a day on Skerra?", "A day has 24 hours."),
    ("And what should I take along?", "Take a warm coat and something to eat."),
    ("Is there a lighthouse?", "Yes, it stands on the northern cape."),
)
QUESTION = "At what time does the ferry leave?"
THOUGHT = (
    "<think>\nThe user asks about Skerra. {0} I check what I know of the island. {1}\n</think>\n\n"
)


class Chat:
    """Messages, and a cache that has seen them as the chat template renders them."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.cache = h2o.H2OCache(model, h2o.H2OConfig.full())
        self.messages: list[dict[str, str]] = []
        self.seen: torch.Tensor | None = None
        """The ids that the cache has seen, [1, n]"""

    def render(self, *, asks: bool) -> torch.Tensor:
        """The ids of the chat, without thoughts. `asks`: with the header of the next answer."""
        inputs = self.tokenizer.apply_chat_template(
            self.messages, add_generation_prompt=asks, return_tensors="pt", return_dict=True
        )
        return inputs["input_ids"]

    @torch.no_grad()
    def read(self, ids: torch.Tensor) -> int:
        """Add to the cache those ids that it has not seen, and forget those that are gone. Returns
        the number of new ones."""
        self.forget(ids)
        new = ids[:, self.cache.get_seq_length() :]
        self.model(new, cache=self.cache, logits_to_keep=1)
        self.seen = ids
        return new.shape[1]

    def forget(self, ids: torch.Tensor) -> None:
        """Remove from the cache the thoughts that a newly rendered chat no longer has."""
        if self.seen is not None:
            self.cache.evict(h2o.dropped_spans(self.tokenizer, self.seen, ids), ids=self.seen)

    def turn(self, question: str, thought: str, answer: str) -> int:
        """A question, a scripted thought and answer. Returns the number of tokens read."""
        self.messages.append({"role": "user", "content": question})
        header = self.render(asks=True)
        self.messages.append({"role": "assistant", "content": answer})
        rest = self.render(asks=False)[:, header.shape[1] :]  # the answer and its end
        thoughts = torch.tensor([self.tokenizer(thought, add_special_tokens=False)["input_ids"]])
        ids = torch.cat([header, thoughts, rest], dim=1)
        return self.read(ids)

    def ask(self, question: str) -> str:
        """The model's own answer, without a thought."""
        self.messages.append({"role": "user", "content": question})
        ids = self.render(asks=True)
        self.forget(ids)
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), cache=self.cache, max_new_tokens=16,
            do_sample=False,
        )  # fmt: skip
        return self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--turns", type=int, default=30, help="(%(default)s)")
    options = parser.parse_args()
    model, tokenizer = h2o.load_model(options.model)
    chat = Chat(model, tokenizer)
    print("turn  tokens of the chat  tokens read  seconds  seconds to prefill the chat again")
    for number in range(1, options.turns + 1):
        question, answer = TURNS[(number - 1) % len(TURNS)]
        start = time.perf_counter()
        read = chat.turn(question, THOUGHT.format(question, "So I answer: " + answer), answer)
        seconds = time.perf_counter() - start
        if number % 5 and number != options.turns:
            continue
        start = time.perf_counter()
        with torch.no_grad():
            model(chat.render(asks=False), use_cache=False, logits_to_keep=1)
        again = time.perf_counter() - start
        held = chat.cache.get_seq_length()
        print(f"{number:4}  {held:18}  {read:11}  {seconds:7.2f}  {again:33.2f}")
    print(f"{QUESTION} {chat.ask(QUESTION)!r}")
    print(chat.cache.report().note)


if __name__ == "__main__":
    main()
