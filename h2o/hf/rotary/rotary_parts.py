"""The classes and functions that turn a language model's queries and keys, found in its code.

In transformers' modeling files the constructor of a module names the classes of its submodules, and
the forward of an attention names the function that turns queries and keys. So both are found from
the class of the model, and no family needs to be known by name. `Probe` runs a small attention
module at any positions and records its queries and keys, by which `h2o.hf.rotary.model_rotary`
proves the rotation.

Shape letters: Q tokens, H query heads, G key/value heads, D head dimension.
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
    """The parts of a language model that turn queries and keys."""

    embedding: Any
    """The class of its rotary module; None where it makes none, whatever its config says"""
    attention: Any
    """The class of its attention"""
    functions: tuple[Callable[..., Any], ...]
    """Functions that turn queries and keys; the config chooses among several"""


def parts_of(text: Any) -> Parts:
    """The parts of the language model with this text config.

    Raises:
        LookupError: what was expected and is not there.
    """
    model = _model_class(text)
    made = _made_by(model)
    embedding = _only("rotary module", [x for x in made if accepts(x.forward, "x", "position_ids")])
    attention = _only(
        "attention by transformers' interface that is given rotary positions",
        [
            x
            for x in made
            if "ALL_ATTENTION_FUNCTIONS" in _names(x.forward)
            and accepts(x.forward, "position_embeddings")
            and accepts(compat.constructor_of(x), "layer_idx")
        ],
    )
    space = vars(sys.modules[attention.__module__])
    named = (space[name] for name in _names(attention.forward) if name.startswith("apply_rotary"))
    functions = tuple(dict.fromkeys(named))
    if not functions:
        raise LookupError("no function apply_rotary...")
    return Parts(embedding if _makes(model, text, embedding) else None, attention, functions)


def _model_class(text: Any) -> Any:
    """The class of the language model without its head."""
    autos = transformers.AutoModel, transformers.AutoModelForCausalLM
    for auto in autos:
        if model := compat.model_class(auto, text):
            return model
    modeling = type(text).__module__.replace(".configuration_", ".modeling_")  # within another
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
    return _only("language model", bases)


def _only(what: str, found: list[Any]) -> Any:
    if len(found) != 1:
        names = ", ".join(x.__name__ for x in found) or "none"
        raise LookupError(f"{what}: expected one, found {names}")
    return found[0]


def _made_by(model: Any) -> list[Any]:
    """The classes of the modules that a class of modules makes, and that these make."""
    found: list[Any] = [model]
    for maker in found:  # which grows
        space = vars(sys.modules[maker.__module__])
        for name in _names(compat.constructor_of(maker)):
            if inspect.isclass(x := space.get(name)) and issubclass(x, nn.Module):
                if x not in found:
                    found.append(x)
    return found[1:]


def _names(function: Any) -> list[str]:
    """All names in a function's code that are not its own."""

    def of(code: types.CodeType) -> Iterator[str]:
        yield from code.co_names
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from of(constant)

    code = getattr(inspect.unwrap(function), "__code__", None)
    return [] if code is None else list(of(code))


def _makes(model: Any, text: Any, embedding: Any) -> bool:
    """Whether a model with this config makes such a module: Granite 4 does by request only."""
    text = copy.deepcopy(text)
    text.num_hidden_layers = 0
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tensors without elements
            made = model(text)
    except Exception as error:
        raise LookupError(f"a {model.__name__} without layers is not to be made: {error}") from None
    return any(isinstance(module, embedding) for module in made.modules())


class _Past:
    """A cache that holds nothing of the tokens that it has seen: Llama 4 asks it how many."""

    def __init__(self, seen: int) -> None:
        self.seen = seen

    def get_seq_length(self, layer: int = 0) -> int:
        return self.seen

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        return keys, values


