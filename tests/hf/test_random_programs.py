"""Random programs: every pair of modes that h2o allows meets, and nothing shows in the cache.

`tests.hf.draws` draws the programs, and `tests.hf.programs` runs them and says what is right. A
program that fails is shrunk and printed.
"""

from __future__ import annotations

import pytest

from h2o.hf import modes
from tests.hf.draws import ELSEWHERE, draw, modes_of, pairs_tested
from tests.hf.faults import FAULTS, ROOT, replaced
from tests.hf.program_models import FAMILIES
from tests.hf.programs import Program, run
from tests.hf.shrinking import as_text, run_or_explain, shrink
from tests.hf.tiny import slow_if

PARTS = 4
pytestmark = [pytest.mark.timeout(1200), pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize(
    ("seed", "part"),
    [slow_if(seed > 2, seed, part) for seed in range(10) for part in range(PARTS)],
)
def test_programs(seed, part):
    for program in list(draw(seed))[part::PARTS]:
        run_or_explain(program)


SHARED = {"heavy": 7, "recent": 3, "head_shares": "echo", "score_by": "mean-echo"}
FOUND = {
    "four bits under autocast": Program(
        "llama, wide",
        {"heavy": 6, "recent": 3, "kv_dtype": "int8-int4"},
        [("read", {"columns": 18}), ("read", {"columns": 3})],
        autocast=True,
        exact=True,
    ),
    "offsets of heads with their own budgets under autocast": Program(
        "llava, wide",
        {
            "heavy": 16,
            "recent": 3,
            "kv_dtype": "int4",
            "positions": "cache_relative",
            "head_shares": [[0.4, 1.8], [1.4, 0.4]],
        },
        [("read", {"columns": 24}), ("read", {"columns": 1}), ("read", {"columns": 4})],
        autocast=True,
        exact=True,
    ),
    "layers without keys in generate_all": Program(
        "gemma3n_text, full",
        {"heavy": 6, "recent": 3},
        [("read", {"columns": 4}), ("all", {"lengths": [2, 5, 7, 6], "prefix": False, "size": 4})],
        rows=1,
    ),
    "a simulated budget of layers that share keys": Program(
        "gemma3n_text", SHARED, [("simulate", {"columns": 27, "prompt": 12})]
    ),
}
"""Programs that have found a fault"""


@pytest.mark.parametrize("name", [name for name in FOUND if FOUND[name].family in FAMILIES])
def test_programs_that_found_a_fault(name):
    run(FOUND[name])


def test_every_allowed_pair_meets():
    """A pair of modes whose cell says that programs test it must be in one of them."""
    met = {pair for program in draw(0) for pair in pairs_tested(modes_of(program))}
    said = {pair for pair, cell in modes.PAIRS.items() if cell == modes.Tested(modes.PROGRAMS)}
    assert said - met == {*ELSEWHERE} & said
    assert len(said & met) > 300


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.new)
def test_each_fault_can_be_put_in(fault):
    """Each line that `tests.hf.faults` replaces must be in the package once."""
    path = ROOT / "h2o" / fault.file
    assert replaced(path.read_text("utf-8"), fault) != path.read_text("utf-8")


def test_a_failing_program_is_shrunk():
    """What has nothing to do with a failure must be left out, and the text must be a program."""
    program = Program(
        "llama",
        {"heavy": 5, "recent": 4, "sinks": 1, "kv_dtype": "int8"},
        [
            ("read", {"columns": 20, "left": (0, 3)}),
            ("file", {}),
            ("look", {}),
            ("crop", {"columns": 4, "back": 2}),
            ("read", {"columns": 1}),
        ],
        pinned=[(1, 3)],
        exact=True,
    )

    def fails(program):
        names = [name for name, _ in program.calls]
        return "crop" in names and program.calls[0][1]["columns"] > 5

    shortest = shrink(program, fails)
    assert shortest.calls[0] == ("read", {"columns": 6, "left": ()})
    assert [name for name, _ in shortest.calls] == ["read", "crop"]
    assert (shortest.rows, shortest.pinned, shortest.exact) == (1, None, False)
    assert shortest.settings == {"heavy": 5, "recent": 4}
    pasted = {}
    exec(as_text(shortest).replace("run(Program(", "program = (Program("), pasted)
    assert pasted["program"] == shortest
    run(shortest)
