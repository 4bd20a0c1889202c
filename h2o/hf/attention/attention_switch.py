"""Switch a model's attention implementation temporarily and thread-safely.

The model's config holds the name of the implementation, and models may share a config. Switches may
end in any order: a config names the implementation of its latest switch, and its original one when
no switch is left. If a second thread or task would replace the name that the first one has set, an
error is raised.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

from h2o import compat
from h2o.hf.attention.attention import switch

CHANGING = threading.RLock()
"""Held while models are changed. Reentrant, since the garbage collector may end the block of a
dropped generator in a thread that is changing a model."""

_in_force: weakref.WeakValueDictionary[int, AttentionSwitch] = weakref.WeakValueDictionary()
"""Switches by id, the latest last. They are garbage collected together with their model."""


class AttentionSwitch:
    """One change of a model's attention implementation, from `apply` to `undo`."""

    def __init__(self, kind: str, name: str) -> None:
        """`kind` describes the model in errors: "patched", "enabled", "simulated" or "served"."""
        self.kind = kind
        self.name = name
        self.thread: threading.Thread | None = threading.current_thread()
        self.task = _current_task()
        self.original: list[tuple[Any, str]] = []
        """Each config and the implementation that it named before all switches"""

    def apply(self, model: Any) -> None:
        """Switch a model, or leave it as it was and raise.

        Raises:
            RuntimeError: another thread or task has switched the model to another name, or a
                simulated model is to be enabled.
            UnsupportedError: the model has attention code of its own.
        """
        with CHANGING:
            for other in _in_force.values():
                if other.name == self.name or not other._covers(model.config):
                    continue
                if elsewhere := other.owner_elsewhere():
                    raise RuntimeError(
                        f"this model is {other.kind} by another {elsewhere}. Wait until its block "
                        f"has ended, or give each {elsewhere} its own model"
                    )
                if (self.kind, other.kind) == ("enabled", "simulated"):
                    raise RuntimeError(
                        "h2o.enable() inside h2o.simulated() would leave the rest of the block "
                        "without the simulation: call it before the block or after it"
                    )
            self.original = [(config, _original_name(config)) for config in _configs_of(model)]
            _in_force[id(self)] = self
            try:
                switch(model, self.name)
            except BaseException:
                self.undo()
                raise

    def undo(self) -> None:
        """Undo the switch. Any thread may do so, in any order."""
        with CHANGING:
            _in_force.pop(id(self), None)
            for config, name in self.original:
                compat.put_attention_name(config, _latest_name(config) or name)

    def check(self, config: Any) -> None:
        """Raise RuntimeError if `set_attn_implementation` has since changed this config."""
        with CHANGING:
            name, expected = compat.attention_name(config), _latest_name(config)
        if name != expected is not None:
            raise RuntimeError(
                f"the attention of this model was set to {name!r} while it is {self.kind}, which "
                "would silently end here. Call set_attn_implementation() before or after the block"
            )

    def is_in_force(self) -> bool:
        """Whether the switch was applied and not undone. A copied switch is never in force."""
        return id(self) in _in_force

    def owner_elsewhere(self) -> str:
        """Return "thread" or "task" if another one made the switch and still runs, else ""."""
        if self.thread is not threading.current_thread():
            return "thread" if self.thread and self.thread.is_alive() else ""
        tasks = [reference and reference() for reference in (self.task, _current_task())]
        both_run = all(task and not task.done() for task in tasks)
        return "task" if both_run and tasks[0] is not tasks[1] else ""

    def _covers(self, config: Any) -> bool:
        return any(switched is config for switched, _ in self.original)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "thread": None, "task": None}


@contextlib.contextmanager
def use_attention(kind: str, model: Any, name: str) -> Iterator[AttentionSwitch]:
    """Apply an `AttentionSwitch` within the block."""
    change = AttentionSwitch(kind, name)
    change.apply(model)
    try:
        yield change
    finally:
        change.undo()


def _current_task() -> weakref.ref[asyncio.Task[Any]] | None:
    with contextlib.suppress(RuntimeError):  # no event loop runs in this thread
        if task := asyncio.current_task():
            return weakref.ref(task)
    return None


def _latest_name(config: Any) -> str | None:
    """The attention implementation of a config's latest switch in force, or None without one."""
    names = [change.name for change in _in_force.values() if change._covers(config)]
    return names[-1] if names else None


def _original_name(config: Any) -> str:
    """The attention implementation of a config before all switches in force."""
    originals = itertools.chain(*(change.original for change in _in_force.values()))
    names = (name for switched, name in originals if switched is config)
    return next(names, None) or compat.attention_name(config)


def _configs_of(model: Any) -> list[Any]:
    """The configs that `set_attn_implementation` may change: those of the model and its parts."""
    by_id = {}
    remaining = [module.config for module in model.modules() if hasattr(module, "config")]
    while remaining:
        config = remaining.pop()
        if id(config) not in by_id and compat.has_attention_name(config):
            by_id[id(config)] = config
            remaining += [getattr(config, name, None) for name in config.sub_configs]
    return list(by_id.values())
