"""Do the tests notice? Random edits of csrc, one at a time, and who survives.

    python tests/mutate.py [--edits 200] [--seed 1] [--only csrc/cpu/step.inc] [--log mutants.json]
                           [--again]

An edit changes an operator, a constant or a bound, turns a condition round or deletes a
statement. The edited core must fail, in this order, to compile, the C tests, the tests in Python
that judge the core alone, or the C tests under ASan and UBSan. To be quick only what an edit
touches is compiled again, and all of that is done at the one instruction set level that this
machine prefers, but for the first C tests, which find most at the level that compiles soonest.
What survives is printed; edits that can change no answer, only speed or memory, are told apart by
KNOWN, with the reason.

A run that was interrupted goes on where its log ends. After new tests `--again` judges once more
what the log says has survived.

Needs `make .venv/core .venv/test`; two hundred edits take two hours or so (with --part, half).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy

from h2o import ops

ROOT = Path(__file__).resolve().parent.parent
LEVEL = ops.info()["levels"][-1]
#: The level whose decode step it takes, and the sources that a step does not need.
STEPS = "avx512bf16" if LEVEL == "avx512amx" else LEVEL
NO_STEPS = ("attend", "evict", "simulate")
VECTORS = "vec_avx2" if LEVEL == "avx2" else "vec_avx512"
BORDER = ("module.c", "exchange.c")  # what needs Python
FLAGS = ["-std=c11", "-O1", "-Werror=return-type", "-fPIC", "-ffp-contract=fast"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-pthread", "-Icsrc"]
FLAGS += ['-DH2O_VERSION="0"', '-DH2O_KERNELS=""']
FLAGS += [f"-I{sysconfig.get_path('include')}", f"-I{numpy.get_include()}"]
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")  # as in setup.py
ENDING = ".abi3.so" if LIMITED else sysconfig.get_config_var("EXT_SUFFIX")
FLAGS += ["-DPy_LIMITED_API=0x030a0000"] if LIMITED else []
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

#: Of each net of C tests its flags and its level.
NETS = {
    "generic": (["-DH2O_GENERIC_ONLY"], "generic"),
    "plain": ([], LEVEL),
    "asan": (SANITIZE, LEVEL),
}

#: The tests in Python, those first that find something soonest.
TESTS = [f"tests/core/test_{x}.py" for x in ("exchange", "errors", "hostile", "levels", "ops")]
TESTS += ["tests/core", *(f"tests/torch/test_{x}.py" for x in ("rolled", "merge", "heads"))]
TESTS += ["tests/torch/test_properties.py::test_results_do_not_depend_on_threads"]

#: Edits that no test can notice, since no answer depends on them: a pattern of
#: "file: line before -> line after", and why.
KNOWN: tuple[tuple[str, str], ...] = (
    (r"COUNT_WORK|H2O_BALANCE|_WORK\b|_RANK\b", "a count of work, for make balance"),
    (r"prefetch|ahead|\.share|next_stride|\.next = ", "asks for memory early: speed only"),
    (
        r"\.inc: *(?!ROUNDS|LINE|STEP_ROWS)[A-Z_]+ = [-0-9(<*sizeof)' ]+,?\s*/\*",
        "a size by which work is cut: speed and rounding",
    ),
    (
        r"KEEP_BYTES = |-> .*KEEP_BLOCKS = 1[57]|bytes \+= \(\*at\)->bytes",
        "how much memory waits to be used again",
    ),
    (r"data >= before .* -> .*data > before ", "no tensor begins at address 0"),
    (r"-> .*< stage; tries|\btries > |pause|thrd_yield", "how often a waiting lane looks"),
    (
        r"job->parts = job->lanes|rounds\.stages = ",
        "into how many tasks; make balance sees too few",
    ),
    (
        r"parallel\.c: .*pthread_cond_init",
        "in a child whose parent waited for nothing it is as new",
    ),
    (r"simulate\.inc: .*job->all\.window\)", "windows without rows more"),
    (r"attend_tall\.inc: .*WAVE_UNITS \*", "how many heads at a time: speed only"),
    (r"turn % 2 == 0 .* -> .*turn % 2 [!=]= [01] ", "which rows a task has: speed only"),
    (r"pairs \? .* : 0\), -> .* : 1\),", "a float more than is used"),
    (r"evict\.inc: .*stored = lower\(.* -> .*higher\(", "room for more than can leave"),
    (r"threads < MAX_THREADS .* -> .*threads <= MAX_THREADS ", "the same where both are equal"),
    (r"STEP_SUM_WHILE\(8\) -> STEP_SUM_WHILE\(9\)", "how many vectors at a time: speed only"),
    (r"(known|feature_names)\[128\].* -> .*\[12[79]\]", "no list of them is so long"),
    (r"char \*needs\[4\]; -> .*\[5\]", "more room than there are needs"),
    (r"fresh < p->dims.Q\) clear.* -> .*fresh <= p", "looks for pads where there are none"),
    (r"va_end\(arguments\); -> ;", "does nothing on these processors"),
    (
        r"module\.c: (loans->stream = |call->table = |if \(count >= more)|api->current_stream\("
        r"|bytes == H2O_UNSERVED",
        "of kernels for GPUs, which tests/cuda judges",
    ),
    (r"level < LEVELS; level", "this machine has every level"),
    (r"i < FEATURES; .* -> .*i <= FEATURES; ", "every name that is asked for is in the list"),
    (
        r"take\(&?a, .*, 1\)[,;}]+ -> .*, 2\)[,;}]+$|take_floats\(a, .*4 \* .* -> .*5 \* |"
        r"rule rules\[6 \+ .* -> .*\[7 \+ |size_t most = 0; -> .*= 1;|"
        r"uint16_t x\[2 \* VL\] = .* -> .*\[3 \* VL\]",
        "more room than is used",
    ),
    (r"i32_at\(&slots->free, b, g, [01]\)", "a tensor of two dimensions has no third stride"),
    (
        r"H2O_MAX_DIMS\) return 0; -> .*return 1;|exchange\.c: int status = 0; -> .*= 1;",
        "what is not below 0 is no error",
    ),
    (r"entry->managed = NULL; -> ;", "what is lent is given back once"),
    (r"cut\.panel_blocks > PANEL_BLOCKS\) \{ -> .*>= ", "how many rows a panel has: speed only"),
    (r"parallel\.c: return 1; /\* nothing new", "looks at the same libraries again"),
    (r"exchange\.c: break; -> ;", "no type is in the list of tables with another one"),
    (r"step_load\(.*H2O_F32, false, n, F\)", "floats and pairs are four bytes each"),
    (r"return -1; -> return -2;", "below 0 is an error, however far"),
    (r"positions\[cell\] = -1; -> .*= -2;", "below 0 is no position, however far"),
    (r"gomp_parallel\(take_part, .*, [01]\)", "how the threads of OpenMP are bound: speed only"),
    (
        r"remember\(|producers\[i\]\.type = type; -> ;",
        "whether a type's table is looked up once or at each call",
    ),
    (
        r"snprintf\(text, (100|48),.* -> .*snprintf\(text, (99|101|47|49),",
        "no shape or index is so long a text",
    ),
    (r"merge\.inc: .* s < lower\(block \+ VL, .* -> .*higher\(", "the next blocks too, early"),
    (r"all\.window = higher\(", "rows of a window: speed only"),
    (r"high = x\[i\] > high .* -> .* >= high", "the same where both are equal"),
    (r"char letter\[2\] = .* -> .*\[3\]", "more room than a letter needs"),
    (r"\(.*char text\[160\]\)", "a parameter, whose length says nothing"),
    (r"exchange\.c: .*XDECREF", "a reference too many: a little memory"),
    (r"rows\.h: .*return; -> ;", "copies the same once more"),
    (r"stored\.h: .*sum \+= x\[i\] - x\[i\]; -> .*sum -= ", "0 or no number, whichever the sign"),
    (r"step\.inc: .*whole = job->lanes == 1 \|\| ", "into how many parts: speed only"),
    (r"exchange\.c: .*LOCK\(exchange\)", "nothing to lock where Python has a GIL"),
    (r"cell < kept \? 0 : .* -> .*cell <= kept", "a cell that a new token begins itself"),
)

SWAPS = (
    (r" \+ ", (" - ",)),
    (r" - ", (" + ",)),
    (r" \* ", (" + ",)),
    (r" < ", (" <= ", " > ")),
    (r" <= ", (" < ",)),
    (r" > ", (" >= ", " < ")),
    (r" >= ", (" > ",)),
    (r" == ", (" != ",)),
    (r" != ", (" == ",)),
    (r" && ", (" || ",)),
    (r" \|\| ", (" && ",)),
    (r" \+= ", (" -= ", " = ")),
    (r"\+\+", ("--",)),
    (r"\blower\(", ("higher(",)),
    (r"\bhigher\(", ("lower(",)),
    (r"\btrue\b", ("false",)),
    (r"\bfalse\b", ("true",)),
    (r"\bif \((?=.*\) ?\{?)", ("if (!",)),
    (r"\bvf_max\(", ("vf_min(",)),
    (r"\bvf_add\(", ("vf_sub(",)),
)


@dataclass
class Edit:
    """One edit of one line, and what noticed it ("" for nothing)."""

    path: str
    line: int
    before: str
    after: str
    caught: str = ""

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.path, self.line, self.before, self.after

    @property
    def reason(self) -> str:
        """Why nothing needs to notice it, or ""."""
        where = f"{Path(self.path).name}: {self.before.strip()} -> {self.after.strip()}"
        return next((why for pattern, why in KNOWN if re.search(pattern, where)), "")


def code_lines(path: Path) -> list[tuple[int, str]]:
    """Lines that are code: no comments, preprocessor, declarations of types."""
    found, comment = [], False
    for number, line in enumerate(path.read_text().splitlines()):
        text = line.strip()
        inside = comment or text.startswith("/*")
        comment = (comment or "/*" in text) and "*/" not in text[text.rfind("/*") :]
        skip = inside or text.startswith(("#", "//", "typedef", "}", "extern", "_Static_assert"))
        if text and not skip:
            found.append((number, line))
    return found


def variants(line: str) -> list[str]:
    """What one edit can make of a line."""
    code = line.split("/*")[0]
    quoted = [m.span() for m in re.finditer(r'"[^"]*"', code)]
    found = []

    def put(match: re.Match[str], new: str) -> None:
        if not any(a <= match.start() < b for a, b in quoted):
            found.append(line[: match.start()] + new + line[match.end() :])

    for pattern, others in SWAPS:
        for match in re.finditer(pattern, code):
            for new in others:
                if new == "if (!":  # the whole condition
                    close = closing(code, match.end() - 1)
                    if close:
                        inner = code[match.end() : close]
                        found.append(f"{line[: match.start()]}if (!({inner}){line[close:]}")
                else:
                    put(match, new)
    for match in re.finditer(r"(?<![\w.])(\d+)(?![\w.])", code):
        put(match, str(int(match[1]) + 1))
        if match[1] != "0":
            put(match, str(int(match[1]) - 1))
    # a whole statement, but no declaration
    if re.match(
        r"\s*(\w[\w\->\.\[\]]*( [-+*|&]?= |\(|\+\+)|return\b|if \(.*;|break|continue).*;\s*$", code
    ):
        found.append(re.match(r"\s*", line)[0] + ";")
    return found


def closing(code: str, opening: int) -> int:
    """Where the bracket that opens there is closed on the same line, or 0."""
    depth = 0
    for i in range(opening, len(code)):
        depth += (code[i] == "(") - (code[i] == ")")
        if depth == 0:
            return i
    return 0


def draw(count: int, seed: int, only: str | None) -> list[Edit]:
    """Edits of random lines; lines of other processors and of other levels are left out."""
    paths = [*ROOT.glob("csrc/*.[ch]"), *ROOT.glob("csrc/cpu/*.inc"), *ROOT.glob("csrc/cpu/*.h")]
    left_out = {f"vec_{x}.h" for x in ("avx2", "avx512", "neon", "generic")} - {f"{VECTORS}.h"}
    left_out |= {"dlpack_abi.h"}
    lines = [
        (path, number, line)
        for path in sorted(paths)
        if path.name not in left_out and (only is None or str(path).endswith(only))
        for number, line in code_lines(path)
    ]
    chance = random.Random(seed)
    chance.shuffle(lines)
    edits = []
    for path, number, line in lines:
        if choices := variants(line):
            edits.append(
                Edit(str(path.relative_to(ROOT)), number + 1, line, chance.choice(choices))
            )
        if len(edits) == count:
            break
    return edits


def judged(log: Path | None, again: bool) -> dict[tuple[str, int, str, str], str]:
    """What noticed the edits of an earlier run; `again` leaves out what nothing noticed."""
    if log is None or not log.exists():
        return {}
    found = [Edit(**x) for x in json.loads(log.read_text())]
    return {x.key: x.caught for x in found if x.caught or not again}


class Workshop:
    """A copy of the sources, objects of all of them as they were, and ways to test an edit."""

    def __init__(self, folder: Path):
        self.folder = folder
        shutil.copytree(ROOT / "csrc", folder / "csrc")
        shutil.copytree(ROOT / "tests", folder / "tests")
        shutil.copytree(ROOT / "h2o", folder / "h2o", ignore=shutil.ignore_patterns("*.so", "data"))
        if (ROOT / "h2o/data").exists():
            (folder / "h2o/data").symlink_to(ROOT / "h2o/data")
        shutil.copy(ROOT / "pyproject.toml", folder)
        self.sources = sorted(str(x.relative_to(folder)) for x in folder.glob("csrc/**/*.c"))
        tests = sorted(folder.glob("tests/c/test_*.c"))
        here = ("test_vec_generic", f"test_{VECTORS}")
        programs = [x for x in tests if "vec_" not in x.stem or x.stem in here]
        self.programs = [str(x.relative_to(folder)) for x in programs]
        for net in NETS:
            for source in self.sources + self.programs:
                assert self.compile(net, source, "clean"), source
            assert not self.link_and_test(net, []), "a C test fails without any edit"
        assert not self.python([]), "a test in Python fails without any edit"

    def run(self, command: list[str], seconds: int = 300, **environment: str) -> bool:
        """Whether a command succeeds in so much of a processor's time, and in memory."""

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
            if "asan" not in command[0]:
                resource.setrlimit(resource.RLIMIT_AS, (32 << 30, resource.RLIM_INFINITY))

        try:
            told = subprocess.run(
                command, cwd=self.folder, capture_output=True, preexec_fn=limit,
                timeout=5 * seconds,  # of what waits for ever, or for a machine with more to do
                env={**os.environ, **environment},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return told.returncode == 0

    def object(self, net: str, source: str, state: str) -> str:
        return f"build/{net}/{state}/{source.replace('/', '_')}.o"

    def compile(self, net: str, source: str, state: str) -> bool:
        out = self.object(net, source, state)
        (self.folder / out).parent.mkdir(parents=True, exist_ok=True)
        flags = [*FLAGS, *NETS[net][0], "-Itests/c"]
        return self.run(["gcc", *flags, "-c", source, "-o", out])

    def touched(self, edit: Edit, net: str) -> list[str]:
        """Sources to compile again; of the levels only what is tested."""
        if edit.path.endswith(".c"):
            return [edit.path]
        name, level = Path(edit.path).name, NETS[net][1]
        needed = set() if name.startswith("step") else {level}
        if not name.startswith(NO_STEPS):
            needed.add(STEPS if level == LEVEL else level)
        levels = [f"csrc/cpu/level_{x}.c" for x in sorted(needed)]
        if "/cpu/" in edit.path:
            return levels + [x for x in self.programs if edit.path.endswith(".h") and "vec_" in x]
        return [x for x in self.sources if "level_" not in x] + levels + self.programs

    def link_and_test(self, net: str, touched: list[str]) -> str:
        """The C test that fails, or ""."""
        flags, level = NETS[net]
        core = [self.object(net, x, "new" if x in touched else "clean")
                for x in self.sources if not x.endswith(BORDER)]  # fmt: skip
        for program in self.programs:
            if net == "generic" and program.endswith("dispatch.c"):
                continue  # asks for the levels that are not there
            own = self.object(net, program, "new" if program in touched else "clean")
            out = f"build/{net}/{Path(program).stem}"
            if not self.run(["gcc", *flags, own, *core, "-o", out, "-pthread", "-lm", "-ldl"]):
                return "link"
            if not self.run([out], 90, H2O_TEST_LEVEL=level):
                return f"{net} {Path(program).stem}"
        return ""

    def python(self, touched: list[str]) -> str:
        """What to say where one of TESTS fails, or ""."""
        objects = [
            self.object("plain", x, "new" if x in touched else "clean") for x in self.sources
        ]
        out = f"h2o/_core{ENDING}"
        if not self.run(["gcc", "-shared", *objects, "-o", out, "-pthread", "-lm", "-ldl"]):
            return "link"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", *TESTS]
        passed = self.run(command, 400, H2O_CPU=LEVEL, PYTHONPATH=str(self.folder))
        return "" if passed else "python"

    def judge(self, edit: Edit) -> str:
        """What notices an edit first, or ""."""
        path = self.folder / edit.path
        text = path.read_text()
        lines = text.splitlines(keepends=True)
        assert lines[edit.line - 1].rstrip("\n") == edit.before
        lines[edit.line - 1] = edit.after + "\n"
        path.write_text("".join(lines))
        try:
            border = edit.path.endswith(BORDER)
            for net in ["plain"] if border else NETS:
                touched = self.touched(edit, net)
                if not all(self.compile(net, x, "new") for x in touched):
                    return "compiler"
                if not border and (failed := self.link_and_test(net, touched)):
                    return failed
                if net == "plain" and (failed := self.python(touched)):
                    return failed
            return ""
        finally:
            path.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="the end of a path")
    parser.add_argument("--log", type=Path, help="all edits as JSON; what it has is not done again")
    parser.add_argument("--again", action="store_true", help="but for what survived")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th edit from the i-th on")
    told = parser.parse_args()
    part, parts = map(int, told.part.split("/"))
    edits = draw(told.edits, told.seed, told.only)[part::parts]
    known = judged(told.log, told.again)
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        for number, edit in enumerate(edits):
            if edit.key in known:
                edit.caught = known[edit.key]
            elif not edit.reason:
                edit.caught = workshop.judge(edit)
            known[edit.key] = edit.caught
            print(
                f"{number:4} {edit.path}:{edit.line} {edit.caught or edit.reason or 'SURVIVED'}",
                flush=True,
            )
            if not edit.caught:
                print(f"     - {edit.before.strip()}\n     + {edit.after.strip()}", flush=True)
            if told.log:
                done = [asdict(x) for x in edits if x.key in known]
                told.log.write_text(json.dumps(done, indent=1))
    alive = [x for x in edits if not x.caught]
    for what, count in Counter(x.caught or x.reason or "SURVIVED" for x in edits).most_common():
        print(f"{count:5} {what}")
    open_ = sum(not x.reason for x in alive)
    print(f"{open_} of {len(edits)} survive unexplained, {len(alive) - open_} can change no answer")


if __name__ == "__main__":
    main()
