"""Packages that only pictures and tables need."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["axes_or_new", "need"]


def need(name: str) -> Any:
    """The module, or an ImportError that says how to get it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        raise ImportError(f"this needs {package}: pip install 'h2o-kv[analysis]'") from error


def axes_or_new(ax: Any = None, **size: Any) -> Any:
    """The given axes, or those of a new pyplot figure. ImportError without matplotlib."""
    if ax is not None:
        return ax
    return need("matplotlib.pyplot").subplots(layout="constrained", **size)[1]
