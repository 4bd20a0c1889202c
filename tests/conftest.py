"""Settings of the whole suite. No torch here: the tests of the core do without."""

import os

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


if device := os.environ.get("H2O_TEST_DEVICE"):
    from tests.cuda import carry

    try:
        carry.switch(device)
    except RuntimeError as error:
        pytest.exit(f"H2O_TEST_DEVICE={device}: {error}", returncode=1)
