"""The work behind `h2o generate`: one prompt, one model, one cache or four.

Every run goes through the model's own generate(), with the cache and the
attention implementation that its users have: the full cache is transformers'
DynamicCache under sdpa. A streamer, which generate() calls for each new token,
takes the times: all up to the first new token is the prefill.
"""

from __future__ import annotations

import importlib.resources
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from h2o import backends, models
from h2o.config import H2OConfig
from h2o.errors import UserError
from h2o.profile import Profile

DOCUMENT = "lighthouse.txt"
QUESTION = "Briefly summarize the following article."
"""Comes before the shipped document when the user gives no prompt."""

TENTH = 0.1
"""Of a full cache's bytes: what the preset of a comparison may take."""


@dataclass(frozen=True)
class Request:
    """What to generate from, and how."""

    config: H2OConfig
    model: str | None = None
    """as for `h2o.models.load`"""
    prompt: str | None = None
    document: str | None = None
    """comes after the prompt, with a blank line between them; without either the
    shipped document and question are taken"""
    chat: bool = False
    """wrap both in the model's chat template (the shipped ones are, if it has one)"""
    dtype: str = "auto"
    max_new_tokens: int = 120
    compare: bool = False
    """run all of `caches` instead of h2o alone"""
    compile: bool = False
    """compile the decode step of caches that h2o makes, before the clock starts"""


@dataclass(frozen=True)
class Run:
    """One generation and what it took."""

    mode: str
    """which of `caches`"""
    text: str
    new_tokens: int
    prefill_seconds: float
    prefill_tokens_per_second: float
    decode_seconds: float
    decode_tokens_per_second: float
    """of the tokens after the first, which the prefill gives; 0 if there are none"""
    kv_bytes_held: int
    """keys and values at the end"""
    kv_bytes_full: int
    """what a full cache would hold then"""
    tokens_seen: int
    tokens_held: int
    """keys at the end, in each layer and key/value head; the mean where they differ"""
    tokens_evicted: int
    mass_evicted: float
    """share of all attention given that evicted keys had received, 0 to 1"""
    tokens_agree: int | None
    """leading tokens equal to the full cache's; None without a full run"""


@dataclass(frozen=True)
class Result:
    """What was done; `asdict` of it is the output of --json."""

    model: str
    dtype: str
    prompt_tokens: int
    budget: dict[str, Any]
    versions: dict[str, str]
    runs: list[Run]


class Progress:
    """Lines about what is going on, for standard error: on a terminal each replaces the last."""

    def __init__(self, quiet: bool = False) -> None:
        self.quiet = quiet
        self.terminal = sys.stderr.isatty()
        self.shown = False  # an update stands on the terminal's last line

    def say(self, text: str) -> None:
        """Something that begins and may take long."""
        if not self.quiet:
            self.update("")
            print(text, file=sys.stderr, flush=True)

    def update(self, text: str) -> None:
        """How far it is: on a terminal only. An empty text takes the last update away."""
        if self.terminal and not self.quiet and (text or self.shown):
            columns = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{text[:columns]}", end="", file=sys.stderr, flush=True)
            self.shown = bool(text)


def generate(
    request: Request, progress: Progress, stream: Callable[[str], None] | None = None
) -> Result:
    """Generate greedily with an H2OCache, or with each of `caches`.

    `stream` is given the text piece by piece as it grows; without it the progress line shows
    the text's end. Errors: UserError.
    """
    if (request.prompt, request.document) != (None, None) and not given_text(request):
        raise UserError("the prompt is empty")
    model, tokenizer = models.load(request.model, dtype=request.dtype, say=progress.say)
    ids = prompt_ids(request, tokenizer)
    tokens = ids.shape[1]
    limit = getattr(model.config, "max_position_embeddings", None)
    if limit and tokens + request.max_new_tokens > limit:
        raise UserError(
            f"the prompt's {tokens} tokens and {request.max_new_tokens} new ones are more than the "
            f"{limit} positions of the model: shorten the prompt or lower --max-new-tokens"
        )
    progress.say(f"reading a prompt of {tokens} tokens")
    warm_up(model, ids)
    runs: list[Run] = []
    reference: list[int] | None = None
    wanted = caches(request.config, model, tokens) if request.compare else {"h2o": request.config}
    for mode, config in wanted.items():
        run, new = generate_once(mode, config, request, model, tokenizer, ids, progress, stream)
        if config is None:
            reference = new
        if reference is not None:
            run = replace(run, tokens_agree=leading_agreement(new, reference))
        runs.append(run)
    return Result(
        model=request.model or models.DEFAULT_MODEL,
        dtype=str(model.dtype).removeprefix("torch."),
        prompt_tokens=tokens,
        budget=asdict(request.config),
        versions=versions(),
        runs=runs,
    )