class Probe:
    """Attention modules with the head dimension of the model's, and weights that are made up."""

    def __init__(self, parts: Parts, text: Any) -> None:
        self.parts, self.text = parts, copy.deepcopy(text)
        D = describe(text)["head_dim"]
        smaller = {"num_attention_heads": 2, "num_key_value_heads": 1, "hidden_size": 2 * D}
        smaller |= {
            name: 32
            for name in ("q_lora_rank", "kv_lora_rank")
            if getattr(text, name, None) is not None
        }
        for name, value in smaller.items():
            if hasattr(self.text, name):
                setattr(self.text, name, value)
        self.name = f"h2o_probe:{next(_numbers)}"
        compat.put_attention_name(self.text, self.name)

    def attended(
        self, layers: Sequence[int], *positions: tuple[Tensor, Any]
    ) -> list[tuple[list[int], list[tuple[Tensor, Tensor]]]]:
        """The input of attention: for layers that are alike, queries [1, H, Q, D] and keys
        [1, G, Q, D] of the same tokens at each of these positions.

        Args:
            positions: ids [1, Q] and what the rotary module makes of them.

        Raises:
            LookupError: a module is not to be made, or run, by what is known of it.
        """
        attention = self.parts.attention
        alike: dict[str, tuple[list[int], nn.Module]] = {}
        try:
            for layer in layers:
                with torch.device("meta"):
                    module = attention(self.text, layer_idx=layer)
                alike.setdefault(_fingerprint(module), ([], module))[0].append(layer)
            return [
                (group, self._heard(_fill_weights(module.eval()), positions))
                for group, module in alike.values()
            ]
        except Exception as error:
            raise LookupError(f"its {attention.__name__} is not to be run: {error}") from None

    def _heard(
        self, module: nn.Module, positions: Sequence[tuple[Tensor, Any]]
    ) -> list[tuple[Tensor, Tensor]]:
        heard: list[tuple[Tensor, Tensor]] = []

        def hear(_: Any, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any) -> Any:
            heard.append((query, key))
            B, H, Q, _ = query.shape
            return value.new_zeros(B, Q, H, value.shape[-1]), None

        compat.register_attention(self.name, hear)
        try:
            with torch.no_grad():
                for ids, tables in positions:
                    module(**self._arguments(ids, tables))
        finally:
            compat.unregister_attention(self.name)
        if len(heard) != len(positions):
            raise LookupError(f"it attends {len(heard)} times")
        return heard

    def _arguments(self, ids: Tensor, tables: Any) -> dict[str, Any]:
        Q, width = ids.shape[1], self.text.hidden_size
        states = torch.arange(Q * width, dtype=torch.float32, device="cpu").sin().view(1, Q, width)
        known: dict[str, Any] = {
            "hidden_states": states, "position_embeddings": tables, "position_ids": ids,
            "attention_mask": None, "layer_past": None, "shared_kv_states": {},
        }  # fmt: skip
        forward = self.parts.attention.forward
        asks = "get_seq_length" in _names(forward)
        known |= compat.with_cache(_Past(int(ids[0, 0])) if asks else None)
        return {name: known[name] for name in compat.parameters_of(forward) if name in known}


def _fingerprint(module: nn.Module) -> str:
    """A module's settings, its layer's number left out, and what it is made of."""
    plain = [
        (name, value)
        for part in module.modules()
        for name, value in vars(part).items()
        if name != "layer_idx" and isinstance(value, bool | int | float | str | None)
    ]
    return f"{plain} {module}"


def _fill_weights(module: nn.Module) -> nn.Module:
    """A module that was made on no device, with weights that no two are alike, norms' too."""
    module = module.to_empty(device="cpu").float()
    sizes = [parameter.numel() for parameter in module.parameters()]
    numbers = torch.arange(max(sizes) + len(sizes), dtype=torch.float32, device="cpu").sin() + 0.1
    for index, parameter in enumerate(module.parameters()):
        parameter.data = numbers[index:][: parameter.numel()].view(parameter.shape)
    return module


_numbers = itertools.count()
