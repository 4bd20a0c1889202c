"""The C core. Use h2o.ops, which documents the operations. A tensor is any object with DLPack."""

from typing import Any, TypedDict

class _Info(TypedDict):
    level: str
    levels: list[str]
    features: str
    threads: int
    thread_source: str
    version: str

KERNELS: str
OPERATIONS: tuple[str, ...]

def call(operation: str, mode: str, /, *operands: Any) -> int | None: ...
def devices(name: str, /) -> tuple[int, list[tuple[str, int, int]]]: ...
def load(name: str, image: bytes, index: int, /) -> None: ...
def info() -> _Info: ...
