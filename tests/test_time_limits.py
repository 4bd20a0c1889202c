"""Every test has a limit of time."""

from __future__ import annotations

import configparser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_test_has_a_limit(request):
    assert 0 < float(request.config.getini("timeout")) <= 600


def test_the_suite_of_transformers_has_the_same_limit(request):
    path = ROOT / "tests" / "transformers_suite" / "pytest.ini"
    options = configparser.ConfigParser()
    options.read(path, "utf-8")
    for name in ("timeout", "timeout_method"):
        assert options["pytest"][name] == str(request.config.getini(name))
