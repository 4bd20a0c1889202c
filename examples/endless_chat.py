"""Chat with a model that has one cache of a fixed size.

    python examples/endless_chat.py --keys 512

Each line of standard input is a turn. The cache keeps attention sinks, heavy hitters and recent
keys of the whole conversation. Cache-relative positions keep every position below the budget, so
the conversation may be longer than the model's context. Ctrl-D ends it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch

import h2o


class Chat:
    """A conversation. `reply` yields the pieces of an answer.

    Args:
        system: the system prompt. Its tokens are evicted like any others unless they are `pinned`.
        pinned: as for an `H2OCache`.

    Raises:
        ValueError: the tokenizer has no chat template.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: h2o.H2OConfig,
        system: str | None = None,
        pinned: Any = None,
    ) -> None:
        if tokenizer.chat_template is None:
            raise ValueError("this model's tokenizer has no chat template")
        self.model, self.tokenizer = model, tokenizer
        self.opening = [] if system is None else [{"role": "system", "content": system}]
        self.cache = h2o.H2OCache(model, config, pinned=pinned)
        self.ids: torch.Tensor | None = None  # the conversation as tokens, 8 bytes each
        ends = model.generation_config.eos_token_id
        self.ends = [tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])]

    def reply(self, said: str, max_new_tokens: int = 200) -> Iterator[str]:
        """Yield the model's greedy answer to the next turn, piece by piece."""
        ids = self.turn(said)
        begin = ids.shape[1]
        shown = ""
        while ids.shape[1] < begin + max_new_tokens:
            token = self._next(ids[:, self.cache.get_seq_length() :])
            ids = torch.cat([ids, ids.new_tensor([[token]])], dim=1)
            self.ids = ids
            if token in self.ends:
                break
            text = self.tokenizer.decode(ids[0, begin:], skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # half a character
                yield text[len(shown) :]
                shown = text

    def turn(self, said: str) -> torch.Tensor:
        """The conversation with the next turn: int [1, n]. The first turn includes the system
        prompt."""
        if self.ids is not None:
            return h2o.next_turn(self.tokenizer, self.ids, said, eos_token_id=self.ends)
        inputs = self.tokenizer.apply_chat_template(
            [*self.opening, {"role": "user", "content": said}],
            add_generation_prompt=True, return_tensors="pt", return_dict=True,
        )  # fmt: skip
        return inputs["input_ids"]

    @torch.no_grad()
    def _next(self, ids: torch.Tensor) -> int:
        """Add tokens [1, n] to the cache and return the most likely next one."""
        text = ids.to(self.model.device)
        # At position 0 the model rotates nothing. The cache rotates each key by its rank among the
        # keys that it holds.
        out = self.model(text, cache=self.cache, position_ids=torch.zeros_like(text))
        return int(out.logits[0, -1].argmax())


def endless(keys: int) -> h2o.H2OConfig:
    """A config for texts of any length with `keys` keys per head. Half of them are the newest."""
    half = keys // 2
    return h2o.H2OConfig(
        heavy=keys - half - 4, recent=half, sinks=4, score_by="mean",
        positions="cache_relative", min_tokens=0,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: SmolLM2-135M-Instruct")
    parser.add_argument("--keys", type=int, default=512, help="keys per head (%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=200, help="limit of an answer")
    options = parser.parse_args()
    model, tokenizer = h2o.load_model(options.model)
    chat = Chat(model, tokenizer, endless(options.keys))
    print("> ", end="", flush=True)
    for line in sys.stdin:
        for piece in chat.reply(line.strip(), options.max_new_tokens):
            print(piece, end="", flush=True)
        print("\n> ", end="", flush=True)
    held = chat.cache.report().total
    print(
        f"\n{chat.cache.get_seq_length()} tokens, KV cache {held.bytes_held / 1e6:.1f} MB; a full "
        f"cache would hold {held.bytes_full / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    main()
