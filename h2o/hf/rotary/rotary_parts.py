"""Finds the classes and functions that rotate a language model's queries and keys, in its code.

In transformers' modeling files the constructor of a module names the classes of its submodules, and
the forward method of an attention module names the function that rotates queries and keys. Both are
therefore found from the class of the model, without a list of model families. `attended` runs small
attention modules at given positions and records their queries and keys, with which
`h2o.hf.rotary.model_rotary` proves the rotation.

Shape letters as in `h2o.hf`.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from h2o import compat
from h2o.compat import accepts
from h2o.model_identity import describe


class Parts(NamedTuple):
    """The parts of a language model that rotate queries and keys."""

    embedding: Any
    """Class of the rotary module; None if a model with this config creates none"""
    attention: Any
    """Class of the attention module"""
    functions: tuple[Callable[..., Any], ...]
    """Functions that rotate queries and keys; if there are several, the config chooses one"""


def parts_of(text: Any) -> Parts:
    """The parts of the language model with this text config.

    Raises:
        LookupError: the code is not as expected, with the reason.
    """
    model = _model_class(text)
    made = _created_classes(model)
    embedding = _find_single(
        "rotary module", [x for x in made if accepts(x.forward, "x", "position_ids")]
    )
    attention = _find_single(
        "attention module that uses AttentionInterface and receives rotary positions",
        [
            x
            for x in made
            if "ALL_ATTENTION_FUNCTIONS" in _names(x.forward)
            and accepts(x.forward, "position_embeddings")
            and accepts(x.__init__, "layer_idx")
        ],
    )
    space = vars(sys.modules[attention.__module__])
    named = (space[name] for name in _names(attention.forward) if name.startswith("apply_rotary"))
    functions = tuple(dict.fromkeys(named))
    if not functions:
        raise LookupError("its attention calls no function named apply_rotary...")
    return Parts(embedding if _creates(model, text, embedding) else None, attention, functions)


def _model_class(text: Any) -> Any:
    """Class of the language model without its head."""
    autos = transformers.AutoModel, transformers.AutoModelForCausalLM
    for auto in autos:
        if model := compat.model_class(auto, text):
            return model
    # A language model that is only a part of another model is in the modeling file of that model.
    modeling = type(text).__module__.replace(".configuration_", ".modeling_")
    classes = [
        x
        for x in vars(sys.modules.get(modeling, text)).values()
        if inspect.isclass(x)
        and issubclass(x, PreTrainedModel)
        and x.config_class is type(text)
        and x.__name__.endswith("Model")
        and not x.__name__.endswith("PreTrainedModel")
    ]
    bases = [x for x in classes if not any(x is not y and issubclass(x, y) for y in classes)]
    return _find_single("language model", bases)


def _find_single(what: str, found: list[Any]) -> Any:
    if len(found) != 1:
        names = ", ".join(x.__name__ for x in found) or "none"
        raise LookupError(f"{what}: expected one, found {names}")
    return found[0]


def _created_classes(model: Any) -> list[Any]:
    """Classes of the modules that a module class creates, directly or through other modules."""
    found: list[Any] = [model]
    for maker in found:  # the list grows in the loop
        space = vars(sys.modules[maker.__module__])
        for name in _names(maker.__init__):
            if inspect.isclass(x := space.get(name)) and issubclass(x, nn.Module):
                if x not in found:
                    found.append(x)
    return found[1:]


def _names(function: Any) -> list[str]:
    """All global names and attributes that a function's code uses."""

    def of(code: types.CodeType) -> Iterator[str]:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from of(constant)

    code = getattr(inspect.unwrap(function), "__code__", None)
    return [] if code is None else list(of(code))


def _creates(model: Any, text: Any, embedding: Any) -> bool:
    """Whether a model with this config creates the rotary module. Granite 4 does so on request
    only."""
    text = copy.deepcopy(text)
    text.num_hidden_layers = 0
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about tensors without elements
            made = model(text)
    except Exception as error:
        raise LookupError(f"{model.__name__} cannot be created without layers: {error}") from None
    return any(isinstance(module, embedding) for module in made.modules())


class _Past:
    """A cache that stores nothing and reports a number of seen tokens, for which Llama 4 asks."""

    def __init__(self, seen: int) -> None:
        self.seen = seen

    def get_seq_length(self, layer: int = 0) -> int:
        return self.seen

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values


