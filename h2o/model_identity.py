"""Which model something was measured with: its shape, and two ways of knowing its weights again.

A path says where a model lay, not which one. `of_model` is exact: a fingerprint of names, shapes
and a sample of each tensor's bytes, which costs milliseconds and changes with any training,
adapter, merge, dtype or quantisation; results are looked up by it. (One number changed by hand
among millions may escape.) `sample` holds in any dtype: a few numbers, which `difference` compares
to within a tolerance; profiles and saved caches carry them. `of_files` is for what is not loaded.

Imports neither torch nor transformers until a fingerprint is taken.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "attention_difference",
    "describe",
    "difference",
    "key_size",
    "latent_row",
    "of_files",
    "of_model",
    "sample",
    "value_width",
]

SHAPE = (
    "model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_size", "intermediate_size", "vocab_size",
)  # fmt: skip

TOLERANCE = 0.01
"""Relative distance of two samples of weights that are still called the same: above what
float16 and bfloat16 round, below what training changes."""

SAMPLE = 4096
"""Elements of a tensor, or bytes at a place of a file, that a fingerprint takes."""


# ---- the shape, from a config ----------------------------------------------------------------


def describe(config: Any) -> dict[str, Any]:
    """Shape of a model from its config; what a config does not say is left out."""
    text = _text_config(config)
    shape: dict[str, Any] = {}
    for name in SHAPE:
        value = _of_full_attention(text, name)
        if isinstance(value, int | str):
            shape[name] = value
    heads = shape.get("num_attention_heads")
    if heads:
        shape.setdefault("num_key_value_heads", heads)
        if "hidden_size" in shape:
            shape.setdefault("head_dim", shape["hidden_size"] // heads)
    return shape


def key_size(config: Any) -> tuple[int, int, float]:
    """(elements of a key, bytes of each in the model's dtype, rows that a full cache has for each
    token and head: 2, key and value, less where values are smaller, or 1, a latent that is both).

    Raises: ValueError for a config that does not tell its head dimension.
    """
    latent = latent_row(config)
    D = latent or describe(config).get("head_dim")
    if not isinstance(D, int):
        raise ValueError('of="bytes" needs a model whose config tells its head dimension')
    dtype = str(getattr(_text_config(config), "dtype", None) or getattr(config, "dtype", None))
    rows: float = 1 if latent else 2
    if width := value_width(config):
        rows = 1 + width / D
    return D, 2 if dtype.endswith(("float16", "half")) else 4, rows


def latent_row(config: Any) -> int | None:
    """Elements of what a cache holds of a token under multi-head latent attention, its latent and
    its rotated key; None for other attention."""
    text = _text_config(config)
    try:
        latent = getattr(text, "kv_lora_rank", None)
    except RuntimeError:  # transformers: layers differ in it
        return None
    return latent + text.qk_rope_head_dim if isinstance(latent, int) else None


def value_width(config: Any) -> int | None:
    """Elements of a value where these are fewer than those of a key; None: they are as many."""
    text = _text_config(config)
    key, value = (_of_full_attention(text, name) for name in ("head_dim", "v_head_dim"))
    is_less = isinstance(value, int) and isinstance(key, int) and value < key
    return value if is_less and latent_row(config) is None else None


def _of_full_attention(text: Any, name: str) -> Any:
    """An attribute of a config; where layers differ in it, that of those with full attention."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # transformers: layers differ in it
        layer = list(text.layer_types).index("full_attention")
        return getattr(text.per_layer_config[layer], name, None)


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


# ---- a few numbers, which hold in any dtype --------------------------------------------------


