"""The lm-eval model "h2o": log-likelihoods and texts of a model with an evicting cache.

lm-eval's own Hugging Face model (`HFLM`) does the loading, tokenization and generation.
Log-likelihoods are computed by one of the protocols of `h2o.evaluation.protocols`. No logits are
reused between requests, so results do not depend on batches. lm-eval: Gao et al., "A framework for
few-shot language model evaluation", github.com/EleutherAI/lm-evaluation-harness.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate import PartialState
from lm_eval.api.instance import Instance
from lm_eval.api.model import CacheHook
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from torch import Tensor
from tqdm import tqdm

from h2o import compat, models
from h2o.arguments.plain_values import check_count
from h2o.config import PARAMETERS, H2OConfig
from h2o.evaluation import needles, protocols, windows
from h2o.evaluation.model_fit import check_supported
from h2o.evaluation.protocols import (
    CONTEXT_REMEDY,
    Tally,
    check,
    one_token_notes,
    why_no_text,
    without_prompt_notes,
)
from h2o.evaluation.published_masks import MASKS
from h2o.evaluation.questions import question_tokens
from h2o.evaluation.setting import Setting, from_config, from_options
from h2o.evaluation.text_tasks import is_text_request
from h2o.hf.attention.attention import switch
from h2o.hf.cache.cache import H2OCache
from h2o.hf.model_traits.layer_kinds import counts_padding
from h2o.hf.model_traits.wrappers import check_no_tuned_prompt, input_device
from h2o.hf.rotary.length_dependent_rope import LengthDependentRope
from h2o.hf.support import transformers_layers
from h2o.utils.processes import world_size

CPU_BATCH = 8
"""The batch size on a CPU for batch_size=auto. lm-eval would try larger ones until memory runs out,
which on a CPU hangs the machine instead of raising an error."""

POLICY = ("variant", *PARAMETERS)
OWN = (*POLICY, "protocol", "prompt_length", "h2o_config")
"""Arguments of the model "h2o". All others go to transformers."""

CUT_TEXT = {"drop": "context", "read": "document"}
"""The text that a real cache cuts, by protocol."""

Request = tuple[Any, list[int], list[int]]
"""A request as lm-eval passes it: (key, context, continuation), the latter two in tokens."""

Pair = tuple[list[int], list[int]]
"""Tokens of a context, not longer than the model supports, and of a continuation."""

log = logging.getLogger(__name__)


@register_model("h2o")
class H2OLM(HFLM):
    """lm-eval's model "h2o", with these arguments in addition to those of HFLM.

    Args:
        pretrained: a name or folder, by default the embedded SmolLM2-135M-Instruct.
        device: a torch device. "cuda", lm-eval's default, becomes "cpu" if torch has no GPU.
        batch_size: "auto" is 8 on the CPU.
        protocol: "simulate", "drop" or "read".
        variant: "h2o" (default), "full", or in simulation "local", "global", "flexgen".
        h2o_config: an `H2OConfig`, from Python. Otherwise its fields: `budget`, or `heavy`,
            `recent`, ... Without any budget it is 0.2.
        prompt_length: number of tokens before the first eviction ("simulate" only).

    Fractions are of the prompt (the context, the document in it, or in simulation the first
    `prompt_length` tokens), of the text so far (`ratio_of="seen"`), or of a text without a prompt.
    """

    def __init__(
        self,
        pretrained: Any = "",
        protocol: str = "simulate",
        prompt_length: int = 1,
        h2o_config: H2OConfig | None = None,
        **kwargs: Any,
    ) -> None:
        policy = {name: kwargs.pop(name) for name in POLICY if name in kwargs}
        _check_spelling(kwargs)
        if h2o_config is not None:
            if wrong := sorted(policy):
                raise ValueError(f"pass h2o_config or {wrong[0]}, not both")
            setting = from_config(h2o_config)
        else:
            setting = from_options(**policy)
        check(setting, protocol, prompt_length)
        size = str(kwargs.get("batch_size", 1))  # lm-eval would score nothing with a negative one
        if not (size.startswith("auto") or (size.isdecimal() and int(size) > 0)):
            raise ValueError(f"batch_size must be a number from 1 or auto, not {size}")
        if isinstance(pretrained, str):
            pretrained = models.full_name(pretrained or None)
        if pretrained == models.DEFAULT_MODEL:
            pretrained = str(models.embedded_folder(log.info))
        elif isinstance(pretrained, str) and models.is_gguf(pretrained):
            pretrained, kwargs["gguf_file"] = os.path.split(os.path.abspath(pretrained))
        kwargs["logits_cache"] = False  # it would reuse one request's logits for another
        # lm-eval's commands pass "cuda:0" by default, even if there is no GPU.
        device = str(kwargs.get("device") or "cuda")
        if device.startswith("cuda") and not torch.cuda.is_available():
            log.info("device=%s: not available to torch, using cpu", device)
            device = "cpu"
        kwargs["device"] = str(models.torch_device(device))
        if world_size() > 1 and isinstance(pretrained, str) and kwargs["device"] == "cpu":
            PartialState(cpu=True)  # otherwise accelerate would choose another device
        super().__init__(pretrained, **kwargs)
        if self._device.type == "meta":  # all weights are offloaded
            self._device = input_device(self.model)
        if self.device.type == "cpu" and self.batch_size == "auto":
            self.batch_size_per_gpu = CPU_BATCH
        if (accelerator := getattr(self, "accelerator", None)) is not None:
            # HFLM distributes rows only on machines with two or more GPUs, and by the process's
            # rank on its own machine.
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes
        if self.backend != "causal":
            raise ValueError(f"h2o evaluates decoders; {pretrained!r} is an encoder-decoder")
        self._attention_before = compat.attention_name(self.model.config)
        self.use(setting, protocol, prompt_length=prompt_length)

    def use(self, setting: Setting, protocol: str = "simulate", *, prompt_length: int = 1) -> None:
        """Evaluate with this setting from now on, without loading the model again.

        Raises: ValueError for a setting that the protocol or the model does not support, or whose
        masks do not exist. TypeError for anything but a `Setting`.
        """
        check(setting, protocol, prompt_length)
        prompt_length = check_count("prompt_length", prompt_length)
        if protocol != "simulate":
            check_no_tuned_prompt(self.model, f"protocol={protocol}")
        if protocol != "simulate" or setting.variant != "full":
            check_supported(self.model, setting.config, simulates=True)
        self.simulates = protocol == "simulate" or setting.is_random
        wanted = self._attention_before if self.simulates else "h2o"
        if compat.attention_name(self.model.config) != wanted:
            switch(self.model, wanted)
        self.angles = LengthDependentRope(self.model)
        self.setting, self.protocol = setting, protocol
        self.prompt_length = prompt_length
        self.ratio_of = setting.ratio_of
        if protocol == "simulate":
            self.ratio_of = protocols.fractions_of(prompt_length, setting.ratio_of)
        self.tally, self.is_counting = Tally(), False

    def describe(self) -> dict[str, Any]:
        """The setting, the protocol and the tally, for result files."""
        return {
            "protocol": self.protocol,
            **self.setting.describe(),
            "ratio_of": self.ratio_of,
            "prompt_len": CUT_TEXT.get(self.protocol, self.prompt_length),
            **dataclasses.asdict(self.tally),
        }

    def get_model_info(self) -> dict[str, Any]:
        notes = []
        if self.protocol == "drop":
            notes = one_token_notes(self.tally, [self.setting])
        elif self.protocol == "simulate" and self.prompt_length == 1:
            notes = without_prompt_notes([self.setting], CONTEXT_REMEDY)
        for note in notes:
            log.warning(note)
        return super().get_model_info() | {"h2o": self.describe()}

    def _loglikelihood_tokens(
        self,
        requests: Sequence[Request],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[tuple[float, bool]]:
        pairs = [self._count_and_truncate(*tokens) for _, *tokens in requests]
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        if self.is_counting:
            return answers
        # Longest first, as in HFLM: a batch that is too large fails at once, and the estimate of
        # the remaining time is never too low.
        lengths = [len(context) + len(continuation) for context, continuation in pairs]
        order = sorted(range(len(pairs)), key=lambda i: (-lengths[i], *pairs[i]))
        size = override_bs or self.batch_size
        size = self._detect_batch_size() if size == "auto" else size
        hide = disable_tqdm or self.rank > 0
        with tqdm(total=len(requests), disable=hide, desc=self.setting.name) as bar:
            for indices in self._batches(order, lengths, size):
                batch = [pairs[i] for i in indices]
                for i, answer in zip(indices, self._answer_batch(batch), strict=True):
                    answers[i], key = answer, requests[i][0]
                    if key is not None:
                        self.cache_hook.add_partial("loglikelihood", key, answer)
                bar.update(len(indices))
        return answers

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[Any]:
        """Answer lm-eval's requests, and the requests of a `TextTask`."""
        others = [x for x in requests if not is_text_request(x)]
        known = iter(super().loglikelihood(others, disable_tqdm) if others else ())
        of_texts = iter(self._answer_texts([x for x in requests if is_text_request(x)]))
        return [next(of_texts if is_text_request(x) else known) for x in requests]

    def _answer_texts(self, requests: Sequence[Instance]) -> list[Any]:
        answers = []
        hide = self.is_counting or self.rank > 0 or not requests
        for request in tqdm(requests, disable=hide, desc=self.setting.name):
            text, asked = request.args
            if "window" in asked:
                answer: Any = windows.answer(self, **asked)
            else:
                answer = needles.answer(self, text, **asked)
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
            answers.append(answer)
        return answers

    def count(self, kind: str, arguments: Sequence[tuple[Any, ...]]) -> Tally:
        """Tally requests of a kind without running the model.

        Args:
            kind: "loglikelihood", "loglikelihood_rolling" or "generate_until", as in lm-eval.
            arguments: arguments of each request.
        """
        before = self.tally, self.cache_hook, self._world_size
        # Store no answers, and do not wait for other processes, which do not count.
        self.tally, self.cache_hook, self._world_size = Tally(), CacheHook(None), 1
        self.is_counting = True
        try:
            requests = [Instance(kind, {}, x, i) for i, x in enumerate(arguments)]
            getattr(self, kind)(requests, disable_tqdm=True)
            return self.tally
        finally:
            self.tally, self.cache_hook, self._world_size = before
            self.is_counting = False

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate as HFLM does, with caches of the setting."""
        lengths = []
        for context, how in (request.args for request in requests):
            new = normalize_gen_kwargs(how, self.max_gen_toks)["max_gen_toks"]
            tokens = self.tok_encode(context)
            lengths.append(len(tokens) + new)
            if self.protocol != "simulate":
                self.tally.truncated += len(tokens) > self.max_length - new
                self._count_kept(tokens[new - self.max_length :])
        texts = [""] * len(requests)
        if self.is_counting:
            return texts
        for indices in self._batches([*range(len(requests))], lengths, max(1, len(requests))):
            batch = [requests[i] for i in indices]
            for i, text in zip(indices, super().generate_until(batch, disable_tqdm), strict=True):
                texts[i] = text
        return texts

    def _batches(self, order: list[int], lengths: list[int], size: int) -> list[list[int]]:
        """Divide the indices in `order` into batches of at most `size`. A text whose length
        determines the rotary angles is a batch by itself. So is every text if the model would count
        padding before the questions as text."""
        counts = self.protocol == "read" and counts_padding(transformers_layers(self.model.config))
        alone = {i: counts or any(self.angles.regime(lengths[i])) for i in order}
        rest = [i for i in order if not alone[i]]
        batches = [rest[start : start + size] for start in range(0, len(rest), size)]
        return [[i] for i in order if alone[i]] + batches

    def _count_and_truncate(self, context: list[int], continuation: list[int]) -> Pair:
        """Count a request, and truncate its context from the left as HFLM does."""
        if not context or not 0 < len(continuation) <= self.max_length:
            raise ValueError(
                f"a request has {len(context)} context and {len(continuation)} continuation "
                f"tokens: both must be above 0, and the continuation at most {self.max_length}"
            )
        cut = max(0, len(context) + len(continuation) - self.max_length - 1)
        if cut and not self.tally.truncated:
            log.warning(
                "a request of %d tokens exceeds the model's %d: its first %d tokens are dropped. "
                "Later requests are truncated likewise (the result file has their number)",
                len(context) + len(continuation), self.max_length, cut,
            )  # fmt: skip
        context = context[cut:]
        is_whole_text = len(context) == 1
        if self.protocol == "drop" and is_whole_text:  # its prompt of one token says nothing
            self.count_text(len(continuation), prompt=1)
        else:
            simulates = self.protocol == "simulate"
            self._count_kept(context + continuation[:-1] if simulates else context)
        self.tally.one_token_answers += len(continuation) == 1
        self.tally.one_token_contexts += is_whole_text
        self.tally.truncated += cut > 0
        return context, continuation

    def _count_kept(self, text: list[int]) -> None:
        """Count the keys that are kept of a simulated text or of a prompt."""
        document, _ = self._split_prompt(text)
        self.count_text(protocols.fraction_base(len(document), self.prompt_length))

    def count_text(self, seen: int, prompt: int | None = None) -> None:
        """Count a request with a text of `seen` tokens. `prompt`: see `H2OConfig.count_held`."""
        self.tally.requests += 1
        self.tally.tokens_seen += seen
        config = self.setting.answering_config.for_model(self.model)
        self.tally.tokens_kept += config.count_held(seen, prompt)

    def _answer_batch(self, batch: Sequence[Pair]) -> list[tuple[float, bool]]:
        """(log-likelihood, whether it is the greedy answer) of each continuation."""
        if self.protocol == "simulate" and self.setting.variant == "full":
            requests = [(None, *pair) for pair in batch]
            return super()._loglikelihood_tokens(requests, True, override_bs=len(batch))
        with self.begin_forward():
            if self.simulates:
                logits = self.simulate(batch, [len(self._split_prompt(x)[0]) for x, _ in batch])
            else:
                *prompts, cache = self._prompts([context for context, _ in batch])
                answers = [continuation for _, continuation in batch]
                logits = protocols.by_cache(self.model, prompts, answers, cache)
        return [self._score(x, tokens) for x, (_, tokens) in zip(logits, batch, strict=True)]

    def simulate(self, pairs: Sequence[Pair], documents: Sequence[int]) -> list[Tensor]:
        """Logits [tokens, vocabulary] of each continuation, by a simulation of the setting. The
        first eviction of each row follows its document, or the `prompt_length` of "simulate"."""
        return protocols.simulate(
            self.model,
            pairs,
            h2o_config=self.setting.config,
            masks=MASKS.get(self.setting.variant),
            prompt_length=self.prompt_length if self.protocol == "simulate" else documents,
            ratio_of=self.ratio_of,
        )

    def _split_prompt(self, prompt: list[int]) -> tuple[list[int], list[int]]:
        """Split a prompt into the document, after which the cache is cut, and the question."""
        n = question_tokens(prompt, self.tokenizer) if self.protocol == "read" else 0
        return prompt[: len(prompt) - n], prompt[len(prompt) - n :]

    def _prompts(self, texts: Sequence[list[int]]) -> tuple[Tensor, Tensor, H2OCache]:
        """Ids and mask [B, n] of prompts, and their cache. It is empty, except with protocol
        "read": then it holds the documents, which are the first padded columns."""
        parts = list(zip(*map(self._split_prompt, texts), strict=True))
        document, question = (protocols.pad_rows(x, pad=self.tokenizer.pad_token_id) for x in parts)
        ids, mask = (torch.cat(x, dim=1) for x in zip(document, question, strict=True))
        if self.protocol == "read":
            with self.begin_forward():
                cache = protocols.read_documents(
                    self.model, self.setting, *document, self.tokenizer
                )
            return ids, mask, cache
        return ids, mask, H2OCache(self.model.config, self.setting.config.for_model(self.model))

    def begin_forward(self) -> torch.autocast:
        """Context for the forward passes of a text in lm-eval's mixed precision, with rotary angles
        that do not depend on earlier texts."""
        self.angles.forget()
        mixed = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype=mixed, enabled=mixed is not None)

    def _score(self, logits: Tensor, continuation: list[int]) -> tuple[float, bool]:
        """The answer to a request, from logits [tokens, vocabulary]."""
        target = torch.tensor(continuation, dtype=torch.long, device=logits.device)
        logprobs = logits.log_softmax(-1, dtype=self.softmax_dtype)
        chosen = logprobs.gather(-1, target[:, None]).sum()
        return float(chosen), bool((logprobs.argmax(-1) == target).all())

    def _model_generate(
        self, context: Tensor, max_length: int, *args: Any, **kwargs: Any
    ) -> Tensor:
        self.angles.forget()
        if why := why_no_text(self.setting, self.protocol):
            raise ValueError(f"this task {why}")
        if self.protocol == "simulate":
            return super()._model_generate(context, max_length, *args, **kwargs)
        columns, mask = context.shape[1], kwargs.pop("attention_mask")
        texts = [ids[real.bool()].tolist() for ids, real in zip(context, mask, strict=True)]
        ids, mask, cache = self._prompts(texts)
        if cache.get_seq_length():  # generate() repeats the prompts for beams, but not a full cache
            cache.batch_repeat_interleave(kwargs.get("num_beams") or 1)
        kwargs[compat.CACHE] = cache
        kwargs["attention_mask"] = mask.to(context.device)
        more = ids.shape[1] - columns  # padding between documents and questions
        tokens = super()._model_generate(ids.to(context.device), max_length + more, *args, **kwargs)
        return tokens[:, more:]


def _check_spelling(names: Iterable[str]) -> None:
    """Raise ValueError for an argument of transformers that looks like one of h2o's, misspelt."""
    for name in names:
        if close := difflib.get_close_matches(name, OWN, 1, cutoff=0.8):
            raise ValueError(f"model argument {name!r} is unknown: did you mean {close[0]}?")
