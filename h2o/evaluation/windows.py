"""The task h2o_perplexity: how well a model predicts a long text with an evicting cache.

The text is cut into windows that know nothing of each other. In each window the model predicts
every token but the first, and eviction starts with the first token. With a prompt, which is read
whole and then cut, only the tokens count whose prediction the cut can change. Those are all after
the first token that follows the prompt. Two protocols give the same numbers: the simulation, with
one forward pass a window, and the real cache, token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from h2o.compat import attention_name, with_cache
from h2o.errors import UserError
from h2o.evaluation.published_masks import MASKS
from h2o.evaluation.setting import Setting
from h2o.evaluation.task_rows import rows, text_of, tokenizer_of
from h2o.hf.cache.cache import H2OCache
from h2o.hf.rotary.angles import positions_after
from h2o.hf.simulation.simulation import simulated


def dataset(
    file: str | None = None,
    window: int = 1024,
    prompt_length: int = 1,
    tokenizer: str | None = None,
    pretrained: str | None = None,
    **_: Any,
) -> dict[str, Any]:
    """The task's rows, from what lm-eval's --metadata says.

    Args:
        file: plain text, UTF-8.
        window: tokens of a window; the last one may be shorter.
        prompt_length: tokens of each window before the first eviction; see `select_scored`.
        tokenizer, pretrained: name or folder of the model's tokenizer.
    """
    text, tokens = text_of(file, "h2o_perplexity"), tokenizer_of(tokenizer, pretrained)
    ids = tokens(text, verbose=False)["input_ids"]
    try:
        windows = cut_windows(ids, window, prompt_length)
    except UserError as error:
        raise UserError(f"{file}: {error}") from error
    return rows(
        [
            {"text": tokens.decode(part), "asked": {"window": part, "prompt_length": prompt_length}}
            for part in windows
        ]
    )


def cut_windows(ids: list[int], window: int, prompt_length: int = 1) -> list[list[int]]:
    """Cut a text into windows that have tokens to score. Raises: UserError if there are none."""
    if len(ids) < 2:
        raise UserError(f"{len(ids)} tokens: nothing to predict")
    if window < 2:
        raise UserError(f"a window of {window} tokens: use at least --window 2")
    windows = [ids[start : start + window] for start in range(0, len(ids), window)]
    fewest = 2 if prompt_length == 1 else prompt_length + 2
    if len(windows[0]) < fewest:
        raise UserError(
            f"--prompt-length {prompt_length}: a window of {len(windows[0])} tokens has none whose "
            f"prediction the cut can change. Use at most --prompt-length {len(windows[0]) - 2}"
        )
    if len(windows[-1]) < fewest:
        windows.pop()
    return windows


def results(doc: dict[str, Any], answers: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Metrics of a window: for lm-eval's weighted perplexity, and the mean loss of a token."""
    ((loss, tokens),) = answers
    return {"perplexity": (-loss, tokens), "nats": loss / tokens}


def answer(lm: Any, window: list[int], prompt_length: int) -> tuple[float, int]:
    """Loss and number of the tokens of a window that count. `lm`: an `h2o.evaluation.lm.H2OLM`.

    Raises: ValueError for a window that does not go with the model or the protocol.
    """
    if lm.protocol == "read":
        raise ValueError("protocol=read: a plain text has no question to cut before")
    if len(window) > lm.max_length:
        raise ValueError(
            f"--window {len(window)}: use from 2 to the model's {lm.max_length} positions"
        )
    lm.add(len(window))
    if lm.is_counting:
        return 0.0, len(window)
    measure = by_simulation if lm.protocol == "simulate" else by_cache
    ids = torch.tensor([window], dtype=torch.long, device=lm.device)
    loss = select_scored(measure(lm.model, ids, lm.setting, prompt_length), prompt_length)
    return loss.double().sum().item(), loss.numel()


def select_scored(loss: Tensor, prompt_length: int) -> Tensor:
    """Select the losses that eviction can change, from those of tokens 1 to n - 1.

    The prompt's last token predicts the next one before anything is evicted. Without a prompt
    (`prompt_length` 1) all losses count, as in a full cache's perplexity.
    """
    return loss[prompt_length:] if prompt_length > 1 else loss


def by_simulation(model: Any, ids: Tensor, setting: Setting, prompt_length: int = 1) -> Tensor:
    """Loss of tokens 1 to n-1 of ids [1, n], from one forward."""
    if setting.variant == "full":
        with torch.no_grad():
            return _loss(model(ids, use_cache=False).logits, ids)
    how = {"masks": MASKS.get(setting.variant), "prompt_length": prompt_length}
    with simulated(model, setting.config, **how), torch.no_grad():
        return _loss(model(ids, use_cache=False).logits, ids)


def by_cache(model: Any, ids: Tensor, setting: Setting, prompt_length: int = 1) -> Tensor:
    """Loss of tokens 1 to n-1 of ids [1, n], token by token after the prompt."""
    config = setting.config.for_model(model)
    cache = H2OCache(model.config, config, prompt_length=ids.shape[1])
    logits = [
        *read(model, cache, ids[:, :prompt_length]),
        *read(model, cache, ids[:, prompt_length:], 1),
    ]
    return _loss(torch.cat(logits, dim=1), ids)


def read(model: Any, cache: H2OCache, ids: Tensor, tokens: int | None = None) -> list[Tensor]:
    """Logits [1, n, vocabulary] of ids [1, N], in one pass or in passes of `tokens`."""
    before = attention_name(model.config)
    model.set_attn_implementation("h2o")
    try:
        logits = []
        with torch.no_grad():
            for chunk in ids.split(tokens or ids.shape[1], dim=1):
                where = positions_after(model, int(cache.get_seq_length()), chunk)
                logits.append(model(chunk, use_cache=True, **with_cache(cache), **where).logits)
        return logits
    finally:
        model.set_attn_implementation(before)


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    """-log p of each token but the first, [n - 1]."""
    return torch.nn.functional.cross_entropy(logits[0, :-1].float(), ids[0, 1:], reduction="none")
