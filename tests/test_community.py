"""Files for people who visit the repository: issue templates and the code of conduct."""

from __future__ import annotations

from pathlib import Path

import pytest

from h2o import cli

ROOT = Path(__file__).resolve().parent.parent
TEMPLATES = ROOT / ".github" / "ISSUE_TEMPLATE"

if not TEMPLATES.is_dir():
    pytest.skip("the repository's own files are not here", allow_module_level=True)
yaml = pytest.importorskip("yaml")

FIELDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
FORMS = sorted(path for path in TEMPLATES.glob("*.yml") if path.name != "config.yml")


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issues_come_with_the_output_of_info(path):
    form = yaml.safe_load(path.read_text("utf-8"))
    assert set(form) == {"name", "description", "labels", "body"}
    assert {field["type"] for field in form["body"]} <= FIELDS
    asked = [field for field in form["body"] if field["type"] != "markdown"]
    assert len({field["id"] for field in asked}) == len(asked)
    (info,) = [field for field in asked if "`h2o info`" in field["attributes"]["label"]]
    assert info["validations"] == {"required": True}
    assert "info" in {entry.name for entry in cli.COMMANDS}


def test_no_issue_goes_around_the_forms():
    assert len(FORMS) == 2
    config = yaml.safe_load((TEMPLATES / "config.yml").read_text("utf-8"))
    assert config == {"blank_issues_enabled": False}


def test_the_code_of_conduct_is_the_standard_one():
    text = (ROOT / "CODE_OF_CONDUCT.md").read_text("utf-8")
    assert "https://www.contributor-covenant.org/version/2/1/code_of_conduct/" in text
    assert "CODE_OF_CONDUCT.md" in (ROOT / "CONTRIBUTING.md").read_text("utf-8")
