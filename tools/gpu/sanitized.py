"""Run every case of the kernel check once on a GPU, for sanitizers. No other kernel runs there.

    compute-sanitizer --tool memcheck --kernel-name kns=h2o_cuda python -m tools.gpu.sanitized

Inputs are made on the CPU, and answers are compared on the CPU with those of the core, so that no
kernel of torch runs on the GPU. Such kernels would disturb two of the tools. racecheck fails with
an error of its own when cuBLAS multiplies 16-bit matrices on Hopper, whichever kernels it watches.
initcheck considers memory uninitialized if the kernel that wrote it is not watched; if all kernels
are watched, it reports torch's copies of empty slots. Here everything that a kernel reads was
either copied to the GPU or written to the workspace by h2o's own kernels.
"""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import torch

from h2o import backends
from h2o.backends import cuda, kernel_check
from tests.cuda.carry import carry, mapped, tensors


def on_cpu(name: str) -> Any:
    """An operation that the core computes on the CPU, for tensors on a device without kernels."""

    def run(*operands: Any) -> None:
        copies = mapped(operands, torch.Tensor.cpu)
        getattr(backends.core, name)(*copies)
        for there, here in zip(tensors(operands), tensors(copies), strict=True):
            there.copy_(here)

    return run


def main() -> int:
    start = time.monotonic()
    reason = cuda._load(0)
    if reason is not None:
        print(f"h2o's kernels cannot be loaded: {reason}")
        return 1
    kernels = cuda._kernels(SimpleNamespace(**{x: on_cpu(x) for x in backends.OPERATIONS}))
    carried = carry(kernels, lambda x: x.to("cuda:0", copy=True), torch.Tensor.cpu)
    for case in kernel_check.CASES:  # each prints a line, to show how far a stopped run came
        mistakes = kernel_check.mistakes(carried, backends.core, "cpu", [case])
        if mistakes:
            print(*mistakes)
            return 1
        print(f"{time.monotonic() - start:4.0f} s  {case.name}", flush=True)
    print("every operation answers as the core does")
    return 0


if __name__ == "__main__":
    sys.exit(main())
