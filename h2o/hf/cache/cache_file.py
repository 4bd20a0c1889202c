"""The file format of a saved cache, with which another process can continue a text.

The file is in safetensors format. Its tensors are those of the layers' snapshots
(`h2o.hf.cache_state.layer_snapshot`), named `<layer>.<tensor>`. Its metadata contains a JSON text
with everything else (settings, a description of the model, numbers of each layer), and a checksum
of the JSON text and all tensors.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from h2o.config import H2OConfig
from h2o.config.profile import Profile
from h2o.hf.cache_state.layer_snapshot import Snapshot, restore, take_snapshot
from h2o.hf.conversation.pins import Pins
from h2o.hf.conversation.state import CacheState
from h2o.hf.layers.layer import H2OLayer
from h2o.hf.layers.pass_runners import CapturedRunner
from h2o.hf.model_traits import tensor_parallel
from h2o.model_identity import difference, record, record_difference, settings_difference
from h2o.packages import version
from h2o.utils.filesystem import atomic_write

KIND = "h2o cache"
LAYOUT = 9
"""Version of the file format. Increase it when older versions of h2o cannot read new files."""


def write(path: Path, cache: Any, model: Any = None) -> None:
    """Write an `H2OCache` to a file; see `H2OCache.save`."""
    model_settings = json.loads(cache.model_settings)
    if model is not None and (reason := _difference(model, cache.model_shape, model_settings)):
        raise ValueError(f"this cache was made for another model: {reason}")
    with atomic_write(path) as draft, cache._copying():  # which raises before the file is replaced
        draft.touch()  # raises the usual OSError if the file cannot be created
        tensors, metadata = _contents(cache, model, model_settings)
        try:
            save_file(tensors, draft, metadata)
        except SafetensorError as error:
            reason = str(error).replace(str(draft), str(path))
            raise OSError(f"{path} could not be written: {reason}") from error


def _contents(
    cache: Any, model: Any, model_settings: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of a file."""
    snapshots = [_with_part(take_snapshot(layer), cache, model) for layer in cache.layers]
    text = json.dumps(
        {
            "kind": KIND,
            "layout": LAYOUT,
            "versions": {name: version(name) for name in ("h2o-kv", "torch", "transformers")},
            "model": cache.model_shape,
            "model_settings": model_settings,
            "record": record(model) if hasattr(model, "named_parameters") else None,
            "settings": _settings(cache),
            "pins": cache.guard.pins._asdict(),
            "state": cache.guard.state.as_dict(),
            "layers": [snapshot.numbers for snapshot in snapshots],
        }
    )
    tensors = {
        f"{index}.{name}": x.cpu().contiguous()
        for index, snapshot in enumerate(snapshots)
        for name, x in snapshot.tensors.items()
    }
    return tensors, {"format": "pt", "h2o": text, "sha256": _checksum(text, tensors)}


def read(cls: Any, path: Path, model: Any, device: Any) -> Any:
    """Make a cache of the class `cls` from a file; see `H2OCache.load`."""
    content, tensors = _read_content(path, model)
    settings = content["settings"]
    loaded = cls(
        model,
        settings["config"],
        trace=settings["trace"],
        compileable=settings["compileable"],
    )
    guard = loaded.guard
    if device is None:
        device = torch.device(getattr(model, "device", "cpu"))  # a config has none
        device = "cpu" if device.type == "meta" else device  # the model is offloaded
    _fill(loaded.layers, content, {name: x.to(device) for name, x in tensors.items()})
    seen = [layer.slots.seen_tokens.tolist() for layer in loaded.layers if _has_slots(layer)]
    if seen != seen[:1] * len(guard.plans):
        raise ValueError(
            f"{path}: the last forward pass was interrupted between two layers, which have seen "
            "different numbers of tokens. Process the text again and save the cache again"
        )
    guard.put(CacheState.from_dict(content["state"]), Pins(**content["pins"]))
    loaded.echo_replacement = settings.get("not_dealt", "")
    return loaded


def _has_slots(layer: Any) -> bool:
    return getattr(layer, "slots", None) is not None


