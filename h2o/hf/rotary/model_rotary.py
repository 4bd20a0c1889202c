"""A model's rotary embedding: the rotation of keys is undone, and done again at other positions.

Rotary embeddings (Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021)
turn pairs of a key's elements by angles that grow with its position. Which elements are pairs and
what the angles are differs between models, so both are taken from the model's own modules
(`h2o.hf.rotary.rotary_parts`), and proven by running its attention.

Shape letters: B batch rows, Q tokens, P positions, D head dimension, F angles: of D elements 2 F
turn.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o import compat
from h2o.errors import UnsupportedError
from h2o.hf.families.layer_kinds import full_layers
from h2o.hf.families.shared_keys import reusing
from h2o.hf.rotary.angles import BY_LENGTH
from h2o.hf.rotary.rotary_parts import Parts, Probe, parts_of

ROLLED = frozenset(
    "llama mistral mixtral qwen2 qwen3 qwen3_moe gemma gpt_neox phi phi3 stablelm olmo2 granite "
    "cohere smollm3 starcoder2 qwen3_next qwen3_5_text olmo_hybrid bamba lfm2 lfm2_moe "
    "falcon_h1".split()
)
"""Model types whose keys can have cache-relative positions (`positions="cache_relative"`): tests
show that the rotation of a key can be undone."""

_HERE, _FURTHER = (0, 3, 11), 50
"""Positions of the proof's tokens, and how much further they are once more; a third time they are
at the end of the longest text, where a model may scale queries by what they have seen."""
_NONE = "it has no rotary position embedding"
_ZERO = torch.zeros(1, 1, dtype=torch.long, device="cpu")


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """x [..., D] turned by angles [..., 2, F]: element i with element F + i; of x's dtype."""
    F = angles.shape[-1]
    cos, sin = angles.unbind(-2)
    a, b = x[..., :F].float(), x[..., F : 2 * F].float()
    parts = [(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)]
    return torch.cat([*parts, x[..., 2 * F :]], dim=-1)


def rotary_refusal(config: Any, *, windows: bool = False) -> str | None:
    """Why keys of a model with this config cannot have cache-relative positions; or None.

    `windows`: whether layers of it have a sliding window.
    """
    text = config.get_text_config(decoder=True)
    is_without = (  # Granite 4's, Zamba 2's
        getattr(text, "position_embedding_type", "rope") != "rope"
        or getattr(text, "use_mem_rope", True) is False
    )
    if is_without or not getattr(text, "rope_parameters", None):
        return _NONE
    if reusing(config):
        return "some layers attend to the keys of others"
    if windows:
        return "its sliding-window layers keep their keys at original positions"
    if text.model_type not in ROLLED or config.model_type not in ROLLED | _PLAIN_POSITIONS:
        return (
            "its rotary embedding has not been tested to come off its keys; tested are "
            f"{', '.join(sorted(ROLLED))}"
        )
    return None


_PLAIN_POSITIONS = frozenset({"llava"})
"""Multimodal models whose language model gets plain positions 0, 1, 2, ..."""


class Proof(NamedTuple):
    """The result of proving a config's rotation."""

    embedding: Any
    """The class of the rotary module"""
    function: Callable[..., Any] | None
    """The function that turns queries and keys"""
    at_end: bool
    """Whether the last elements of a head turn, not the first"""
    turning: frozenset[int]
    """The layers whose queries and keys turn; SmolLM3 leaves positions out in some"""


_proofs: dict[str, Proof | str] = {}
"""Proofs by config, or why there is none."""


