"""Results on disk: the facts that they depend on, and files from which a run can be resumed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import platform
from pathlib import Path
from typing import Any

from h2o import model_identity, ops
from h2o.errors import UserError
from h2o.packages import versions
from h2o.utils.filesystem import make_writable

PACKAGES = ("h2o-kv", "torch", "transformers", "lm-eval", "rouge-score", "numpy")


def provenance(model: Any, tokenizer: Any, name: str) -> dict[str, Any]:
    """Facts that a result depends on besides its setting: model, versions, machine."""
    device = model.device.type
    return {
        "model": name,
        "weights": model_identity.model_fingerprint(model, tokenizer),
        "dtype": str(model.dtype).removeprefix("torch."),
        "versions": versions(*PACKAGES),
        "python": platform.python_version(),
        "core": ops.info()["level"],
        **({"device": device} if device not in ("cpu", "meta") else {}),  # meta: offloaded weights
    }


BEGINNING = '{"facts": '
"""The first characters of each line."""


class ResultFile:
    """A file of JSON lines, one for each result, from which a later run resumes.

    A result is stored with all the facts that its numbers depend on. A run that finds a result
    with the same facts does not measure again. Lines are appended and never changed.

    Raises: UserError for a file of another kind, and for a folder that cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        make_writable(path.parent)
        path.touch()
        self.path, self.results = path, dict[str, dict[str, Any]]()
        lines = list(filter(None, path.read_text("utf-8", errors="replace").split("\n")))
        if any(not BEGINNING.startswith(line[: len(BEGINNING)]) for line in lines):
            raise UserError(f"{path} is not a file of results: move it, or write elsewhere")
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                cell = json.loads(line)  # fails for a line that a killed run left unfinished
                self.results[fingerprint(cell["facts"])] = cell["result"]

    def find(self, facts: dict[str, Any]) -> dict[str, Any] | None:
        """The result with these facts, or None."""
        return self.results.get(fingerprint(facts))

    def put(self, facts: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """Append a result, and return it as read back from JSON."""
        cell = _plain({"facts": facts, "result": result})
        self.results[fingerprint(facts)] = cell["result"]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(cell)}")  # the line before may be unfinished
        return cell["result"]


def fingerprint(facts: dict[str, Any]) -> str:
    """Short hash of facts, to name the files that belong to them."""
    text = json.dumps(_plain(facts), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A value as read back from JSON."""
    return json.loads(json.dumps(value, default=str))
