"""Answers of an evaluation as they come, for the run that goes on after an interrupted one."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from h2o.processes import Processes

__all__ = ["Journal", "Request"]

Request = tuple[Any, list[int], list[int]]
"""What lm-eval passes: (key, context, continuation), the latter two in tokens."""


class Journal:
    """Answers of an evaluation in a file, one line each, written as they come. Without a path
    it remembers nothing. Of several processes the first one reads and writes it."""

    def __init__(self, path: Path | None, processes: Processes) -> None:
        self.path = path if processes.first else None
        self.answers: dict[str, tuple[float, bool]] = {}
        lines = path.read_text("utf-8").split("\n") if self.path and path.exists() else []
        for line in lines:
            with contextlib.suppress(ValueError):  # a last line that was cut short
                key, logprob, greedy = json.loads(line)
                self.answers[key] = (logprob, greedy)
        self.answers = processes.of_first(self.answers)

    def get(self, request: Request) -> tuple[float, bool] | None:
        return self.answers.get(self._key(request))

    def put(self, request: Request, answer: tuple[float, bool]) -> None:
        if self.path:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write("\n" + json.dumps([self._key(request), *answer]))

    @staticmethod
    def _key(request: Request) -> str:
        return hashlib.sha256(json.dumps(request[1:]).encode()).hexdigest()
