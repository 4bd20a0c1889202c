"""One request of `h2o.generate_all`: its prompt, how its tokens are chosen, and its answer.

transformers decides on the tokens: for each request `generate()` makes the logits processors and
stopping criteria that a call with this request alone would have.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMode,
    MaxLengthCriteria,
    StoppingCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from h2o.arguments.plain_values import check_count, check_seed, is_list, wrong
from h2o.arguments.torch_values import check_ids
from h2o.compat import with_cache
from h2o.compat_calls import ModelCall
from h2o.compat_wrappers import num_virtual_tokens
from h2o.config import H2OConfig, check_config
from h2o.errors import UnsupportedError
from h2o.hf.batching.prefix import check_prompt, check_removal
from h2o.hf.cache.cache import H2OCache
from h2o.hf.cache.cache_plan import get_plan
from h2o.hf.chat.chat_spans import without_spans
from h2o.hf.chat.chat_template import arguments_of, is_chat, prompt_ids
from h2o.hf.chat.system_turn import system_span
from h2o.hf.conversation.pins import Pins
from h2o.hf.model_traits.wrappers import check_pins, input_device, model_after_prompt
from h2o.hf.modes import Mode, check_modes, config_modes
from h2o.hf.rotary.length_dependent_rope import LengthDependentRope, positions_after
from h2o.hf.support import text_config_of
from h2o.model_identity import vocabulary_of
from h2o.spans import check_spans, size

Prompt = Any  # a text, a chat, token ids, or a Request with one of them


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt with its own settings for `generate_all`. None means the setting of the call."""

    prompt: Prompt
    """A text; a chat, as a list of messages; or token ids [n], as a list, an array or a tensor"""
    max_new_tokens: int | None = None
    """By default that of this request's `generation_config`, and then that of the call"""
    seed: int | None = None
    """Seed for sampling; by default the call's `seed` plus the request's index"""
    generation_config: Any = None
    config: H2OConfig | None = None
    """Config with other `heavy`, `recent` or `budget_unit`; the rest must be as in the call"""
    pinned: Any = None
    """Pins as for `H2OCache`, or "system": the system turn of a chat"""
    stopping_criteria: Sequence[StoppingCriteria] = ()
    """transformers' criteria, in addition to those of the generation config. They get ids [1, n]
    that include the prompt"""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Arguments of the template for a prompt that is a chat: `tools`, `enable_thinking`, ..."""
    evict: Any = ()
    """Spans [(start, stop), ...] of tokens that this request's copy of `prefix` forgets, as by
    `H2OCache.evict`. The prompt has these tokens. They are removed from it, so that all that counts
    its tokens counts the shorter text"""


@dataclasses.dataclass(frozen=True)
class Result:
    """The answer to one prompt."""

    index: int
    """Index of the prompt among `prompts`"""
    ids: list[int]
    """The new tokens"""
    text: str | None
    """The answer without special tokens; None without a tokenizer"""
    prompt_tokens: int
    finish_reason: str
    """"stop" (an end token, a stop string or a criterion), "length", or "error" """
    report: dict[str, int]
    """`seen`: tokens; `kept`: keys per head on average; `bytes`: memory of the row. Empty after an
    error"""
    error: Exception | None = None
    """Why the prompt could not be answered"""


@dataclasses.dataclass
class Settings:
    """Settings that all requests of one call share."""

    model: Any
    config: H2OConfig
    generation_config: Any
    max_new_tokens: int | None
    tokenizer: Any
    prefix: H2OCache | None
    seed: int
    pinned: Any
    on_token: Callable[[int, int], Any] | None
    angles: LengthDependentRope
    chat_template_kwargs: Mapping[str, Any]
    is_compiled: bool = False

    def __post_init__(self) -> None:
        self.virtual = num_virtual_tokens(self.model)
        """Embeddings of prompt tuning before each text, which are in the cache but have no ids"""

    def pins_of(self, request: Request, ids: Tensor) -> Any:
        """`pinned` for the cache of a request with token ids [1, n]."""
        pinned = self.pinned if request.pinned is None else request.pinned
        if pinned is None:
            return None
        if self.prefix is not None:
            raise ValueError(
                "pinned cannot be combined with prefix=: give pinned to the prefix's H2OCache"
            )
        check_pins(self.model, pinned)
        if isinstance(pinned, str) and pinned == "system":
            if not is_chat(request.prompt):
                raise ValueError('pinned="system" needs a chat: pass a list of messages')
            how = self.template_kwargs_of(request)
            return [system_span(self.tokenizer, request.prompt, ids, **how)]
        if (last := Pins.of(pinned).last) > ids.shape[1]:
            raise ValueError(f"pinned ends at token {last}, but the prompt has {ids.shape[1]}")
        return pinned

    def template_kwargs_of(self, request: Request) -> Mapping[str, Any]:
        """Arguments of the chat template for a request."""
        own = request.chat_template_kwargs
        return arguments_of(request.prompt, own, self.chat_template_kwargs)

    def ids_of(self, request: Request) -> Tensor:
        """Token ids [1, n] of a request's prompt."""
        how = self.template_kwargs_of(request)
        prompt = tokenize(request.prompt, self.tokenizer, how)
        known, hint = vocabulary_of(self.model), 'or a text, a chat, tokenizer(text)["input_ids"]'
        ids = check_ids("the prompt", prompt, one_row=True, vocabulary=known, hint=hint)
        return ids.to(input_device(self.model))

    def make_decoding_arguments(
        self, request: Request, ids: Tensor, cache: H2OCache
    ) -> dict[str, Any]:
        """Arguments that `generate()` passes to its decoding loop for a request."""
        settings, limit = self.generation_config, self.max_new_tokens
        if request.generation_config is not None:
            settings = request.generation_config
            if getattr(settings, "max_new_tokens", None) is not None:
                limit = None  # an argument of generate() would replace the request's own number
        check_generation(settings)
        if request.max_new_tokens is not None:
            limit = check_count("max_new_tokens", request.max_new_tokens)
        more: dict[str, Any] = {} if limit is None else {"max_new_tokens": limit}
        if self._setting(settings, "cache_implementation") is not None:
            more["cache_implementation"] = None  # of the checkpoint; generate() has the H2OCache
        given = request.stopping_criteria
        if not is_list(given) or not all(map(callable, given)):
            raise TypeError(wrong("stopping_criteria", given, "a list of transformers' criteria"))
        criteria = StoppingCriteriaList(given)
        strings = self._setting(settings, "stop_strings")
        if strings is not None:  # with custom_generate, generate() finds no tokenizer
            if self.tokenizer is None:
                raise ValueError("stop_strings need a tokenizer: pass tokenizer=")
            criteria.append(StopStringCriteria(self.tokenizer, strings))
            more["stop_strings"] = None
        arguments: dict[str, Any] = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),  # a prompt's pad id is a token like any other
            generation_config=settings,
            **with_cache(cache),
            stopping_criteria=criteria,
            custom_generate=decoding_arguments,
            **more,
        )
        return arguments

    def _setting(self, settings: Any, name: str) -> Any:
        """A setting of `generate()`: that of a user's generation config, or else the model's."""
        said = (getattr(x, name, None) for x in (settings, self.model.generation_config))
        return next((x for x in said if x is not None), None)

    def cache_for(self, request: Request, ids: Tensor) -> H2OCache:
        """An empty cache for a request with token ids [1, n], or a copy of the prefix."""
        pinned = self.pins_of(request, ids)
        config = self.config
        if request.config is not None:
            check_config(request.config)
            config = request.config.for_model(self.model)
            config = get_plan(self.model, text_config_of(self.model.config), config).h2o_config
            names = ("budget", "heavy", "recent", "budget_unit")
            budgets = {name: getattr(self.config, name) for name in names}
            if self.is_compiled:
                check_modes({Mode.COMPILED, *config_modes(config)})
            if dataclasses.replace(config, **budgets) != self.config:
                raise ValueError(
                    f"a request's config may differ from the call's only in heavy, recent and "
                    f"budget_unit. The request has {config}, the call has {self.config}"
                )
        if self.prefix is None:
            tokens = ids.shape[1] + self.virtual
            return H2OCache(self.model.config, config, prompt_length=tokens, pinned=pinned)
        if config != self.config:
            raise ValueError("with prefix= a request has the prefix's budget: leave out config")
        return self.prefix.fork()


