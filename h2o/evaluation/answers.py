"""Texts that a model writes for an evaluation: many requests at a time where rows serve them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from h2o.borrowed import with_cache
from h2o.evaluation.setting import Setting
from h2o.hf.cache.new_cache import new_cache
from h2o.hf.rows.generate_all import generate_all, serves
from h2o.hf.rows.request import Request

__all__ = ["answers", "by_rows", "in_rows"]


def in_rows(model: Any, setting: Setting, request: Request, tokenizer: Any = None) -> bool:
    """Whether requests like this one are for `by_rows`. Others, and those of the full cache, whose
    rows would grow without bounds, are for `model.generate()`."""
    return setting.variant == "h2o" and serves(model, setting.config, request, tokenizer)


def by_rows(
    model: Any, setting: Setting, requests: Iterable[Request], rows: int, tokenizer: Any = None
) -> Iterator[tuple[int, list[int]]]:
    """(index, new tokens) of each request, as they finish: the tokens that `generate()` gives it
    alone, with a cache of the setting.

    Raises: what reading a prompt raises.
    """
    results = generate_all(
        model, requests, setting.config, rows=rows, tokenizer=tokenizer, as_completed=True
    )
    with contextlib.closing(results):  # an error's traceback would keep the model's lock
        for result in results:
            if result.error is not None:
                raise result.error
            yield result.index, result.ids


def answers(
    model: Any, setting: Setting, requests: Sequence[Request], rows: int, tokenizer: Any
) -> Iterator[tuple[int, list[int]]]:
    """As `by_rows`, and one after the other where these do not serve. Prompts are ids [n], as
    tensors."""
    if requests and in_rows(model, setting, requests[0], tokenizer):
        yield from by_rows(model, setting, requests, rows, tokenizer)
        return
    for index, request in enumerate(requests):
        yield index, _alone(model, setting, request, tokenizer)


@torch.no_grad()
def _alone(model: Any, setting: Setting, request: Request, tokenizer: Any) -> list[int]:
    config = None if setting.variant == "full" else setting.config
    ids = request.prompt[None].to(model.device)
    tokens = ids.shape[1]
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        **with_cache(new_cache(model, config, tokens)),
        generation_config=request.generation_config,
        tokenizer=tokenizer,
    )
    new: list[int] = out[0, tokens:].tolist()
    return new
