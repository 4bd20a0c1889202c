"""A lock on a model's attention implementation for as long as it is patched, and its configs.

The name of the attention lies in the model's config, which models may share. What changes it
for a while (`patched`, `enable`, `simulated`) holds a patch lock. They may end in any order: a
config says what the latest of its locks wants, and what it said at first when none is left. What
two threads, or two tasks of asyncio, would take away from each other is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import weakref
from typing import Any

from h2o import borrowed
from h2o.hf.attention.attention import switch

__all__ = ["PatchLock", "configs_of"]

_names = threading.RLock()
"""Held while names in configs and the list of patch locks change. The same thread may come again:
a generator that was dropped amid its block ends whenever memory is collected."""

_held: list[PatchLock] = []
"""The latest last."""


class PatchLock:
    """That of one `enable` of `patched`, one block of `simulated`, or one `generate_all`
    ("served"), which hands each pass its cache and so goes with all that want the same name.

    A copy of it, in a copied model, holds nothing: the configs of that model were never switched
    here, and it has what they said at first with it.
    """

    def __init__(self, kind: str, model: Any, name: str, settings: Any = None) -> None:
        """`settings`: what threads that patch one model must have in common."""
        self.kind = kind
        self.settings = settings
        self.name = name
        self.model = id(model)
        self.config = model.config
        self.copied = False
        self.thread: threading.Thread | None = threading.current_thread()
        self.task = _current_task()
        self.first: list[tuple[Any, str]] = []
        """Each config with what it said before any lock"""

    def acquire(self, model: Any) -> None:
        """Switches the model's attention to the lock's name.

        Raises:
            RuntimeError: a thread or task that still runs holds one that does not go with it.
            UnsupportedError: a model with attention code of its own.

        Whatever the error, the model is as it was.
        """
        with _names:
            if excluding := next(filter(self._excludes, _held), None):
                other = "thread" if excluding.thread is not self.thread else "task"
                both_patch = self.kind == excluding.kind == "patched"
                how = " with other settings" if both_patch else ""
                raise RuntimeError(
                    f"this model is {excluding.kind} by another {other}{how}: enter one "
                    f"h2o.patched() around all {other}s, where each call has a cache of its own, "
                    f"or give each {other} its own model"
                )
            self.first = [(config, _said_at_first(config)) for config in configs_of(model)]
            _held.append(self)
            try:
                switch(model, self.name)
            except BaseException:
                self.release()
                raise

    def release(self) -> None:
        """Any thread may, in any order; a second time it does nothing, but in a copy."""
        with _names:
            if self in _held:
                _held.remove(self)
            elif not self.copied:
                return
            for config, name in self.first:
                names = [lock.name for lock in _held if lock._has(config)]
                borrowed.put_attention_name(config, names[-1] if names else name)

    def beside(self, other: PatchLock) -> bool:
        """Whether the two belong to tasks of which neither has come to its end."""
        tasks = [None if lock.task is None else lock.task() for lock in (self, other)]
        alive = [task for task in tasks if task is not None and not task.done()]
        return len(alive) == 2 and alive[0] is not alive[1]

    def _has(self, config: Any) -> bool:
        return any(locked is config for locked, _ in self.first)

    def _excludes(self, other: PatchLock) -> bool:
        if other.thread is None or not other.thread.is_alive():
            return False
        if self.name == other.name and "served" in (self.kind, other.kind):
            return False
        if self.kind == other.kind == "patched":  # both say "h2o", and know whose a call is
            apart = other.thread is not self.thread and other.model == self.model
            return apart and other.settings != self.settings
        apart = other.thread is not self.thread or self.beside(other)
        return apart and other.config is self.config

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "thread": None, "task": None, "copied": True}


def _current_task() -> weakref.ref[asyncio.Task[Any]] | None:
    with contextlib.suppress(RuntimeError):  # no loop runs in this thread
        if task := asyncio.current_task():
            return weakref.ref(task)
    return None


def _said_at_first(config: Any) -> str:
    """The attention implementation of a config before any lock that is held."""
    said = [name for lock in _held for locked, name in lock.first if locked is config]
    name: str = said[0] if said else borrowed.attention_name(config)
    return name


def configs_of(model: Any) -> list[Any]:
    """The configs that `set_attn_implementation` may change: the model's and its parts'."""
    by_id = {}
    remaining = [module.config for module in model.modules() if hasattr(module, "config")]
    while remaining:
        config = remaining.pop()
        if id(config) not in by_id and borrowed.has_attention_name(config):
            by_id[id(config)] = config
            remaining += [getattr(config, name, None) for name in config.sub_configs]
    return list(by_id.values())