def sample(model: Any, tensors: int = 24, numbers: int = 6) -> dict[str, list[float]]:
    """A few numbers of a few parameters of a model, for `Profile.weights`."""
    parameters = sorted(_parameters(model).items())
    numbers_of = {}
    for name, parameter in parameters[:: max(1, -(-len(parameters) // tensors))]:
        values = _values(parameter, numbers)
        if values is not None:
            numbers_of[name] = [float(f"{value:.4g}") for value in values]
    return numbers_of


def difference(
    model: Any, shape: Mapping[str, Any], weights: Mapping[str, Sequence[float]]
) -> str | None:
    """What tells a model from the one that `describe` and `sample` have described; None if nothing
    does. Of a config the shape only is looked at."""
    config = getattr(model, "config", model)
    here = describe(config)
    for name, wanted in shape.items():
        if here.get(name, wanted) != wanted:
            return f"{name} is {wanted} there and {here[name]} here"
    if config is model or not weights:
        return None
    return _weights_apart(_parameters(model), weights)


def attention_difference(
    attention: Any, layer: int, weights: Mapping[str, Sequence[float]]
) -> str | None:
    """As `difference`, by the attention module of one layer alone: of what `sample` has described
    the parameters that lie in it."""
    inside = _parameters(attention)
    here, of_layer = {}, f".{layer}."
    for name in weights:
        path = name.partition(of_layer)[2].partition(".")[2]  # behind the module's own name
        if path in inside:
            here[name] = inside[path]
    return _weights_apart(here, weights)


def _weights_apart(
    parameters: Mapping[str, Any], weights: Mapping[str, Sequence[float]]
) -> str | None:
    for name, wanted in weights.items():
        values = _values(parameters[name], len(wanted)) if name in parameters else None
        if values is None:  # quantised, offloaded, cut or renamed by an adapter: no comparison
            continue
        apart = math.dist(values, wanted) / (math.hypot(*wanted) or 1.0)
        if not apart <= TOLERANCE:
            return f"its shape is the same, but the weights of {name} differ by {apart:.0%}"
    return None


def _parameters(model: Any) -> dict[str, Any]:
    """Parameters by name, without those of which this process has a part only and cannot tell."""
    from h2o import borrowed

    model = borrowed.compiled_model(model)
    cut: set[int] = set()
    for module in model.modules():
        if borrowed.device_mesh(module) is not None:
            cut.update(map(id, module.parameters()))
    return {name: x for name, x in model.named_parameters() if id(x) not in cut}


def _values(parameter: Any, numbers: int) -> list[float] | None:
    """Evenly spread numbers of a parameter; None of one that is quantised, cut or not in memory."""
    if not parameter.dtype.is_floating_point or parameter.is_meta or parameter.numel() < numbers:
        return None
    if hasattr(parameter, "__tensor_flatten__"):
        return None
    flat = parameter.detach().reshape(-1)
    step = flat.numel() // numbers
    return flat[step // 2 :: step][:numbers].float().cpu().tolist()


# ---- the exact fingerprint -------------------------------------------------------------------


def of_model(model: Any, tokenizer: Any = None) -> str:
    """16 hexadecimal digits for a model's config, weights and adapters, and for its tokenizer.

    Of a model that is cut over processes all of them call it, and get the same.
    """
    digest = hashlib.sha256()
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype"):
        config.pop(name, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for name, adapter in sorted(getattr(model, "peft_config", {}).items()):
        digest.update(f"{name} {sorted(vars(adapter).items(), key=str)}".encode())
    for name, tensor in _tensors(model):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype}".encode())
        digest.update(_bytes(tensor))
    if tokenizer is not None:
        digest.update(_of_tokenizer(tokenizer).encode())
    return digest.hexdigest()[:16]


def of_files(texts: Iterable[str]) -> str:
    """16 digits for the files and folders that are named in these texts, "" if none is there.

    Names, sizes, and bytes from the beginning, the middle and the end of each file.
    """
    digest = hashlib.sha256()
    files = sorted({file for text in texts for path in _paths(text) for file in _below(path)})
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file} {size}".encode())
        with file.open("rb") as content:
            for start in {0, max(0, size // 2), max(0, size - SAMPLE)}:
                content.seek(start)
                digest.update(content.read(SAMPLE))
    return digest.hexdigest()[:16] if files else ""


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers by name, those inside of quantised tensors instead of these."""
    every = dict([*model.named_parameters(), *model.named_buffers()])
    for name in sorted(every):
        yield from _plain(name, _loaded(model, name, every[name].detach()))


def _loaded(model: Any, name: str, value: Tensor) -> Tensor:
    """The tensor, or what accelerate puts in its place for the time of a forward pass."""
    import torch

    from h2o import borrowed

    module, _, parameter = name.rpartition(".")
    for one in borrowed.accelerate_hooks(model.get_submodule(module)):
        weights = getattr(one, "weights_map", None)
        if value.is_meta and weights is not None:
            return torch.as_tensor(weights[parameter], device="cpu")
    return value


def _plain(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    import torch

    if hasattr(value, "full_tensor"):  # a part of it in each of several processes
        yield name, value.full_tensor()
    elif hasattr(value, "__tensor_flatten__"):  # torchao's and quanto's subclasses
        inner, _ = value.__tensor_flatten__()
        for part in sorted(inner):
            yield from _plain(f"{name}.{part}", getattr(value, part))
    elif isinstance(value, torch.Tensor):
        yield name, value


def _bytes(tensor: Tensor) -> bytes:
    """Bytes of elements that are spread evenly; none of a tensor that is nowhere."""
    import torch

    if tensor.is_meta or tensor.numel() == 0:
        return b""
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    some = flat[:: max(1, flat.numel() // SAMPLE)].cpu().contiguous()
    return some.view(torch.uint8).numpy().tobytes()


def _of_tokenizer(tokenizer: Any) -> str:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items())
    return f"{words} {getattr(tokenizer, 'chat_template', None)} {tokenizer.special_tokens_map}"


def _paths(text: str) -> Iterator[Path]:
    """Paths in an argument: a path, name=path,name=path, or JSON."""
    for part in text.replace('"', ",").replace("=", ",").split(","):
        path = Path(part.strip())
        if part.strip() and path.exists():
            yield path.resolve()


def _below(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
