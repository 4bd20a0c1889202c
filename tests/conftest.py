"""Settings of the whole suite. No torch here: the tests of the core do without."""

import os

import pytest
from hypothesis import HealthCheck, settings

from h2o import backends

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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """With H2O_BACKEND=torch what that backend says it does not do is left out."""
    try:
        return (yield)
    except RuntimeError as error:
        if backends.forced and "only the C core does this yet" in str(error):
            pytest.skip(str(error))
        raise
