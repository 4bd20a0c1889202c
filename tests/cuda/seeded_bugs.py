"""Bugs seeded into the kernels, to see whether the check on the device finds them.

    python -m tests.cuda.seeded_bugs [--jobs 2] [NAME ...]

Each bug is an edit of csrc/cuda in a copy of the tree. The copy's emulated kernels
(tests/cuda/fake) then run `h2o.backends.kernel_check`, with threads in a random order: once with
the current cases, and once with older cases of at most 44 slots. Each bug takes half a minute of
CPU time.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "seeded"


class Bug(NamedTuple):
    """An edit of a file of csrc/cuda. `old` occurs in it exactly once."""

    file: str
    old: str
    new: str


BUGS = {
    # missing barriers, and copies without a wait
    "forward: a tile is read before it is loaded": Bug(
        "forward.cuh", "    sync_block();\n    tile_dots", "    tile_dots"
    ),
    "forward with matrices: values overwrite keys in use": Bug(
        "matrix_forward.cuh", "        sync_block(); /* all threads are done with the keys */\n", ""
    ),
    "sums with matrices: queries overwrite those in use": Bug(
        "matrix_keys.cuh", "    return block_any(far);\n", "    return far;\n"
    ),
    "sums with matrices: queries are not waited for": Bug(
        "matrix_keys.cuh", "bool far = false;\n    wait_copies<0>();\n", "bool far = false;\n"
    ),
    "step: values are weighted before the weights are there": Bug(
        "step_part.cuh",
        "    part_softmax(item, part, begin, end);\n    sync_block();\n",
        "    part_softmax(item, part, begin, end);\n",
    ),
    "step with matrices: warps are combined before they are done": Bug(
        "step_matrix.cuh",
        "            sync_block();\n            combine_warps",
        "            combine_warps",
    ),
    "step with matrices: rows are read before they are there": Bug(
        "step_ring.cuh", "        wait_copies<HALVES - 1>();\n", ""
    ),
    "step: a rank changes before it is read": Bug(
        "step_finish.cuh",
        "    sync_block(); /* all threads have read what is changed below */\n",
        "",
    ),
    # arrival counters
    "the first block to arrive ends a head": Bug("common.cuh", "== blocks - 1", "== 0"),
    "step: the last but one ends a head": Bug(
        "step.cuh",
        "&counters[g], gridDim.x)",
        "&counters[g], gridDim.x > 1 ? gridDim.x - 1 : 1)",
    ),
    "step: the first head ends a row": Bug(
        "step.cuh",
        "&counters[p->dims.G], (uint32_t)p->dims.G)",
        "&counters[p->dims.G], 1)",
    ),
    "simulate: a counter is not cleared for the next window": Bug(
        "window_tiles.cuh", "    if (threadIdx.x == 0) w.parts_done[tile] = 0;\n", ""
    ),
    # tiles
    "sums with matrices: the first tile of queries comes again": Bug(
        "matrix_keys.cuh", "        from += (int64_t)tile->index * source->tile;\n", ""
    ),
    "sums with matrices: a tile past the last query has no mask": Bug(
        "matrix_keys.cuh",
        "last <= turn->at && turn->at + WIDTH <= turn->count",
        "last <= turn->at",
    ),
    # slots, parts, heads
    "sums: the parts of queries after the first are forgotten": Bug(
        "sums.cuh", "part < share->parts; part++", "part < 1; part++"
    ),
    "sums with matrices: keys that the first queries do not see are left out for all": Bug(
        "matrix_keys.cuh", "turn->ahead >= turn->at + WIDTH", "turn->ahead >= turn->at"
    ),
    "evict: a slot too few is emptied": Bug(
        "evict.cuh",
        "s < end; s += blockDim.x) {\n        store->positions[s] = -1;",
        "s < end - 1; s += blockDim.x) {\n        store->positions[s] = -1;",
    ),
    "step: the slots that parts leave over are forgotten": Bug(
        "step_item.cuh", "(uint32_t)item.slots + (uint32_t)at.parts - 1", "(uint32_t)item.slots"
    ),
    "step: parts past the eighth are forgotten": Bug(
        "step_finish.cuh",
        "part < parts; part += STEP_PARTS_READ",
        "part < lower(parts, STEP_PARTS_READ); part += STEP_PARTS_READ",
    ),
    "step: the fifth head overwrites the first": Bug(
        "step_part.cuh",
        "(part * item->R + r + i) * item->D + e",
        "(part * item->R + i) * item->D + e",
    ),
    # policies
    "attend: the largest attention does not fade": Bug(
        "attend_tiles.cuh", "h2o_larger(*score * decay, sum)", "h2o_larger(*score, sum)"
    ),
    "step: the next rank is not lowered": Bug(
        "step_finish.cuh",
        "        if (s != slot && item->ranks[s] > rank) ",
        "        if (s != slot && item->ranks[s] > rank + 1) ",
    ),
    "evict: the last digit of ranks is not looked at": Bug(
        "select.cuh", "shift >= 0; shift -= 8", "shift > 0; shift -= 8"
    ),
    # loads
    "quantized rows: words at addresses of half words": Bug(
        "elements.cuh", "    if (bits % 4 == 0) {", "    if (bits % 2 == 0) {"
    ),
}
SEEDS = (1, 2)
"""Seeds for the order in which threads run."""
LIMIT = 3600
"""Seconds after which a check is stopped. A bug may keep it from ending."""


def built(number: int, bug: Bug) -> Path:
    """Build a fake driver whose kernels have the bug."""
    folder = BUILT / str(number)
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("csrc", "tests/cuda", "build/cuda"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("lib", "*.so.1"))
    shutil.copy2(ROOT / "Makefile", folder)
    file = folder / "csrc" / "cuda" / bug.file
    text = file.read_text("utf-8")
    assert text.count(bug.old) == 1, f"{bug.file} has {text.count(bug.old)} times {bug.old!r}"
    file.write_text(text.replace(bug.old, bug.new), "utf-8")
    command = ["make", "--silent", "build/cuda/libcuda.so.1"]
    subprocess.run(command, cwd=folder, check=True, stderr=subprocess.DEVNULL)
    return folder / "build" / "cuda" / "libcuda.so.1"


def small_cases() -> tuple:
    """Cases of the check before it had cases of realistic sizes."""
    import torch

    from h2o.backends.kernel_check import Case

    return (
        Case(64, torch.float32),
        Case(80, torch.float16, kv_dtype="int8", pads=True),
        Case(128, torch.bfloat16, value_weighted=True, ragged=True),
        Case(256, torch.bfloat16, kv_dtype="int8-int4"),
        Case(64, torch.bfloat16, softcap=2.0),
        Case(64, torch.float32, softcap=1e6),
    )


def check(library: str, small: bool) -> None:
    """Print the first mistake that the check finds with this driver, if any."""
    import torch

    from h2o import backends
    from h2o.backends import kernel_check
    from tests.cuda import device

    torch.set_num_threads(1)
    cases = small_cases() if small else kernel_check.CASES
    driver = device.load(library)
    operations = device.carried(driver, device.operations(driver, setattr))
    for seed in SEEDS:
        driver.library.shim_seed(ctypes.c_uint64(seed))
        for case in cases:
            kernel_check.CASES = (case,)
            if mistakes := kernel_check.mistakes(operations, backends._portable(), "cpu"):
                print(mistakes[0])
                return


def found(library: Path, small: bool) -> str:
    """Output of the check, run in a process of its own. A crash counts, since a GPU would fault
    too."""
    command = [sys.executable, "-m", "tests.cuda.seeded_bugs", "--library", str(library)]
    try:
        done = subprocess.run(
            command + ["--small"] * small, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT
        )
    except subprocess.TimeoutExpired:
        return "does not end"
    if done.returncode < 0:
        return f"ends by signal {-done.returncode}"
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def tried(number: int) -> tuple[str, str]:
    """Output of the check for one bug: with the small cases, and with the current ones."""
    library = built(number, list(BUGS.values())[number])
    return found(library, small=True), found(library, small=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--library", help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a bug's name")
    arguments = parser.parse_args()
    if arguments.library:
        check(arguments.library, arguments.small)
        return 0
    chosen = [n for n, bug in enumerate(BUGS) if not arguments.names
              or any(name in bug for name in arguments.names)]  # fmt: skip
    subprocess.run(["make", "--silent", "build/cuda/libcuda.so.1"], cwd=ROOT, check=True)
    missed = [0, 0]
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for number, said in zip(chosen, pool.map(tried, chosen), strict=True):
            print(list(BUGS)[number])
            for which, (label, text) in enumerate(zip(("small", "now"), said, strict=True)):
                print(f"    {label:5}  {text or 'MISSED'}", flush=True)
                missed[which] += not text
    print(f"of {len(chosen)} the small cases miss {missed[0]}, the check as it is {missed[1]}")
    return int(missed[1] > 3)


if __name__ == "__main__":
    sys.exit(main())