def attended(
    parts: Parts, text: Any, layers: Sequence[int], *positions: tuple[Tensor, Any]
) -> list[tuple[list[int], list[tuple[Tensor, Tensor]]]]:
    """Run the attention of some layers on the same tokens at several positions.

    The attention modules are small, with the model's head dimension and made-up weights.

    Args:
        positions: position ids [1, Q] and the output of the rotary module for them.

    Returns:
        Groups of layers whose attention modules are alike, each with the queries [1, H, Q, D] and
        keys [1, G, Q, D] that reach attention at each of the positions.

    Raises:
        LookupError: an attention module cannot be created or run.
    """
    name, width = f"h2o_probe:{next(_numbers)}", 2 * describe(text)["head_dim"]
    alike: dict[str, tuple[list[int], nn.Module]] = {}
    try:
        if getattr(text, "is_heterogeneous", False):  # layers differ in their heads
            configs = [_smaller(text.per_layer_config[layer], width, name) for layer in layers]
        else:
            configs = [_smaller(text, width, name)] * len(layers)
        for layer, config in zip(layers, configs, strict=True):
            with torch.device("meta"):
                module = parts.attention(config, layer_idx=layer)
            alike.setdefault(_fingerprint(module), ([], module))[0].append(layer)
        return [
            (group, _record_queries_and_keys(_fill_weights(module.eval()), name, width, positions))
            for group, module in alike.values()
        ]
    except Exception as error:
        raise LookupError(f"its {parts.attention.__name__} cannot be run: {error}") from None


def _smaller(config: Any, width: int, name: str) -> Any:
    """A config for a small attention module that calls the attention function `name`."""
    config = copy.deepcopy(config)
    smaller = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": width}
    for field, value in smaller.items():
        if hasattr(config, field):
            setattr(config, field, value)
    compat.put_attention_name(config, name)
    return config


def _arguments(forward: Any, width: int, ids: Tensor, tables: Any) -> dict[str, Any]:
    """Arguments for the forward method of an attention module, always for the same tokens."""
    Q = ids.shape[1]
    states = torch.arange(Q * width, dtype=torch.float32, device="cpu").sin().view(1, Q, width)
    known: dict[str, Any] = {
        "hidden_states": states, "position_embeddings": tables, "position_ids": ids,
        "attention_mask": None, "layer_past": None, "shared_kv_states": {},
    }  # fmt: skip
    asks = "get_seq_length" in _names(forward)
    known |= compat.with_cache(_Past(int(ids[0, 0])) if asks else None)
    return {name: known[name] for name in compat.parameters_of(forward) if name in known}


def _record_queries_and_keys(
    module: nn.Module, name: str, width: int, positions: Sequence[tuple[Tensor, Any]]
) -> list[tuple[Tensor, Tensor]]:
    """The queries and keys with which a module calls the attention function `name`."""
    recorded: list[tuple[Tensor, Tensor]] = []

    def record_call(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
        recorded.append((query, key))
        B, H, Q, _ = query.shape
        return value.new_zeros(B, Q, H, value.shape[-1]), None

    compat.register_attention(name, record_call)
    try:
        with torch.no_grad():
            for ids, tables in positions:
                module(**_arguments(module.forward, width, ids, tables))
    finally:
        compat.unregister_attention(name)
    if len(recorded) != len(positions):
        raise LookupError(f"its attention function ran {len(recorded)} times")
    return recorded


def _fingerprint(module: nn.Module) -> str:
    """A module's settings, except for the number of its layer, and its structure."""
    plain = [
        (name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if name != "layer_idx" and isinstance(value, bool | int | float | str | None)
    ]
    return f"{plain} {module}"


def _fill_weights(module: nn.Module) -> nn.Module:
    """Give a module on the meta device weights on the CPU, all different even in norms."""
    module = module.to_empty(device="cpu").float()
    sizes = [parameter.numel() for parameter in module.parameters()]
    numbers = torch.arange(max(sizes) + len(sizes), dtype=torch.float32, device="cpu").sin() + 0.1
    for index, parameter in enumerate(module.parameters()):
        parameter.data = numbers[index:][: parameter.numel()].view(parameter.shape)
    return module


_numbers = itertools.count()
