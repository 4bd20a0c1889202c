"""The versions of vLLM that h2o was tested with."""

from __future__ import annotations

TESTED = ("0.32", "0.33")
"""Minor versions, by whose internals `plugin`, `runners` and `validation` go."""


def is_tested(version: str) -> bool:
    """Whether a version of vLLM is one of `TESTED`."""
    return ".".join(version.split(".")[:2]) in TESTED
