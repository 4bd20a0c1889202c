"""h2o: heavy-hitter (H2O) KV-cache eviction for Hugging Face transformers, with a C core.

```python
import h2o

model, tokenizer = h2o.load_model("Qwen/Qwen3-0.6B")  # a transformers model with attention "h2o"
cache = h2o.H2OCache(model, budget=0.2)  # a fifth of the bytes of a full cache
model.generate(**inputs, cache=cache)
```

Importing h2o needs NumPy only. Names that need torch or transformers import them on first use.
The attention "h2o" is registered with transformers once both packages have been imported, in
either order.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from typing import TYPE_CHECKING, Any

from h2o import packages

try:
    packages.check()
    from h2o import backends, ops
except (ImportError, ValueError) as error:  # ValueError: H2O_CPU or H2O_BACKEND is invalid
    if packages.is_command():
        sys.exit(f"h2o: error: {error}")
    raise

from h2o.config import H2OConfig
from h2o.config.profile import Profile
from h2o.errors import UnsupportedError

if TYPE_CHECKING:  # the names in _LAZY, for type checkers and editors
    from h2o.analysis.analyze import analyze as analyze
    from h2o.calibration.calibrate import calibrate as calibrate
    from h2o.hf.batching.generate_all import generate_all as generate_all
    from h2o.hf.batching.packed_weights import packed_weights as packed_weights
    from h2o.hf.batching.request import Request as Request
    from h2o.hf.batching.request import Result as Result
    from h2o.hf.cache.cache import H2OCache as H2OCache
    from h2o.hf.chat.chat_spans import dropped_spans as dropped_spans
    from h2o.hf.chat.chat_spans import thought_spans as thought_spans
    from h2o.hf.chat.chat_spans import tool_spans as tool_spans
    from h2o.hf.chat.chat_spans import without_spans as without_spans
    from h2o.hf.chat.next_turn import next_turn as next_turn
    from h2o.hf.chat.system_turn import system_span as system_span
    from h2o.hf.document.compress import compress_document as compress_document
    from h2o.hf.layers.layer import H2OLayer as H2OLayer
    from h2o.hf.patch import disable as disable
    from h2o.hf.patch import enable as enable
    from h2o.hf.patch import patched as patched
    from h2o.hf.simulation.simulation import simulated as simulated
    from h2o.hf.support import supports as supports
    from h2o.models import load_model as load_model

__version__: str = backends.VERSION

_LAZY = {
    "H2OCache": "h2o.hf.cache.cache",
    "H2OLayer": "h2o.hf.layers.layer",
    "Request": "h2o.hf.batching.request",
    "Result": "h2o.hf.batching.request",
    "analyze": "h2o.analysis.analyze",
    "calibrate": "h2o.calibration.calibrate",
    "compress_document": "h2o.hf.document.compress",
    "disable": "h2o.hf.patch",
    "dropped_spans": "h2o.hf.chat.chat_spans",
    "enable": "h2o.hf.patch",
    "generate_all": "h2o.hf.batching.generate_all",
    "load_model": "h2o.models",
    "next_turn": "h2o.hf.chat.next_turn",
    "packed_weights": "h2o.hf.batching.packed_weights",
    "patched": "h2o.hf.patch",
    "simulated": "h2o.hf.simulation.simulation",
    "supports": "h2o.hf.support",
    "system_span": "h2o.hf.chat.system_turn",
    "thought_spans": "h2o.hf.chat.chat_spans",
    "tool_spans": "h2o.hf.chat.chat_spans",
    "without_spans": "h2o.hf.chat.chat_spans",
}

__all__ = ["H2OConfig", "Profile", "UnsupportedError", "__version__", "ops", *_LAZY]


def _get(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'h2o' has no attribute {name!r}")
    with packages.explain_missing(f"h2o.{name}"):
        value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


if not TYPE_CHECKING:  # type checkers would otherwise accept any name
    __getattr__ = _get


def __dir__() -> list[str]:
    """Public names, without the modules imported above for internal use."""
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})


_INTERFACE = "transformers.modeling_utils"  # the module with transformers' attention functions


def _register() -> None:
    """Register the attention "h2o" with transformers.

    An error here must not make `import transformers` fail. If this version of transformers lacks
    something that h2o needs, the attention "h2o" raises the ImportError when it is called, like
    the rest of h2o.
    """
    try:
        with packages.explain_missing('attn_implementation="h2o"'):
            importlib.import_module("h2o.hf.attention.attention")  # registers when imported
    except ImportError as error:
        _register_error(error)


def _register_error(error: ImportError) -> None:
    def raise_error(*_: Any, **__: Any) -> Any:
        raise error

    transformers = sys.modules[_INTERFACE]
    if hasattr(transformers, "AttentionInterface"):
        transformers.AttentionInterface.register("h2o", raise_error)


class _AfterTransformers:
    """Import hook that registers the attention after transformers is imported."""

    @classmethod
    def find_spec(cls, name: str, path: Any = None, target: Any = None) -> Any:
        if name != _INTERFACE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                run(module)
                if cls in sys.meta_path:
                    sys.meta_path.remove(cls)
                _register()

            spec.loader.exec_module = exec_module
        return spec


if _INTERFACE in sys.modules:
    _register()
else:
    sys.meta_path.insert(0, _AfterTransformers)
