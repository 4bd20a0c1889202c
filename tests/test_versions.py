"""tools/versions.py: what is reported about the newest versions, and what fails a run."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if not (ROOT / "tools" / "versions.py").is_file():
    pytest.skip("needs a checkout", allow_module_level=True)
sys.path.insert(0, str(ROOT / "tools"))
versions = pytest.importorskip("versions")  # packaging may be missing where the core's tests run


def test_all_that_is_compared_is_pinned():
    pins = versions.pinned_versions()
    assert set(versions.PACKAGES) | set(versions.PINNED_WITH_TORCH) <= set(pins)
    assert pins["lm-eval"]  # "lm_eval" in the file
    assert versions.compare(pins, pins) == ([], False)


def test_pages_name_the_versions_that_all_tests_run_with():
    """README.md names them, and no page names others."""
    pins = versions.pinned_versions()
    torch, transformers, numpy = (
        ".".join(pins[name].split(".")[:2]) for name in ("torch", "transformers", "numpy")
    )
    sentence = f"tests run with torch {torch}, transformers {transformers} and NumPy {numpy}."
    readme = ROOT / "README.md"
    assert sentence in readme.read_text("utf-8")
    for page in (readme, *sorted((ROOT / "docs").rglob("*.md"))):
        said = " ".join(page.read_text("utf-8").split())
        assert said.count("tests run with torch") == said.count(sentence), page


def test_newer_and_older_versions_are_told_apart():
    pins = dict.fromkeys(versions.PACKAGES, "5.9.0")
    assert versions.compare(pins | {"peft": "5.9"}, pins) == ([], False)
    words, newer = versions.compare(pins | {"peft": "5.10.0"}, pins)
    assert (words, newer) == (["peft 5.10.0 (constraints.txt has 5.9.0)"], True)
    words, newer = versions.compare(pins | {"numpy": "5.8.0"}, pins)
    assert (words, newer) == (["numpy 5.8.0 (constraints.txt has 5.9.0)"], False)


@pytest.mark.parametrize(
    ("output", "failures", "counts"),
    [
        ("...\n9 passed, 2 skipped in 3.10s\n", [], "9 passed, 2 skipped in 3.10s"),
        (
            "= short test summary info =\nSKIPPED [1] no GPU\nFAILED a.py::b - ValueError: c\n"
            "ERROR tests/d.py - ImportError\n1 failed, 7 passed, 1 error in 9.00s",
            ["FAILED a.py::b - ValueError: c", "ERROR tests/d.py - ImportError"],
            "1 failed, 7 passed, 1 error in 9.00s",
        ),
        (
            "!!!! KeyboardInterrupt !!!!\n7 passed in 61.00s",
            [],
            "7 passed in 61.00s, and the time was over before the last test",
        ),
        ("usage: pytest", ["ERROR pytest stopped early: usage: pytest"], "usage: pytest"),
    ],
)
def test_what_pytest_prints_is_summarized(output, failures, counts):
    assert versions.summarize(output) == (failures, counts)


@pytest.mark.parametrize("newer", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("failed", [False, True])
def test_a_release_of_others_stops_nothing(monkeypatch, tmp_path, capsys, newer, strict, failed):
    """A failure with a newer release fails the run only with --strict. It is printed, and written
    to a file for the end of the run."""
    monkeypatch.setattr(versions, "ROOT", tmp_path)
    monkeypatch.setattr(versions, "try_newest", lambda minutes: ("peft", failed, newer))
    monkeypatch.setattr(sys, "argv", ["versions.py", "--newest", *["--strict"] * strict])
    assert versions.main() == (failed and (strict or not newer))
    said = (tmp_path / "build" / "newest.txt").read_text()
    assert ("FAILED" in said) == failed
    assert capsys.readouterr().out == said