def _read_content(path: Path, model: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read and check a file. Return its JSON content, with `settings["config"]` as an `H2OConfig`,
    and its tensors.

    Raises: as `H2OCache.load`.
    """
    try:
        metadata, tensors = _open_file(path)
        if "h2o" not in metadata:
            raise ValueError("is a safetensors file that H2OCache.save did not write")
        text = metadata["h2o"]
        if metadata.get("sha256") != _checksum(text, tensors):
            raise ValueError(
                "the checksum does not match the content: the file was edited or damaged. Process "
                "the text again and save the cache again"
            )
        content = json.loads(text)
        if content["kind"] != KIND:
            raise ValueError(f"has the kind {content['kind']!r}, wanted {KIND!r}")
        if content["layout"] != LAYOUT:
            raise ValueError(
                f"was written in layout {content['layout']}, but this version of h2o reads layout "
                f"{LAYOUT}. Load it with the version that wrote it, or process the text again"
            )
        reason = _difference(model, content["model"], content.get("model_settings", {}))
        if reason is None and content["record"] is not None:
            reason = record_difference(model, content["record"])
        if reason is not None:
            raise ValueError(
                f"this cache belongs to another model: {reason}. Pass the model that processed the "
                "text"
            )
        _check_part(content["layers"], tensors, model)
        content["settings"]["config"] = _config(content["settings"]["config"])
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return content, tensors


def _difference(model: Any, shape: dict[str, Any], settings: dict[str, Any]) -> str | None:
    """The first difference of a model or config from the shape and the settings of another."""
    return difference(model, shape, {}) or settings_difference(model, settings)


def _fill(layers: list[Any], content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Restore new layers from the result of `read`. The layers use the tensors without copying.

    Raises:
        ValueError: a tensor or number is missing or unknown.
    """
    if len(layers) != len(content["layers"]):
        raise ValueError(
            f"the file has {len(content['layers'])} layers, but the model has {len(layers)}"
        )
    for index, (layer, numbers) in enumerate(zip(layers, content["layers"], strict=True)):
        prefix = f"{index}."
        of_layer = {
            name.removeprefix(prefix): x for name, x in tensors.items() if name.startswith(prefix)
        }
        try:
            restore(layer, Snapshot(of_layer, numbers))
        except (KeyError, TypeError) as error:
            raise ValueError(f"layer {index} was written by another version: {error}") from error


def _with_part(snapshot: Snapshot, cache: Any, model: Any) -> Snapshot:
    """Add `part` to a layer's snapshot: the part of the model's heads whose keys the layer holds.

    A layer filled from a DynamicCache learns this in its next forward pass. Before that only the
    model knows.

    Raises:
        ValueError: the layer holds only part of the heads, and no model was given.
    """
    if not cache.guard.state.unscored or "part" not in snapshot.numbers:
        return snapshot
    if model is not None:
        part = tensor_parallel.part_of_heads(model)
        return Snapshot(snapshot.tensors, snapshot.numbers | {"part": part})
    total, held = cache.model_shape.get("num_key_value_heads"), _heads(snapshot.tensors, "")
    if total not in (None, held) and tensor_parallel.is_distributed():
        raise ValueError(
            f"this cache holds {held} of {total} key/value heads, copied from a DynamicCache. "
            "Before its first forward pass it does not know which. Pass the model to save()"
        )
    return snapshot


def _heads(tensors: dict[str, Tensor], prefix: str) -> int | None:
    """Number of key/value heads in a layer's slots; None if the layer has no slots."""
    free = tensors.get(f"{prefix}slots.next_slot")
    return None if free is None else free.shape[1]


def _check_part(layers: list[dict[str, Any]], tensors: dict[str, Tensor], model: Any) -> None:
    """Raise ValueError if this process of a tensor-parallel model has other heads than the file."""
    parts = {
        tuple(numbers["part"])
        for index, numbers in enumerate(layers)
        if "part" in numbers and _heads(tensors, f"{index}.") is not None
    }
    for part in parts:
        reason = f"holds the heads of {tensor_parallel.describe_part(part)}"
        if not hasattr(model, "config"):
            if part == tensor_parallel.WHOLE and not tensor_parallel.is_distributed():
                continue
            raise ValueError(
                f"{reason}, and a config does not say which heads are here. Pass the model to "
                "load()"
            )
        if (here := tensor_parallel.part_of_heads(model)) != part:
            raise ValueError(
                f"{reason}, but this is {tensor_parallel.describe_part(here)}. "
                + (
                    "Load it in a single process, or let each process save its own heads"
                    if part == tensor_parallel.WHOLE
                    else "Start as many processes as saved the cache, and let each load the file "
                    "that it saved, from its own path"
                )
            )


def _open_file(path: Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    path.open("rb").close()  # raises the usual OSError if the file cannot be read
    try:
        with safe_open(path, framework="pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}
    except SafetensorError as error:
        raise ValueError(
            f"is truncated, damaged or not a safetensors file ({error}). Save the cache again"
        ) from error


def _checksum(text: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(text.encode())
    for name, x in sorted(tensors.items()):
        digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
        digest.update(x.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _settings(cache: Any) -> dict[str, Any]:
    """Settings to make the same cache again, for JSON: fields of `H2OConfig`, a note, and flags."""
    fields = {x.name: getattr(cache.config, x.name) for x in dataclasses.fields(H2OConfig)}
    if isinstance(fields["head_shares"], Profile):
        fields["head_shares"] = fields["head_shares"].as_dict()
    first = next((x for x in cache.layers if isinstance(x, H2OLayer)), None)
    return {
        "config": fields,
        "not_dealt": cache.echo_replacement,
        "trace": first is not None and first.trace is not None,
        "compileable": first is not None and isinstance(first.runner, CapturedRunner),
    }


def _config(fields: dict[str, Any]) -> H2OConfig:
    """Rebuild the `H2OConfig` from the fields in the output of `_settings`."""
    fields = dict(fields)
    if isinstance(fields.get("head_shares"), dict):
        fields["head_shares"] = Profile.from_dict(fields["head_shares"])
    if fields.get("_token_bytes") is not None:
        fields["_token_bytes"] = tuple(fields["_token_bytes"])
    try:
        return H2OConfig(**fields)
    except TypeError as error:
        raise ValueError(f"was written by a later version of h2o ({error})") from error
