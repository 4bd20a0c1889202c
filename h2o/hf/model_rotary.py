"""A model's rotary embedding: the rotation of keys is undone, and done again at other positions.

`h2o.hf.cache_relative` needs it, and `h2o.hf.echo` rotates queries on. Rotary embeddings (Su et
al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021) turn pairs of a key's
elements by angles that grow with its position. Which elements are pairs, how many there are and
what the angles are differs between models, so all of it is asked of the model's modeling file: of
its rotary module and of its `apply_rotary_pos_emb`.

Shape letters: B batch rows, Q tokens, P positions, D head dimension, F angles: of D elements 2 F
turn.
"""

from __future__ import annotations

import copy
import inspect
import sys
from typing import Any

import torch
import transformers
from torch import Tensor

from h2o.errors import Unsupported
from h2o.hf.shared_keys import reusing

__all__ = ["ROLLED", "Rotary", "refusal", "turned"]

ROLLED = frozenset(
    "llama mistral mixtral qwen2 qwen3 qwen3_moe gemma gpt_neox phi phi3 stablelm olmo2 granite "
    "cohere smollm3 starcoder2".split()
)
"""Model types whose keys can have cache-relative positions (`positions="rolled"`): tests show that
the rotation of a key can be undone."""

_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embedding whose angles depend on how long the text is."""

_FULL = "full_attention"
"""Whose angles are meant, of a model that has others in layers with a window."""


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """x [..., D] turned by angles [..., 2, F]: element i with element F + i; of x's dtype."""
    F = angles.shape[-1]
    cos, sin = angles.unbind(-2)
    a, b = x[..., :F].float(), x[..., F : 2 * F].float()
    parts = [(a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype)]
    return torch.cat([*parts, x[..., 2 * F :]], dim=-1)


def refusal(config: Any, *, windows: bool = False, served: frozenset[str] = ROLLED) -> str | None:
    """Why keys of a model with this config cannot be rotated again; or None.

    `windows`: whether layers of it have a sliding window. `served`: model types that can.
    """
    text = config.get_text_config(decoder=True)
    if not getattr(text, "rope_parameters", None):
        return "it has no rotary position embedding"
    if reusing(config):
        return "some layers attend to the keys of others"
    if windows:
        return "its sliding-window layers keep their keys at original positions"
    if text.model_type not in served or config.model_type not in served | _PLAIN_POSITIONS:
        return (
            "its rotary embedding has not been tested to come off its keys; tested are "
            f"{', '.join(sorted(served))}"
        )
    return None


_PLAIN_POSITIONS = frozenset({"llava"})
"""Multimodal models whose language model gets plain positions 0, 1, 2, ..."""


def has_rotary(config: Any, layer: int) -> bool:
    """Whether a layer of a model has rotary positions; SmolLM3 leaves them out in some."""
    by_layer = getattr(config.get_text_config(decoder=True), "no_rope_layers", None)
    return not by_layer or bool(by_layer[layer])


