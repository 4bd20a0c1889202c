"""Settings of the whole suite. No torch here: the tests of the core do without."""

import gc
import os
import sys

import pytest
from hypothesis import HealthCheck, settings

# Two processes test at a time, on two cores often: threads of torch that wait in a loop for
# milliseconds keep the other one from running.
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
    """So that no search for garbage goes through it: a million objects, in half a second each."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure():
    """Thaw: triton, in torch's builds for CUDA, reports as leaked what is frozen at the end."""
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def one_thread(request):
    """Threads cost tiny models more than they bring. The operations themselves are tested with all
    there are."""
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
