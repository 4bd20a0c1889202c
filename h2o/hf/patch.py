"""`h2o.patched`, `h2o.enable`: use H2O without changing code that calls generate(), model(...) or a
pipeline.

Patching a model changes its attention implementation, replaces two methods of `generate()` and the
one that begins continuous batching, and adds a hook that gives direct forward passes a cache. All
of this is reverted when the last block or `enable` of the model ends.
"""

from __future__ import annotations

import dataclasses
import inspect
import traceback
import warnings
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from types import MethodType
from typing import Any

import torch
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.generation import GenerationMode
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor
from typing_extensions import Unpack

from h2o import compat
from h2o.compat import CACHE, PREPARE_CACHE, PREPARE_PROCESSORS
from h2o.config import H2OConfig, resolve_config
from h2o.config.fields import ConfigFields, Pinned
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_switch import CHANGING, AttentionSwitch
from h2o.hf.cache.cache import H2OCache
from h2o.hf.layers.cache_relative_variant import zero_positions
from h2o.hf.model_traits.wrappers import check_pins, generating_part, input_device, unwrap
from h2o.hf.modes import Mode, check_modes, config_modes
from h2o.hf.support import model_modes
from h2o.model_identity import config_of
from h2o.utils.with_block import with_block

SCORED = 8
"""Number of texts, each scored in a single forward pass, after which `patched` warns that no budget
affects their logits"""
_UNAFFECTED = (
    f"h2o.patched() scored {SCORED} texts by one forward pass each. Eviction starts only after a "
    "prompt, so their logits are those of a full cache, whatever the budget. To score texts use "
    "h2o.simulated(), or h2o eval (lm-eval's model h2o in h2o.evaluation.lm) instead of HFLM"
)

CONTINUOUS_BATCHING = "init_continuous_batching"
"""Method of a model that begins continuous batching"""

_ATTRIBUTE = "_h2o_patches"
_GENERATE = inspect.unwrap(GenerationMixin.generate).__code__

_entered: ContextVar[tuple[weakref.ref[Patch], ...]] = ContextVar("h2o_patched", default=())
"""Blocks of all models that this context has entered, the latest last. Some may have ended."""