class Rotary:
    """The rotary embedding of the model that a config describes. Shared by the layers of a cache.

    That the full attention of the model turns queries and keys by it, and by nothing else, is
    proven when the first one is made of a config: an attention module of each layer, with weights
    that are made up, is run over the same tokens at three distances from the start.

    Raises:
        UnsupportedError: naming the reason.
    """

    def __init__(self, config: Any, *, asked: str = 'positions="cache_relative"') -> None:
        """`asked`: what errors say was asked for."""
        self.asked = asked
        self.adjacent = False  # whether pairs are adjacent elements
        self.comes_adjacent = False  # whether they are so where the model begins to turn them
        self.at_end = False  # whether the last elements of a head are turned, not the first
        self.width = 0  # elements that are rotated, 2 F
        self._table: Tensor | None = None
        self._shifts: dict[tuple[int, int], Tensor] = {}
        self._modules: dict[torch.device, Any] = {}  # copies of the module by device
        self._layer = -1
        self._ids: Tensor | None = None
        self._off: Tensor | None = None
        self.function: Callable[..., Any] | None = None
        text = config.get_text_config(decoder=True)
        if not getattr(text, "rope_parameters", None):
            raise self._cannot(config, _NONE)
        name = f"{type(text).__qualname__} {text.to_json_string(use_diff=False)}"
        if name not in _proofs:
            _proofs[name] = self._proof_of(text)
        proof = _proofs[name]
        if isinstance(proof, str):
            raise self._cannot(config, proof)
        self._embed_by(proof.embedding, text)
        self.turning, self.function, self.at_end = proof.turning, proof.function, proof.at_end
        self.by_length &= bool(self.turning)
        if self.turning:
            self._find_pairs()

    def _cannot(self, config: Any, reason: str) -> UnsupportedError:
        return UnsupportedError(f"{self.asked} does not support {config.model_type}: {reason}")

    def _embed_by(self, embedding: Any, text: Any) -> list[int]:
        """Makes the rotary module of a text config. The layers that it can be for."""
        layers = full_layers(text)
        try:
            with torch.device("cpu"):
                self.module = embedding(text)
        except Exception as error:  # of a config that no released model has
            raise LookupError(f"no {embedding.__name__}: {error}") from None
        self._modules = {}
        by_type = compat.accepts(self.module.forward, "layer_type")
        rope, self._layer_type = text.rope_parameters, {}
        if by_type:
            layer_type, *others = {text.layer_types[i] for i in layers}
            if others:
                raise LookupError("layers of several types have full attention")
            rope, self._layer_type = rope.get(layer_type, rope), {"layer_type": layer_type}
        if rope is None:  # Beam has positions in layers with a window alone
            rope, layers = {"rope_type": "default"}, []
        kind = rope["rope_type"] if by_type else getattr(self.module, "rope_type", "default")
        self.by_length = kind in BY_LENGTH
        self.most = text.max_position_embeddings
        self.unchanged = rope.get("original_max_position_embeddings") or self.most
        return layers

    def _proof_of(self, text: Any) -> Proof | str:
        try:
            parts = parts_of(text)
            if parts.embedding is None:
                return _NONE
            layers = self._embed_by(parts.embedding, text)
            return self._proven(parts, text, layers)
        except LookupError as error:
            return f"its rotation of keys is not known: {error}"

    def _proven(self, parts: Parts, text: Any, layers: list[int]) -> Proof:
        """Raises LookupError where there is no proof."""
        here = torch.tensor([_HERE], dtype=torch.long, device="cpu")
        end = max(_FURTHER, (self.unchanged if self.by_length else self.most) - 1 - _HERE[-1])
        heard = []
        if layers:
            places = here, here + _FURTHER, here + end
            try:
                cases = [(ids, self._embedded(ids, torch.float32)) for ids in places]
            except Exception as error:
                name = parts.embedding.__name__
                raise LookupError(f"its {name} is not to be run: {error}") from None
            heard = [
                (layer, *attended)
                for group, attended in Probe(parts, text).attended(layers, *cases)
                for layer in group
                if not all(map(torch.equal, 2 * attended[0], attended[1] + attended[2]))
            ]
        if not heard:
            return Proof(parts.embedding, None, False, frozenset())
        problems = []
        for self.function in parts.functions:
            try:
                self._find_pairs()
                for layer, first, later, last in heard:
                    moved = (first[0] != last[0]).any(0).any(0).any(0).nonzero()[:, 0]
                    self.at_end = int(moved[0]) >= first[0].shape[-1] - self.width > 0
                    if not self._is_turned(first, later, last):
                        raise LookupError(f"layer {layer} does not turn by these angles alone")
                turning = frozenset(layer for layer, *_ in heard)
                return Proof(parts.embedding, self.function, self.at_end, turning)
            except (LookupError, TypeError, RuntimeError) as error:  # of a function with other uses
                problems.append(str(error))
        raise LookupError("; ".join(problems))

    def _is_turned(self, *attended: tuple[Tensor, ...]) -> bool:
        """Whether queries and keys of the three cases are the first ones, turned. Far away float32
        has a position's angles no longer: there pairs must be as long."""
        angles = self.shift(_FURTHER)
        for here, later, last in zip(*attended, strict=True):
            here, later, last = map(self.halves, (here, later, last))
            pairs = (rotate(here, angles), later), (self._sizes(here), self._sizes(last))
            if not all(torch.allclose(a, b, atol=1e-3 * float(b.abs().max())) for a, b in pairs):
                return False
        return True

    def _sizes(self, x: Tensor) -> Tensor:
        """Lengths of the pairs that are rotated, and the other elements as they are; x [..., D] has
        the order of `halves`."""
        pairs = x[..., : self.width].unflatten(-1, (2, -1))
        return torch.cat([torch.linalg.vector_norm(pairs, dim=-2), x[..., self.width :]], dim=-1)

    def turns(self, layer: int) -> bool:
        """Whether a layer's queries and keys are rotated."""
        return layer in self.turning

    def _find_pairs(self) -> None:
        """Finds which elements are pairs: adjacent ones, or i and i + D / 2. DeepSeek's are
        adjacent before they are turned, and no longer behind."""
        D = self._tables(_ZERO, torch.float32)[0].shape[-1]
        if (frequencies := getattr(self.module, "inv_freq", None)) is not None:
            D = 2 * len(frequencies)  # some models have each cosine once
        self.width, self._shifts = D, {}
        if D % 2:
            raise LookupError(f"{D} elements are turned, an odd number")
        ids = torch.tensor([[0, 1, 7]], dtype=torch.long, device="cpu")
        row = torch.linspace(-1, 1, 3 * D, dtype=torch.float32, device="cpu")
        row = row.reshape(1, 1, 3, D).sin() + 1
        for self.comes_adjacent, self.adjacent in ((False, False), (True, True), (True, False)):
            firsts, seconds = row.unflatten(-1, (-1, 2)).unbind(-1)
            given = torch.cat([firsts, seconds], -1) if self.comes_adjacent else row
            found = self._halves(self._applied(row, ids))
            if torch.allclose(rotate(given, self._angles(ids, row.dtype)), found):
                return
        raise LookupError("pairs are not turned by one angle each")

    def halves(self, x: Tensor) -> Tensor:
        """x [..., D] with the first elements of all pairs, then the second ones, then the rest."""
        if self.at_end:
            x = torch.cat([x[..., -self.width :], x[..., : -self.width]], dim=-1)
        return self._halves(x)

    def _halves(self, x: Tensor) -> Tensor:
        """`halves` for x whose first elements are turned."""
        if not self.adjacent:
            return x
        D = self.width
        return torch.cat([x[..., 0:D:2], x[..., 1:D:2], x[..., D:]], dim=-1)

    def table(self, ranks: int, device: Any = None) -> Tensor:
        """Angles of positions 0 to P - 1, [P, 2, F] float32, P >= `ranks`.

        Of a model whose angles depend on the length, P = `ranks`: those of a text so long.
        """
        held = 0 if self._table is None else len(self._table)
        if held < ranks or (self.by_length and held != ranks):
            P = ranks if self.by_length else max(ranks, held + held // 2, 64)
            positions = torch.arange(P, dtype=torch.long, device="cpu")[None]
            self._table = self._angles(positions, torch.float32)[0, 0].contiguous()
        if device is not None and self._table.device != device:
            self._table = self._table.to(device)
        return self._table

    def shift(self, distance: int, length: int = 0) -> Tensor:
        """Angles [2, F] float32 that rotate what is in `halves` on by so many positions.

        Models that scale what they rotate have done so already, and the angles do not again. All
        layers ask for the same few distances, which are remembered.

        Args:
            length: tokens of the text, of a model whose angles depend on it.
        """
        length = length if self.by_length else 0
        if (distance, length) not in self._shifts:
            place = 1 if length else distance
            pair = [[place, max(place, length - 1)]]
            ids = torch.tensor(pair, dtype=torch.long, device="cpu")
            angles = self._angles(ids, torch.float32)[0, 0, 0]
            if length:  # where the module makes other angles for what is further than the text
                one = torch.atan2(angles[1].double(), angles[0].double())
                angles = torch.stack([(distance * one).cos(), (distance * one).sin()]).float()
            self._shifts[distance, length] = angles / torch.linalg.vector_norm(angles, dim=0)
        return self._shifts[distance, length]

    def off(self, ids: Tensor, dtype: torch.dtype, layer: int) -> Tensor | None:
        """Angles [B or 1, 1, Q, 2, F] that undo the model's rotation at position_ids [B or 1, Q],
        of what is in `halves`; None where there is nothing to undo.

        Computed for the first layer of a forward pass, and shared by the others.

        Raises:
            UnsupportedError: the model's angles depend on more than its config and ids.
        """
        if self._ids is not ids or layer <= self._layer:
            self._off = self._inverse(ids, dtype)
        self._ids, self._layer = ids, layer
        return self._off

    def _inverse(self, ids: Tensor, dtype: torch.dtype) -> Tensor | None:
        if ids.ndim != 2:
            raise UnsupportedError(
                f'positions="cache_relative" needs position_ids [B, Q], not {list(ids.shape)}'
            )
        if getattr(self.module, "attention_scaling", 1) == 1 and ids.is_cpu and not ids.any():
            return None  # elsewhere reading ids would wait for the device
        if self.by_length and int(ids.max()) >= self.most:
            raise UnsupportedError(
                f'positions="cache_relative": beyond {self.most} tokens the angles of this model '
                f"({self.module.rope_type}) depend on what it read before; use h2o.patched(), or "
                "give position_ids of 0, which leave the keys as they are"
            )
        cos, sin = self._angles(ids, dtype).unbind(-2)
        size = cos * cos + sin * sin
        return torch.stack([cos / size, -sin / size], dim=-2)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": None, "_off": None, "_table": None, "_shifts": {}}

    def __deepcopy__(self, memo: Any) -> Rotary:
        """A copy for another cache; the module, which is never changed, is the same."""
        return copy.copy(self)

    def _angles(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, 1, Q, 2, F] float32: cosines and sines as the model makes them in a dtype."""
        D = self.width
        first = torch.zeros(D, dtype=dtype, device=ids.device)  # 1 in the first of each pair
        first[slice(0, D, 2) if self.comes_adjacent else slice(D // 2)] = 1
        out = self._applied(first.expand(ids.shape[0], 1, ids.shape[1], D), ids)
        return self._halves(out).float().unflatten(-1, (2, D // 2))

    def _applied(self, x: Tensor, ids: Tensor) -> Tensor:
        """x [B, heads, Q, D] rotated at ids as the model would."""
        assert self.function is not None
        _, second, *_ = compat.parameters_of(self.function)
        tables = self._tables(ids, x.dtype)
        if second.startswith(("cos", "freqs")):
            out: Tensor = self.function(x, *tables)
            return out
        return self.function(x, x, *tables)[0]

    def _tables(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Cosines and sines, or both as complex numbers."""
        tables = self._embedded(ids, dtype)
        return tables if isinstance(tables, tuple) else (tables,)

    def _embedded(self, ids: Tensor, dtype: torch.dtype) -> Any:
        """The output of the model's rotary module for ids."""
        module = self._modules.get(ids.device, self.module)
        # Modules whose angles depend on the length change with each call: so a copy.
        if self.by_length or (module is self.module and not ids.is_cpu):
            module = copy.deepcopy(self.module).to(ids.device)
        if not self.by_length:
            self._modules[ids.device] = module
        x = torch.zeros(1, dtype=dtype, device=ids.device)
        return module(x, ids, **self._layer_type)
