"""Tensor parallelism: which of a model's attention heads this process has.

transformers gives each process of a mesh an equal part of every layer's heads, in order. A cache's
layer therefore sees keys of these heads alone, while budgets are defined over all heads. Latents,
of which each serves all heads, are whole in every process; the scores of their heads are summed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, distributed, nn

from h2o import compat_wrappers

WHOLE = (0, 1)
"""The `part` of a model that is in one process."""


def part(module: nn.Module) -> tuple[int, int]:
    """(i, n): this process has the i-th of n equal parts of an attention module's heads.

    A module that is cut in another way (FSDP, for one) is whole when it computes.
    """
    mesh = mesh_of(module)
    return WHOLE if mesh is None else (mesh.get_local_rank(), mesh.size())


def part_of_heads(model: nn.Module) -> tuple[int, int]:
    """The `part` of a whole model; `WHOLE` for one that is cut over processes except for its
    attention."""
    here = part(model)
    indexed = [x for x in model.modules() if hasattr(x, "layer_idx")]
    attention = [x for x in indexed if not any(y in indexed for y in x.modules() if y is not x)]
    if attention and all(mesh_of(x) is None for x in attention):
        return WHOLE
    return here


def describe_part(part: tuple[int, int]) -> str:
    """A part of the heads by name, for errors."""
    index, parts = part
    return f"tensor parallel rank {index} of {parts}" if parts > 1 else "a whole model"


def is_distributed() -> bool:
    """Whether this process is one of several."""
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return distributed.get_world_size() > 1


def mesh_of(module: nn.Module) -> Any:
    """The one-dimensional DeviceMesh over which a module's heads are cut; None for a whole module.

    The dimension is named "tp", as transformers and accelerate do, or has no name. What FSDP cuts
    is whole when it computes.
    """
    if not is_distributed():
        return None
    from torch.distributed.fsdp import FSDPModule  # which a torch without distributed lacks

    gathered = any(isinstance(child, FSDPModule) for child in module.modules())
    for mesh in _meshes(module):
        names = mesh.mesh_dim_names or ()
        if "tp" in names:
            return mesh["tp"] if mesh.ndim > 1 else mesh
        if mesh.ndim == 1 and not names and not gathered:
            return mesh
    return None


def over_all_heads(scores: Tensor, mesh: Any, largest: bool) -> None:
    """Sums scores of each process's heads over a mesh's processes, in place; or their maximum."""
    over = distributed.ReduceOp.MAX if largest else distributed.ReduceOp.SUM
    distributed.all_reduce(scores, over, group=mesh.get_group())


def _meshes(module: nn.Module) -> Iterator[Any]:
    """The DeviceMesh of each sharded parameter, or as transformers notes it."""
    for parameter in module.parameters():
        if hasattr(parameter, "placements"):
            yield parameter.device_mesh  # type: ignore[attr-defined]
    for child in module.modules():
        if (mesh := compat_wrappers.device_mesh(child)) is not None:
            yield mesh
