"""An agent that forgets old tool results: what each turn reads, takes and holds.

    python examples/agent.py --calls 60

A user asks for a report on many rooms. For each room the model says something, and a tool answers
with a long list. Only the last lists stay in the cache, and only the last turns. Beside it are (a)
a full cache that reads the shortened chat anew for each turn, as engines without `evict` must, and
(b) a full cache that keeps everything. At the end all three are asked about what was not forgotten.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

import h2o

TASK = (
    "Check all rooms of the museum, one after the other. The keeper of the museum is called Orla "
    "Venn. The museum closes at half past seven. The code of the alarm is 4182. Remember all this. "
    "I will ask for it at the end."
)
FACTS = (
    ("All rooms are checked. What is the name of the keeper of the museum?", "Venn"),
    ("All rooms are checked. When does the museum close?", "seven"),
    ("All rooms are checked. What is the code of the alarm?", "4182"),
)
"""What the task says: questions, and what a right answer contains"""
WORDS = "lamp vase coin mask rope bell drum sail book fork knot cage harp kite oar quill".split()


def result(room: int, items: int) -> dict[str, str]:
    """A message of the tool: the things in a room."""
    things = [f"{WORDS[(room * 7 + i * 3) % len(WORDS)]} {room * i % 97}" for i in range(items)]
    return {"role": "tool", "content": f"Room {room}: " + ", ".join(things)}


class Agent:
    """A chat on one cache, which can forget old tool results and old turns."""

    def __init__(self, model: Any, tokenizer: Any, ids: torch.Tensor) -> None:
        """
        Args:
            ids: [1, n], the beginning of the chat.
        """
        self.model, self.tokenizer, self.ids = model, tokenizer, ids
        self.turns = torch.zeros_like(ids)
        """[1, n], the turn of each token, 0 for the beginning of the chat"""
        self.cache = h2o.H2OCache(model, h2o.H2OConfig.full())
        self.seconds = 0.0
        """CPU seconds of all turns so far, which no other program disturbs"""

    def turn(self, message: Any, results: int | None = None, turns: int | None = None) -> int:
        """Answer a message.

        Args:
            results: tool results that the chat keeps, counted from the last one. None keeps all.
            turns: turns that it keeps besides its beginning. None keeps all.

        Returns:
            The number of tokens that were read.
        """
        start, seen = time.process_time(), self.cache.get_seq_length()
        ids = h2o.next_turn(self.tokenizer, self.ids, message)
        self.ids = self.answer(self.cache, ids, 8)
        new = self.ids.shape[1] - self.turns.shape[1]
        self.turns = torch.nn.functional.pad(self.turns, (0, new), value=int(self.turns.max()) + 1)
        self.forget(results, turns)
        self.seconds += time.process_time() - start
        return ids.shape[1] - seen

    def forget(self, results: int | None, turns: int | None) -> None:
        """Remove old tool results and old turns from the cache and from `ids`."""
        gone = torch.zeros_like(self.ids, dtype=torch.bool)
        if results is not None:
            for start, stop in h2o.tool_spans(self.tokenizer, self.ids, results):
                gone[:, start:stop] = True
        if turns is not None:
            gone |= (self.turns > 0) & (self.turns <= self.turns.max() - turns)
        self.cache.evict(gone[:, : self.cache.get_seq_length()], ids=self.ids)
        self.ids, self.turns = self.ids[~gone][None], self.turns[~gone][None]

    def answer(self, cache: Any, ids: torch.Tensor, tokens: int) -> torch.Tensor:
        """The ids of the chat with up to so many more tokens."""
        return self.model.generate(
            ids, attention_mask=torch.ones_like(ids), cache=cache, max_new_tokens=tokens,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip

    def ask(self, question: str) -> str:
        """The answer to a question, which leaves no trace in the chat."""
        ids = h2o.next_turn(self.tokenizer, self.ids, question)
        out = self.answer(self.cache.fork(), ids, 16)
        return self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)

    def megabytes(self) -> float:
        """What the cache holds."""
        return self.cache.report().total.bytes_held / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--calls", type=int, default=60, help="tool calls (%(default)s)")
    parser.add_argument("--items", type=int, default=12, help="things per room (%(default)s)")
    parser.add_argument("--results", type=int, default=3, help="results kept (%(default)s)")
    parser.add_argument("--turns", type=int, default=12, help="turns kept (%(default)s)")
    options = parser.parse_args()
    model, tokenizer = h2o.load_model(options.model)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": TASK}],
        add_generation_prompt=True, return_tensors="pt", return_dict=True,
    )  # fmt: skip
    forgets, keeps = (Agent(model, tokenizer, inputs["input_ids"]) for _ in range(2))
    print("call  read  CPU s  (a) read  (a) CPU s  (b) CPU s      MB  (b) MB")
    for call in range(1, options.calls + 1):
        anew = Agent(model, tokenizer, forgets.ids)
        message = result(call, options.items)
        before = [agent.seconds for agent in (forgets, keeps)]
        read, _ = forgets.turn(message, options.results, options.turns), keeps.turn(message)
        if call % 10 and call != options.calls:
            continue
        read_anew = anew.turn(message)
        now, full = forgets.seconds - before[0], keeps.seconds - before[1]
        print(
            f"{call:4}  {read:4}  {now:5.2f}  {read_anew:8}  {anew.seconds:9.2f}  {full:9.2f}  "
            f"{forgets.megabytes():6.2f}  {keeps.megabytes():6.2f}",
            flush=True,
        )
    print(f"CPU seconds of all calls: {forgets.seconds:.0f}, (b) {keeps.seconds:.0f}")
    agents = {"forgets": forgets, "(a)": anew, "(b)": keeps}
    for question, right in FACTS:
        for name, agent in agents.items():
            said = agent.ask(question)
            print(f"{name:7}  {'found' if right in said else 'not found':9}  {said!r}", flush=True)
    print(forgets.cache.report().note)


if __name__ == "__main__":
    main()