def caches(config: H2OConfig, model: Any, prompt_tokens: int) -> dict[str, H2OConfig | None]:
    """What a comparison runs, by the names that it shows; None is transformers' own cache.

    "full" comes first, as the others are held against it; then "h2o", which is `config`; the best
    preset for the model in a tenth of the bytes, "calibrated" where there is a profile and "robust"
    where there is none; and "local", as many keys as h2o, but the newest.
    """
    heavy, recent = config.for_model(model).tokens(prompt_tokens)
    local = replace(
        config, heavy=0, recent=heavy + recent, of="keys", shares=None, kv_dtype=None, merge=None
    )
    profile = config.shares if isinstance(config.shares, Profile) else Profile.shipped(model)
    if profile is None:
        name, preset = "robust", H2OConfig.robust(TENTH, of="bytes")
    else:
        name, preset = "calibrated", H2OConfig.calibrated(TENTH, profile, of="bytes")
    preset = replace(preset, positions=config.positions)
    return {"full": None, "h2o": config, name: preset, "local": local}


def prompt_ids(request: Request, tokenizer: Any) -> Any:
    """Token ids [1, n] of what the request asks for."""
    if request.document is None and request.prompt is None:
        document = importlib.resources.files("h2o").joinpath("data", DOCUMENT).read_text("utf-8")
        request = replace(
            request, prompt=QUESTION, document=document, chat=tokenizer.chat_template is not None
        )
    return encode(tokenizer, given_text(request), request.chat)


def given_text(request: Request) -> str:
    """Prompt and document as one text."""
    parts = (request.prompt, request.document)
    return "\n\n".join(part.strip() for part in parts if part and part.strip())


def encode(tokenizer: Any, text: str, chat: bool) -> Any:
    """Token ids [1, n] of a text, or of a chat with this as its first turn."""
    if not chat:
        return tokenizer(text, return_tensors="pt")["input_ids"]
    if tokenizer.chat_template is None:
        raise UserError("--chat: this model's tokenizer has no chat template")
    turn = {"role": "user", "content": text}
    return tokenizer.apply_chat_template(
        [turn], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]


def warm_up(model: Any, ids: Any) -> None:
    """Read the weights from the disk, which the first run would have to wait for otherwise."""
    import torch

    with torch.no_grad():
        model(ids[:, :8], use_cache=False)


def generate_once(
    mode: str,
    config: H2OConfig | None,
    request: Request,
    model: Any,
    tokenizer: Any,
    ids: Any,
    progress: Progress,
    stream: Callable[[str], None] | None,
) -> tuple[Run, list[int]]:
    """One run of `generate`, and the tokens that came."""
    import torch

    compiled = request.compile and config is not None
    cache = new_cache(model, config, ids.shape[1], compiled)
    how: dict[str, Any] = {"do_sample": False}
    if compiled:
        progress.say(f"{mode}: compiling the decode step, which takes a minute or two")
        how |= compiling()
        few, warm = ids[:, :8], new_cache(model, config, ids.shape[1], compiled)
        mask = torch.ones_like(few)
        model.generate(few, attention_mask=mask, past_key_values=warm, max_new_tokens=3, **how)
    streamer = Streamer(mode, tokenizer, progress, stream, request.max_new_tokens)
    hooks = [] if compiled else watch_layers(model, streamer.prefilling)
    try:
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            streamer=streamer,
            max_new_tokens=request.max_new_tokens,
            **how,
        )
    finally:
        progress.update("")
        for hook in hooks:
            hook.remove()
    prefill, *steps = streamer.seconds
    run = Run(
        mode=mode,
        text=streamer.text,
        new_tokens=len(streamer.tokens),
        prefill_seconds=prefill,
        prefill_tokens_per_second=ids.shape[1] / prefill,
        decode_seconds=sum(steps),
        decode_tokens_per_second=len(steps) / sum(steps) if steps else 0.0,
        tokens_agree=None,
        **holdings(cache),
    )
    return run, streamer.tokens


