"""What a patched model has in place of its own methods: its patches, of which one serves a call.

Three things of the one model instance are changed, and put back when its last patch is removed: the
method with which `generate()` makes its cache, the one with which it makes its logits processors,
and a hook that gives direct forward passes a cache. The patches come and go in any order.
"""

from __future__ import annotations

import threading
import weakref
from contextvars import ContextVar
from types import MethodType
from typing import Any

from transformers import DynamicCache
from transformers.generation import GenerationMode
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from h2o import borrowed
from h2o.borrowed import CACHE, PREPARE_CACHE, PREPARE_PROCESSORS
from h2o.errors import UnsupportedError
from h2o.hf.families.wrapped import unwrapped
from h2o.hf.forms.cache_relative import at_zero

__all__ = ["PatchStack"]

Patch = Any  # of h2o.hf.patch.patching, which stands on this file

_ATTRIBUTE = "_h2o_patches"

_entered: ContextVar[tuple[weakref.ref[Patch], ...]] = ContextVar("h2o_patched", default=())
"""The blocks of `patched`, of any model, that this context has entered, the latest last. A task of
asyncio has a context of its own, a copy of that in which it was made; a thread begins with none.
One that ended in another context may still be among them."""


_changing = threading.RLock()
"""Held while a model's patches come and go. The same thread may come again, as in patch_lock.py."""


