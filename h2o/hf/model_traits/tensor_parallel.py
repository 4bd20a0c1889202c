"""Tensor parallelism: which of a model's attention heads this process has.

transformers gives each process of a mesh an equal part of every layer's heads, in order. A cache's
layer therefore sees the keys of these heads only, while budgets are defined over all heads. Latents
are shared by all heads, so every process has all of them, and the scores that they get in each
process are combined.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, distributed, nn

WHOLE = (0, 1)
"""The `part` of a model that a single process holds whole."""


def part(module: nn.Module) -> tuple[int, int]:
    """(i, n): this process has the i-th of n equal parts of an attention module's heads.

    A module that is sharded in another way, such as by FSDP, is whole when it computes.
    """
    mesh = mesh_of(module)
    return WHOLE if mesh is None else (mesh.get_local_rank(), mesh.size())


def part_of_heads(model: nn.Module) -> tuple[int, int]:
    """The `part` of a model. It is `WHOLE` for a model that is cut over several processes except
    for its attention."""
    here = part(model)
    indexed = [x for x in model.modules() if hasattr(x, "layer_idx")]
    attention = [x for x in indexed if not any(y in indexed for y in x.modules() if y is not x)]
    if attention and all(mesh_of(x) is None for x in attention):
        return WHOLE
    return here


def describe_part(part: tuple[int, int]) -> str:
    """Name a part of the heads in an error message."""
    index, parts = part
    return f"tensor parallel rank {index} of {parts}" if parts > 1 else "a whole model"


def is_distributed() -> bool:
    """Whether this process is one of several."""
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1


def mesh_of(module: nn.Module) -> Any:
    """The one-dimensional DeviceMesh over which a module's heads are cut; None for a whole module.

    The mesh dimension is named "tp", as in transformers and accelerate, or has no name. A module
    that FSDP shards is whole when it computes.
    """
    if not is_distributed():
        return None
    from torch.distributed.fsdp import FSDPModule  # missing in a torch without distributed

    gathered = any(isinstance(child, FSDPModule) for child in module.modules())
    for mesh in _meshes(module):
        names = mesh.mesh_dim_names or ()
        if "tp" in names:
            return mesh["tp"] if mesh.ndim > 1 else mesh
        if mesh.ndim == 1 and not names and not gathered:
            return mesh
    return None


def reduce_over_heads(scores: Tensor, mesh: Any, largest: bool) -> None:
    """Sum scores over the processes of a mesh in place, or take their maximum with `largest`."""
    over = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
    distributed.all_reduce(scores, over, group=mesh.get_group())


def _meshes(module: nn.Module) -> Iterator[Any]:
    """Yield the DeviceMesh of each sharded parameter."""
    for parameter in module.parameters():
        if hasattr(parameter, "placements"):
            yield parameter.device_mesh  # type: ignore[attr-defined]
