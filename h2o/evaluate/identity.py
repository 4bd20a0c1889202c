"""What was measured: a fingerprint of a model as it is in memory, or of files not yet loaded.

A path says where a model lay, not which one; results that are looked up by the path alone are those
of whatever lay there before. Fingerprints take names, shapes and a sample of each tensor's bytes,
so that they cost milliseconds and change with any training, adapter, merge or quantisation. One
number changed by hand among millions may escape.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["of_files", "of_model"]

SAMPLE = 4096  # elements of a tensor, or bytes at a place of a file


def of_model(model: Any, tokenizer: Any = None) -> str:
    """16 hexadecimal digits for a model's config, weights and adapters, and for its tokenizer.

    Of a model that is cut over processes all of them call it, and find the same.
    """
    seen = hashlib.sha256()
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype"):
        config.pop(name, None)
    seen.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, adapter in sorted(getattr(model, "peft_config", {}).items()):
        seen.update(f"{name} {sorted(vars(adapter).items(), key=str)}".encode())
    for name, tensor in _tensors(model):
        seen.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        seen.update(_sample(tensor))
    if tokenizer is not None:
        seen.update(_of_tokenizer(tokenizer).encode())
    return seen.hexdigest()[:16]


def of_files(texts: Iterable[str]) -> str:
    """16 digits for the files and folders that are named in these texts, "" if none is there.

    Names, sizes, and bytes from the beginning, the middle and the end of each file.
    """
    seen = hashlib.sha256()
    files = sorted({file for text in texts for place in _places(text) for file in _below(place)})
    for file in files:
        size = file.stat().st_size
        seen.update(f"{file} {size}".encode())
        with file.open("rb") as content:
            for start in {0, max(0, size // 2), max(0, size - SAMPLE)}:
                content.seek(start)
                seen.update(content.read(SAMPLE))
    return seen.hexdigest()[:16] if files else ""


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, those inside of quantised tensors instead of these."""
    every = dict([*model.named_parameters(), *model.named_buffers()])
    for name in sorted(every):
        yield from _plain(name, _loaded(model, name, every[name].detach()))


def _loaded(model: Any, name: str, value: Tensor) -> Tensor:
    """The tensor, or what accelerate puts in its place for the time of a forward pass."""
    place, _, own = name.rpartition(".")
    hook = getattr(model.get_submodule(place), "_hf_hook", None)
    for one in getattr(hook, "hooks", [hook]):
        weights = getattr(one, "weights_map", None)
        if value.is_meta and weights is not None:
            return torch.as_tensor(weights[own])
    return value


def _plain(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if hasattr(value, "full_tensor"):  # a part of it in each of several processes
        yield name, value.full_tensor()
    elif hasattr(value, "__tensor_flatten__"):  # torchao's and quanto's subclasses
        inner, _ = value.__tensor_flatten__()
        for part in sorted(inner):
            yield from _plain(f"{name}.{part}", getattr(value, part))
    elif isinstance(value, Tensor):
        yield name, value


def _sample(tensor: Tensor) -> bytes:
    """Bytes of elements that are spread evenly; none of a tensor that is nowhere."""
    if tensor.is_meta or tensor.numel() == 0:
        return b""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLE)].cpu().contiguous()
    return some.view(torch.uint8).numpy().tobytes()


def _of_tokenizer(tokenizer: Any) -> str:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items())
    return f"{words} {getattr(tokenizer, 'chat_template', None)} {tokenizer.special_tokens_map}"


def _places(text: str) -> Iterator[Path]:
    """Paths in an argument: a path, name=path,name=path, or JSON."""
    for part in text.replace('"', ",").replace("=", ",").split(","):
        place = Path(part.strip())
        if part.strip() and place.exists():
            yield place.resolve()


def _below(place: Path) -> list[Path]:
    return [file for file in place.rglob("*") if file.is_file()] if place.is_dir() else [place]
