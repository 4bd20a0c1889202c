"""A model's rotary embedding: undo the rotation of keys, and rotate them to other positions.

Rotary embeddings (Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021)
rotate pairs of a key's elements by angles that grow with the key's position. Models differ in which
elements form pairs and in the angles. Both are therefore taken from the model's own modules
(`h2o.hf.rotary.rotary_parts`) and verified by running its attention.

Shape letters as in `h2o.hf`, and P positions, F angles, which rotate 2 F of the D elements of a
head.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from h2o import compat
from h2o.errors import UnsupportedError
from h2o.hf.model_traits.layer_kinds import layers_of_kind
from h2o.hf.rotary.length_dependent_rope import BY_LENGTH
from h2o.hf.rotary.rotary_parts import Parts, attended, parts_of

CACHE_RELATIVE_TYPES = frozenset(
    "llama mistral mixtral qwen2 qwen3 qwen3_moe gemma gpt_neox phi phi3 stablelm olmo2 granite "
    "cohere smollm3 starcoder2 qwen3_next qwen3_5_text olmo_hybrid bamba lfm2 lfm2_moe "
    "falcon_h1".split()
)
"""Model types that support cache-relative positions (`positions="cache_relative"`): tests show that
the rotation of their keys can be undone."""

_HERE, _FURTHER = (0, 3, 11), 50
"""Positions of the tokens in the proof's first run, and their shift in its second run. In the third
run the tokens are at the end of the longest text, where some models scale queries by the number of
tokens before them."""
_NONE = "it has no rotary position embedding"
_ZERO = torch.zeros(1, 1, dtype=torch.long, device="cpu")


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate x [..., D] by angles [..., 2, F]. Element i is paired with element F + i. The result
    has the dtype of x. Raises: ValueError for fewer than 2 F elements."""
    F = angles.shape[-1]
    if x.shape[-1] < 2 * F:
        raise ValueError(
            f"the cache's model rotates {2 * F} elements of each key, but keys have "
            f"{x.shape[-1]}. Make the H2OCache from the config of the model that uses it"
        )
    cos, sin = angles.unbind(-2)
    a, b = x[..., :F].float(), x[..., F : 2 * F].float()
    parts = [(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)]
    return torch.cat([*parts, x[..., 2 * F :]], dim=-1)


def rotary_refusal(config: Any) -> str | None:
    """Why h2o does not support cache-relative positions for a model with this config, as far as its
    rotary embedding decides, or None."""
    text = config.get_text_config(decoder=True)
    is_without = (  # in Granite 4 and Zamba 2
        getattr(text, "position_embedding_type", "rope") != "rope"
        or getattr(text, "use_mem_rope", True) is False
    )
    if is_without or not getattr(text, "rope_parameters", None):
        return _NONE
    if (
        text.model_type not in CACHE_RELATIVE_TYPES
        or config.model_type not in CACHE_RELATIVE_TYPES | _PLAIN_POSITIONS
    ):
        return (
            "undoing its rotation of keys has not been tested; it has been tested for "
            f"{', '.join(sorted(CACHE_RELATIVE_TYPES))}"
        )
    return None


_PLAIN_POSITIONS = frozenset({"llava"})
"""Multimodal models that pass plain positions 0, 1, 2, ... to their language model"""


_found: dict[str, ModelRotary | str] = {}
"""The rotary embedding of each config, or the reason why it is not known"""


def rotary_of(config: Any) -> ModelRotary:
    """The rotary embedding for a cache with cache-relative positions.

    Raises:
        UnsupportedError: the rotation is not known, with the reason.
    """
    found = find_rotary(config)
    if isinstance(found, str):
        raise UnsupportedError(
            f'positions="cache_relative" does not support {config.model_type}: {found}'
        )
    return found


def find_rotary(config: Any, kind: str = "h2o") -> ModelRotary | str:
    """The rotary embedding of the model that a config describes, for the layers of one cache that
    have this kind ("h2o" or "sliding"), or the reason why it is not known."""
    text = config.get_text_config(decoder=True)
    if not getattr(text, "rope_parameters", None):
        return _NONE
    name = f"{kind} {type(text).__qualname__} {text.to_json_string(use_diff=False)}"
    if name not in _found:
        _found[name] = _find(text, kind)
    return copy.copy(_found[name])


