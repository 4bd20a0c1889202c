"""H2O inside vLLM: a plugin that serves a model's attention from pages of fixed size.

vLLM calls `register` in each of its processes, as the entry point `h2o` of
`vllm.general_plugins` says. Nothing changes where `--additional-config` has no entry `h2o`.
`plugin` is the only module that knows vLLM.
"""

from __future__ import annotations

__all__ = ["TESTED", "register"]

TESTED = ("0.32",)
"""Minor versions of vLLM whose internals `plugin` was tested with."""


def register() -> None:
    """Tells vLLM of h2o's attention; of another vLLM than `TESTED` only who refuses to serve."""
    from vllm.v1.attention.backends import registry
    from vllm.version import __version__ as version

    tested = ".".join(version.split(".")[:2]) in TESTED
    module = "plugin" if tested else "untested"
    registry.register_backend(
        registry.AttentionBackendEnum.CPU_ATTN, f"h2o.vllm.{module}.H2OAttentionBackend"
    )
    if tested:
        from h2o.vllm import plugin

        plugin.register_requests()
