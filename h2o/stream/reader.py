"""Several caches read the same endless text: how well the model predicts it with each, over time.

Every cache reads every chunk before the next one comes, so that a text may come from standard
input. Perplexity is that of each stretch of `every` tokens, not of all so far: a cache that has
lost its way shows at once.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from h2o.borrowed import with_cache
from h2o.config import H2OConfig
from h2o.config_fields import Positions
from h2o.evaluate.setting import Setting
from h2o.hf.cache import H2OCache
from h2o.hf.new_cache import bytes_of_keys
from h2o.hf.patch_lock import input_device
from h2o.hf.positions import positions_after
from h2o.stream.endless import endless

__all__ = ["Point", "Reader", "read"]


@dataclasses.dataclass(frozen=True)
class Point:
    """One stretch of a text with one cache."""

    tokens: int
    """read so far, at its end"""
    perplexity: float
    """of the stretch alone"""
    ms_per_token: float
    kv_bytes: int
    """held at its end: keys, values and what the policy notes of them"""
    highest_position: int
    """that any key or query was given in the stretch"""


class Reader:
    """A model that reads with one cache.

    Args:
        model: with attn_implementation="h2o".
        setting: of `h2o.evaluate.setting`, with a cache behind it, budgets in tokens. "full" is
            transformers' DynamicCache, which ends where the model's positions do.
        positions: as of `H2OConfig`; "full" has no other than the original ones.

    Raises: UserError for what is no cache, and for fractions: a text without end has none.
    """

    def __init__(self, model: Any, setting: Setting, positions: Positions = "rolled") -> None:
        config = endless(setting, positions)
        self.name, self.model = setting.name, model
        self.config: H2OConfig | None = None
        self.cache: Any = DynamicCache(config=model.config)
        if setting.variant != "full":
            self.config = config
            self.cache = H2OCache(model, config)
        text = model.config.get_text_config(decoder=True)
        self.limit = text.max_position_embeddings if self.config is None else math.inf
        self.ended = False
        """Whether the model has no more positions for it."""
        self.points: list[Point] = []
        self.seen = 0
        self._logits: Tensor | None = None  # [1, V] for the next token
        self._loss, self._predicted, self._seconds, self._tokens = 0.0, 0, 0.0, 0

    @property
    def rolled(self) -> bool:
        return self.config is not None and self.config.positions == "rolled"

    def feed(self, ids: list[int]) -> None:
        """Reads the next tokens, all in one forward pass."""
        if self.seen + len(ids) > self.limit:
            self.ended = True
        if self.ended:
            return
        start = time.perf_counter()
        text = torch.tensor([ids], dtype=torch.long, device=input_device(self.model))
        # Ranks say where keys are, so the model may count as it likes: from 0, always.
        where = positions_after(self.model, self.seen, text)
        if self.rolled:
            where = {"position_ids": torch.zeros_like(text)}
        with torch.no_grad():
            out = self.model(text, use_cache=True, **with_cache(self.cache), **where)
        logits = out.logits[0].float()
        self._seconds += time.perf_counter() - start
        predicted = logits[:-1]
        if self._logits is not None:
            predicted = torch.cat([self._logits, predicted])
        wanted = text[0, len(ids) - len(predicted) :]
        self._loss += torch.nn.functional.cross_entropy(predicted, wanted, reduction="sum").item()
        self._predicted += len(wanted)
        self._tokens += len(ids)
        self._logits = logits[-1:].clone()
        self.seen += len(ids)

    def close_stretch(self, chunk: int) -> Point | None:
        """The stretch since the last call; None for one in which nothing was predicted."""
        if not self._predicted:
            return None
        point = Point(
            self.seen,
            math.exp(min(self._loss / self._predicted, 700.0)),
            1000 * self._seconds / self._tokens,
            self.bytes_held(),
            self.highest_position(chunk),
        )
        self._loss, self._predicted, self._seconds, self._tokens = 0.0, 0, 0.0, 0
        self.points.append(point)
        return point

    def bytes_held(self) -> int:
        """Of the cache: keys, values and what the policy notes of them."""
        if self.config is not None:
            total = self.cache.report().total
            return total.bytes_held + total.bytes_bookkeeping
        return bytes_of_keys(self.cache)

    def highest_position(self, chunk: int) -> int:
        """That the last chunk's tokens had in the model's rotary embedding."""
        if not self.rolled:
            return self.seen - 1
        assert self.config is not None
        chunk = min(chunk, self.seen)
        return self.config.held(self.seen - chunk) + chunk - 1


def read(
    chunks: Iterable[list[int]],
    readers: list[Reader],
    *,
    every: int = 500,
    tell: Callable[[list[Reader]], None] = lambda readers: None,
) -> Iterator[list[Reader]]:
    """Feeds chunks of a text to all readers; yields them at the end of every stretch.

    `tell` is called after each chunk. A last stretch that is shorter counts from half its length,
    and so it does when KeyboardInterrupt breaks off the reading, which is then raised again.
    """
    stretch, size = 0, 1
    interrupt: KeyboardInterrupt | None = None
    try:
        for chunk in chunks:
            size = max(size, len(chunk))
            for reader in readers:
                reader.feed(chunk)
            stretch += len(chunk)
            tell(readers)
            if stretch >= every:
                stretch = 0
                for reader in readers:
                    reader.close_stretch(size)
                yield readers
    except KeyboardInterrupt as error:
        interrupt = error
    if stretch >= every / 2 or not any(reader.points for reader in readers):
        for reader in readers:
            reader.close_stretch(size)
        yield readers
    if interrupt is not None:
        raise interrupt
