"""Count the instructions of each operation at each CPU level, to compare commits.

    python benchmarks/callgrind.py [--save counts.json] [--against counts.json]

Times drift with the machine, but counts do not: the same source and compiler give the same number.
Levels that valgrind supports (not AVX-512) run under callgrind, which leaves its files for
callgrind_annotate in the output folder. The others are single-stepped with ptrace, which takes
minutes. Everything runs on one thread with 4 query heads, 1 key head and D = 128: a prompt of 96
tokens, its eviction to 64 keys, a decode step over 64 keys, and the simulation of the text with a
prompt of 64. Decode steps with values in four bits have 400 keys, with D = 128 and with 64. Those
with offsets transform the query, the new token and the output: the others do not.
"""

from __future__ import annotations

import argparse
import glob
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
UNDER_VALGRIND = ("generic", "avx2", "neon")
NEEDS_PYTHON = ("arguments.c", "exchange.c", "module.c")
"""Files of the core that need Python's headers"""


def build(folder: Path) -> Path:
    """Compile count.c and the core with the flags of the package."""
    program = folder / "count"
    flags = ["-std=c11", "-O3", "-g", "-ffp-contract=fast", "-fno-math-errno"]
    flags += ["-fno-trapping-math", "-I", str(ROOT / "csrc"), "-I", str(ROOT / "tests/c")]
    sources = glob.glob(str(ROOT / "csrc/**/*.c"), recursive=True)
    sources = [x for x in sources if not x.endswith(NEEDS_PYTHON)]
    sources += [str(ROOT / "benchmarks/count.c")]
    libraries = ["-lm", "-ldl", "-pthread"]
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, *flags, "-o", str(program), *sources, *libraries]
    subprocess.run(command, check=True)
    return program


def operations(program: Path) -> list[str]:
    """Names of the operations that the program can count."""
    listed = subprocess.run([program], check=True, capture_output=True, text=True)
    return listed.stdout.split()


def count(program: Path, level: str, operation: str, folder: Path) -> int:
    """Count the instructions of one call."""
    if level not in UNDER_VALGRIND or shutil.which("valgrind") is None:
        counted = subprocess.run(
            [program, level, operation, "step"], check=True, capture_output=True, text=True
        )
        return int(counted.stdout)
    out = folder / f"callgrind.{level}.{operation}"
    command = ["valgrind", "--tool=callgrind", "--toggle-collect=counted"]
    command += [f"--callgrind-out-file={out}", str(program), level, operation]
    subprocess.run(command, check=True, capture_output=True)
    total = re.search(r"^(?:summary|totals): (\d+)", out.read_text(), re.MULTILINE)
    assert total is not None, f"no totals in {out}"
    return int(total[1])


def levels() -> list[str]:
    """The levels that this machine can run."""
    program = "import h2o.ops, json; print(json.dumps(h2o.ops.info()['levels']))"
    answer = subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=ROOT
    )
    return json.loads(answer.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--save", type=Path, help="write the counts as JSON")
    parser.add_argument("--against", type=Path, help="show the change from earlier counts")
    parser.add_argument("--output", type=Path, help="keep callgrind's files in this folder")
    options = parser.parse_args()
    before = json.loads(options.against.read_text()) if options.against else {}
    counts: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.output or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        program = build(folder)
        for level in levels():
            for operation in operations(program):
                key = f"{level} {operation}"
                counts[key] = count(program, level, operation, folder)
                change = f"  {counts[key] / before[key] - 1:+.2%}" if key in before else ""
                print(f"{level:12} {operation:25} {counts[key]:12,}{change}", flush=True)
    if options.save:
        options.save.write_text(json.dumps(counts, indent=1) + "\n")


if __name__ == "__main__":
    main()
