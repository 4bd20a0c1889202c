"""Resources of the compiled kernels, read from the file that is shipped, where it was built."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FATBIN = ROOT / "h2o" / "kernels.fatbin"


def test_no_kernel_spills_much():
    path = ROOT / "tools" / "cuda_resources.py"
    if not FATBIN.exists() or not path.exists():
        pytest.skip("no kernels for GPUs in this build: make cuda")
    spec = importlib.util.spec_from_file_location("cuda_resources", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    if tool.cuobjdump() is None:
        pytest.skip("needs cuobjdump")
    kernels = tool.kernels(str(FATBIN), tool.cuobjdump())
    assert {"h2o_cuda_step", "h2o_cuda_forward_bf16_128"} <= {k.name for k in kernels}
    assert not [k for k in kernels if k.local > tool.LOCAL]