@dataclasses.dataclass(eq=False)
class Patch:
    """One `enable` of a model, or one block of `patched`.

    `cache` is the latest cache that was made, for `print(patch.cache.report())`. A copy of a
    patched model (deepcopy, pickle, torch.save) is enabled and has its own patches.
    """

    model: Any
    config: H2OConfig
    options: dict[str, Any]  # pinned and trace of each cache
    is_block: bool
    cache: H2OCache | None = None
    pass_cache: H2OCache | None = None  # the latest of a direct forward pass
    scored: int = 0  # direct forward passes that no second token followed

    def __post_init__(self) -> None:
        self.switch = AttentionSwitch("patched" if self.is_block else "enabled", "h2o")
        cache = self.make_cache()  # raises for a model that h2o does not support
        check_modes({Mode.PATCHED, *config_modes(cache.config), *model_modes(self.model)})
        self.settings, self.cache = (self.config, cache.guard.pins, self.options["trace"]), None

    @property
    def is_active(self) -> bool:
        """Whether the patch was applied and not undone."""
        return self in _patches_of(self.model)

    def make_cache(self, prompt_length: Any = None) -> H2OCache:
        """Make a fresh cache for the model."""
        config = self.model.config
        cache = H2OCache(config, self.config, prompt_length=prompt_length, **self.options)
        self.cache = cache  # another thread's call may replace the attribute at any time
        return cache

    def make_pass_cache(self) -> H2OCache:
        """Make a fresh cache for a direct forward pass."""
        last = self.pass_cache
        if last is not None and last.is_prompt_only():
            self.count_scored()
        cache = self.pass_cache = self.make_cache()
        return cache

    def count_scored(self) -> None:
        """Count a text that was scored in a single forward pass, and warn if there are many."""
        self.scored += 1
        if self.scored == SCORED:
            warnings.warn(_UNAFFECTED, stacklevel=2)

    def apply(self) -> None:
        """Patch the model. Raises what `enable` raises, and then leaves the model as it was."""
        with CHANGING:
            for other in _patches_of(self.model):
                elsewhere = other.switch.owner_elsewhere()
                if elsewhere and other.settings != self.settings:
                    raise RuntimeError(
                        f"this model is patched by another {elsewhere} with other settings. Give "
                        f"all {elsewhere}s the same settings. For different ones pass each call a "
                        "cache of its own, generate(..., cache=h2o.H2OCache(model, budget=0.2)), "
                        'after one model.set_attn_implementation("h2o"), without h2o.patched()'
                    )
            self.switch.apply(self.model)
            try:
                _warn_without_cache(self.model)
                stack = self.model.__dict__.get(_ATTRIBUTE) or PatchStack(self.model)
                stack.patches.append(self)
            except BaseException:
                self.switch.undo()
                raise
        if self.is_block:
            entered = [x for x in _entered.get() if (patch := x()) and patch.is_active]
            _entered.set((*entered, weakref.ref(self)))

    def undo(self) -> None:
        """Undo this patch, but no other of the model. Raises RuntimeError if it is not active."""
        with CHANGING:
            if not self.is_active:
                raise RuntimeError("this patch has already been undone")
            attributes = vars(self.model)
            stack = attributes[_ATTRIBUTE]
            stack.patches.remove(self)
            if not stack.patches:
                stack.hook.remove()
                for name in (*stack.before, _ATTRIBUTE):
                    attributes.pop(name, None)  # other code may have removed it
                attributes.update({name: x for name, x in stack.before.items() if x is not None})
            if not stack.patches or self.switch.is_in_force():
                self.switch.undo()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "is_block": False, "cache": None, "pass_cache": None}