def tokenize(prompt: Prompt, tokenizer: Any, template_kwargs: Mapping[str, Any]) -> Any:
    """Token ids of a text, or of a chat by its template. Other prompts are returned unchanged.

    Raises: ValueError if a text or a chat has no `tokenizer`, or a chat has no template.
    """
    check_tokenizer(tokenizer, [prompt])
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    return prompt_ids(tokenizer, prompt, **template_kwargs) if is_chat(prompt) else prompt


def check_tokenizer(tokenizer: Any, prompts: Sequence[Prompt]) -> None:
    """Raise ValueError if all prompts need a tokenizer and there is none, and TypeError for
    something else in its place."""
    if tokenizer is not None and not callable(tokenizer):
        expected = "a tokenizer of transformers, such as AutoTokenizer.from_pretrained(name)"
        raise TypeError(wrong("tokenizer", tokenizer, expected))
    if tokenizer is None and prompts:
        plain = (prompt.prompt if isinstance(prompt, Request) else prompt for prompt in prompts)
        if all(isinstance(prompt, str) or is_chat(prompt) for prompt in plain):
            raise ValueError("prompts that are texts or chats need a tokenizer: pass tokenizer=")


def check_generation(settings: Any) -> None:
    """Raise TypeError unless a user's generation config is one, and UnsupportedError for fields
    that would have no effect."""
    if not isinstance(settings, GenerationConfig | None):
        expected = "a transformers.GenerationConfig, such as GenerationConfig(do_sample=True)"
        raise TypeError(wrong("generation_config", settings, expected))
    if getattr(settings, "use_cache", None) is False:
        raise UnsupportedError(
            "generation_config has use_cache=False, but generate_all always uses an H2OCache: "
            "leave use_cache out, or call model.generate()"
        )
    if getattr(settings, "cache_implementation", None) not in (None, "dynamic"):
        raise UnsupportedError(
            f"generation_config has cache_implementation={settings.cache_implementation!r}, but "
            "generate_all always uses an H2OCache: leave it out, or call model.generate()"
        )
    if getattr(settings, "token_healing", None):
        raise UnsupportedError(
            "generation_config has token_healing=True, which generate_all does not support: leave "
            "it out, or call model.generate() with an H2OCache"
        )
    if (getattr(settings, "num_beams", None) or 1) > 1:
        check_modes({Mode.GENERATE_ALL, Mode.BEAMS})
    for name in ("attentions", "hidden_states", "logits", "scores"):
        if getattr(settings, f"output_{name}", None):
            raise UnsupportedError(
                f"generation_config has output_{name}=True, but a Result has tokens only: leave it "
                "out, or call model.generate() with an H2OCache"
            )


