"""`h2o.patched(model)`: H2O for code that only calls model.generate(), model(...) or a pipeline.

Three things of the one model instance are changed, and all of them put back: the
name of its attention implementation, the method with which `generate()` makes
its cache, and a hook that gives direct forward passes one.
"""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

from transformers.generation import GenerationMode

from h2o.config import H2OConfig, one_config
from h2o.errors import Unsupported
from h2o.hf.attention import switch
from h2o.hf.cache import H2OCache
from h2o.hf.cache_relative import at_zero
from h2o.hf.patch_lock import PatchLock, configs_lock, configs_of, unwrapped

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from h2o.config_fields import ConfigFields

__all__ = ["Patch", "disable", "enable", "patched"]

_PREPARE = "_prepare_cache_for_generation"  # the method of GenerationMixin, 5.4 to 5.23
SCORED = 8  # texts in single forward passes before patched() warns that they feel no budget

_STACK = "_h2o_patches"  # attribute of a patched model: its patches, the latest last


class Patch:
    """One `enable` of one model.

    `cache` is the latest cache that was made, for `print(patch.cache.report())`; it is kept
    until the next one is made or the patch is dropped. A copy of an enabled model (deepcopy,
    pickle, torch.save) is enabled as well, with patches of its own and without that cache.
    """

    def __init__(self, model: Any, config: H2OConfig, *, trace: bool = False) -> None:
        self.model = model
        self.config = config
        self.traced = trace
        self.cache: H2OCache | None = None
        self.asked: H2OCache | None = None  # the latest that a direct forward pass was given
        self.scored = 0  # how many of these were never asked for a second token

    def make_cache(self, prompt_length: Any = None) -> H2OCache:
        """A fresh cache for the model."""
        self.cache = H2OCache(
            self.model.config, self.config, prompt_length=prompt_length, trace=self.traced
        )
        return self.cache

    def apply(self) -> None:
        """Raises `Unsupported`, with the model as it was."""
        model = self.model
        H2OCache(model.config, self.config)  # refuses what cannot be served
        _warn_of_no_cache(model)
        self.place = list(inspect.signature(model.forward).parameters).index("past_key_values")
        self.lock = PatchLock("patched", model)
        with self.lock.acquired():
            self.configs = _switch(model)
        model.__dict__.setdefault(_STACK, []).append(self)
        self.before = model.__dict__.get(_PREPARE)
        model.__dict__[_PREPARE] = self
        # Before the hooks of outer patches: the innermost one gives the cache.
        self.hook = model.register_forward_pre_hook(
            self._before_forward, prepend=True, with_kwargs=True
        )

    def undo(self) -> None:
        """Raises RuntimeError when a later patch of the same model is still in place."""
        stack = self.model.__dict__.get(_STACK, [])
        if not stack or stack[-1] is not self:
            raise RuntimeError("patches of a model must be undone in reverse order, each once")
        self.hook.remove()
        if self.before is None:
            del self.model.__dict__[_PREPARE]
        else:
            self.model.__dict__[_PREPARE] = self.before
        stack.pop()
        if not stack:
            del self.model.__dict__[_STACK]
        _switch_back(self.configs)
        self.lock.release()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "cache": None, "asked": None}

    def __call__(
        self,
        generation_config: Any,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Instead of `GenerationMixin._prepare_cache_for_generation`."""
        if model_kwargs.get("past_key_values") is not None or generation_config.use_cache is False:
            original = self.before or MethodType(getattr(type(self.model), _PREPARE), self.model)
            return original(generation_config, model_kwargs, *args, **kwargs)
        if getattr(generation_config, "is_assistant", False):
            raise Unsupported(
                "the draft model of assisted decoding goes back over several of its forward "
                "passes, which an H2OCache cannot: leave the draft model outside of h2o.patched()"
            )
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise Unsupported(
                f"cache_implementation={implementation!r} inside h2o.patched(): a model has one "
                "cache, and this one would keep everything; drop the argument, or leave patched()"
            )
        length = _prompt_length(generation_config, model_kwargs)
        assisted = GenerationMode.ASSISTED_GENERATION in (*args, *kwargs.values())
        # In one piece, with no draft after it: a cache can tell the length by itself.
        in_one = generation_config.prefill_chunk_size is None and not assisted
        if in_one and any(n != 1 for n in (length if isinstance(length, list) else [length])):
            length = None
        cache = self.make_cache(length)
        if assisted:
            cache.activate_past_recording()  # before 5.16 transformers does not ask
        model_kwargs["past_key_values"] = cache
        return None

    def _before_forward(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Gives a forward pass that would make a cache of its own one of ours."""
        with_cache = self._with_cache(model, args, kwargs)
        if self.config.positions == "original":
            return with_cache
        args, kwargs = with_cache or (args, kwargs)
        return args, at_zero(args, kwargs)

    def _with_cache(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if kwargs.get("past_key_values") is not None or model.training:
            return None
        if len(args) > self.place:  # given by position
            return None
        use_cache = kwargs.get("use_cache")
        if use_cache is None:
            use_cache = getattr(model.config.get_text_config(decoder=True), "use_cache", True)
        if not use_cache:
            return None
        self._warn_of_scoring()
        self.asked = self.make_cache()
        return args, {**kwargs, "past_key_values": self.asked, "use_cache": True}

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
                "lm-eval's model h2o (h2o.evaluate.lm) instead of HFLM",
                stacklevel=2,
            )


def enable(
    model: Any,
    h2o_config: H2OConfig | None = None,
    *,
    trace: bool = False,
    **parameters: Unpack[ConfigFields],
) -> Patch:
    """From now on every generate() and forward pass of this model has a fresh `H2OCache`.

    Where the caller gives a cache of their own, or `use_cache=False`, that is used. Undone by
    `disable(model)`; `patched` does both. Nested calls stack: the latest one counts. Every
    thread that calls the model is served, each call with a cache of its own.

    Args:
        model: a causal language model of transformers, or a PEFT model around one.
        h2o_config, parameters: as for `H2OCache`.
        trace: as for `H2OCache`.

    Raises:
        Unsupported: (a ValueError) a model that h2o cannot serve, naming the reason. generate()
            raises it for `cache_implementation="static"` and other caches that are not H2O.
        RuntimeError: another thread has this model enabled or simulated.
    """
    patch = Patch(
        _base(model), one_config(h2o_config, parameters).for_model(_base(model)), trace=trace
    )
    patch.apply()
    return patch


def disable(model: Any) -> None:
    """Undoes the latest `enable` of this model. Raises RuntimeError without one."""
    stack = _base(model).__dict__.get(_STACK)
    if not stack:
        raise RuntimeError("h2o is not enabled for this model")
    stack[-1].undo()


@contextlib.contextmanager
def patched(
    model: Any,
    h2o_config: H2OConfig | None = None,
    *,
    trace: bool = False,
    **parameters: Unpack[ConfigFields],
) -> Iterator[Patch]:
    """`enable` for the length of a with block, undone on exit, also after an error.

    ```python
    with h2o.patched(model, heavy=0.1, recent=0.1) as patch:
        pipe("...")
        print(patch.cache.report())
    ```
    """
    patch = enable(model, h2o_config, trace=trace, **parameters)
    try:
        yield patch
    finally:
        patch.undo()


def _base(model: Any) -> Any:
    """The model whose generate() makes the cache: inside PEFT or torch.compile, the wrapped one."""
    base = unwrapped(model)
    if not hasattr(base, _PREPARE):
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
            stacklevel=4,
        )


