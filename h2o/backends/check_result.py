"""The result of checking the kernels of a device, and its file in the cache folder."""

from __future__ import annotations

import hashlib
import itertools
import json
from pathlib import Path
from typing import Any, NamedTuple

AttentionByTokens = dict[int, str]
"""The attention implementation for prompts, by the smallest number of tokens for which it is used,
in ascending order. Each is a name in `h2o.backends.prompt_attention.TORCH_ATTENTIONS`, or "" for
h2o's own kernels, which also handle all prompts with fewer tokens than the first number."""


class CheckResult(NamedTuple):
    """Result of a check of a device's kernels."""

    mistakes: list[str]
    """Mistakes of the kernels. The kernels are used if there are none."""
    prompts: dict[int, AttentionByTokens]
    """The attention for each entry of `h2o.backends.prompt_attention.DEPTHS` measured so far."""

    @property
    def prompts_in_words(self) -> str:
        """The attention for prompts in words. Empty if h2o's own kernels handle all prompts."""
        if not any(self.prompts.values()):
            return ""
        depths = sorted(self.prompts)
        groups = itertools.groupby(depths, key=lambda depth: _in_words(self.prompts[depth]))
        parts = {max(group): text for text, group in groups}
        if len(parts) == 1:
            return "".join(parts.values())
        return ", ".join(f"{text} (head dimensions up to {top})" for top, text in parts.items())


def _in_words(attentions: AttentionByTokens) -> str:
    from h2o.backends.prompt_attention import LEAST_TOKENS

    first, *others = ({LEAST_TOKENS: ""} | attentions).items()
    later = (f", from {least:,} tokens by {name or OWN}" for least, name in others)
    return (first[1] or OWN) + "".join(later)


OWN = "h2o's kernels"


def load_result(facts: dict[str, Any]) -> CheckResult | None:
    """The result stored for these facts, or None if there is none in this format."""
    try:
        known = json.loads(_file(facts).read_text("utf-8"))
        prompts = {int(depth): _parse_attention(x) for depth, x in known["prompts"].items()}
        return CheckResult(list(map(str, known["mistakes"])), prompts)
    except (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _parse_attention(known: dict[str, str]) -> AttentionByTokens:
    """Parse the attention for one depth. Raises: ValueError for a name that this version lacks."""
    from h2o.backends.prompt_attention import TORCH_ATTENTIONS

    attentions = dict(sorted((int(least), name) for least, name in known.items()))
    if not set(attentions.values()) <= {*TORCH_ATTENTIONS, ""}:
        raise ValueError(f"unknown attention: {attentions}")
    return attentions


def save_result(facts: dict[str, Any], result: CheckResult) -> None:
    """Store a result. If the folder is not writable, every process checks the kernels again."""
    from h2o.utils.filesystem import atomic_write

    try:
        path = _file(facts)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as draft:
            draft.write_text(json.dumps(facts | result._asdict(), indent=2), "utf-8")
    except (OSError, RuntimeError):
        return


def _file(facts: dict[str, Any]) -> Path:
    from h2o.utils.filesystem import cache_folder

    name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_folder() / f"check-{name}.json"
