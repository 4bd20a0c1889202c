"""Settings of the whole suite. No torch here: the tests of the core do without."""

import os

import pytest
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


if device := os.environ.get("H2O_TEST_DEVICE"):
    from tests.cuda import carry

    try:
        carry.switch(device)
    except RuntimeError as error:
        pytest.exit(f"H2O_TEST_DEVICE={device}: {error}", returncode=1)
