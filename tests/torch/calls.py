"""The calls of tests.core.calls, with torch tensors."""

from __future__ import annotations

import torch

from tests.core.calls import Call
from tests.core.calls import make as make_arrays

TABLE = hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
"""Whether torch has DLPack's exchange table (2.10 and later). Older versions pass capsules, which
they refuse to make for more kinds of tensors."""


def plain_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().resolve_neg().contiguous().view(torch.uint8).numpy().tobytes()


class TorchCall(Call):
    def snapshot(self) -> dict[str, bytes]:
        tensors = {name: self.get(name) for name in self.tensors()}
        return {
            name: plain_bytes(tensor)
            for name, tensor in tensors.items()
            if type(tensor) is torch.Tensor and is_plain(tensor)
        }


def is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
        and tensor.untyped_storage().nbytes() > 0
        and not tensor.is_conj()
        and not tensor.is_nested
    )


def make(name: str, dtype: torch.dtype = torch.float32) -> Call:
    """A valid call on tensors that own their memory. The 4-D tensors have this dtype."""
    arrays = make_arrays(name)
    call: Call = TorchCall(arrays.function, arrays.arguments, arrays.written)
    for tensor in call.tensors():
        array = torch.from_numpy(call.get(tensor)).clone()
        call = call.put(tensor, array.to(dtype) if array.dim() == 4 else array)
    return call