def decoding_arguments(model: Any, input_ids: Tensor, **arguments: Any) -> dict[str, Any]:
    """Stand in for the decoding loop of `generate()` and return the loop's arguments."""
    return arguments


class ActiveRequest:
    """A request from its prompt to its last token."""

    def __init__(self, index: int, request: Request, settings: Settings) -> None:
        self.index = index
        self.settings = settings
        self.ids = settings.ids_of(request)
        self.prompt_tokens = self.ids.shape[1]
        self.cache = settings.cache_for(request, self.ids)
        self.tokens_prefilled = max(0, int(self.cache.get_seq_length()) - settings.virtual)
        if self.tokens_prefilled:
            check_prompt(self.cache, self.tokens_prefilled, self.ids)
        if spans := check_spans("evict", request.evict):
            check_removal(spans, self.tokens_prefilled, settings.virtual)
            self.cache.evict(spans, ids=self.ids[:, : self.tokens_prefilled])
            self.tokens_prefilled -= size(spans)
            self.ids = without_spans(self.ids, spans)
            self.prompt_tokens = self.ids.shape[1]
        prepared = settings.make_decoding_arguments(request, self.ids, self.cache)
        self.processors = prepared["logits_processor"]
        self.criteria = prepared["stopping_criteria"]
        self.generation_config = prepared["generation_config"]
        self.last_logits = {k: v for k, v in prepared.items() if k == "logits_to_keep"}
        mode = self.generation_config.get_generation_mode(None)
        if mode not in (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE):
            raise UnsupportedError(
                f"generate_all does not support {mode.value}: use model.generate() with an H2OCache"
            )
        if (self.generation_config.num_return_sequences or 1) > 1:
            raise UnsupportedError("num_return_sequences is above 1: repeat the prompt instead")
        at = settings.seed + index if request.seed is None else check_seed(request.seed)
        self.generator = None
        if self.generation_config.do_sample:
            self.generator = torch.Generator(input_device(settings.model)).manual_seed(at)
        self.new: list[int] = []
        self.finish_reason = ""
        ends = [x for x in self.criteria if type(x) is EosTokenCriteria]
        self.ends = {token for x in ends for token in x.eos_token_id.tolist()}
        limits = [x.max_length for x in self.criteria if type(x) is MaxLengthCriteria]
        self.limit = min(limits, default=self.generation_config.max_length)
        self.warn_if_too_long()
        are_numbers = len(ends) + len(limits) == len(self.criteria)
        self.is_plain_greedy = not self.processors and self.generator is None and are_numbers
        """Whether the likeliest token is next, and only end tokens or the length end the answer"""

    def warn_if_too_long(self) -> None:
        """Warn if the prompt exceeds the rotary positions of the model, unless its angles adapt to
        the length. (Learned positions raise an error there.)"""
        text = self.settings.model.config.get_text_config(decoder=True)
        limit = getattr(text, "max_position_embeddings", None) or math.inf
        rope = getattr(text, "rope_parameters", None)
        is_fixed = bool(rope) and rope.get("rope_type") != "dynamic"
        is_original = self.settings.config.positions == "original"
        if self.prompt_tokens > limit and is_fixed and is_original:
            warnings.warn(
                f"prompt {self.index} has {self.prompt_tokens} tokens, but the model has {limit} "
                "positions, beyond which it writes gibberish: shorten the prompt",
                stacklevel=2,
            )

    @property
    def chunk(self) -> int:
        """Number of prompt tokens in the next chunk."""
        chunk: int = self.generation_config.prefill_chunk_size or self.prompt_tokens
        return min(chunk, self.prompt_tokens - self.tokens_prefilled)

    @torch.no_grad()
    def prefill_next_chunk(self) -> Tensor | None:
        """Prefill the next chunk. After the last one, return logits [1, vocabulary] of the first
        new token."""
        settings, begin = self.settings, self.tokens_prefilled
        ids = self.ids[:, begin : begin + self.chunk]
        forward = model_after_prompt(settings.model) if begin else settings.model
        where = {}
        if begin or not settings.virtual:
            seen = begin + settings.virtual + (self.cache.guard.state.row(0).offset or 0)
            where = positions_after(settings.model, seen, ids)
        settings.angles.forget()
        call = ModelCall.of(settings.model, ids, None, where.get("position_ids"))
        with self.cache.guard.telling(call):
            output = forward(
                input_ids=ids,
                use_cache=True,
                **where,
                **with_cache(self.cache),
                **self.last_logits,
            )
        self.tokens_prefilled += ids.shape[1]
        return output.logits[:, -1] if self.tokens_prefilled == self.prompt_tokens else None

    def accept(self, logits: Tensor) -> None:
        """Choose the next token by logits [1, vocabulary]."""
        scores = self.processors(self.ids, logits.to(dtype=torch.float32, copy=True))
        if self.generator is None:
            token = scores.argmax(-1, keepdim=True)
        else:
            token = torch.multinomial(scores.softmax(-1), 1, generator=self.generator)
        self.ids = torch.cat([self.ids, token], dim=1)
        self.new.append(int(token))
        # A criterion may return one value for the whole batch.
        answers = (x(self.ids, scores) for x in self.criteria)
        hit = [bool(torch.as_tensor(answer, device="cpu").all()) for answer in answers]
        by_length = [isinstance(criterion, MaxLengthCriteria) for criterion in self.criteria]
        if any(hit):
            stopped = any(x and not y for x, y in zip(hit, by_length, strict=True))
            self.finish_reason = "stop" if stopped else "length"

    def take(self, token: int) -> None:
        """Append the next token of a request with `is_plain_greedy`."""
        self.new.append(token)
        if token in self.ends:
            self.finish_reason = "stop"
        elif self.prompt_tokens + len(self.new) >= self.limit:
            self.finish_reason = "length"

    def result(self, report: dict[str, int]) -> Result:
        tokenizer = self.settings.tokenizer
        text = None
        if tokenizer is not None:
            text = tokenizer.decode(self.new, skip_special_tokens=True)
        return Result(self.index, self.new, text, self.prompt_tokens, self.finish_reason, report)
