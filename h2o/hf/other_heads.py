"""Attention whose heads the operations of `h2o.ops` take only in another form.

Values may be narrower than keys (MiMo-V2-Flash): they are stored with zeros behind them, which add
nothing to an answer. And a model may repeat all heads of the keys one after the other, not each by
itself, between cache and attention (JetMoe): its query heads h, h + G, h + 2G, ... share keys, and
are brought together. A layer of the cache and the attention of simulation, calibration and analysis
both go by the functions here.

Shape letters: B batch rows, H query heads, G key/value heads, Q new tokens, n columns of another
cache, D head dimension of keys, V of values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from h2o.errors import Unsupported
from h2o.hf.attention_call import AttentionCall
from h2o.hf.layer import H2OLayer
from h2o.hf.traced_tensor import TracedTensor, plain
from h2o.model_identity import value_width

__all__ = ["OtherHeadsLayer", "answers", "restored", "uniform", "width_of"]


def width_of(config: Any) -> int | None:
    """V of a model with this config whose attention is of such a form; None: it is not."""
    text = config.get_text_config(decoder=True)
    width: int | None = text.head_dim if text.model_type == "jetmoe" else value_width(config)
    return width


def uniform(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, H, Q, D], keys [B, G, N, D] and values [B, G, N, D] as the operations take them,
    of what a module attends with. Others are returned as they are."""
    G = _heads(module, key)
    if G < key.shape[1]:
        key, value = key[:, :G], value[:, :G]
        query = query.unflatten(1, (-1, G)).transpose(1, 2).flatten(1, 2)
    return query, key, _as_wide(module, value, key)


def answers(module: nn.Module, out: Tensor, key: Tensor) -> Tensor:
    """A module's own answers [B, Q, H, V] as those to `uniform` queries, [B, Q, H, D]."""
    G = _heads(module, key)
    if G < key.shape[1]:
        out = out.unflatten(2, (-1, G)).transpose(2, 3).flatten(2, 3)
    return _as_wide(module, out, key)


def restored(module: nn.Module, out: Tensor, key: Tensor, width: int) -> Tensor:
    """Answers [B, Q, H, D] to `uniform` queries as the module expects them, [B, Q, H, V], where
    `key` and `width` = V are what it attends with."""
    G = _heads(module, key)
    if G < key.shape[1]:
        out = out.unflatten(2, (G, -1)).transpose(2, 3).flatten(2, 3)
    return out[..., :width]


def _heads(module: nn.Module, key: Tensor) -> int:
    """G before a module has repeated its keys."""
    G: int = getattr(module, "num_key_value_heads", key.shape[1])
    repeated = getattr(module, "num_key_value_groups", 0) == 1 and key.shape[1] > G
    return G if repeated else key.shape[1]


def _as_wide(module: nn.Module, value: Tensor, key: Tensor) -> Tensor:
    """`_widened` to a key's elements; of keys and values that a module expands from latents, which
    have a form of their own (`h2o.hf.latent_attention`), as it is."""
    return value if hasattr(module, "kv_b_proj") else _widened(value, key.shape[-1])


def _widened(value: Tensor, D: int) -> Tensor:
    """With zeros behind its V elements."""
    V = value.shape[-1]
    return torch.nn.functional.pad(value, (0, D - V)) if V < D else value


class OtherHeadsLayer(H2OLayer):
    """An `H2OLayer` of such a model, whose values have `width` elements."""

    def __init__(self, *args: Any, width: int, **kwargs: Any) -> None:
        self.width = width
        super().__init__(*args, **kwargs)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As `H2OLayer.update`, given values [B, G, Q, V]."""
        key, _ = super().update(key_states, self._stored(key_states, value_states))
        return TracedTensor.of(key, h2o_layer=self), value_states

    def attend(self, call: AttentionCall) -> Tensor:
        """As `H2OLayer.attend`; [B, Q, H, V]."""
        key, width = plain(call.key), call.value.shape[-1]
        query, keys, values = uniform(call.module, call.query, key, plain(call.value))
        out = super().attend(call._replace(query=query, key=keys, value=values))
        return restored(call.module, out, key, width)

    def take_over(self, keys: Tensor, values: Tensor | None, mask: Tensor | None) -> None:
        """Holds keys [B, G, n, D] and values [B, G, n, V] of another cache."""
        assert values is not None
        super().take_over(keys, self._stored(keys, values), mask)

    def held(self) -> tuple[Tensor, Tensor]:
        """Keys and values in the order of `kept`."""
        keys, values = super().held()
        return keys, values[..., : self.width]

    def by_slot(self) -> tuple[Tensor, Tensor]:
        """Keys and values of each slot."""
        keys, values = super().by_slot()
        return keys, values[..., : self.width]

    @property
    def rows_per_token(self) -> float:
        """Of each key/value head in a full cache, by the size of a key: a value may be less."""
        return 1 + self.width / self.row_size[0] if self.row_size[0] else 2

    def _stored(self, keys: Tensor, values: Tensor) -> Tensor:
        if values.shape[-1] != self.width:
            raise Unsupported(
                f"layer {self.layer_idx} has values of {values.shape[-1]} elements: its model's "
                f"config tells of {self.width}"
            )
        return _widened(values, keys.shape[-1])
