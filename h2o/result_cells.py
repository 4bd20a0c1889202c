"""Results on disk, for all that measures a model: what they depend on, and files of them that a run
which was interrupted goes on with.
"""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from h2o import model_identity, ops
from h2o.errors import UserError
from h2o.filesystem import atomic_write, lock, make_writable
from h2o.packages import versions
from h2o.processes import ALONE, Processes

__all__ = ["Cells", "fingerprint", "provenance"]

PACKAGES = ("h2o-kv", "torch", "transformers", "lm-eval", "rouge-score", "numpy")


def provenance(model: Any, tokenizer: Any, name: str) -> dict[str, Any]:
    """What a result depends on beside its setting: model, versions, machine."""
    device = model.device.type
    return {
        "model": name,
        "weights": model_identity.model_fingerprint(model, tokenizer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions(*PACKAGES),
        "python": platform.python_version(),
        "core": ops.info()["level"],
        **({"device": device} if device not in ("cpu", "meta") else {}),  # meta: all is offloaded
    }


class Cells:
    """A JSON file of results, one cell per thing measured, that a second run completes.

    Every cell is filed under all that its numbers depend on. A run that finds a cell under the
    same facts takes it instead of measuring again; cells under other facts stay in the file
    untouched. The file is replaced at once, never written in part, and what other processes
    have put into it meanwhile is kept.

    Of several processes the first one reads and writes it, and the others know what it knows.

    Raises: UserError for a file of another kind, and for a folder that cannot be written to.
    """

    def __init__(self, path: Path, kind: str, processes: Processes = ALONE) -> None:
        self.path, self.kind, self.processes = path, kind, processes
        self.cells: dict[str, dict[str, Any]] = {}
        if processes.first:
            make_writable(path.parent)
            self.cells = self._read()
        self.in_file = dict(self.cells)
        """Of the first process: also what other runs have put there."""
        self.cells = processes.of_first(self.cells)
        self.written = self._stamp()

    def _stamp(self) -> tuple[int, ...] | None:
        """What changes when another process replaces the file; None without one."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            return None
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    def _read(self) -> dict[str, dict[str, Any]]:
        try:
            content = json.loads(self.path.read_text("utf-8"))
            if content["kind"] != self.kind:
                raise ValueError(f"it is of {content['kind']!r}")
            return {fingerprint(cell["facts"]): cell for cell in content["cells"]}
        except FileNotFoundError:
            return {}
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                f"{self.path} is no result file of {self.kind!r} ({error}): "
                "move it, or write elsewhere"
            ) from error

    def find(self, facts: dict[str, Any]) -> dict[str, Any] | None:
        cell = self.cells.get(fingerprint(facts))
        return cell and cell["result"]

    def put(self, facts: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """Returns the result as the file has it. Called by every process with the same."""
        cell = _plain({"facts": facts, "result": result})
        self.cells[fingerprint(facts)] = cell
        self._write()
        self.cells = self.processes.of_first(dict(self.in_file))
        return cell["result"]

    def _write(self) -> None:
        """The file as the first process knows it, with what others have put there."""
        if not self.processes.first:
            return
        with lock(self.path):
            if self._stamp() != self.written:
                self.in_file = self._read()
            self.in_file |= self.cells
            content = {"kind": self.kind, "cells": list(self.in_file.values())}
            with atomic_write(self.path) as draft:
                draft.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
            self.written = self._stamp()


def fingerprint(facts: dict[str, Any]) -> str:
    """A short name for facts, for files that belong to them."""
    text = json.dumps(_plain(facts), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """As it will be read back from JSON."""
    return json.loads(json.dumps(value, default=str))
