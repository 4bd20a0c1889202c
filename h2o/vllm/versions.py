"""The versions of vLLM that h2o was tested with, and what differs between them."""

from __future__ import annotations

TESTED = ("0.32", "0.33")
"""Minor versions on whose internals `plugin`, `connector`, `scheduler` and `validation` depend. One
difference matters to h2o: at a waiting request for which there is no room, 0.32's scheduler ends
the pass, and 0.33's continues with the requests behind it (`scheduler.PrefixScheduler`)."""


def is_tested(version: str) -> bool:
    """Whether a version of vLLM is one of `TESTED`."""
    return ".".join(version.split(".")[:2]) in TESTED
