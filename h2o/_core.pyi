"""The C core. Use h2o.ops, which documents the operations; a tensor is whatever speaks DLPack."""

from typing import Any, TypedDict

class _Info(TypedDict):
    level: str
    levels: list[str]
    features: str
    threads: int
    thread_source: str
    version: str

def attend(
    query: Any,
    keys: Any,
    values: Any,
    mask: Any | None,
    slots: tuple[Any, ...] | None,
    out: Any,
    scores: Any,
    scale: float,
    decay: float,
    softcap: float,
    /,
) -> None: ...
def evict(
    keys: Any,
    values: Any,
    scores: Any,
    mask: Any | None,
    slots: tuple[Any, ...],
    sinks: int,
    rank_by: str,
    decay: float,
    value_weighted: bool,
    merge: float | None,
    /,
) -> None: ...
def step(
    query: Any,
    key: Any,
    value: Any,
    mask: Any | None,
    slots: tuple[Any, ...],
    out: Any,
    scale: float,
    softcap: float,
    sinks: int,
    rank_by: str,
    decay: float,
    value_weighted: bool,
    merge: float | None,
    table: Any | None,
    ranks: Any | None,
    /,
) -> None: ...
def simulate(
    query: Any,
    keys: Any,
    values: Any,
    mask: Any | None,
    prompt: Any,
    budget: Any,
    out: Any,
    evicted_at: Any,
    scores: Any,
    scale: float,
    softcap: float,
    sinks: int,
    rank_by: str,
    decay: float,
    value_weighted: bool,
    merge: float | None,
    stored_keys: Any | None,
    stored_values: Any | None,
    /,
) -> None: ...
def check_attend(
    query: Any,
    keys: Any,
    values: Any,
    mask: Any | None,
    slots: tuple[Any, ...] | None,
    out: Any,
    scores: Any,
    scale: float,
    decay: float,
    softcap: float,
    /,
) -> None: ...
def check_evict(
    keys: Any,
    values: Any,
    scores: Any,
    mask: Any | None,
    slots: tuple[Any, ...],
    sinks: int,
    rank_by: str,
    decay: float,
    value_weighted: bool,
    merge: float | None,
    /,
) -> None: ...
def check_step(
    query: Any,
    key: Any,
    value: Any,
    mask: Any | None,
    slots: tuple[Any, ...],
    out: Any,
    scale: float,
    softcap: float,
    sinks: int,
    rank_by: str,
    decay: float,
    value_weighted: bool,
    merge: float | None,
    table: Any | None,
    ranks: Any | None,
    /,
) -> None: ...
def check_simulate(
    query: Any,
    keys: Any,
    values: Any,
    mask: Any | None,
    prompt: Any,
    budget: Any,
    out: Any,
    evicted_at: Any,
    scores: Any,
    scale: float,
    softcap: float,
    sinks: int,
    rank_by: str,
    decay: float,
    value_weighted: bool,
    merge: float | None,
    stored_keys: Any | None,
    stored_values: Any | None,
    /,
) -> None: ...
def info() -> _Info: ...
