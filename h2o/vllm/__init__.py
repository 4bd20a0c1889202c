"""H2O inside vLLM: a plugin that serves a model's attention from pages of fixed size.

vLLM calls `register` in each of its processes, as the entry point `h2o` of
`vllm.general_plugins` says, and asks `Requests`, the entry point `h2o` of
`vllm.logits_processors`, whether a request is valid. Nothing changes where `--additional-config`
has no entry `h2o`. `plugin` has the attention, `connector` and `scheduler` the requests and the
prompts that these share, `validation` what is refused; only these know vLLM.
"""

from __future__ import annotations

import logging
from typing import Any

from h2o.vllm.versions import TESTED, is_tested


def register() -> None:
    """Tells vLLM of h2o's attention, in the place of the CPU's and as the backend CUSTOM. The other
    backends, and those of another vLLM than `TESTED`, only learn who refuses to serve, so that an
    entry `h2o` is never passed over in silence."""
    from vllm.version import __version__ as version

    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError:  # nobody there who could refuse
        logging.getLogger("vllm.h2o").warning(
            "h2o knows vLLM %s, not %s: an entry h2o of --additional-config is passed over",
            *(", ".join(TESTED), version),
        )
        return

    tested = is_tested(version)
    cpu_backend = "plugin.H2OAttentionBackend" if tested else "refusing_backends.CPU_ATTN"
    register_backend(AttentionBackendEnum.CPU_ATTN, f"h2o.vllm.{cpu_backend}")
    if tested and not AttentionBackendEnum.CUSTOM.is_overridden():  # by another plugin
        register_backend(AttentionBackendEnum.CUSTOM, "h2o.vllm.plugin.H2OCustomBackend")
    for backend in AttentionBackendEnum:
        on_cpu = backend.name.startswith(("CPU_", "AMX_"))
        by_path = backend.name == "ROCM_AITER_FA"  # vLLM imports its module
        if backend.value and not (on_cpu or by_path or backend.is_overridden()):
            register_backend(backend, f"h2o.vllm.refusing_backends.{backend.name}")
    if tested:
        from h2o.vllm import metrics

        metrics.publish()


def __getattr__(name: str) -> Any:
    """`Requests`; of a vLLM that was not tested a class that does nothing, since vLLM ends where
    the entry point cannot be loaded."""
    if name != "Requests":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.version import __version__ as version

    if is_tested(version):
        from h2o.vllm import validation

        return validation.Requests
    from h2o.vllm import refusing_backends

    return refusing_backends.logits_processor()