class Rotary:
    """The rotary embedding of the model that a config describes. Shared by the layers of a cache.

    Raises:
        Unsupported: naming the reason.
    """

    def __init__(
        self,
        config: Any,
        *,
        windows: bool = False,
        served: frozenset[str] = ROLLED,
        asked: str = 'positions="rolled"',
    ) -> None:
        """`windows`, `served`: as for `refusal`. `asked`: what errors say was asked for."""
        self.asked = asked
        if reason := refusal(config, windows=windows, served=served):
            raise Unsupported(f"{asked} cannot serve {config.model_type}: {reason}")
        text = config.get_text_config(decoder=True)
        model = transformers.AutoModelForCausalLM._model_mapping[type(text)]
        self.modeling = model.__module__
        kinds = [
            kind
            for name, kind in vars(sys.modules[self.modeling]).items()
            if name.endswith("RotaryEmbedding") and inspect.isclass(kind)
        ]
        if len(kinds) != 1:
            raise self._unknown(config, f"{len(kinds)} rotary embeddings")
        with torch.device("cpu"):
            self.module = kinds[0](text)
        by_type = "layer_type" in inspect.signature(self.module.forward).parameters
        self._layer_type = {"layer_type": _FULL} if by_type else {}
        rope = text.rope_parameters.get(_FULL, text.rope_parameters)
        kind = rope["rope_type"] if by_type else getattr(self.module, "rope_type", "default")
        self.by_length = kind in _BY_LENGTH
        self.most = text.max_position_embeddings
        self.unchanged = rope.get("original_max_position_embeddings") or self.most
        self.adjacent = False  # whether pairs are adjacent elements
        self.width = 0  # elements that are rotated, 2 F
        self._table: Tensor | None = None
        self._shifts: dict[int, Tensor] = {}
        self._layer = -1
        self._ids: Tensor | None = None
        self._off: Tensor | None = None
        self._find_pairs(config)

    def _find_pairs(self, config: Any) -> None:
        """Finds which elements are pairs: adjacent ones, or i and i + D / 2."""
        one = torch.ones(1, 1, dtype=torch.long, device="cpu")
        D = self._cos_sin(one, torch.float32)[0].shape[-1]
        if (frequencies := getattr(self.module, "inv_freq", None)) is not None:
            D = 2 * len(frequencies)  # some models have each cosine once
        self.width = D
        row = torch.eye(1, D, dtype=torch.float32, device="cpu")[None, None]
        partners = self._applied(row, one).flatten()[1:].nonzero()[:, 0] + 1
        if partners.tolist() not in ([1], [D // 2]) or D % 2:
            raise self._unknown(config, f"element 0 turning with {partners.tolist()} of {D}")
        self.adjacent = partners.tolist() == [1] and D > 2
        ids = torch.tensor([[0, 1, 7]], dtype=torch.long, device="cpu")
        row = torch.linspace(-1, 1, 3 * D, dtype=torch.float32, device="cpu")
        row = row.reshape(1, 1, 3, D).sin() + 1
        expected = self.halves(self._applied(row, ids))
        if not torch.allclose(turned(self.halves(row), self._angles(ids, row.dtype)), expected):
            raise self._unknown(config, "no plain rotation")

    def _unknown(self, config: Any, actual: str) -> Unsupported:
        return Unsupported(
            f"{self.asked} cannot serve {config.model_type}: of {self.modeling} h2o expected one "
            f"rotary embedding that turns pairs of elements, and found {actual}"
        )

    def halves(self, x: Tensor) -> Tensor:
        """x [..., D] with the first elements of all pairs, then the second ones, then the rest."""
        if not self.adjacent:
            return x
        D = self.width
        return torch.cat([x[..., 0:D:2], x[..., 1:D:2], x[..., D:]], dim=-1)

    def unhalved(self, x: Tensor) -> Tensor:
        """What `halves` has made x [..., D] of."""
        if not self.adjacent:
            return x
        D = self.width
        pairs = x[..., :D].unflatten(-1, (2, D // 2)).mT.flatten(-2)
        return torch.cat([pairs, x[..., D:]], dim=-1)

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

    def shift(self, distance: int) -> Tensor:
        """Angles [2, F] float32 that rotate what is in `halves` on by so many positions.

        Models that scale what they rotate have done so already, and the angles do not again. All
        layers ask for the same few distances, which are remembered.
        """
        if distance not in self._shifts:
            ids = torch.tensor([[distance]], dtype=torch.long, device="cpu")
            angles = self._angles(ids, torch.float32)[0, 0, 0]
            self._shifts[distance] = angles / torch.linalg.vector_norm(angles, dim=0)
        return self._shifts[distance]

    def off(self, ids: Tensor, dtype: torch.dtype, layer: int) -> Tensor | None:
        """Angles [B or 1, 1, Q, 2, F] that undo the model's rotation at position_ids [B or 1, Q],
        of what is in `halves`; None where there is nothing to undo.

        Computed for the first layer of a forward pass, and shared by the others.

        Raises:
            Unsupported: the model's angles depend on more than its config and ids.
        """
        if self._ids is not ids or layer <= self._layer:
            self._off = self._inverse(ids, dtype)
        self._ids, self._layer = ids, layer
        return self._off

    def _inverse(self, ids: Tensor, dtype: torch.dtype) -> Tensor | None:
        if ids.ndim != 2:
            raise Unsupported(
                f'positions="rolled" needs position_ids [B, Q], not of shape {list(ids.shape)}'
            )
        if self.module.attention_scaling == 1 and ids.is_cpu and not ids.any():
            return None  # elsewhere reading ids would wait for the device
        if self.by_length and int(ids.max()) >= self.most:
            raise Unsupported(
                f'positions="rolled": beyond {self.most} tokens the angles of this model '
                f"({self.module.rope_type}) depend on what it read before; use h2o.patched(), or "
                "give position_ids of 0, which leave the keys as they are"
            )
        cos, sin = self._angles(ids, dtype).unbind(-2)
        size = cos * cos + sin * sin
        return torch.stack([cos / size, -sin / size], dim=-2)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ids": None, "_off": None}

    def _angles(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """[B, 1, Q, 2, F] float32: cosines and sines as the model makes them in a dtype."""
        D = self.width
        first = torch.zeros(D, dtype=dtype, device=ids.device)  # 1 in the first of each pair
        first[slice(0, D, 2) if self.adjacent else slice(D // 2)] = 1
        out = self._applied(first.expand(ids.shape[0], 1, ids.shape[1], D), ids)
        return self.halves(out).float().unflatten(-1, (2, D // 2))

    def _applied(self, x: Tensor, ids: Tensor) -> Tensor:
        """x [B, heads, Q, D] rotated at ids as the model would."""
        apply = sys.modules[self.modeling].apply_rotary_pos_emb
        return apply(x, x, *self._cos_sin(ids, x.dtype))[0]

    def _cos_sin(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        # Modules whose angles depend on the length change with each call: so a copy.
        module = copy.deepcopy(self.module) if self.by_length else self.module
        x = torch.zeros(1, dtype=dtype, device=ids.device)
        return module.to(ids.device)(x, ids, **self._layer_type)