def compiling() -> dict[str, Any]:
    """What makes the model's generate() compile, also on a CPU."""
    from transformers import CompileConfig

    config = CompileConfig(fullgraph=True, mode="default")
    config._compile_all_devices = True
    return {"compile_config": config}


def new_cache(
    model: Any, config: H2OConfig | None, prompt_tokens: int, compileable: bool = False
) -> Any:
    """An empty cache, of all keys without a config, after telling the model which attention goes
    with it. Errors: UserError for one that is to be compiled and cannot."""
    from transformers import DynamicCache

    from h2o.errors import Unsupported
    from h2o.hf.cache import H2OCache

    model.set_attn_implementation("sdpa" if config is None else "h2o")
    if config is None:
        return DynamicCache(config=model.config)
    try:
        return H2OCache(model.config, config, prompt_length=prompt_tokens, compileable=compileable)
    except Unsupported as error:
        if compileable:
            raise UserError(f"--compile: {error}") from error
        raise


def holdings(cache: Any) -> dict[str, Any]:
    """The fields of a Run that tell what a cache holds."""
    if not hasattr(cache, "report"):
        held = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
        seen = cache.get_seq_length()
        return {
            "kv_bytes_held": held,
            "kv_bytes_full": held,
            "tokens_seen": seen,
            "tokens_held": seen,
            "tokens_evicted": 0,
            "mass_evicted": 0.0,
        }
    report = cache.report()
    total, layers = report.total, sum(layer.kind == "h2o" for layer in report.layers)
    seen = held = cache.get_seq_length()
    if layers:  # otherwise all have a sliding window of their own
        seen, held = total.seen[0] // layers, total.kept[0] // layers
    return {
        "kv_bytes_held": total.bytes_held,
        "kv_bytes_full": total.bytes_full,
        "tokens_seen": seen,
        "tokens_held": held,
        "tokens_evicted": seen - held,
        "mass_evicted": total.share_evicted,
    }


def versions() -> dict[str, str]:
    """Of what a result depends on."""
    import torch
    import transformers

    installed = {package.__name__: package.__version__ for package in (torch, transformers)}
    return {"h2o": backends.VERSION, **installed}


def leading_agreement(tokens: list[int], others: list[int]) -> int:
    """How many tokens from the first on are the same in both."""
    pairs = list(zip(tokens, others, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def watch_layers(model: Any, passed: Callable[[int, int], None]) -> list[Any]:
    """Hooks that call `passed(layers done, layers)` whenever an attention layer is through."""
    attentions = [module for module in model.modules() if hasattr(module, "layer_idx")]
    layers = 1 + max((module.layer_idx for module in attentions), default=0)

    def after(module: Any, *_: Any) -> None:
        passed(module.layer_idx + 1, layers)

    return [module.register_forward_hook(after) for module in attentions]


class Streamer:
    """What generate() calls as it goes: put() with the prompt, put() with each token, end()."""

    def __init__(
        self,
        mode: str,
        tokenizer: Any,
        progress: Progress,
        stream: Callable[[str], None] | None,
        max_new_tokens: int,
    ) -> None:
        self.mode, self.tokenizer, self.progress = mode, tokenizer, progress
        self.stream, self.max_new_tokens = stream, max_new_tokens
        self.tokens: list[int] = []
        self.text = ""
        self.seconds: list[float] = []
        """from the prompt to the first token, then from token to token"""
        self.since: float | None = None

    def prefilling(self, layer: int, layers: int) -> None:
        if not self.tokens:
            self.progress.update(f"{self.mode}: prefill, layer {layer} of {layers}")

    def put(self, value: Any) -> None:
        now = time.perf_counter()
        if self.since is not None:
            self.seconds.append(now - self.since)
            self.tokens.extend(value.reshape(-1).tolist())
            self.show(final=False)
        # What showing takes is the terminal's time, not the model's.
        self.since = time.perf_counter()

    def end(self) -> None:
        self.show(final=True)

    def show(self, final: bool) -> None:
        """Stream what is new, but never half a character: the rest comes with later tokens."""
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if text.endswith("\ufffd") and not final:
            return
        if self.stream:
            self.progress.update("")
            self.stream(text[len(self.text) :])
        else:
            tail = " ".join(text[-60:].split())
            count = f"{len(self.tokens)} of {self.max_new_tokens}"
            self.progress.update(f"{self.mode}: {count}  ...{tail}")
        self.text = text
