"""Results on disk: what they depend on, and files with which an interrupted run continues."""

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
        **({"device": device} if device not in ("cpu", "meta") else {}),  # meta: all is offloaded
    }


BEGINNING = '{"facts": '
"""The first characters of each line"""


class Cells:
    """A file of JSON lines, one for each result, which a second run completes.

    A result is filed under all that its numbers depend on, so a run that finds one under the same
    facts need not measure again. Lines are appended and never changed.

    Raises: UserError for a file of another kind, and for a folder that cannot be written to.
    """

    def __init__(self, path: Path) -> None:
        make_writable(path.parent)
        path.touch()
        self.path, self.results = path, dict[str, dict[str, Any]]()
        lines = list(filter(None, path.read_text("utf-8", errors="replace").split("\n")))
        if any(not BEGINNING.startswith(line[: len(BEGINNING)]) for line in lines):
            raise UserError(f"{path} is no file of results: move it, or write elsewhere")
        for line in lines:
            with contextlib.suppress(json.JSONDecodeError, KeyError, TypeError):
                cell = json.loads(line)  # not of a line that a killed run left unfinished
                self.results[fingerprint(cell["facts"])] = cell["result"]

    def find(self, facts: dict[str, Any]) -> dict[str, Any] | None:
        """The result under these facts, None if there is none."""
        return self.results.get(fingerprint(facts))

    def put(self, facts: dict[str, Any], result: dict[str, Any]) -> dict[str, Any]:
        """Append a result, and return it as JSON has it."""
        cell = _plain({"facts": facts, "result": result})
        self.results[fingerprint(facts)] = cell["result"]
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps(cell)}")  # after a line that may be unfinished
        return cell["result"]


def fingerprint(facts: dict[str, Any]) -> str:
    """A short name for facts, for files that belong to them."""
    text = json.dumps(_plain(facts), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    """A value as JSON gives it back."""
    return json.loads(json.dumps(value, default=str))
