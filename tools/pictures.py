"""Save pictures together with a hash of the figures that they show.

`tests/test_documentation.py` compares the hash, and so notices an outdated picture. `make pictures`
draws all pictures again.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
STYLE = {"svg.hashsalt": "h2o", "font.size": 9, "axes.titlesize": 10}


def hash_of(shown: Any) -> str:
    """A hash of figures, which must be serializable as JSON."""
    return hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:16]


def save(figure: Any, name: str, shown: Any) -> None:
    """Write `docs/pictures/<name>.svg`. The same figures give the same bytes."""
    import matplotlib

    path = FOLDER / f"{name}.svg"
    with matplotlib.rc_context(STYLE):
        figure.savefig(path, metadata={"Date": None, "Description": f"figures {hash_of(shown)}"})
    print(f"{path}: {path.stat().st_size} bytes")


def is_up_to_date(name: str, shown: Any) -> bool:
    """Whether the picture `name` shows these figures."""
    return f"figures {hash_of(shown)}" in (FOLDER / f"{name}.svg").read_text("utf-8")
