"""Settings of the whole suite. No torch here: the tests of the core do without."""

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
