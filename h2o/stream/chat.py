"""A chat that goes on for ever: turn after turn on one cache of fixed size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from h2o.borrowed import with_cache
from h2o.config import H2OConfig
from h2o.errors import UserError
from h2o.hf.cache import H2OCache
from h2o.hf.patch_lock import input_device
from h2o.hf.positions import positions_after

__all__ = ["Chat"]


class Chat:
    """A conversation with one model.

    Args:
        model, tokenizer: the model with attn_implementation="h2o", the tokenizer with a template.
        config: the cache's.
        system: what the system prompt says, if the template has room for one.

    Raises: UserError without a chat template.
    """

    def __init__(
        self, model: Any, tokenizer: Any, config: H2OConfig, system: str | None = None
    ) -> None:
        if tokenizer.chat_template is None:
            raise UserError("this model's tokenizer has no chat template")
        self.model, self.tokenizer = model, tokenizer
        self.cache = H2OCache(model, config)
        self.rolled = config.positions == "rolled"
        self.system = [] if system is None else [{"role": "system", "content": system}]
        ends = model.generation_config.eos_token_id
        self.ends = {tokenizer.eos_token_id, *(ends if isinstance(ends, list) else [ends])} - {None}

    def reply(self, said: str, max_new_tokens: int = 200) -> Iterator[str]:
        """What the model answers to the next turn, piece by piece, chosen greedily."""
        ids = self.tokenizer(self.message(said), add_special_tokens=False)["input_ids"]
        answer: list[int] = []
        shown = ""
        while True:
            token = self._next(ids)
            if token in self.ends:
                self._next([token])
                break
            answer.append(token)
            text = self.tokenizer.decode(answer, skip_special_tokens=True)
            if not text.endswith("\ufffd"):  # never half a character
                yield text[len(shown) :]
                shown = text
            if len(answer) == max_new_tokens:
                self._next([token, self.tokenizer.eos_token_id])  # as if it had ended here
                break
            ids = [token]

    def message(self, said: str) -> str:
        """The next turn as the template has it: all of it at first, later what is new."""
        user = {"role": "user", "content": said}
        if not self.cache.get_seq_length():
            return self._render([*self.system, user], True)
        # What stood before is no longer there to be rendered: any turn will do.
        before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
        head = self._render(before, False).rstrip("\n")
        rendered = self._render([*before, user], True)
        if not rendered.startswith(head):
            raise UserError("the chat template rewrites earlier turns: it cannot go on for ever")
        return rendered[len(head) :]

    def _render(self, turns: list[dict[str, str]], prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(
            turns, add_generation_prompt=prompt, tokenize=False
        )

    def _next(self, ids: list[int]) -> int:
        """Reads ids; the most likely next one."""
        text = torch.tensor([ids], dtype=torch.long, device=input_device(self.model))
        where = positions_after(self.model, int(self.cache.get_seq_length()), text)
        if self.rolled:
            where = {"position_ids": torch.zeros_like(text)}
        with torch.no_grad():
            out = self.model(text, use_cache=True, **with_cache(self.cache), **where)
        return int(out.logits[0, -1].argmax())
