"""A lock on a model's attention implementation for as long as it is patched, and its configs.

The name of the attention lies in the model's config, which models may share. What changes it
for a while (`patched`, `enable`, `simulated`) holds a patch lock. Patches of one thread nest; those
of two threads would put back what the other one needs, and are refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from h2o.errors import Unsupported

__all__ = ["PatchLock", "configs_lock", "configs_of", "unwrapped"]

configs_lock = threading.Lock()
"""Held while names in configs and the list of patch locks change."""

_held: list[PatchLock] = []


class PatchLock:
    """That of one block of `patched` or `simulated`; a copy of it, in a copied model, has no
    thread."""

    def __init__(self, kind: str, model: Any) -> None:
        self.kind = kind
        self.model = id(model)
        self.config = model.config
        self.thread: threading.Thread | None = threading.current_thread()

    @contextlib.contextmanager
    def acquired(self) -> Iterator[None]:
        """Acquires the lock, if what is done within does not fail.

        Raises:
            RuntimeError: a thread that still runs holds one that does not go with it.
        """
        with configs_lock:
            if any(map(self._excludes, _held)):
                raise RuntimeError(
                    f"this model is {next(filter(self._excludes, _held)).kind} by another thread: "
                    "enter one h2o.patched() around all threads, where each call has a cache of "
                    "its own, or give each thread its own model"
                )
            yield
            _held.append(self)

    def release(self) -> None:
        """Any thread may release it."""
        with configs_lock, contextlib.suppress(ValueError):
            _held.remove(self)

    def _excludes(self, other: PatchLock) -> bool:
        if other.thread is self.thread or other.thread is None or not other.thread.is_alive():
            return False
        if self.kind == other.kind == "patched":  # both say "h2o", whichever ends first
            return other.model == self.model
        return other.config is self.config

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "thread": None}


def unwrapped(model: Any) -> Any:
    """The model of transformers inside torch.compile's and PEFT's wrappers.

    Raises:
        Unsupported: prefix tuning, whose keys belong to no token.
    """
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            tuned = getattr(getattr(model, "active_peft_config", None), "peft_type", "")
            if str(tuned).rpartition(".")[2] in ("PREFIX_TUNING", "CARTRIDGE"):
                raise Unsupported(
                    "h2o cannot serve prefix tuning: PEFT fills a cache of its own with keys that "
                    "belong to no token; LoRA and prompt tuning are served"
                )
            model = model.get_base_model()
        else:
            return model


def configs_of(model: Any) -> list[Any]:
    """The configs that `set_attn_implementation` may change: the model's and its parts'."""
    by_id = {}
    remaining = [module.config for module in model.modules() if hasattr(module, "config")]
    while remaining:
        config = remaining.pop()
        if id(config) not in by_id and hasattr(config, "_attn_implementation"):
            by_id[id(config)] = config
            remaining += [getattr(config, name, None) for name in config.sub_configs]
    return list(by_id.values())
