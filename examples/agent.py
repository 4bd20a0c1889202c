"""An agent that forgets old tool results: what each turn reads, takes and holds.

    python examples/agent.py --calls 60

A user asks for a report on many rooms. For each room the model says something, and a tool answers
with a long list. Only the last three lists stay in the cache. Beside it are (a) a full cache that
prefills the shortened chat again, as engines without `evict` must, and (b) a full cache that keeps
every list.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import h2o

TASK = (
    "Check all rooms of the museum, one after the other. The keeper of the museum is called Orla "
    "Venn. Remember this name. I will ask for it at the end."
)
QUESTION = "All rooms are checked. What is the name of the keeper of the museum?"
WORDS = "lamp vase coin mask rope bell drum sail book fork knot cage harp kite oar quill".split()


def result(room: int, items: int) -> dict[str, str]:
    """A message of the tool: the things in a room."""
    things = [f"{WORDS[(room * 7 + i * 3) % len(WORDS)]} {room * i % 97}" for i in range(items)]
    return {"role": "tool", "content": f"Room {room}: " + ", ".join(things)}


class Agent:
    """A chat on one cache that forgets all tool results except the last `keep_last`."""

    def __init__(self, model: Any, tokenizer: Any, cache: Any, keep_last: int | None) -> None:
        self.model, self.tokenizer, self.cache, self.keep_last = model, tokenizer, cache, keep_last
        inputs = tokenizer.apply_chat_template(
            [{"role": "user", "content": TASK}],
            add_generation_prompt=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
        self.ids = self.answer(inputs["input_ids"], 8)

    def answer(self, ids: torch.Tensor, tokens: int) -> torch.Tensor:
        """The ids of the chat with up to so many more tokens."""
        return self.model.generate(
            ids, attention_mask=torch.ones_like(ids), cache=self.cache, max_new_tokens=tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip

    def turn(self, message: Any, tokens: int = 8) -> int:
        """Answer a message. Returns the number of tokens that were read."""
        seen = self.cache.get_seq_length()
        ids = h2o.next_turn(self.tokenizer, self.ids, message)
        self.ids = self.answer(ids, tokens)
        if self.keep_last is not None:
            spans = h2o.tool_spans(self.tokenizer, self.ids, self.keep_last)
            self.cache.evict(spans, ids=self.ids)
            self.ids = h2o.without_spans(self.ids, spans)
        return ids.shape[1] - seen

    def ask(self, question: str) -> str:
        """The answer to a question."""
        before = h2o.next_turn(self.tokenizer, self.ids, question).shape[1]
        self.turn(question, 24)
        return self.tokenizer.decode(self.ids[0, before:], skip_special_tokens=True)


def prefill_time(model: Any, ids: torch.Tensor) -> float:
    """Seconds to prefill the chat with a new full cache."""
    start = time.perf_counter()
    with torch.no_grad():
        model(ids, cache=h2o.H2OCache(model, h2o.H2OConfig.full()), logits_to_keep=1)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--calls", type=int, default=60, help="tool calls (%(default)s)")
    parser.add_argument("--items", type=int, default=12, help="things per room (%(default)s)")
    options = parser.parse_args()
    model, tokenizer = h2o.load_model(options.model)
    agents = [
        Agent(model, tokenizer, h2o.H2OCache(model, h2o.H2OConfig.full()), keep_last)
        for keep_last in (3, None)
    ]
    print("call  tokens read  seconds  (a) seconds  tokens held  (b) tokens held     MB  (b) MB")
    for call in range(1, options.calls + 1):
        start = time.perf_counter()
        read = agents[0].turn(result(call, options.items))
        seconds = time.perf_counter() - start
        agents[1].turn(result(call, options.items))
        if call % 10 and call != options.calls:
            continue
        anew = prefill_time(model, agents[0].ids)
        held = [agent.cache.get_seq_length() for agent in agents]
        size = [agent.cache.report().total.bytes_held / 1e6 for agent in agents]
        print(
            f"{call:4}  {read:11}  {seconds:7.2f}  {anew:11.2f}  {held[0]:11}  {held[1]:15}  "
            f"{size[0]:5.1f}  {size[1]:6.1f}"
        )
    for name, agent in zip(("without the results", "with all results"), agents, strict=True):
        print(f"{name}: {agent.ask(QUESTION)!r}")
    print(agents[0].cache.report().note)


if __name__ == "__main__":
    main()
