"""Mutation tests: make random edits of csrc, one at a time, and report those that no test notices.

    python tests/mutate.py [--edits 200] [--seed 1] [--only csrc/cpu/step.inc] [--log mutants.json]
                           [--again]

An edit changes an operator, a constant or a bound, negates a condition or deletes a statement. One
of these must fail, tried in this order: the compiler, the C tests, the Python tests of the core
alone, the C tests under ASan and UBSan. For speed only the files that an edit affects are compiled
again. Tests run at the instruction set level that this machine prefers, except for the first C
tests, which run at the level that compiles fastest and find most edits. Surviving edits are
printed. Each needs a new test, or a comment on its line that says that it "changes no answer" and
why (speed, memory, another compiler).

An interrupted run resumes where its log ends. After new tests, `--again` tries again the edits that
survived according to the log.

Needs `make .venv/core .venv/test`. Two hundred edits take about two hours. To use two processes,
give them --part 0/2 and --part 1/2.
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
#: The level whose decode step LEVEL uses, and the sources that a step does not need.
STEPS = "avx512amxint8" if LEVEL == "avx512amx" else LEVEL
NO_STEPS = ("attend", "evict", "simulate")
VECTORS = "vec_avx2" if LEVEL == "avx2" else "vec_avx512"
BORDER = ("module.c", "arguments.c", "exchange.c")  # the sources that need Python's headers
FLAGS = ["-std=c11", "-O1", "-Werror=return-type", "-fPIC", "-ffp-contract=fast"]
FLAGS += ["-fno-math-errno", "-fno-trapping-math", "-pthread", "-Icsrc"]
FLAGS += ['-DH2O_VERSION="0"', '-DH2O_KERNELS=""']
FLAGS += [f"-I{sysconfig.get_path('include')}", f"-I{numpy.get_include()}"]
LIMITED = not sysconfig.get_config_var("Py_GIL_DISABLED")  # as in setup.py
ENDING = ".abi3.so" if LIMITED else sysconfig.get_config_var("EXT_SUFFIX")
FLAGS += ["-DPy_LIMITED_API=0x030a0000"] if LIMITED else []
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]

#: Flags and level of each set of C tests.
NETS = {
    "generic": (["-DH2O_GENERIC_ONLY"], "generic"),
    "plain": ([], LEVEL),
    "asan": (SANITIZE, LEVEL),
}

#: The tests in Python. Those that find errors fastest come first.
TESTS = [f"tests/core/test_{x}.py" for x in ("exchange", "errors", "hostile", "levels", "ops")]
TESTS += ["tests/core", *(f"tests/torch/test_{x}.py" for x in ("cache_relative", "heads"))]
TESTS += ["tests/torch/test_properties.py::test_results_do_not_depend_on_threads"]

#: Code that cannot change an answer: counts of work for `make balance`, and prefetching.
HINTS = re.compile(r"COUNT_WORK|H2O_BALANCE|_WORK\b|_RANK\b|prefetch")
#: Text in the comment of a line whose edits can change speed or memory, but no answer.
JUSTIFIED = "changes no answer"

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
    """One edit of one line. `caught` names what noticed it, "" if nothing did."""

    path: str
    line: int
    before: str
    after: str
    caught: str = ""

    @property
    def key(self) -> tuple[str, int, str, str]:
        return self.path, self.line, self.before, self.after

    @property
    def is_justified(self) -> bool:
        """Whether no test needs to notice the edit: see HINTS and JUSTIFIED."""
        return bool(HINTS.search(self.before)) or JUSTIFIED in self.before


def code_lines(path: Path) -> list[tuple[int, str]]:
    """Lines of code, without comments, preprocessor directives and type declarations."""
    lines, comment = [], False
    for number, line in enumerate(path.read_text().splitlines()):
        text = line.strip()
        inside = comment or text.startswith("/*")
        comment = (comment or "/*" in text) and "*/" not in text[text.rfind("/*") :]
        skip = inside or text.startswith(("#", "//", "typedef", "}", "extern", "_Static_assert"))
        if text and not skip:
            lines.append((number, line))
    return lines


def variants(line: str) -> list[str]:
    """All versions of a line after one edit."""
    code = line.split("/*")[0]
    quoted = [m.span() for m in re.finditer(r'"[^"]*"', code)]
    edits = []

    def put(match: re.Match[str], new: str) -> None:
        if not any(a <= match.start() < b for a, b in quoted):
            edits.append(line[: match.start()] + new + line[match.end() :])

    for pattern, others in SWAPS:
        for match in re.finditer(pattern, code):
            for new in others:
                if new == "if (!":  # the whole condition
                    close = closing(code, match.end() - 1)
                    if close:
                        inner = code[match.end() : close]
                        edits.append(f"{line[: match.start()]}if (!({inner}){line[close:]}")
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
        edits.append(re.match(r"\s*", line)[0] + ";")
    return edits


def closing(code: str, opening: int) -> int:
    """Index of the bracket that closes the one at `opening`, or 0 if it is not on this line."""
    depth = 0
    for i in range(opening, len(code)):
        depth += (code[i] == "(") - (code[i] == ")")
        if depth == 0:
            return i
    return 0


def draw(count: int, seed: int, only: str | None) -> list[Edit]:
    """Draw edits of random lines, except lines for other processors and levels."""
    paths = [*ROOT.glob("csrc/*.[ch]"), *ROOT.glob("csrc/cpu/*.inc"), *ROOT.glob("csrc/cpu/*.h")]
    others = ("avx2", "avx512", "neon", "bytes_neon", "generic")
    left_out = {f"vec_{x}.h" for x in others} - {f"{VECTORS}.h"}
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
    """Results of an earlier run by edit. With `again`, without the edits that survived."""
    if log is None or not log.exists():
        return {}
    edits = [Edit(**x) for x in json.loads(log.read_text())]
    return {x.key: x.caught for x in edits if x.caught or not again}


class Workshop:
    """A copy of the sources with their unedited objects, in which edits are tested."""

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
            assert not self.link_and_test(net, []), "a C test fails without an edit"
        assert not self.python([]), "a test in Python fails without an edit"

    def run(self, command: list[str], seconds: int = 300, **environment: str) -> bool:
        """Whether a command succeeds within a limit of CPU seconds and of memory."""

        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
            if "asan" not in command[0]:
                resource.setrlimit(resource.RLIMIT_AS, (32 << 30, resource.RLIM_INFINITY))

        try:
            completed = subprocess.run(
                command, cwd=self.folder, capture_output=True, preexec_fn=limit,
                timeout=5 * seconds,  # for a command that hangs, or a busy machine
                env={**os.environ, **environment},
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return False
        return completed.returncode == 0

    def object(self, net: str, source: str, state: str) -> str:
        return f"build/{net}/{state}/{source.replace('/', '_')}.o"

    def compile(self, net: str, source: str, state: str) -> bool:
        out = self.object(net, source, state)
        (self.folder / out).parent.mkdir(parents=True, exist_ok=True)
        flags = [*FLAGS, *NETS[net][0], "-Itests/c"]
        return self.run(["gcc", *flags, "-c", source, "-o", out])

    def touched(self, edit: Edit, net: str) -> list[str]:
        """Sources to compile again after an edit, only for the levels that are tested."""
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
        """Link and run the C tests. Returns the name of the first that fails, or ""."""
        flags, level = NETS[net]
        core = [self.object(net, x, "new" if x in touched else "clean")
                for x in self.sources if not x.endswith(BORDER)]  # fmt: skip
        for program in self.programs:
            if net == "generic" and program.endswith("dispatch.c"):
                continue  # needs levels that this set does not have
            binary = self.object(net, program, "new" if program in touched else "clean")
            out = f"build/{net}/{Path(program).stem}"
            if not self.run(["gcc", *flags, binary, *core, "-o", out, "-pthread", "-lm", "-ldl"]):
                return "link"
            if not self.run([out], 90, H2O_TEST_LEVEL=level):
                return f"{net} {Path(program).stem}"
        return ""

    def python(self, touched: list[str]) -> str:
        """Link the core and run TESTS. Returns what failed, or ""."""
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
        """Return what notices an edit first, or ""."""
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


def verdict(edit: Edit) -> str:
    return edit.caught or (JUSTIFIED if edit.is_justified else "SURVIVED")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edits", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="edit only files whose path ends with this")
    parser.add_argument("--log", type=Path, help="JSON file of results; edits in it are skipped")
    parser.add_argument("--again", action="store_true", help="retry edits that survived before")
    parser.add_argument("--part", default="0/1", help="i/n: every n-th edit from the i-th on")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    edits = draw(arguments.edits, arguments.seed, arguments.only)[part::parts]
    known = judged(arguments.log, arguments.again)
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder))
        for number, edit in enumerate(edits):
            if edit.key in known:
                edit.caught = known[edit.key]
            elif not edit.is_justified:
                edit.caught = workshop.judge(edit)
            known[edit.key] = edit.caught
            print(f"{number:4} {edit.path}:{edit.line} {verdict(edit)}", flush=True)
            if not edit.caught:
                print(f"     - {edit.before.strip()}\n     + {edit.after.strip()}", flush=True)
            if arguments.log:
                done = [asdict(x) for x in edits if x.key in known]
                arguments.log.write_text(json.dumps(done, indent=1))
    for what, count in Counter(map(verdict, edits)).most_common():
        print(f"{count:5} {what}")


if __name__ == "__main__":
    main()