def _find(text: Any, kind: str) -> ModelRotary | str:
    try:
        parts = parts_of(text)
        return _NONE if parts.embedding is None else ModelRotary(parts, text, kind)
    except LookupError as error:
        return f"its rotation of keys is not known: {error}"


_NO_ROWS: tuple[Any, Any] = (None, None)


class ModelRotary:
    """The rotary embedding of a language model, made by `find_rotary`.

    The constructor verifies that positions act on the attention of all layers of one kind only by
    this rotation of queries and keys. An attention module of each layer, with made-up weights, is
    run on the same tokens at three distances from the start of a text.

    Raises:
        LookupError: the rotation is not known, with the reason.
    """

    def __init__(self, parts: Parts, text: Any, kind: str) -> None:
        self.function: Callable[..., Any] | None = None
        """Function that rotates queries and keys; None if no layer rotates them"""
        self._takes_one = False  # whether the function rotates one tensor, not queries and keys
        self.rotated_layers: frozenset[int] = frozenset()
        """Layers whose queries and keys are rotated; SmolLM3 skips some layers"""
        self.adjacent = False  # whether pairs are adjacent elements
        self.width = 0  # number of elements that are rotated, 2 F
        self.most = text.max_position_embeddings
        self._table: Tensor | None = None
        self._shifts: dict[tuple[int, int], Tensor] = {}
        self._rows: tuple[Any, Any] = _NO_ROWS
        self._modules: dict[torch.device, Any] = {}  # copies of the rotary module by device
        self._layer = -1
        self._ids: Tensor | None = None
        self._inverse_angles: Tensor | None = None
        try:
            with torch.inference_mode(False), torch.device("cpu"):
                self.module = parts.embedding(text)
        except Exception as error:  # raised for configs that no released model has
            raise LookupError(f"{parts.embedding.__name__} cannot be created: {error}") from None
        layers = layers_of_kind(text, kind)
        by_type = compat.accepts(self.module.forward, "layer_type")
        rope, self._layer_type = text.rope_parameters, {}
        if by_type:
            layer_type, *others = {text.layer_types[i] for i in layers}
            if others:
                raise LookupError("layers of several types have full attention")
            rope, self._layer_type = rope.get(layer_type, rope), {"layer_type": layer_type}
        if rope is None:  # Beam rotates only in its sliding-window layers
            rope, layers = {"rope_type": "default"}, []
        kind = rope["rope_type"] if by_type else getattr(self.module, "rope_type", "default")
        self.by_length = kind in BY_LENGTH
        unchanged = rope.get("original_max_position_embeddings") or self.most
        end = max(_FURTHER, (unchanged if self.by_length else self.most) - 1 - _HERE[-1])
        if layers:
            self._prove(parts, text, layers, end)
        self.by_length &= bool(self.rotated_layers)

    def _prove(self, parts: Parts, text: Any, layers: list[int], end: int) -> None:
        """Find and prove the rotation, or raise LookupError with the reason why it cannot be
        proven. The third run is `end` positions after the first."""
        here = torch.tensor([_HERE], dtype=torch.long, device="cpu")
        places = here, here + _FURTHER, here + end
        try:
            cases = [(ids, self._run_embedding(ids, torch.float32)) for ids in places]
        except Exception as error:
            name = parts.embedding.__name__
            raise LookupError(f"its {name} cannot be run: {error}") from None
        recorded = {
            layer: runs
            for group, runs in attended(parts, text, layers, *cases)
            for layer in group
            if not all(map(torch.equal, 2 * runs[0], runs[1] + runs[2]))
        }
        problems = []
        for self.function in parts.functions if recorded else ():
            try:
                second = compat.parameters_of(self.function)[1]
                self._takes_one = second.startswith("cos")
                self._find_pairs()
                for layer, runs in recorded.items():
                    if not self._is_rotation(*runs):
                        raise LookupError(f"layer {layer} does more than rotate by these angles")
                self.rotated_layers = frozenset(recorded)
                return
            except (LookupError, TypeError, RuntimeError) as error:
                name = getattr(self.function, "__name__", "its rotation")
                ours = type(error) is LookupError
                problems.append(str(error) if ours else f"{name} takes other angles than h2o's")
        if problems:
            raise LookupError("; ".join(problems))

    def _is_rotation(self, *runs: tuple[Tensor, ...]) -> bool:
        """Whether queries and keys of the later two runs are those of the first run, rotated. In
        the last run only the lengths of pairs are compared, because float32 is not precise enough
        for the angles of large positions."""
        angles = self.shift(_FURTHER)
        for here, later, last in zip(*runs, strict=True):
            here, later, last = map(self.halves, (here, later, last))
            pairs = (rotate(here, angles), later), (self._sizes(here), self._sizes(last))
            if not all(torch.allclose(a, b, atol=1e-3 * float(b.abs().max())) for a, b in pairs):
                return False
        return True

    def _sizes(self, x: Tensor) -> Tensor:
        """Lengths of the rotated pairs, followed by the other elements unchanged; x [..., D] is in
        the order of `halves`."""
        pairs = x[..., : self.width].unflatten(-1, (2, -1))
        return torch.cat([torch.linalg.vector_norm(pairs, dim=-2), x[..., self.width :]], dim=-1)

    def _find_pairs(self) -> None:
        """Find which elements form pairs: adjacent elements, or i and i + D / 2."""
        D = self._run_embedding(_ZERO, torch.float32)[0].shape[-1]
        if (frequencies := getattr(self.module, "inv_freq", None)) is not None:
            D = 2 * len(frequencies)  # some tables have each cosine only once
        self.width, self._shifts, self._rows = D, {}, _NO_ROWS
        if D % 2:
            raise LookupError(f"{D} elements are rotated, which is an odd number")
        ids = torch.tensor([[0, 1, 7]], dtype=torch.long, device="cpu")
        row = torch.linspace(-1, 1, 3 * D, dtype=torch.float32, device="cpu")
        row = row.reshape(1, 1, 3, D).sin() + 1
        for self.adjacent in (False, True):
            rotated = self.halves(self._rotate_like_model(row, ids))
            if torch.allclose(rotate(self.halves(row), self._angles(ids, row.dtype)), rotated):
                return
        raise LookupError("some pair of elements is not rotated by a single angle")

    def halves(self, x: Tensor) -> Tensor:
        """Reorder x [..., D]: the first elements of all pairs, then the second ones, then the
        elements that are not rotated."""
        if not self.adjacent:
            return x
        D = self.width
        return torch.cat([x[..., 0:D:2], x[..., 1:D:2], x[..., D:]], dim=-1)

    def table(self, ranks: int, device: Any = None) -> Tensor:
        """Angles of positions 0 to P - 1, [P, 2, F] float32, P >= `ranks`.

        If the model's angles depend on the length of the text, P is `ranks`, and the angles are
        those of a text of that length.
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
        """Angles [2, F] float32 that rotate x, in the order of `halves`, forward by `distance`.

        The angles carry no scale, because models that scale what they rotate have done so already.
        Angles are remembered, because all layers ask for the same few distances.

        Args:
            distance: number of positions.
            length: number of tokens in the text, for models whose angles depend on it.
        """
        length = length if self.by_length else 0
        if (distance, length) not in self._shifts:
            place = 1 if length else distance
            pair = [[place, max(place, length - 1)]]
            ids = torch.tensor(pair, dtype=torch.long, device="cpu")
            angles = self._angles(ids, torch.float32)[0, 0, 0]
            if length:  # ids beyond the text would change the angles, so multiply those of 1
                one = torch.atan2(angles[1].double(), angles[0].double())
                angles = torch.stack([(distance * one).cos(), (distance * one).sin()]).float()
            self._shifts[distance, length] = angles / torch.linalg.vector_norm(angles, dim=0)
        return self._shifts[distance, length]

    def move(self, x: Tensor, distances: Sequence[int]) -> Tensor:
        """Rotate queries or keys [B, ..., D], in the model's order of elements, to positions that
        are higher by a distance for each row, or lower if it is negative."""
        angles = self._angles_of_rows((*distances,), x.device)
        between = [1] * (x.ndim - 2)
        moved = rotate(self.halves(x), angles.view(len(angles), *between, *angles.shape[1:]))
        if not self.adjacent:
            return moved
        pairs = moved[..., : self.width].unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
        return torch.cat([pairs, moved[..., self.width :]], dim=-1)

    def _angles_of_rows(self, distances: tuple[int, ...], device: torch.device) -> Tensor:
        """Angles [B, 2, F]. Those of the last call are kept, since all layers ask for the same."""
        asked, angles = self._rows
        if asked != (distances, device):
            signs = [[[1.0], [-1.0 if distance < 0 else 1.0]] for distance in distances]
            each = torch.stack([self.shift(abs(distance)) for distance in distances])
            angles = (each * each.new_tensor(signs)).to(device)
            self._rows = (distances, device), angles
        return angles

    def inverse_angles(self, ids: Tensor, dtype: torch.dtype, layer: int) -> Tensor | None:
        """Angles [B or 1, 1, Q, 2, F] that undo the model's rotation of keys in the order of
        `halves`, at position_ids [B or 1, Q]; None if there is nothing to undo.

        The first layer of a forward pass computes the angles, and the others share them.

        Raises:
            UnsupportedError: the model's angles depend on more than its config and ids.
        """
        if self._ids is not ids or layer <= self._layer:
            self._inverse_angles = self._compute_inverse_angles(ids, dtype)
        self._ids, self._layer = ids, layer
        return self._inverse_angles

    def _compute_inverse_angles(self, ids: Tensor, dtype: torch.dtype) -> Tensor | None:
        if ids.ndim != 2:
            raise UnsupportedError(
                f'positions="cache_relative" needs position_ids [B, Q], not {list(ids.shape)}'
            )
        if getattr(self.module, "attention_scaling", 1) == 1 and ids.is_cpu and not ids.any():
            return None  # on a GPU, reading ids would wait for the device
        if self.by_length and int(ids.max()) >= self.most:
            raise UnsupportedError(
                f'positions="cache_relative": beyond {self.most} tokens, the angles of this model '
                f"({self.module.rope_type}) depend on earlier texts. Use h2o.patched(), or pass "
                "position_ids of 0, which leave the keys unrotated"
            )
        cos, sin = self._angles(ids, dtype).unbind(-2)
        size = cos * cos + sin * sin
        return torch.stack([cos / size, -sin / size], dim=-2)

    def __getstate__(self) -> dict[str, Any]:
        forgotten = {"_ids": None, "_inverse_angles": None, "_table": None, "_shifts": {}}
        return {**self.__dict__, **forgotten, "_rows": _NO_ROWS}

    def __deepcopy__(self, memo: Any) -> ModelRotary:
        """A copy for another cache. It shares the rotary module, which is never changed."""
        return copy.copy(self)

    def _angles(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Cosines and sines as the model computes them in a dtype, [B, 1, Q, 2, F] float32."""
        D = self.width
        first = torch.zeros(D, dtype=dtype, device=ids.device)  # 1 in each pair's first element
        first[slice(0, D, 2) if self.adjacent else slice(D // 2)] = 1
        out = self._rotate_like_model(first.expand(ids.shape[0], 1, ids.shape[1], D), ids)
        return self.halves(out).float().unflatten(-1, (2, D // 2))

    def _rotate_like_model(self, x: Tensor, ids: Tensor) -> Tensor:
        """Rotate x [B, heads, Q, D] at positions `ids` as the model would."""
        assert self.function is not None
        cos_and_sin = self._run_embedding(ids, x.dtype)
        if self._takes_one:
            return self.function(x, *cos_and_sin)  # type: ignore[no-any-return]
        return self.function(x, x, *cos_and_sin)[0]  # type: ignore[no-any-return]

    def _run_embedding(self, ids: Tensor, dtype: torch.dtype) -> Any:
        """The output of the model's rotary module for positions `ids`: cosines and sines."""
        module = self._modules.get(ids.device, self.module)
        # Call a copy of a module whose angles depend on the length: each call changes the module.
        if self.by_length or (module is self.module and not ids.is_cpu):
            module = copy.deepcopy(self.module).to(ids.device)
        if not self.by_length:
            self._modules[ids.device] = module
        x = torch.zeros(1, dtype=dtype, device=ids.device)
        return module(x, ids, **self._layer_type)
