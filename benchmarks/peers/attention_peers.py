"""Attention of other packages over the same tensors, called as their users do. Most need a GPU."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..correctness import WrongResult
from . import torch_peers

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
"""Backends of torch's scaled_dot_product_attention. Not all are supported everywhere."""

Run = Callable[[], Any]


class Offers:
    """The peers of a table that work here, and why the others do not.

    Attributes:
        runs: functions by name.
        missing: reasons by name.
    """

    def __init__(self, prepared: Callable[[Run], Run] = lambda run: run) -> None:
        """prepared: converts a peer's call to the function that is timed (a graph, for example)."""
        self.prepared = prepared
        self.runs: dict[str, Run] = {}
        self.missing: dict[str, str] = {}

    def offer(self, name: str, make: Callable[[], Run]) -> None:
        """Add a peer if it works. `make` prepares its call."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch explains why a backend is not available
                run = make()
                run()
            self.runs[name] = self.prepared(run)
        except WrongResult:
            raise
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0][:200]
            self.missing[name] = f"{type(error).__name__}: {reason}"
            print(f"{name}: left out: {self.missing[name]}", file=sys.stderr)

    def facts(self) -> dict[str, Any]:
        return {"left out": self.missing} if self.missing else {}

    def sdpa(self, query: Tensor, keys: Tensor, values: Tensor, causal: bool) -> None:
        """Offer each backend of SDPA, over grouped heads and over copies for every query head."""
        self.in_turn("", query, [(keys, values)], causal)

    def decode(self, keys: str, query: Tensor, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Offer attention of one query over each layer's (keys, values) in turn. `keys` describes
        them."""
        self.in_turn(f", {keys}", query, pairs, causal=False)
        truth = torch_peers.sdpa(query, *pairs[0], causal=False)["gqa"]()
        self.offer(f"FlashInfer, {keys}", lambda: flashinfer(query, pairs, truth))

    def in_turn(
        self, suffix: str, query: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], causal: bool
    ) -> None:
        ways = [torch_peers.sdpa(query, *pair, causal=causal) for pair in pairs]
        for name, backend in BACKENDS.items():
            for heads in ways[0]:

                def run(backend: Any = backend, heads: str = heads) -> None:
                    with sdpa_kernel(backend):
                        for way in ways:
                            way[heads]()

                self.offer(f"SDPA {name}, {heads}{suffix}", lambda run=run: run)


def flex(query: Tensor, keys: Tensor, values: Tensor) -> Run:
    """torch's FlexAttention with a causal mask, compiled on a GPU."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    n = query.shape[2]
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, n, n, device=query.device.type)
    attend = torch.compile(flex_attention) if query.is_cuda else flex_attention
    return lambda: attend(query, keys, values, block_mask=mask, enable_gqa=True)


PAGE = 16


def flashinfer(query: Tensor, pairs: Sequence[tuple[Tensor, Tensor]], truth: Tensor) -> Run:
    """FlashInfer's decode over pages. `truth`: the answer [B, H, 1, D] over the first pair."""
    if importlib.util.find_spec("flashinfer") is None:
        raise ImportError("not installed: pip install flashinfer-python")
    import flashinfer as package

    B, H, _, D = query.shape
    G, k = pairs[0][0].shape[1:3]
    caches = [torch.stack([pages(x) for x in pair], dim=1) for pair in pairs]
    each = -(-k // PAGE)
    workspace = torch.zeros(128 << 20, dtype=torch.uint8, device=query.device)
    wrapper = package.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "HND", use_tensor_cores=H // G >= 4
    )
    counts = {"dtype": torch.int32, "device": query.device}
    wrapper.plan(
        torch.arange(B + 1, **counts) * each,
        torch.arange(B * each, **counts),
        torch.full((B,), (k - 1) % PAGE + 1, **counts),
        H, G, D, PAGE, q_data_type=query.dtype, kv_data_type=query.dtype,
    )  # fmt: skip
    flat = query[:, :, 0].contiguous()
    answer = wrapper.run(flat, caches[0])
    if not torch.allclose(answer.float(), truth[:, :, 0].float(), rtol=0.05, atol=0.05):
        raise WrongResult("FlashInfer answers otherwise than SDPA")
    return lambda: [wrapper.run(flat, cache) for cache in caches]


def pages(x: Tensor) -> Tensor:
    """[B, G, k, D] as [B * pages, G, PAGE, D], the last page of each row filled up with zeros."""
    B, G, k, D = x.shape
    each = -(-k // PAGE)
    padded = x.new_zeros(B, G, each * PAGE, D)
    padded[:, :, :k] = x
    return padded.view(B, G, each, PAGE, D).transpose(1, 2).reshape(B * each, G, PAGE, D)