class PatchStack:
    """All patches of one model, the latest last."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.patches: list[Patch] = []
        self.cache_index = borrowed.cache_position(model)
        replaced = {PREPARE_CACHE: self.prepare_cache, PREPARE_PROCESSORS: self.logits_processors}
        self.before = {name: model.__dict__.get(name) for name in replaced}
        model.__dict__.update(replaced, **{_ATTRIBUTE: self})
        self.hook = model.register_forward_pre_hook(
            self.before_forward, prepend=True, with_kwargs=True
        )

    @staticmethod
    def of(model: Any) -> PatchStack | None:
        """The one of a model that is patched."""
        stack: PatchStack | None = model.__dict__.get(_ATTRIBUTE)
        return stack

    @classmethod
    def add(cls, patch: Patch) -> None:
        """The first patch changes its model, each one counts from now on."""
        with _changing:
            stack = cls.of(patch.model) or cls(patch.model)
            stack.patches.append(patch)
        if patch.is_block:
            _entered.set((*_open_blocks(), weakref.ref(patch)))

    def remove(self, patch: Patch) -> None:
        """Wherever it stands; with the last patch the model has its own methods again."""
        if patch.is_block:
            _entered.set(tuple(block for block in _open_blocks() if block() is not patch))
        with _changing:
            self.patches.remove(patch)
            if not self.patches:
                self._restore()

    def _restore(self) -> None:
        self.hook.remove()
        attributes = self.model.__dict__
        del attributes[_ATTRIBUTE]
        for name, before in self.before.items():
            if before is None:
                attributes.pop(name, None)
            else:
                attributes[name] = before

    def serving(self) -> Patch | None:
        """The patch that serves a call of this context: the latest, but no block of another context
        where this one has entered a block itself.

        Raises:
            RuntimeError: this context has entered none, and tasks have entered different ones.
        """
        patches = list(self.patches)  # another thread may end one
        entered = {block() for block in _entered.get()}
        if not entered.isdisjoint(patches):
            return [patch for patch in patches if patch in entered or not patch.is_block][-1]
        if not patches:
            return None
        latest = patches[-1]
        for patch in patches[:-1]:
            if patch.settings != latest.settings and patch.lock.beside(latest.lock):
                raise RuntimeError(
                    "several tasks have this model in h2o.patched() with different settings, and "
                    "this call is in none of their contexts, so it cannot be told which of them "
                    "it is for: call the model in the task itself or by asyncio.to_thread, not in "
                    "a thread that the task starts otherwise"
                )
        return latest

    # ---- What stands in place of the model's own -----------------------------------------------

    def prepare_cache(
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Instead of `GenerationMixin._prepare_cache_for_generation`."""
        _refuse_early_exit(generation_config)
        has_cache = borrowed.cache_in(model_kwargs) is not None
        patch = None if has_cache or generation_config.use_cache is False else self.serving()
        if patch is None:
            return self._original(PREPARE_CACHE)(generation_config, model_kwargs, *args, **kwargs)
        if getattr(generation_config, "is_assistant", False):
            raise UnsupportedError(
                "the draft model of assisted decoding goes back over several of its forward "
                "passes, which an H2OCache cannot: leave the draft model outside of h2o.patched()"
            )
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise UnsupportedError(
                f"cache_implementation={implementation!r} inside h2o.patched(): a model has one "
                "cache, and this one would keep everything; drop the argument, or leave patched()"
            )
        assisted = GenerationMode.ASSISTED_GENERATION in (*args, *kwargs.values())
        # In one piece, with no draft after it: a cache can tell the length by itself.
        in_one = generation_config.prefill_chunk_size is None and not assisted
        length = None if in_one else _prompt_length(generation_config, model_kwargs)
        cache = patch.make_cache(length)
        if generation_config.prefill_chunk_size is None and not assisted:
            cache.pass_state.reread()
        if assisted:
            cache.activate_past_recording()  # before 5.16 transformers does not ask
        model_kwargs[CACHE] = cache
        return None

    def logits_processors(self, *args: Any, **kwargs: Any) -> Any:
        """Instead of `GenerationMixin._get_logits_processor`: the text without a prompt that
        `guidance_scale` reads beside ours has the full cache that it has outside of a patch too."""
        processors = self._original(PREPARE_PROCESSORS)(*args, **kwargs)
        for processor in processors:
            if isinstance(processor, UnbatchedClassifierFreeGuidanceLogitsProcessor):
                context: dict[str, Any] = processor.unconditional_context
                ours = unwrapped(processor.model) is self.model
                if ours and context["use_cache"] and context[CACHE] is None:
                    context[CACHE] = DynamicCache(config=self.model.config)
        return processors

    def before_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gives a forward pass that would make a cache of its own one of ours."""
        with_cache = self._with_cache(model, args, kwargs)
        if all(patch.config.positions == "original" for patch in list(self.patches)):
            return with_cache
        args, kwargs = with_cache or (args, kwargs)
        return args, at_zero(args, kwargs)

    def _with_cache(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if borrowed.cache_in(kwargs) is not None or model.training:
            return None
        if len(args) > self.cache_index:  # given by position
            return None
        use_cache = kwargs.get("use_cache")
        if use_cache is None:
            use_cache = getattr(model.config.get_text_config(decoder=True), "use_cache", True)
        if not use_cache or (patch := self.serving()) is None:
            return None
        return args, {
            **borrowed.without_cache(kwargs),
            **borrowed.with_cache(patch.cache_for_pass()),
            "use_cache": True,
        }

    def _original(self, name: str) -> Any:
        return self.before[name] or MethodType(getattr(type(self.model), name), self.model)


def _open_blocks() -> tuple[weakref.ref[Patch], ...]:
    """What this context has entered and has not ended."""
    alive = ((block, block()) for block in _entered.get())
    return tuple(block for block, patch in alive if patch is not None and patch.is_active)


def _refuse_early_exit(generation_config: Any) -> None:
    """Raises `UnsupportedError` before the model drafts: until a draft ends, transformers has taken
    layers off the model's config."""
    if getattr(generation_config, "assistant_early_exit", None) is not None:
        raise UnsupportedError(
            "assistant_early_exit inside h2o.patched(): the model drafts with its own first "
            "layers and goes back over several forward passes, which an H2OCache cannot. Use "
            "prompt_lookup_num_tokens instead, or leave patched()"
        )


def _prompt_length(generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """Tokens of the whole prompt of each row, before it is cut into chunks."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        return [max(1, n) for n in mask.sum(1).tolist()]  # nothing but pads may be a row, too
    # transformers drops a mask of ones and notes its length
    return borrowed.known_prompt_length(generation_config)
