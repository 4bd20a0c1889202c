"""A vLLM plugin for tests: on SIGUSR1 each process of a server writes which objects of h2o it
holds."""

from __future__ import annotations

import collections
import functools
import gc
import json
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FOLDER = "H2O_TEST_HELD"
"""Environment variable with the folder to write to."""

CONTAINERS = (dict, list, set, collections.deque)


def installed(folder: Path) -> dict[str, str]:
    """Install this plugin in a folder, and return the environment of a server that loads it."""
    about = folder / "held-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: held\nVersion: 0\n")
    (about / "entry_points.txt").write_text(
        f"[vllm.general_plugins]\nheld = {__name__}:answer_signals\n"
    )
    root = Path(__file__).parents[2]
    return {FOLDER: str(folder), "PYTHONPATH": os.pathsep.join(map(str, (root, folder)))}


def answer_signals() -> None:
    """Entry point that vLLM calls in each of its processes."""
    signal.signal(signal.SIGUSR1, _write)
    _write()


def _write(*_: Any) -> None:
    path = Path(os.environ[FOLDER], f"{os.getpid()}.json")
    new = path.with_suffix(".new")
    new.write_text(json.dumps(held()))
    new.replace(path)


def ask(folder: Path) -> dict[str, dict[str, int]]:
    """Result of `held` in each process, by process id."""
    files = sorted(folder.glob("*.json"))
    for file in files:
        file.unlink()
        os.kill(int(file.stem), signal.SIGUSR1)
    deadline = time.monotonic() + 60
    while not all(file.exists() for file in files):
        assert time.monotonic() < deadline, [file for file in files if not file.exists()]
        time.sleep(0.1)
    return {file.stem: json.loads(file.read_text()) for file in files}


def held() -> dict[str, int]:
    """Numbers of living objects of h2o's classes in this process, and of elements in containers.
    The containers are attributes of these objects, of classes and of modules, or caches of
    functions."""
    gc.unfreeze()  # vLLM freezes the objects that engines start with
    gc.collect()
    found: collections.Counter[str] = collections.Counter()
    for one in gc.get_objects():
        name = _name_of(type(one))
        if name is not None:
            found[name] += 1
            found.update(_sizes(name, getattr(one, "__dict__", {}).items()))
        elif issubclass(type(one), functools._lru_cache_wrapper) and _is_ours(one):
            found[f"{one.__module__}.{one.__qualname__}()"] = one.cache_info().currsize
        elif issubclass(type(one), type) and _is_ours(one):
            found.update(_sizes(f"class {_name_of(one)}", vars(one).items()))
    for module in [*sys.modules.values()]:
        if module is not None and module.__name__.partition(".")[0] == "h2o":
            found.update(_sizes(module.__name__, vars(module).items()))
    return dict(found)


def _is_ours(one: Any) -> bool:
    module = getattr(one, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] == "h2o"


def _name_of(kind: type) -> str | None:
    return f"{kind.__module__}.{kind.__qualname__}" if _is_ours(kind) else None


def _sizes(name: str, attributes: Iterable[tuple[str, Any]]) -> dict[str, int]:
    return {
        f"{name}.{x}": len(value)
        for x, value in attributes
        if isinstance(value, CONTAINERS) and not x.startswith("__")
    }
