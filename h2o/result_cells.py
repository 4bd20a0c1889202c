"""Results on disk, for all that measures a model: what they depend on, and files of them that a run
which was interrupted goes on with.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from h2o import model_identity, ops
from h2o.errors import UserError
from h2o.filesystem import atomic_write, lock, make_writable
from h2o.packages import versions
from h2o.processes import ALONE, Processes

__all__ = ["Cells", "fingerprint", "provenance"]

Work = tuple[dict[str, Any], Callable[[], dict[str, Any]]]
"""The facts of a result, and what measures it."""

PATIENCE = 20
"""Times that a file took to be written which pass before `Cells.complete` writes it again."""

PACKAGES = ("h2o-kv", "torch", "transformers", "lm-eval", "rouge-score", "numpy")


def provenance(
    model: Any, tokenizer: Any, name: str, seeds: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a result depends on beside its setting: model, versions, machine, seeds."""
    device = model.device.type
    return {
        "model": name,
        "weights": model_identity.of_model(model, tokenizer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions(*PACKAGES),
        "python": platform.python_version(),
        "core": ops.info()["level"],
        "seeds": seeds or {},
        **({"device": device} if device not in ("cpu", "meta") else {}),  # meta: all is offloaded
    }


class Cells:
    """A JSON file of results, one cell per thing measured, that a second run completes.

    Every cell is filed under all that its numbers depend on. A run that finds a cell under the
    same facts takes it instead of measuring again; cells under other facts stay in the file
    untouched. The file is replaced at once, never written in part, and what other processes
    have put into it meanwhile is kept. Since that takes the longer, the more it holds, `complete`
    spends at most a twentieth of its time on it: a process that is killed loses what it measured
    in less than `PATIENCE` times one writing, one that is interrupted loses nothing.

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
        self.noted = False
        """Whether there are cells that the file does not have."""
        self.next_write = 0.0
        """Of `time.monotonic`, for `complete`."""

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

    def as_json(self, asked: Iterable[dict[str, Any]]) -> str:
        """The cells of these facts, which the file has, as the file shows them."""
        cells = [self.cells[fingerprint(facts)] for facts in asked]
        return json.dumps({"kind": self.kind, "file": str(self.path), "cells": cells}, indent=1)

    def put(self, facts: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """Returns the result as the file has it. Called by every process with the same."""
        cell = self._note(facts, result)
        self._write()
        self.cells = self.processes.of_first(dict(self.in_file))
        return cell["result"]

    def _note(self, facts: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """The cell, which is not in the file yet."""
        cell = _plain({"facts": facts, "result": result})
        self.cells[fingerprint(facts)] = cell
        self.noted = True
        return cell

    def _write(self) -> None:
        """The file as the first process knows it, with what others have put there."""
        if not self.processes.first:
            return
        start = time.monotonic()
        with lock(self.path):
            if self._stamp() != self.written:
                self.in_file = self._read()
            self.in_file |= self.cells
            content = {"kind": self.kind, "cells": list(self.in_file.values())}
            with atomic_write(self.path) as draft:
                draft.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
            self.written = self._stamp()
        if self.processes.world == 1:  # several would come to know different ones
            self.cells |= self.in_file
        self.noted = False
        end = time.monotonic()
        self.next_write = end + PATIENCE * (end - start)

    def complete(self, rows: Sequence[Sequence[Work]], name: str) -> list[list[dict[str, Any]]]:
        """The result of each piece of work; what the file does not have is measured.

        Processes share it: each measures the same column of another row. `name`: of the bar.
        """
        world, columns = self.processes.world, len(rows[0])
        with (
            self._completing([facts for row in rows for facts, _ in row]),
            self._bar(len(rows) * columns, name) as bar,
        ):
            for start in range(0, len(rows), world):
                for column in zip(*rows[start : start + world], strict=True):
                    missing = [work for work in column if self.find(work[0]) is None]
                    measured = self.processes.shared(missing, lambda work: work[1]())
                    for (facts, _), result in measured:
                        self._note_in_time(facts, result)
                    bar.update(len(column))
        return [[self.cells[fingerprint(facts)]["result"] for facts, _ in row] for row in rows]

    def complete_together(
        self,
        every: Sequence[dict[str, Any]],
        measure: Callable[[Sequence[int]], Iterator[tuple[int, dict[str, Any]]]],
        name: str,
    ) -> list[dict[str, Any]]:
        """As `complete`, of one column whose rows are measured many at a time.

        Args:
            every: the facts of each result.
            measure: yields (index among its argument, result), in any order, for some rows that the
                file does not have.
        """
        with self._completing(every), self._bar(len(every), name) as bar:
            missing = [i for i, facts in enumerate(every) if self.find(facts) is None]
            bar.update(len(every) - len(missing))
            for i, result in self.processes.streamed(missing, measure):
                self._note_in_time(every[i], result)
                bar.update()
        return [self.cells[fingerprint(facts)]["result"] for facts in every]

    @contextlib.contextmanager
    def _completing(self, every: Sequence[dict[str, Any]]) -> Iterator[None]:
        """All processes want the same results, and know the same ones after that."""
        self.processes.agree(every)
        try:
            yield
        finally:
            if self.noted:
                self._write()
        self.cells = self.processes.of_first(self.in_file | self.cells)

    def _bar(self, total: int, name: str) -> Any:
        from tqdm import tqdm  # --help does without

        return tqdm(total=total, desc=name, disable=not self.processes.first)

    def _note_in_time(self, facts: dict[str, Any], result: dict[str, Any]) -> None:
        self._note(facts, result)
        if time.monotonic() >= self.next_write:
            self._write()


def fingerprint(facts: dict[str, Any]) -> str:
    """A short name for facts, for files that belong to them."""
    text = json.dumps(_plain(facts), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """As it will be read back from JSON."""
    return json.loads(json.dumps(value, default=str))
