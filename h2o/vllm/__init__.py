"""H2O in vLLM: a plugin that runs a model's attention on pages of fixed size.

vLLM calls `register` in each of its processes (entry point `h2o` of `vllm.general_plugins`) and
lets `Requests` validate each request (entry point `h2o` of `vllm.logits_processors`). Without an
entry `h2o` in `--additional-config` nothing changes. `plugin` has the attention, `connector` and
`scheduler` handle requests and the prompts that they share, `validation` rejects what h2o does not
support. Only these four modules depend on vLLM when they are imported.
"""

from __future__ import annotations

import logging
from typing import Any

from h2o.vllm.versions import TESTED, is_tested


def register() -> None:
    """Register h2o's attention as vLLM's backend for the CPU and as the backend CUSTOM.

    The other backends, and the CPU's in a vLLM that is not in `TESTED`, are replaced by stand-ins
    that raise an error if the config has an entry `h2o`, so that the entry is never silently
    ignored.
    """
    from vllm.version import __version__ as version

    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:  # no backend can be replaced by one that raises an error
        logging.getLogger("vllm.h2o").warning(
            "h2o supports vLLM %s, not %s: an entry h2o in --additional-config is ignored",
            *(", ".join(TESTED), version),
        )
        return

    tested = is_tested(version)
    cpu_backend = "plugin.H2OAttentionBackend" if tested else "unsupported_backends.CPU_ATTN"
    register_backend(AttentionBackendEnum.CPU_ATTN, f"h2o.vllm.{cpu_backend}")
    if tested and not AttentionBackendEnum.CUSTOM.is_overridden():  # by another plugin
        register_backend(AttentionBackendEnum.CUSTOM, "h2o.vllm.plugin.H2OCustomBackend")
    for backend in AttentionBackendEnum:
        on_cpu = backend.name.startswith(("CPU_", "AMX_"))
        by_path = backend.name == "ROCM_AITER_FA"  # vLLM imports this backend's module directly
        if backend.value and not (on_cpu or by_path or backend.is_overridden()):
            register_backend(backend, f"h2o.vllm.unsupported_backends.{backend.name}")
    if tested:
        from h2o.vllm import metrics

        metrics.publish()


def __getattr__(name: str) -> Any:
    """Return `Requests`. For an untested vLLM it is a class that does nothing, since vLLM exits if
    it cannot load the entry point."""
    if name != "Requests":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.version import __version__ as version

    if is_tested(version):
        from h2o.vllm import validation

        return validation.Requests
    from h2o.vllm import unsupported_backends

    return unsupported_backends.logits_processor()
