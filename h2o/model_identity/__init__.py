"""Identity of a model: its shape, and ways to recognize its weights.

- `model_fingerprint` is an exact hash of names, shapes and a sample of each tensor's bytes, which
  takes milliseconds. Any training, adapter, merge, dtype or quantization changes the hash. (A
  single changed number among millions may go unnoticed.) Results are stored under it.
- `sample` takes a few numbers that are the same in any dtype, up to a tolerance. `difference`
  compares them. Profiles contain them.
- `record` has a hash and a sample of each weight, and the settings of the config. Saved caches
  contain it.
- `files_fingerprint` is a hash of files that are not loaded (`h2o.model_identity.files`).

Weights of adapters count while the adapters are active (`h2o.model_identity.weights`). Neither
torch nor transformers is imported until a fingerprint is taken.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from h2o.model_identity.files import files_fingerprint as files_fingerprint
from h2o.model_identity.weights import (
    Weight,
    first_difference,
    is_of_adapter,
    numbers_of,
    places_of,
    plain_tensors,
    relative_distance,
    rounded,
    sample_tensors,
    weights_inside,
    weights_of,
)

SHAPE = (
    "model_type", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
    "hidden_size", "intermediate_size", "vocab_size",
)  # fmt: skip

SAMPLE = 4096
"""Number of elements that a fingerprint takes from a tensor."""


# ---- the shape, from a config ----------------------------------------------------------------


def config_of(model: Any) -> Any:
    """The config of a transformers model, or the config that was given instead of a model.

    Raises: TypeError for anything else, such as a name or what `h2o.load_model` returns.
    """
    config = getattr(model, "config", model)
    if not hasattr(config, "get_text_config") or isinstance(config, type):
        hint = "write model, tokenizer = h2o.load_model(name) and pass model"
        if isinstance(model, str):
            hint += f". The command h2o info --model {model} needs no weights"
        for attribute in ("model", "module"):  # of a pipeline, of DataParallel
            if hasattr(getattr(model, attribute, None), "config"):
                hint = f"pass its .{attribute}"
        name = model.__name__ if isinstance(model, type) else type(model).__name__
        raise TypeError(f"expected a model of transformers, or its config, not {name}: {hint}")
    return config


def vocabulary_of(model: Any) -> float:
    """Number of token ids of a model, by its config; infinity if the config does not say."""
    text = config_of(model).get_text_config(decoder=True)
    return getattr(text, "vocab_size", math.inf)


def describe(config: Any, layer_type: str = "full_attention") -> dict[str, Any]:
    """Shape of a model from its config. If layers differ, the shape of those of `layer_type`.
    Entries that the config does not have are left out."""
    text = _text_config(config)
    shape: dict[str, Any] = {}
    for name in SHAPE:
        value = _layer_value(text, name, layer_type)
        if isinstance(value, int | str):
            shape[name] = value
    heads = shape.get("num_attention_heads")
    if heads:
        shape.setdefault("num_key_value_heads", heads)
        if "hidden_size" in shape:
            shape.setdefault("head_dim", shape["hidden_size"] // heads)
    return shape


def key_size(config: Any) -> tuple[int, int, int]:
    """(elements of a key, bytes of an element in the model's dtype, rows per token and head in a
    full cache: 2 for key and value, 1 for a latent that is both).

    Raises: ValueError for a config without a head dimension.
    """
    latent = latent_row(config)
    D = latent or describe(config).get("head_dim")
    if not isinstance(D, int):
        raise ValueError('budget_unit="bytes" needs a model whose config has a head dimension')
    is_half = str(dtype_of(config)).endswith(("float16", "half"))
    return D, 2 if is_half else 4, 1 if latent else 2


def dtype_of(config: Any) -> Any:
    """The dtype that a config names for its language model, or None: the model is in float32."""
    return getattr(_text_config(config), "dtype", None) or getattr(config, "dtype", None)


def latent_row(config: Any) -> int | None:
    """Number of elements that a cache holds per token with multi-head latent attention: those of
    the latent and of the rotated key. None for other attention."""
    text = _text_config(config)
    try:
        latent = getattr(text, "kv_lora_rank", None)
    except RuntimeError:  # raised by transformers if layers differ in the attribute
        return None
    return latent + text.qk_rope_head_dim if isinstance(latent, int) else None


def _layer_value(text: Any, name: str, layer_type: str) -> Any:
    """An attribute of a config. If layers differ in it, its value for layers of `layer_type`."""
    try:
        return getattr(text, name, None)
    except RuntimeError:  # raised by transformers if layers differ in the attribute
        types = list(getattr(text, "layer_types", None) or [layer_type])
        layer = types.index(layer_type)
        return getattr(text.per_layer_config[layer], name, None)


def _text_config(config: Any) -> Any:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


# ---- a few numbers, the same in any dtype ----------------------------------------------------


def sample(model: Any) -> dict[str, list[float]]:
    """A few numbers from a few parameters of a model and of its active adapters, for
    `Profile.weights`."""
    return {name: rounded(x) for name, x in sample_tensors(places_of(model)).items()}


def difference(
    model: Any, shape: Mapping[str, Any], weights: Mapping[str, Sequence[float]]
) -> str | None:
    """The first difference between a model and the model that `shape` (from `describe`) and
    `weights` (from `sample`) describe, or None. Of a config only the shape is compared."""
    config = config_of(model)
    here = describe(config)
    for name, wanted in shape.items():
        if here.get(name, wanted) != wanted:
            return f"this model's {name} is {here[name]}, not {wanted}"
    if config is model or not weights:
        return None
    return first_difference({x.name: x for x in weights_of(model)}, weights)


def attention_difference(
    attention: Any, layer: int, weights: Mapping[str, Sequence[float]]
) -> str | None:
    """`difference` for the attention module of one layer, using the sampled parameters that belong
    to the module."""
    inside = {x.name: x for x in weights_inside(attention)}
    parts = {name.partition(".")[0] for name in inside}
    here, wanted, of_layer = {}, {}, f".{layer}."
    for name, numbers in weights.items():
        path = name.partition(of_layer)[2].partition(".")[2]  # the part after the module's name
        if path in inside:
            here[name] = inside[path]
        if path in inside or (is_of_adapter(path) and path.partition(".")[0] in parts):
            wanted[name] = numbers
    if not any(map(is_of_adapter, weights)):
        here |= {name: x for name, x in inside.items() if is_of_adapter(name)}
    return first_difference(here, wanted)


# ---- a record of each weight, for files of keys and values -----------------------------------

_PASSING = (
    "architectures", "attention_dropout", "chunk_size_feed_forward", "dtype", "id2label",
    "initializer_range", "label2id", "model_type", "problem_type", "quantization_config",
    "return_dict", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
"""Settings of a config that do not change keys and values."""


def record(model: Any) -> dict[str, Any]:
    """Describe every weight of a model, and its config, for `record_difference` and JSON."""
    weights = {x.name: [*_digest(x), numbers_of(x)] for x in weights_of(model)}
    return {"weights": weights, "config": settings_of(model.config)}


def record_difference(model: Any, there: Mapping[str, Any]) -> str | None:
    """The first difference between a model and the model that `there` (from `record`) describes, or
    None.

    Weights in the same dtype must be identical, others equal within a tolerance. Given a config,
    only its settings are compared. A setting that only one of the two configs has is ignored.
    """
    config = config_of(model)
    if reason := settings_difference(model, there["config"]):
        return reason
    if config is model:
        return None
    here = record(model)["weights"]
    for name in sorted({*here, *there["weights"]}):
        if name not in here or name not in there["weights"]:
            where = "exists only in this model" if name in here else "is missing in this model"
            what = "an adapter's weight" if is_of_adapter(name) else "a weight"
            return f"{what} {where}: {name}"
        (dtype, digest, values), (wanted_dtype, wanted_digest, wanted) = (
            here[name], there["weights"][name],
        )  # fmt: skip
        if dtype == wanted_dtype and digest != wanted_digest:
            return f"the shapes are equal, but the weights of {name} differ"
        is_known = values and wanted and dtype != wanted_dtype
        if is_known and (apart := relative_distance(values, wanted)):
            return f"the shapes are equal, but the weights of {name} differ by {apart:.1%}"
    return None


def _digest(weight: Weight) -> tuple[str, str]:
    """(format, digest of the scale and the numbers) of a weight. The digest is "" for a weight that
    is cut over processes, because processes may have different parts."""
    if weight.is_shard:
        return "cut", ""
    digest = hashlib.sha256()
    _add_weight(digest, weight, whole=False)
    tensor = weight.tensor
    is_plain = tensor.dtype.is_floating_point and not hasattr(tensor, "__tensor_flatten__")
    stored = "" if is_plain else f"{type(tensor).__name__} "
    return f"{stored}{tensor.dtype}", digest.hexdigest()[:16]


def settings_of(config: Any) -> dict[str, Any]:
    """Settings of a config that may change keys and values, such as those of rotary embeddings, in
    JSON types."""
    every = json.loads(json.dumps(_text_config(config).to_dict(), default=str))
    return {
        name: value
        for name, value in every.items()
        if name not in _PASSING and not name.startswith(("_", "output_"))
        and not name.endswith("_token_id")
    }  # fmt: skip


def settings_difference(model: Any, there: Mapping[str, Any]) -> str | None:
    """The first difference between the settings of a model or its config and those that `there`
    (from `settings_of`) describes, or None. A setting that only one of them has is ignored."""
    return _first_difference(there, settings_of(config_of(model)), "config")


def rotary_difference(config: Any, there: Mapping[str, Any]) -> str | None:
    """`settings_difference` for the rotary embedding alone, which takes microseconds."""
    rotary = getattr(_text_config(config), "rope_parameters", None)
    here = {"rope_parameters": rotary} if rotary else {}
    return _first_difference(there, json.loads(json.dumps(here, default=str)), "config")


def _first_difference(there: Any, here: Any, name: str) -> str | None:
    """The first setting that both have and that differs, described for an error."""
    if isinstance(there, dict) and isinstance(here, dict):
        both = (x for x in there if x in here)
        apart = (_first_difference(there[x], here[x], f"{name}.{x}") for x in both)
        return next(filter(None, apart), None)
    return None if there == here else f"this model's {name} is {here}, not {there}"


# ---- the exact fingerprint -------------------------------------------------------------------


def model_fingerprint(model: Any, tokenizer: Any = None) -> str:
    """16 hexadecimal digits for a model's config, weights, adapters and tokenizer.

    If a model is cut over processes, all of them must call this, and get the same result.
    """
    digest = hashlib.sha256()
    config = model.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "dtype"):
        config.pop(name, None)
    digest.update(json.dumps(config, sort_keys=True, default=str).encode())
    for weight in weights_of(model):
        digest.update(weight.name.encode())
        _add_weight(digest, weight, whole=True)
    if tokenizer is not None:
        digest.update(_describe_tokenizer(tokenizer).encode())
    return digest.hexdigest()[:16]


def _add_weight(digest: Any, weight: Weight, *, whole: bool) -> None:
    """Add a weight's scale, format and some evenly spaced elements to a hash. `whole`: see
    `plain_tensors`."""
    import torch

    for name, tensor in plain_tensors("", weight.tensor, whole=whole):
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype} {weight.scale}".encode())
        if not tensor.is_meta and tensor.numel():
            some = tensor.reshape(-1)[:: max(1, tensor.numel() // SAMPLE)].cpu().contiguous()
            digest.update(some.view(torch.uint8).numpy().tobytes())


def _describe_tokenizer(tokenizer: Any) -> str:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items())
    return f"{words} {getattr(tokenizer, 'chat_template', None)} {tokenizer.special_tokens_map}"
