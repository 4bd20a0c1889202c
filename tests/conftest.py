"""Settings of the whole suite, without importing torch, which the core's tests do not need."""

import gc
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# Two processes run tests at the same time, often on two cores. Without this limit torch's threads
# would spin for milliseconds while they wait, and keep the other process from running.
os.environ.setdefault("GOMP_SPINCOUNT", "10000")

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


if device := os.environ.get("H2O_TEST_DEVICE"):
    from tests.cuda import carry

    try:
        carry.switch(device)
    except RuntimeError as error:
        pytest.exit(f"H2O_TEST_DEVICE={device}: {error}", returncode=1)