class PatchStack:
    """The patches of a model, the latest last, and the methods that replace the model's own."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.patches: list[Patch] = []
        self.cache_index = compat.cache_position(model)
        replaced = {
            PREPARE_CACHE: self.prepare_cache,
            PREPARE_PROCESSORS: self.logits_processors,
            CONTINUOUS_BATCHING: self.continuous_batching,
        }
        self.before = {name: model.__dict__.get(name) for name in replaced}
        model.__dict__.update(replaced, **{_ATTRIBUTE: self})
        self.hook = model.register_forward_pre_hook(
            self.before_forward, prepend=True, with_kwargs=True
        )

    def active_patch(self) -> Patch | None:
        """The patch that gives a call in this context its cache."""
        patches = list(self.patches)  # copied: another thread may end a patch
        blocks = [patch for entered in _entered.get() if (patch := entered()) in patches]
        enabled = [patch for patch in patches if not patch.is_block]
        return next(reversed(blocks or enabled or patches), None)

    def prepare_cache(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Stand in for `GenerationMixin._prepare_cache_for_generation`."""
        patch = self.active_patch()
        has_cache = compat.cache_in(model_kwargs) is not None
        wants_cache = not has_cache and generation_config.use_cache is not False
        if patch is not None:
            _check_generation(generation_config, wants_cache)
        if patch is None or not wants_cache:
            return self._original(PREPARE_CACHE)(generation_config, model_kwargs, *args, **kwargs)
        assisted = GenerationMode.ASSISTED_GENERATION in (*args, *kwargs.values())
        if assisted:  # the first forward pass is the prompt and a draft
            cache = patch.make_cache(compat.known_prompt_length(generation_config, model_kwargs))
        else:
            cache = patch.make_cache()
            if generation_config.prefill_chunk_size is None:
                cache.guard.allow_cache_drop()
        model_kwargs[CACHE] = cache
        return None

    def logits_processors(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `GenerationMixin._get_logits_processor`. With `guidance_scale` the text
        without the prompt keeps a full cache."""
        processors = self._original(PREPARE_PROCESSORS)(*args, **kwargs)
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                context: dict[str, Any] = processor.unconditional_context
                ours = unwrap(processor.model) is self.model
                if ours and context["use_cache"] and context[CACHE] is None:
                    context[CACHE] = DynamicCache(config=self.model.config)
        return processors

    def continuous_batching(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `ContinuousMixin.init_continuous_batching`, which `generate_batch` calls. On
        a GPU it would replace h2o's attention by flash attention, and nothing would be evicted."""
        if self.active_patch() is None:
            return self._original(CONTINUOUS_BATCHING)(*args, **kwargs)
        raise UnsupportedError(
            "generate_batch() inside h2o.patched() or after h2o.enable(): transformers' continuous "
            "batching stores keys in pages, from which h2o cannot evict them. Call "
            "h2o.generate_all(model, prompts, budget=0.2, rows=16), which is h2o's own continuous "
            "batching"
        )

    def before_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give a forward pass an `H2OCache` where it would make another cache itself. Count it as a
        scored text if it uses no cache, which the caller or the config may say. (The config does
        once a Trainer is made.)"""
        if len(args) > self.cache_index:
            names = compat.parameters_of(model.forward)
            args, kwargs = (), {**dict(zip(names, args, strict=False)), **kwargs}
        has_cache = compat.cache_in(kwargs) is not None
        use_cache = kwargs.get("use_cache")
        is_default = use_cache is None
        if is_default:
            use_cache = getattr(model.config.get_text_config(decoder=True), "use_cache", True)
        patch = None if has_cache or model.training else self.active_patch()
        if patch is not None and use_cache:
            cache = compat.with_cache(patch.make_pass_cache())
            kwargs = {**compat.without_cache(kwargs), **cache, "use_cache": True}
        elif patch is not None and (is_default or _scores_a_text(model)):
            patch.count_scored()
        return args, zero_positions(args, kwargs)

    def _original(self, name: str) -> Any:
        return self.before[name] or MethodType(getattr(type(self.model), name), self.model)


def enable(
    model: Any,
    h2o_config: H2OConfig | None = None,
    *,
    pinned: Pinned = None,
    trace: bool = False,
    **parameters: Unpack[ConfigFields],
) -> Patch:
    """Give every generate() and forward pass of a model a fresh `H2OCache` from now on.

    A cache that the caller passes is used instead, and `use_cache=False` is respected. Calls may
    come from several threads; each call has its own cache. With `guidance_scale` the text without
    the prompt keeps a full cache. A second `enable` of a model replaces the first, until `disable`
    undoes it: `disable` undoes the latest `enable`.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        h2o_config, parameters, pinned, trace: as for `H2OCache`, for each call's prompt.

    Raises:
        UnsupportedError: (a ValueError) h2o does not support the model. generate() raises it for
            `cache_implementation="static"` and other kinds of cache.
        ValueError: the model is on the device "meta", without the values of its weights.
        RuntimeError: another thread or task has the model patched with other settings, or the
            model is simulated.
    """
    config = resolve_config(h2o_config, parameters, enable)
    return _apply(model, config, {"pinned": pinned, "trace": trace}, is_block=False)


def disable(model: Any) -> None:
    """Undo the latest `enable` of a model. Blocks of `patched` end by themselves.

    Raises:
        RuntimeError: the model is not enabled.
        TypeError: this is not a model of transformers with generate().
    """
    patches = _patches_of(_base_of(model))
    enabled = [patch for patch in patches if not patch.is_block]
    if not enabled:
        raise RuntimeError("h2o is not enabled for this model")
    enabled[-1].undo()


@with_block
def patched(
    model: Any,
    h2o_config: H2OConfig | None = None,
    *,
    pinned: Pinned = None,
    trace: bool = False,
    **parameters: Unpack[ConfigFields],
) -> Iterator[Patch]:
    """Do what `enable` does, for the calls inside a with block.

    ```python
    with h2o.patched(model, budget=0.2) as patch:
        pipe("...")
        print(patch.cache.report())
    ```

    A call uses the latest block that its own thread or asyncio task has entered. If there is none,
    it uses the latest `enable`, or else the latest block of any thread, since a thread that streams
    has entered none. Blocks of several threads and tasks may overlap, as in a server, if all have
    the same settings. After the last block, also after an error, the model is as before.
    """
    config = resolve_config(h2o_config, parameters, patched)
    patch = _apply(model, config, {"pinned": pinned, "trace": trace}, is_block=True)
    try:
        yield patch
    finally:
        if patch.is_active:
            patch.undo()


def _apply(model: Any, config: H2OConfig, options: dict[str, Any], is_block: bool) -> Patch:
    base = _base_of(model)
    check_pins(model, options["pinned"])
    patch = Patch(base, config.for_model(base), options, is_block)
    input_device(base)  # raises for a model without weights
    patch.apply()
    return patch


def _base_of(model: Any) -> Any:
    """The model inside PEFT, torch.compile and models such as BLIP-2, where generate() makes the
    cache. Raises TypeError for an object without generate()."""
    base = generating_part(unwrap(model))
    if hasattr(base, PREPARE_CACHE):
        return base
    hint = _hint(base)
    if not hint:
        config_of(model)  # raises for what is no model of transformers, and says what to pass
    raise TypeError(
        f"expected a model of transformers with generate(), not {type(model).__name__}{hint}"
    )


def _hint(model: Any) -> str:
    """What to do instead of patching an object without generate()."""
    if hasattr(getattr(model, "model", None), PREPARE_CACHE):
        return "; for a pipeline pass its .model"
    if hasattr(getattr(model, "module", None), PREPARE_CACHE):  # DataParallel
        return "; pass its .module"
    if isinstance(model, PreTrainedModel):
        return (
            ". Without generate() a text takes one forward pass, which evicts nothing. "
            "h2o.simulated() shows what a budget would change"
        )
    return ""


def _patches_of(model: Any) -> list[Patch]:
    stack = vars(model).get(_ATTRIBUTE)
    return [] if stack is None else list(stack.patches)


def _warn_without_cache(model: Any) -> None:
    """Warn if a model's config says use_cache=False, since nothing is evicted then."""
    settings = (getattr(model, "generation_config", None), model.config.get_text_config())
    if any(getattr(x, "use_cache", None) is False for x in settings):
        warnings.warn(
            "this model's config says use_cache=False, so its calls use no cache and h2o evicts "
            "nothing. Set model.config.use_cache = model.generation_config.use_cache = True, or "
            "pass use_cache=True in each call",
            stacklevel=5,
        )


def _scores_a_text(model: Any) -> bool:
    """Whether a forward pass with use_cache=False is a call of the user's own, which runs h2o's
    attention: no step of generate(), and no pass of a simulation."""
    name = compat.attention_name(model.config.get_text_config(decoder=True))
    if name != "h2o" or torch.compiler.is_compiling():
        return False
    return all(frame.f_code is not _GENERATE for frame, _ in traceback.walk_stack(None))


def _check_generation(generation_config: Any, wants_cache: bool) -> None:
    """Raise for drafts, before early exit removes layers from the config, and for other caches."""
    early = getattr(generation_config, "assistant_early_exit", None) is not None
    if early or getattr(generation_config, "is_assistant", False):
        raise UnsupportedError(
            f"{'assistant_early_exit' if early else 'a draft model'} inside h2o.patched(): drafts "
            "roll back several forward passes, which an H2OCache cannot do. Leave the draft model "
            "outside of patched(), or use prompt_lookup_num_tokens"
        )
    implementation = generation_config.cache_implementation
    if wants_cache and implementation not in (None, "dynamic"):
        raise UnsupportedError(
            f"cache_implementation={implementation!r} inside h2o.patched() would replace the "
            "H2OCache with a cache that keeps every key. Drop the argument. If you did not pass "
            "it, set model.generation_config.cache_implementation = None"
        )
