"""lm-eval's `generate_until` through the rows of `h2o.generate_all`.

A request means what it means to lm-eval's Hugging Face model (`HFLM`) in a batch of its own: by
HFLM's own functions it is tokenized and cut, its arguments become those of `generate()`, its end is
found and its text cut.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.models.utils_hf import MultiTokenEOSCriteria
from tqdm import tqdm

from h2o.borrowed import with_cache
from h2o.evaluation.setting import Setting
from h2o.hf.cache.cache import H2OCache
from h2o.hf.rows.generate_all import generate_all, serves
from h2o.hf.rows.request import Request, decoding_arguments

__all__ = ["by_rows", "divided", "in_rows", "texts"]


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


def divided(
    lm: HFLM, setting: Setting, requests: Sequence[Instance]
) -> tuple[list[int], list[int]]:
    """(those for rows, those for HFLM's batches), by index, the longest first."""
    order = sorted(
        range(len(requests)),
        key=lambda i: (-len(lm.tok_encode(requests[i].args[0])), requests[i].args[0]),
    )
    known: dict[str, bool] = {}
    """By arguments, which alone decide"""
    parts: tuple[list[int], list[int]] = ([], [])
    for i in order:
        context, how = requests[i].args
        if (name := repr(how)) not in known:
            known[name] = _has_room(lm, how) and in_rows(
                lm.model, setting, _request(lm, setting, context, how)
            )
        parts[not known[name]].append(i)
    return parts


def texts(
    lm: HFLM,
    setting: Setting,
    requests: Sequence[Instance],
    indices: Sequence[int],
    rows: int,
    seed: int,
    disable_tqdm: bool = False,
) -> dict[int, str]:
    """The answers to `requests` of these indices; HFLM's memory of answers has each at once.

    Args:
        rows: at a time.
        seed: request i samples as `generate()` does after `torch.manual_seed(seed + i)`.
    """

    def all_of_them() -> Iterator[Request]:
        for i in indices:
            yield _request(lm, setting, *requests[i].args, seed + i)

    by_index = {}
    mixed = lm.mixed_precision_dtype
    with (
        tqdm(
            total=len(indices), disable=disable_tqdm, desc="Running generate_until requests"
        ) as bar,
        torch.autocast(lm.device.type, dtype=mixed, enabled=mixed is not None),
        contextlib.closing(by_rows(lm.model, setting, all_of_them(), rows)) as results,
    ):
        for number, ids in results:
            i = indices[number]
            context, how = requests[i].args
            by_index[i] = _text(lm, ids, _stop(lm, normalize_gen_kwargs(how)))
            lm.cache_hook.add_partial("generate_until", (context, how), by_index[i])
            bar.update()
    return by_index


def _has_room(lm: HFLM, how: dict[str, Any]) -> bool:
    """Whether any of a prompt is left beside the new tokens; if not, HFLM says so."""
    return normalize_gen_kwargs(how, lm.max_gen_toks)["max_gen_toks"] < lm.max_length


def _stop(lm: HFLM, kwargs: dict[str, Any]) -> list[str]:
    end = lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
    return handle_stop_sequences(kwargs.pop("until", None), eos=end)


def _request(
    lm: HFLM, setting: Setting, context: str, how: dict[str, Any], seed: int | None = None
) -> Request:
    """What HFLM's `_model_generate` would have `generate()` do with this prompt."""
    kwargs: dict[str, Any] = normalize_gen_kwargs(how, lm.max_gen_toks)
    stop, new = _stop(lm, kwargs), kwargs.pop("max_gen_toks")
    ids, mask = lm.tok_batch_encode(
        [context], left_truncate_len=lm.max_length - new, truncation=lm.truncation
    )
    prepared = HFLM._model_generate(
        lm,
        ids.to(lm.device),
        attention_mask=mask.to(lm.device),
        stop=stop,
        max_length=kwargs.pop("max_length", ids.shape[1] + new),
        **with_cache(H2OCache(lm.model.config, setting.config.for_model(lm.model))),
        custom_generate=decoding_arguments,
        **kwargs,
    )
    own = [x for x in prepared["stopping_criteria"] if isinstance(x, MultiTokenEOSCriteria)]
    return Request(
        ids[0],
        seed=seed,
        generation_config=prepared["generation_config"],
        stopping_criteria=own,
    )


def _text(lm: HFLM, ids: list[int], stop: list[str]) -> str:
    """An answer as HFLM gives it: what follows on thoughts, up to the first stop string."""
    end = lm.think_end_token
    if not isinstance(end, int):
        return postprocess_generated_text(lm.tok_decode(ids), stop, end)
    if end in ids:
        ids = ids[len(ids) - ids[::-1].index(end) :]
    return postprocess_generated_text(lm.tok_decode(ids).lstrip(), stop, None)
