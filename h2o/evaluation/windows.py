"""The task h2o_perplexity: how well a model predicts a long text with an evicting cache.

The text is divided into independent windows. In each window the model predicts every token but the
first, and eviction starts with the first token. With a prompt, which is prefilled whole and then
cut, only tokens whose prediction the cut can change are scored: all after the first token that
follows the prompt. Fractional budgets are then fractions of the prompt, or with `ratio_of="seen"`
of the text so far, as in `generate()`. Two protocols give the same numbers: the simulation, with
one forward pass per window, and the real cache, with one token at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lm_eval.api.metrics import weighted_mean, weighted_perplexity
from torch import Tensor

from h2o.errors import UserError
from h2o.evaluation import protocols
from h2o.evaluation.published_masks import MASKS
from h2o.evaluation.setting import Setting
from h2o.evaluation.text_tasks import Samples, TextTask, format_error
from h2o.hf.cache.cache import H2OCache
from h2o.hf.simulation.simulation import simulated


class Perplexity(TextTask):
    """The task. The answer to each window is the total loss and the number of the scored tokens."""

    @property
    def unit(self) -> str:
        return "window" if self.config.metadata.get("prompt_length", 1) == 1 else "prompt"

    @staticmethod
    def make_rows(
        text: str, tokenizer: Any, file: str, window: int = 1024, prompt_length: int = 1, **_: Any
    ) -> list[dict[str, Any]]:
        """Make a row of each window.

        Args:
            window: number of tokens per window. The last window may be shorter.
            prompt_length: number of tokens before the first eviction in each window, see
                `count_scored`.
        """
        ids = tokenizer(text, verbose=False)["input_ids"]
        try:
            windows = cut_windows(ids, window, prompt_length)
        except UserError as error:
            raise UserError(f"{file}: {error}") from error
        asked = [{"window": part, "prompt_length": prompt_length} for part in windows]
        return [{"text": tokenizer.decode(x["window"]), "asked": x} for x in asked]

    @staticmethod
    def columns(samples: Samples, full: Samples | None) -> dict[str, str]:
        each = [tuple(sample["perplexity"]) for sample in samples]
        perplexity = weighted_perplexity(each)
        error = format_error([loss / tokens for loss, tokens in each], 2, perplexity)
        cells = {"perplexity": f"{perplexity:.2f}{error}"}
        if full:
            pairs = zip(each, (sample["perplexity"] for sample in full), strict=True)
            lost = [(there[0] - here[0], here[1]) for here, there in pairs]
            error = format_error([loss / tokens for loss, tokens in lost], 3)
            cells["nats lost"] = f"{weighted_mean(lost):.3f}{error}"
        return cells | {"scored": f"{sum(tokens for _, tokens in each)}"}


def cut_windows(ids: list[int], window: int, prompt_length: int = 1) -> list[list[int]]:
    """Cut a text into windows that have tokens to score. Raises: UserError if there are none."""
    if len(ids) < 2:
        raise UserError(f"a text of {len(ids)} tokens has nothing to predict")
    if window < 2:
        raise UserError(f"a window of {window} tokens is too short: use at least --window 2")
    windows = [ids[start : start + window] for start in range(0, len(ids), window)]
    if count_scored(len(windows[0]), prompt_length) < 1:
        raise UserError(
            f"--prompt-length {prompt_length}: a window of {len(windows[0])} tokens has none whose "
            f"prediction the cut can change. Use at most --prompt-length {len(windows[0]) - 2}"
        )
    if count_scored(len(windows[-1]), prompt_length) < 1:
        windows.pop()
    return windows


def count_scored(tokens: int, prompt_length: int) -> int:
    """Number of tokens, at the end of a window, whose loss eviction can change.

    The prompt's last token predicts the next one before anything is evicted. Without a prompt
    (`prompt_length` 1) all but the first count, as in a full cache's perplexity.
    """
    return tokens - 1 - (prompt_length if prompt_length > 1 else 0)


def results(doc: dict[str, Any], answers: Sequence[tuple[float, int]]) -> dict[str, Any]:
    """Metrics of a window: those for lm-eval's weighted perplexity, and the mean loss per token."""
    ((loss, tokens),) = answers
    return {"perplexity": (-loss, tokens), "nats": loss / tokens}


def answer(lm: Any, window: list[int], prompt_length: int) -> tuple[float, int]:
    """Total loss and number of a window's scored tokens. `lm` is an `h2o.evaluation.lm.H2OLM`.

    Raises: ValueError for a window that is too long for the model, and for protocol "read".
    """
    if lm.protocol == "read":
        raise ValueError("protocol=read: a plain text has no question to cut before")
    if len(window) > lm.max_length:
        raise ValueError(
            f"--window {len(window)}: use a number from 2 to the model's {lm.max_length} positions"
        )
    lm.count_text(protocols.fraction_base(len(window), prompt_length))
    if lm.is_counting:
        return 0.0, len(window)
    measure = by_simulation if lm.simulates else by_cache
    ids = torch.tensor([window], dtype=torch.long, device=lm.device)
    with lm.begin_forward():
        loss = measure(lm.model, ids, lm.setting, prompt_length)
    loss = loss[-count_scored(len(window), prompt_length) :]
    return loss.double().sum().item(), loss.numel()


def by_simulation(model: Any, ids: Tensor, setting: Setting, prompt_length: int = 1) -> Tensor:
    """Loss of tokens 1 to n-1 of ids [1, n], from one forward pass."""
    unit = protocols.fractions_of(prompt_length, setting.ratio_of)
    how = {"masks": MASKS.get(setting.variant), "prompt_length": prompt_length, "ratio_of": unit}
    is_full = setting.variant == "full"
    with nullcontext() if is_full else simulated(model, setting.config, **how), torch.no_grad():
        return _loss(model(ids, use_cache=False).logits[0, :-1], ids[0, 1:])


def by_cache(model: Any, ids: Tensor, setting: Setting, prompt_length: int = 1) -> Tensor:
    """Loss of tokens `prompt_length` to n-1 of ids [1, n], with one token at a time after the
    prompt. The model must run the attention "h2o"."""
    base = protocols.fraction_base(ids.shape[1], prompt_length)
    cache = H2OCache(model.config, setting.config.for_model(model), prompt_length=base)
    prompt, rest = ids[:, :prompt_length].cpu(), ids[0, prompt_length:]
    prompts = prompt, torch.ones_like(prompt)
    (logits,) = protocols.by_cache(model, prompts, [rest.tolist()], cache)
    return _loss(logits, rest)


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    """-log p of each token [n], from its logits [n, vocabulary]."""
    return torch.nn.functional.cross_entropy(
        logits.float(), ids.to(logits.device), reduction="none"
    )