def _prompt_length(generation_config: Any, model_kwargs: dict[str, Any]) -> Any:
    """Tokens of the whole prompt of each row, before it is cut into chunks."""
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.ndim == 2:
        return [max(1, n) for n in mask.sum(1).tolist()]  # nothing but pads may be a row, too
    # transformers drops a mask of ones and notes its length
    return getattr(generation_config, "_mask_length", None)


# ---- The name of the attention implementation --------------------------------------------------
#
# It lives in the config, which models made from one config share. Each switched config is
# therefore counted, and put back when the last of its models is: in whatever order that happens.
# The configs of a copied model were never switched here; they have what they said before with them.

_switched: dict[int, tuple[Any, Any, int]] = {}
"""id of a config: the config (so that the id stays its own), what it said before, a count."""


def _switch(model: Any) -> list[tuple[Any, str]]:
    """Switches a model to "h2o"; returns its configs with what they said, for `_switch_back`."""
    before = [(config, config._attn_implementation) for config in configs_of(model)]
    switch(model, "h2o")
    for config, name in before:
        _, first, count = _switched.get(id(config), (None, name, 0))
        _switched[id(config)] = (config, first, count + 1)
    return before


def _switch_back(configs: list[tuple[Any, str]]) -> None:
    with configs_lock:
        for config, name in configs:
            _, first, count = _switched.pop(id(config), (config, name, 1))
            if count > 1:
                _switched[id(config)] = (config, first, count - 1)
            else:
                config._attn_implementation_internal = first
