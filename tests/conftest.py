"""Settings of the whole suite, without importing torch, which the core's tests do not need."""

import gc
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Two processes run tests at the same time, often on two cores. Without this limit torch's threads
# would spin for milliseconds while they wait, and keep the other process from running.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")
# Each layer of a cache checks its slots after each pass (h2o/hf/layers/slot_check.py).
os.environ.setdefault("H2O_CHECK", "1")

if importlib.util.find_spec("hypothesis"):  # a machine with a GPU may have pytest only
    from hypothesis import HealthCheck, settings

    settings.register_profile(
        "h2o",
        deadline=None,
        max_examples=25,
        print_blob=True,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("h2o")


@pytest.fixture(autouse=True, scope="module")
def _what_is_imported_stays():
    """Exclude the objects that imports have created from garbage collection. There are a million of
    them, and each collection would take half a second."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Unfreeze, since triton, in torch's builds for CUDA, reports frozen objects as leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def one_thread(request):
    """Run tiny models on one thread, on which they are faster. The operations themselves are tested
    with all threads."""
    torch = sys.modules.get("torch")
    if torch is None or request.path.parent.name in ("core", "torch"):
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkout(tmp_path_factory):
    """A folder with the files of this checkout, and with the sdist and the pure wheel built from
    them in dist, without a compiler. A file of kernels is there too."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        pytest.skip("needs a checkout")
    folder = tmp_path_factory.mktemp("checkout")
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True)
    for name in listed.stdout.decode().splitlines():
        if (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)
    (folder / "h2o" / "kernels.fatbin").write_bytes(b"kernels")
    for command, variables in (("sdist", {}), ("bdist_wheel", {"H2O_PURE": "1"})):
        subprocess.run(
            [sys.executable, "setup.py", "--quiet", command],
            cwd=folder, env=os.environ | {"CC": "no-such-compiler"} | variables, check=True,
            capture_output=True,
        )  # fmt: skip
    return folder


if device := os.environ.get("H2O_TEST_DEVICE"):
    from tests.cuda import carry

    try:
        carry.switch(device)
    except RuntimeError as error:
        pytest.exit(f"H2O_TEST_DEVICE={device}: {error}", returncode=1)
