"""Keep the instructions of a chat while hundreds of turns pass through a cache of a fixed size.

    python examples/pinned_chat.py --turns 200 --keys 192

Two chats with one model get the same system prompt and the same turns, an invented harbor log. One
chat pins its system prompt, the other lets its keys be evicted like any others. With --full a third
chat keeps every key, which shows what the model forgets even so. Every --every turns all are asked
a question that only the system prompt answers. The question goes to a copy of each chat's cache, so
that the conversation itself does not repeat the answer.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator

from endless_chat import Chat, endless

import h2o

SYSTEM = (
    "You answer calls at Marrow Point harbor. Keep every answer under ten words. "
    "The harbor master is Captain Ingrid Solberg. The pier closes at nine in the evening."
)
QUESTION, ANSWER = "What is the name of the harbor master at Marrow Point?", "solberg"
SHIPS = ("Aurora", "Sabrina", "Lund", "Petrel", "Corvo", "Halcyon", "Mistral")
GOODS = ("salt", "timber", "coal", "herring", "barley")


def reports(turns: int) -> Iterator[str]:
    """Yield what the user says in each turn."""
    for turn in range(turns):
        ship, goods = SHIPS[turn % len(SHIPS)], GOODS[turn % len(GOODS)]
        yield f"Call {turn + 1}: the {ship} brings {3 + 7 * turn % 90} tons of {goods}."


def share_held(chat: Chat, tokens: int) -> float:
    """Share of the system prompt's keys that the cache holds, over all layers and heads."""
    held = [
        ((kept.positions >= 0) & (kept.positions < tokens)).sum(-1).float().mean() / tokens
        for kept in map(chat.cache.kept, range(len(chat.cache.layers)))
    ]
    return float(sum(held) / len(held))


def ask(chat: Chat, question: str, max_new_tokens: int) -> str:
    """Answer a question without adding it to the conversation."""
    cache, ids = chat.cache, chat.ids
    chat.cache = cache.fork()
    answer = " ".join("".join(chat.reply(question, max_new_tokens)).split())
    chat.cache, chat.ids = cache, ids
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="turns between two questions")
    parser.add_argument("--keys", type=int, default=192, help="keys per head (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=12, help="limit of an answer")
    parser.add_argument("--full", action="store_true", help="add a chat that keeps every key")
    options = parser.parse_args()
    model, tokenizer = h2o.load_model(options.model)
    config = endless(options.keys)
    span = h2o.system_span(
        tokenizer, [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "x"}]
    )
    chats = {
        "pinned": Chat(model, tokenizer, config, SYSTEM, pinned=[span]),
        "left to the budget": Chat(model, tokenizer, config, SYSTEM),
    }
    if options.full:
        every = dataclasses.replace(h2o.H2OConfig.full(), positions="cache_relative")
        chats["every key"] = Chat(model, tokenizer, every, SYSTEM)
    print(f"{span[1]} tokens of instructions, {options.keys} keys per head. {QUESTION}")
    for turn, said in enumerate(reports(options.turns), start=1):
        for name, chat in chats.items():
            for _ in chat.reply(said, options.max_new_tokens):
                pass
            if turn % options.every == 0:
                answer = ask(chat, QUESTION, 2 * options.max_new_tokens)
                held = chat.cache.report().total.bytes_held
                print(
                    f"{turn:5} turns, {chat.ids.shape[1]:6} tokens, "
                    f"{held / 1e6:.2f} MB, {name:18} "
                    f"{share_held(chat, span[1]):4.0%} of the instructions held, "
                    f"{'right' if ANSWER in answer.lower() else 'wrong'}: {answer}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
