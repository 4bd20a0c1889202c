"""lm-eval's `generate_until` through the rows of `h2o.generate_all`.

Answers are those of lm-eval's Hugging Face model (`HFLM`) for each request in a batch of its own:
HFLM's functions tokenize and cut the prompt, make the arguments of `generate()`, find the end and
cut the text.
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

from h2o.compat import with_cache
from h2o.evaluation.setting import Setting
from h2o.hf.batching.generate_all import generate_all, serves
from h2o.hf.batching.request import Request, decoding_arguments
from h2o.hf.cache.cache import H2OCache

__all__ = ["can_use_rows", "divide_requests", "generate_in_rows", "generate_texts"]


def can_use_rows(model: Any, setting: Setting, request: Request, tokenizer: Any = None) -> bool:
    """Whether `generate_in_rows` supports requests like this one. Others are for
    `model.generate()`, and so are those of the full cache, whose rows would grow without bounds."""
    return setting.variant == "h2o" and serves(model, setting.config, request, tokenizer)


def generate_in_rows(
    model: Any, setting: Setting, requests: Iterable[Request], rows: int, tokenizer: Any = None
) -> Iterator[tuple[int, list[int]]]:
    """Yield (index, new tokens) of each request when it is finished. The tokens are those of
    `generate()` for the request alone, with a cache of the setting.

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


def divide_requests(
    lm: HFLM, setting: Setting, requests: Sequence[Instance]
) -> tuple[list[int], list[int]]:
    """Divide requests into (those for rows, those for HFLM's batches), by index, longest first."""
    order = sorted(
        range(len(requests)),
        key=lambda i: (-len(lm.tok_encode(requests[i].args[0])), requests[i].args[0]),
    )
    known: dict[str, bool] = {}
    """Whether rows support a request, by its arguments"""
    parts: tuple[list[int], list[int]] = ([], [])
    for i in order:
        context, how = requests[i].args
        if (name := repr(how)) not in known:
            known[name] = _has_room(lm, how) and can_use_rows(
                lm.model, setting, _request(lm, setting, context, how)
            )
        parts[not known[name]].append(i)
    return parts


def generate_texts(
    lm: HFLM,
    setting: Setting,
    requests: Sequence[Instance],
    indices: Sequence[int],
    rows: int,
    seed: int,
    disable_tqdm: bool = False,
) -> dict[int, str]:
    """Answer the requests of these indices. HFLM's cache of answers gets each at once.

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
        contextlib.closing(generate_in_rows(lm.model, setting, all_of_them(), rows)) as results,
    ):
        for number, ids in results:
            i = indices[number]
            context, how = requests[i].args
            by_index[i] = _text(lm, ids, _stop(lm, normalize_gen_kwargs(how)))
            lm.cache_hook.add_partial("generate_until", (context, how), by_index[i])
            bar.update()
    return by_index


def _has_room(lm: HFLM, how: dict[str, Any]) -> bool:
    """Whether the new tokens leave room for a prompt. If not, HFLM raises an error."""
    return normalize_gen_kwargs(how, lm.max_gen_toks)["max_gen_toks"] < lm.max_length


def _stop(lm: HFLM, kwargs: dict[str, Any]) -> list[str]:
    end = lm.tok_decode(lm.eot_token_id, skip_special_tokens=False)
    return handle_stop_sequences(kwargs.pop("until", None), eos=end)


def _request(
    lm: HFLM, setting: Setting, context: str, how: dict[str, Any], seed: int | None = None
) -> Request:
    """The request that HFLM's `_model_generate` would make of this prompt for `generate()`."""
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
    """The answer of these tokens, as in HFLM: after the thoughts, up to the first stop string."""
    end = lm.think_end_token
    if not isinstance(end, int):
        return postprocess_generated_text(lm.tok_decode(ids), stop, end)
    if end in ids:
        ids = ids[len(ids) - ids[::-1].index(end) :]
    return postprocess_generated_text(lm.tok_decode(ids).lstrip(), stop, None)
