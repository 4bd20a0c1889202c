"""Whose turn it is to change a model's attention, and which configs say what it is.

The name of the attention lies in the model's config, which models may share. What changes it
for a while (`patched`, `enable`, `simulated`) takes a turn. Turns of one thread nest; those of two
threads would put back what the other one needs, and are refused.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from h2o.errors import Unsupported

__all__ = ["Turn", "configs_of", "lock", "unwrapped"]

lock = threading.Lock()
"""Held while names in configs and the list of turns change."""

_turns: list[Turn] = []


class Turn:
    """One block of `patched` or `simulated`; a copy of it, in a copied model, is nobody's."""

    def __init__(self, kind: str, model: Any) -> None:
        self.kind = kind
        self.model = id(model)
        self.config = model.config
        self.thread: threading.Thread | None = threading.current_thread()

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Takes the turn, if what is done within does not fail.

        Errors: RuntimeError while a thread that still runs has one that does not go with it.
        """
        with lock:
            if any(map(self._excludes, _turns)):
                raise RuntimeError(
                    f"this model is {next(filter(self._excludes, _turns)).kind} by another thread: "
                    "enter one h2o.patched() around all threads, where each call has a cache of "
                    "its own, or give each thread its own model"
                )
            yield
            _turns.append(self)

    def end(self) -> None:
        """Any thread may end it."""
        with lock, contextlib.suppress(ValueError):
            _turns.remove(self)

    def _excludes(self, other: Turn) -> bool:
        if other.thread is self.thread or other.thread is None or not other.thread.is_alive():
            return False
        if self.kind == other.kind == "patched":  # both say "h2o", whoever is first to leave
            return other.model == self.model
        return other.config is self.config

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "thread": None}


def unwrapped(model: Any) -> Any:
    """The model of transformers inside torch.compile's and PEFT's wrappers.

    Errors: `Unsupported` for prefix tuning, whose keys are no tokens.
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
    found = {}
    waiting = [module.config for module in model.modules() if hasattr(module, "config")]
    while waiting:
        config = waiting.pop()
        if id(config) not in found and hasattr(config, "_attn_implementation"):
            found[id(config)] = config
            waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())
