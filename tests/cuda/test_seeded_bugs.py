"""The list of seeded bugs, which is run by hand, still fits the kernels."""

import pytest

from tests.cuda.seeded_bugs import BUGS, ROOT


@pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="needs a checkout")
@pytest.mark.parametrize("name", BUGS)
def test_each_bug_has_its_place(name):
    bug = BUGS[name]
    assert (ROOT / "csrc" / "cuda" / bug.file).read_text("utf-8").count(bug.old) == 1
    assert bug.new != bug.old
