"""`h2o.patched(model)`: H2O for code that only calls model.generate(), model(...) or a pipeline.

A patched model has another attention implementation, two replaced methods of `generate()`, and a
hook that gives direct forward passes a cache. Its last patch to end undoes all of it. A call is
served by the latest block of `patched` that its context (contextvars) has entered, else by the
latest `enable`, else by the latest block: of a thread that a block starts, as to stream from
`generate()`, the context is empty. Blocks of several contexts ask for the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from collections.abc import Iterator
from contextvars import ContextVar
from types import MethodType
from typing import TYPE_CHECKING, Any

from transformers import DynamicCache
from transformers.generation import GenerationMode
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from h2o import compat
from h2o.compat import CACHE, PREPARE_CACHE, PREPARE_PROCESSORS
from h2o.config import H2OConfig, one_config
from h2o.errors import UnsupportedError
from h2o.hf.attention.attention_switch import CHANGING, AttentionSwitch
from h2o.hf.cache.cache import H2OCache
from h2o.hf.families.tuned_prompts import check_pins
from h2o.hf.families.wrappers import unwrap
from h2o.hf.forms.cache_relative import at_zero

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from h2o.config_fields import ConfigFields, Pinned

__all__ = ["Patch", "disable", "enable", "patched"]

SCORED = 8
"""Texts in single forward passes before `patched` warns that such scores feel no budget"""

_ATTRIBUTE = "_h2o_patches"

_entered: ContextVar[tuple[weakref.ref[Patch], ...]] = ContextVar("h2o_patched", default=())
"""Blocks of any model that this context has entered, the latest last. A block that ended in another
context may still be among them. An asyncio task begins with a copy of its maker's context, a thread
with an empty one."""


@dataclasses.dataclass(eq=False)
class Patch:
    """One `enable` of a model, or one block of `patched`.

    `cache` is the latest cache that was made, for `print(patch.cache.report())`. A copy of a
    patched model (deepcopy, pickle, torch.save) is enabled, with patches of its own.
    """

    model: Any
    config: H2OConfig
    pinned: Pinned
    trace: bool
    is_block: bool
    cache: H2OCache | None = None
    pass_cache: H2OCache | None = None  # the latest of a direct forward pass
    scored: int = 0  # caches of direct forward passes that never got a second token

    def __post_init__(self) -> None:
        self.switch = AttentionSwitch("patched", "h2o")

    @property
    def is_active(self) -> bool:
        """Whether the patch was applied and not undone."""
        return self in _patches_of(self.model)

    def make_cache(self, prompt_length: Any = None) -> H2OCache:
        """Make a fresh cache for the model."""
        self.cache = H2OCache(
            self.model.config,
            self.config,
            prompt_length=prompt_length,
            pinned=self.pinned,
            trace=self.trace,
        )
        return self.cache

    def make_pass_cache(self) -> H2OCache:
        """Make a fresh cache for a direct forward pass."""
        if self.pass_cache is not None and self.pass_cache.is_prompt_only():
            self.scored += 1
            if self.scored == SCORED:
                warnings.warn(
                    f"{SCORED} texts went through a model in h2o.patched() in one forward pass "
                    "each. Eviction starts after a prompt, so their logits are those of a full "
                    "cache at any budget. To score texts use h2o.simulated(), or lm-eval's model "
                    "h2o (h2o.evaluation.lm) instead of HFLM",
                    stacklevel=2,
                )
        self.pass_cache = self.make_cache()
        return self.pass_cache

    def apply(self) -> None:
        """Patch the model, or leave it as it was and raise what `enable` does."""
        pins = self.make_cache().pass_state.pins  # or UnsupportedError
        self.settings, self.cache = (self.config, pins, self.trace), None
        with CHANGING:
            for other in _patches_of(self.model):
                elsewhere = other.switch.elsewhere()
                if elsewhere and other.settings != self.settings:
                    raise RuntimeError(
                        f"this model is patched by another {elsewhere} with other settings. Give "
                        f"all {elsewhere}s the same settings, or each a model of its own"
                    )
            self.switch.apply(self.model)
            try:
                _warn_of_no_cache(self.model)
                (_stack_of(self.model) or PatchStack(self.model)).patches.append(self)
            except BaseException:
                self.switch.undo()
                raise
        if self.is_block:
            blocks = ((entered, entered()) for entered in _entered.get())
            still_open = (entered for entered, patch in blocks if patch and patch.is_active)
            _entered.set((*still_open, weakref.ref(self)))

    def undo(self) -> None:
        """Undo the patch, whichever others the model has. Raises RuntimeError a second time."""
        with CHANGING:
            stack = _stack_of(self.model)
            if stack is None or self not in stack.patches:
                raise RuntimeError("this patch is undone already")
            stack.patches.remove(self)
            if not stack.patches:
                stack.restore()
            if not stack.patches or self.switch.is_in_force():
                self.switch.undo()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "is_block": False, "cache": None, "pass_cache": None}


class PatchStack:
    """A patched model's patches, the latest last, and what stands in place of its own methods."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.patches: list[Patch] = []
        self.cache_index = compat.cache_position(model)
        replaced = {PREPARE_CACHE: self.prepare_cache, PREPARE_PROCESSORS: self.logits_processors}
        self.before = {name: model.__dict__.get(name) for name in replaced}
        model.__dict__.update(replaced, **{_ATTRIBUTE: self})
        self.hook = model.register_forward_pre_hook(
            self.before_forward, prepend=True, with_kwargs=True
        )

    def restore(self) -> None:
        """Give the model its own methods back."""
        self.hook.remove()
        attributes = self.model.__dict__
        for name, before in {**self.before, _ATTRIBUTE: None}.items():
            if before is None:
                attributes.pop(name, None)
            else:
                attributes[name] = before

    def serving(self) -> Patch | None:
        """The patch that serves a call of this context."""
        patches = list(self.patches)  # another thread may end one
        blocks = [patch for entered in _entered.get() if (patch := entered()) in patches]
        enabled = [patch for patch in patches if not patch.is_block]
        return next(reversed(blocks or enabled or patches), None)

    def prepare_cache(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Stand in for `GenerationMixin._prepare_cache_for_generation`."""
        if self.serving() is not None:
            _refuse_drafts(generation_config)
        has_cache = compat.cache_in(model_kwargs) is not None
        wants_cache = not has_cache and generation_config.use_cache is not False
        patch = self.serving() if wants_cache else None
        if patch is None:
            return self._original(PREPARE_CACHE)(generation_config, model_kwargs, *args, **kwargs)
        _refuse_other_caches(generation_config)
        assisted = GenerationMode.ASSISTED_GENERATION in (*args, *kwargs.values())
        if assisted or generation_config.prefill_chunk_size is not None:
            cache = patch.make_cache(_prompt_length(generation_config, model_kwargs))
        else:
            cache = patch.make_cache()  # which learns the prompt's length from its one pass
            cache.pass_state.reread()
        if assisted:
            cache.activate_past_recording()  # transformers does so itself from 5.16 on
        model_kwargs[CACHE] = cache
        return None

    def logits_processors(self, *args: Any, **kwargs: Any) -> Any:
        """Stand in for `GenerationMixin._get_logits_processor`: for `guidance_scale` the text
        without the prompt keeps its full cache."""
        processors = self._original(PREPARE_PROCESSORS)(*args, **kwargs)
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                context: dict[str, Any] = processor.unconditional_context
                ours = unwrap(processor.model) is self.model
                if ours and context["use_cache"] and context[CACHE] is None:
                    context[CACHE] = DynamicCache(config=self.model.config)
        return processors

    def before_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Give a forward pass that would make a cache of its own one of ours."""
        if self._wants_cache(args, kwargs) and (patch := self.serving()) is not None:
            kwargs = {
                **compat.without_cache(kwargs),
                **compat.with_cache(patch.make_pass_cache()),
                "use_cache": True,
            }
        return args, at_zero(args, kwargs)

    def _wants_cache(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        has_cache = compat.cache_in(kwargs) is not None or len(args) > self.cache_index
        use_cache = kwargs.get("use_cache")
        if use_cache is None:
            use_cache = getattr(self.model.config.get_text_config(decoder=True), "use_cache", True)
        return bool(use_cache) and not has_cache and not self.model.training

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

    A cache that the caller gives is used instead, and `use_cache=False` is respected. `disable`
    undoes the latest `enable`; `patched` does both. Calls of all threads are served, each with a
    cache of its own. With `guidance_scale` the text without the prompt keeps a full cache, as it
    does beside an `H2OCache` given by hand.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        h2o_config, parameters: as for `H2OCache`.
        pinned, trace: as for `H2OCache`, for each call's prompt.

    Raises:
        UnsupportedError: (a ValueError) h2o does not support the model. generate() raises it for
            `cache_implementation="static"` and other caches that are not H2O.
        RuntimeError: another thread or task has the model patched with other settings, or
            simulated.
    """
    return _apply(model, one_config(h2o_config, parameters), pinned, trace, is_block=False)


def disable(model: Any) -> None:
    """Undo the latest `enable` of a model. Blocks of `patched` end by themselves.

    Raises:
        RuntimeError: the model is not enabled.
    """
    enabled = [patch for patch in _patches_of(_base(model)) if not patch.is_block]
    if not enabled:
        raise RuntimeError("h2o is not enabled for this model")
    enabled[-1].undo()


@contextlib.contextmanager
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
    with h2o.patched(model, heavy=0.1, recent=0.1) as patch:
        pipe("...")
        print(patch.cache.report())
    ```

    Blocks nest, and the latest one that the thread or asyncio task has entered serves. A thread
    that has entered none, as one that runs generate() for a streamer, is served by the latest
    `enable`, else by the latest block. Other threads and tasks may enter blocks of the same model
    at the same time, as the handlers of a server do, if all ask for the same settings. The model is
    as before when its last block has ended, also after an error.
    """
    config = one_config(h2o_config, parameters)
    patch = _apply(model, config, pinned, trace, is_block=True)
    try:
        yield patch
    finally:
        if patch.is_active:
            patch.undo()


def _apply(model: Any, config: H2OConfig, pinned: Pinned, trace: bool, is_block: bool) -> Patch:
    base = _base(model)
    check_pins(model, pinned)
    patch = Patch(base, config.for_model(base), pinned, trace, is_block)
    patch.apply()
    return patch


def _base(model: Any) -> Any:
    """The model whose generate() makes the cache: inside PEFT or torch.compile, the wrapped one."""
    base = unwrap(model)
    if not hasattr(base, PREPARE_CACHE):
        raise TypeError(
            f"expected a model of transformers with generate(), not {type(model).__name__}"
            + ("; a pipeline has it as .model" if hasattr(base, "model") else "")
        )
    return base


def _stack_of(model: Any) -> PatchStack | None:
    stack: PatchStack | None = model.__dict__.get(_ATTRIBUTE)
    return stack


def _patches_of(model: Any) -> list[Patch]:
    stack = _stack_of(model)
    return [] if stack is None else list(stack.patches)


def _warn_of_no_cache(model: Any) -> None:
    """Warn if a model's config says use_cache=False, since nothing is evicted then."""
    settings = (getattr(model, "generation_config", None), model.config.get_text_config())
    if any(getattr(x, "use_cache", None) is False for x in settings):
        warnings.warn(
            "this model's config says use_cache=False: its calls ask for no cache, so h2o evicts "
            "nothing. Set model.config.use_cache = model.generation_config.use_cache = True, or "
            "give use_cache=True in each call",
            stacklevel=5,
        )


def _refuse_drafts(generation_config: Any) -> None:
    """Raise before the model drafts: for early exit transformers takes layers off its config."""
    early = getattr(generation_config, "assistant_early_exit", None) is not None
    if early or getattr(generation_config, "is_assistant", False):
        raise UnsupportedError(
            f"{'assistant_early_exit' if early else 'a draft model'} inside h2o.patched(): drafts "
            "go back over several forward passes, which an H2OCache cannot. Leave the draft model "
            "outside of patched(), or use prompt_lookup_num_tokens"
        )


def _refuse_other_caches(generation_config: Any) -> None:
    implementation = generation_config.cache_implementation
    if implementation not in (None, "dynamic"):
        raise UnsupportedError(
            f"cache_implementation={implementation!r} inside h2o.patched(): a model has one cache, "
            "and this one would keep everything. Drop the argument, or leave patched()"
        )


def _prompt_length(generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """Tokens of each row's whole prompt, before the prompt is cut into chunks."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        return [max(1, n) for n in mask.sum(1).tolist()]  # a row may be nothing but padding
    return compat.known_prompt_length(generation_config)  # transformers drops a mask of ones
