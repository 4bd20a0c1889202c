"""`h2o.generate_all`: answer many prompts in a batch of fixed size, refilling rows as they finish.

In a static batch every row waits for the longest answer. Here the next prompt gets a row as soon
as the row's answer is complete (`h2o.hf.batching.batch_scheduler`). With H2O a row has a constant
size, so no memory is moved or freed in between. This is continuous batching (Yu et al., Orca, OSDI
2022) without pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any, Literal

from typing_extensions import Unpack

from h2o.arguments.plain_values import check_count, check_flag, check_seed, wrong
from h2o.config import H2OConfig, resolve_config
from h2o.config.fields import ConfigFields, Pinned
from h2o.hf.batching.batch_scheduler import Scheduler
from h2o.hf.batching.prefix import check_prefix, copy_of_prefix
from h2o.hf.batching.request import (
    Prompt,
    Request,
    Result,
    Settings,
    check_generation,
    check_tokenizer,
)
from h2o.hf.batching.row_batch import RowBatch
from h2o.hf.cache.cache import H2OCache
from h2o.hf.chat.chat_template import check_template_arguments
from h2o.spans import check_pinned


def generate_all(
    model: Any,
    prompts: Iterable[Prompt],
    h2o_config: H2OConfig | None = None,
    *,
    rows: int,
    max_new_tokens: int | None = None,
    generation_config: Any = None,
    tokenizer: Any = None,
    prefix: H2OCache | None = None,
    seed: int = 0,
    pinned: Pinned | Literal["system"] = None,
    on_token: Callable[[int, int], Any] | None = None,
    as_completed: bool = False,
    compileable: bool = False,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **parameters: Unpack[ConfigFields],
) -> Iterator[Result]:
    """Answer any number of prompts, a fixed number of them at a time.

    ```python
    for result in h2o.generate_all(
        model, prompts, heavy=128, recent=128, rows=16, max_new_tokens=256, tokenizer=tokenizer
    ):
        print(result.index, result.text)
    ```

    Each request gets the tokens that `generate()` would give it alone with an `H2OCache` of the
    same config, up to rounding: its neighbors change only the order in which the sums of a larger
    matrix product are added. Short prompts are prefilled together, others one at a time, in chunks
    if `generation_config.prefill_chunk_size` is set. Active rows decode a token after each chunk,
    or after 2,048 tokens of prompts. Several calls, also in several threads, may share a model.

    Args:
        model: a causal language model of transformers, in eval mode.
        prompts: each a text, a chat, token ids or a `Request`. May be an endless iterator: a prompt
            is taken only when a row is idle.
        h2o_config, parameters: as for `H2OCache`. Fractions are of each request's own text.
        rows: number of requests that are decoded at a time. `h2o info --memory` counts how many
            fit. Prompts being prefilled (one, or short ones of up to 512 tokens, 2,048 on a GPU)
            need memory for keys and values on top.
        max_new_tokens, generation_config: as for `generate()`.
        tokenizer: needed for prompts that are texts or chats, for stop strings and `Result.text`.
        prefix: a cache of one row and the same settings that has read what all prompts begin with,
            such as a document (`H2OCache.load`). Its settings apply if none are given. Each prompt
            still contains those tokens. If the first one does not, the call raises an error.
        seed: request i samples as `generate()` does after `torch.manual_seed(seed + i)`.
        pinned: as for `H2OCache`, for each prompt whose `Request` has no pins of its own. "system"
            pins the system turn of a chat.
        on_token: called with the index of a request and each new token.
        as_completed: yield results as they finish, not in the order of the prompts.
        compileable: use torch.compile: one graph for the decode steps of all rows. Compiling takes
            about a minute. Prompts are prefilled eagerly. Give budgets in tokens. A fraction needs
            `ratio_of="prompt"`, and a longer prompt then lengthens all rows, so that steps are
            compiled again. A model that cannot be compiled runs eagerly, with a warning.
        chat_template_kwargs: arguments of the chat template, such as `{"enable_thinking": False}`
            or `{"tools": [...]}`, for each prompt that is a chat and whose `Request` has none.

    Yields:
        A `Result` for each prompt. If a prompt cannot be answered, its `finish_reason` is "error"
        and the others continue. Exceptions raised by `prompts` or `on_token` propagate.

    Raises:
        UnsupportedError: beam search or assisted decoding; layers with sliding windows.
        ValueError: an invalid argument. All prompts of a list are texts or chats, and there is no
            `tokenizer`. The first prompt does not begin with the tokens of `prefix`.
        TypeError: `tokenizer`, `prefix` or `chat_template_kwargs` is something else, or a keyword
            is unknown.
    """
    if isinstance(prefix, H2OCache) and h2o_config is None and not parameters:
        h2o_config = prefix.config
    config = resolve_config(h2o_config, parameters, generate_all).for_model(model)
    rows = check_count("rows", rows)
    if max_new_tokens is not None:
        max_new_tokens = check_count("max_new_tokens", max_new_tokens)
    seed = check_seed(seed)
    as_completed = check_flag("as_completed", as_completed)
    compileable = check_flag("compileable", compileable)
    check_pinned(pinned, ("prompt", "system"))
    if isinstance(prompts, str | Mapping | Request):
        raise ValueError(f"prompts is a single {type(prompts).__name__}; pass a list of prompts")
    if not isinstance(prompts, Iterable):
        raise TypeError(wrong("prompts", prompts, "a list of prompts"))
    if on_token is not None and not callable(on_token):
        raise TypeError(wrong("on_token", on_token, "a function (index, token)"))
    check_generation(generation_config)
    check_template_arguments({} if chat_template_kwargs is None else chat_template_kwargs)
    check_tokenizer(tokenizer, prompts if isinstance(prompts, Sequence) else ())
    if isinstance(prompts, Sized):
        rows = max(1, min(rows, len(prompts)))
    batch = RowBatch(model, config, rows, compileable)
    config = batch.cache.config  # a model without rotary positions, for example, has no echo
    if prefix is not None:
        prefix = copy_of_prefix(check_prefix(prefix, config))  # the caller may use the original
    settings = Settings(
        model, config, generation_config, max_new_tokens, tokenizer, prefix, seed, pinned,
        on_token, batch.angles, chat_template_kwargs or {}, compileable,
    )  # fmt: skip
    results = Scheduler(settings, prompts, batch).run()
    return results if as_completed else _in_order(results)


def _in_order(results: Iterator[Result]) -> Iterator[Result]:
    """Results in the order of their index, each as soon as all earlier ones have been yielded."""
    early: dict[int, Result] = {}
    wanted = 0
    for result in results:
        early[result.index] = result
        while wanted in early:
            yield early.pop(wanted)
            wanted += 1
