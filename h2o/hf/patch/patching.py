"""`h2o.patched(model)`: H2O for code that only calls model.generate(), model(...) or a pipeline.

Each patch of a model switches the name of its attention implementation and joins its `PatchStack`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from h2o.borrowed import PREPARE_CACHE
from h2o.config import H2OConfig, one_config
from h2o.hf.attention.patch_lock import PatchLock
from h2o.hf.cache.cache import H2OCache
from h2o.hf.families.tuned_prompts import check_pins
from h2o.hf.families.wrapped import unwrapped
from h2o.hf.patch.patch_stack import PatchStack

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from h2o.config_fields import ConfigFields, Pinned

__all__ = ["Patch", "disable", "enable", "patched"]

SCORED = 8  # texts in single forward passes before patched() warns that they feel no budget


class Patch:
    """One `enable` of one model, or one block of `patched`.

    `cache` is the latest cache that was made, for `print(patch.cache.report())`; it is kept
    until the next one is made or the patch is dropped. A copy of an enabled model (deepcopy,
    pickle, torch.save) is enabled as well, with patches of its own and without that cache.
    """

    def __init__(
        self,
        model: Any,
        config: H2OConfig,
        *,
        pinned: Pinned = None,
        trace: bool = False,
        is_block: bool = False,
    ) -> None:
        self.model = model
        self.config = config
        self.pinned = pinned
        self.traced = trace
        self.is_block = is_block
        self.cache: H2OCache | None = None
        self.asked: H2OCache | None = None  # the latest that a direct forward pass was given
        self.scored = 0  # how many of these were never asked for a second token

    @property
    def is_active(self) -> bool:
        """Whether it was applied and not undone."""
        stack = PatchStack.of(self.model)
        return stack is not None and self in stack.patches

    def make_cache(self, prompt_length: Any = None) -> H2OCache:
        """A fresh cache for the model."""
        cache = H2OCache(
            self.model.config,
            self.config,
            prompt_length=prompt_length,
            pinned=self.pinned,
            trace=self.traced,
        )
        self.cache = cache
        return cache

    def cache_for_pass(self) -> H2OCache:
        """A fresh cache for a direct forward pass."""
        self._warn_of_scoring()
        self.asked = self.make_cache()
        return self.asked

    def apply(self) -> None:
        """Raises `UnsupportedError`, with the model as it was."""
        model = self.model
        pins = H2OCache(model.config, self.config, pinned=self.pinned).pass_state.pins  # or refuses
        self.settings = self.config, pins, self.traced
        self.lock = PatchLock("patched", model, "h2o", self.settings)
        self.lock.acquire(model)
        try:
            _warn_of_no_cache(model)
            PatchStack.add(self)
        except BaseException:
            self.lock.release()
            raise

    def undo(self) -> None:
        """Whichever patches of the same model are in place. Raises RuntimeError a second time."""
        stack = PatchStack.of(self.model)
        if stack is None or self not in stack.patches:
            raise RuntimeError("this patch is undone already")
        stack.remove(self)
        if not stack.patches or not self.lock.copied:  # in a copy the last one is for all
            self.lock.release()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": None, "asked": None}

    def _warn_of_scoring(self) -> None:
        """Whole texts in single passes, one after the other, are being scored."""
        if self.asked is None or not self.asked.is_prompt_only():
            return
        self.scored += 1
        if self.scored == SCORED:
            warnings.warn(
                f"h2o.patched(): {SCORED} texts went through the model in one pass each. Keys are "
                "evicted after a prompt, so such logits are those of a full cache, whatever the "
                "budget. To score texts (log-likelihoods, perplexity) use h2o.simulated(), or "
                "lm-eval's model h2o (h2o.evaluation.lm) instead of HFLM",
                stacklevel=2,
            )


def enable(
    model: Any,
    h2o_config: H2OConfig | None = None,
    *,
    pinned: Pinned = None,
    trace: bool = False,
    **parameters: Unpack[ConfigFields],
) -> Patch:
    """From now on every generate() and forward pass of this model has a fresh `H2OCache`.

    Where the caller gives a cache of their own, or `use_cache=False`, that is used. Undone by
    `disable(model)`; `patched` does both. Nested calls stack: the latest one counts. Every
    thread that calls the model is served, each call with a cache of its own. Of `guidance_scale`
    the text without the prompt keeps a full cache, as it does beside an `H2OCache` given by hand.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        h2o_config, parameters: as for `H2OCache`.
        pinned, trace: as for `H2OCache`, of each call's prompt.

    Raises:
        UnsupportedError: (a ValueError) a model that h2o cannot serve, naming the reason.
            generate() raises it for `cache_implementation="static"` and other caches that are not
            H2O.
        RuntimeError: another thread has this model enabled with other settings, or another thread
            or task has it simulated.
    """
    return _applied(model, one_config(h2o_config, parameters), pinned=pinned, trace=trace)


def disable(model: Any) -> None:
    """Undoes the latest `enable` of this model; a block of `patched` ends by itself.

    Raises:
        RuntimeError: none is in place.
    """
    stack = PatchStack.of(_base(model))
    enabled = [] if stack is None else [patch for patch in stack.patches if not patch.is_block]
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
    """`enable` for the length of a with block, undone on exit, also after an error.

    ```python
    with h2o.patched(model, heavy=0.1, recent=0.1) as patch:
        pipe("...")
        print(patch.cache.report())
    ```

    Blocks of one model may overlap and end in any order; the model is as before after the last.
    Tasks of asyncio each have their own: a call is served by the latest block that its task has
    entered, and one of a task that has entered none by the latest of all. Threads may each enter a
    block of their own, as the handlers of a server do, if the settings are the same. Two generators
    that take turns in one task have the latest in common.
    """
    config = one_config(h2o_config, parameters)
    patch = _applied(model, config, pinned=pinned, trace=trace, is_block=True)
    try:
        yield patch
    finally:
        if patch.is_active:
            patch.undo()


def _applied(model: Any, config: H2OConfig, **how: Any) -> Patch:
    base = _base(model)
    check_pins(model, how["pinned"])
    patch = Patch(base, config.for_model(base), **how)
    patch.apply()
    return patch


def _base(model: Any) -> Any:
    """The model whose generate() makes the cache: inside PEFT or torch.compile, the wrapped one."""
    base = unwrapped(model)
    if not hasattr(base, PREPARE_CACHE):
        raise TypeError(
            f"expected a model of transformers with generate(), not {type(model).__name__}"
            + ("; a pipeline has it as .model" if hasattr(base, "model") else "")
        )
    return base


def _warn_of_no_cache(model: Any) -> None:
    """A model whose config says use_cache=False asks for no cache, and nothing is evicted."""
    settings = (getattr(model, "generation_config", None), model.config.get_text_config())
    if any(getattr(x, "use_cache", None) is False for x in settings):
        warnings.warn(
            "this model's config says use_cache=False: its calls ask for no cache, so h2o evicts "
            "nothing. Set model.config.use_cache = model.generation_config.use_cache = True, or "
            "give use_cache=True in each call",
            stacklevel=5,
        )
