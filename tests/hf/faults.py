"""Faults of one line, each of which the random programs must find.

    python -m tests.hf.faults            tries all
    python -m tests.hf.faults 3 17       tries these

Each fault is put into a copy of the package, in which the programs of one draw run until one fails,
or the test that the fault names. A fault that nothing finds is a gap in the tests.
"""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Fault(NamedTuple):
    """A line of the package, and what replaces it."""

    file: str
    """Path below h2o"""
    old: str
    new: str
    modes: str = ""
    """Names of modes whose programs are the likeliest to find it; they run first"""
    test: str = ""
    """The test that finds it, if no program can"""


STATE, TEXT = "hf/cache_state", "hf/conversation"
PROMPT, BATCHING = "hf/prompt", "hf/batching"
SIMULATION, TORCH = "hf/simulation", "backends/torch_backend"
FAULTS = (
    # ---- slots, rows and pins ----
    Fault(
        f"{STATE}/slot_layout.py",
        "new[:, : part.shape[1]] = part",
        "new[:, -part.shape[1] :] = part",
        "TURNS",
    ),
    Fault(
        f"{STATE}/slot_layout.py",
        "        if to is not None:\n            to[index] = rows",
        '        if to is not None and name != "scores":\n            to[index] = rows',
        "GENERATE_ALL",
    ),
    Fault(
        f"{STATE}/slot_layout.py",
        "torch.cat([slots.positions[:, 0] >= 0, real], dim=1)",
        "torch.cat([slots.positions[:, 0] >= -1, real], dim=1)",
        "FROM_DYNAMIC PADDING",
    ),
    Fault(
        f"{TEXT}/named_removal.py",
        "moved_back=row.moved_back + shift,",
        "moved_back=shift,",
        "NAMED_SPANS SIMULATED",
    ),
    Fault(
        f"{BATCHING}/row_batch.py",
        "(state.moved_back if is_rotated else 0)",
        "0",
        "NAMED_SPANS GENERATE_ALL",
    ),
    Fault(
        "hf/cache/cache.py",
        "self._change_rows(lambda x: x[rows.to(x.device)])",
        "self._change_rows(lambda x: x[rows.sort().values.to(x.device)])",
        "ROW_MOVES BEAMS",
    ),
    Fault(f"{TEXT}/pins.py", "right=True)", "right=False)", "PINS"),
    Fault(f"{TEXT}/pins.py", "return any(n < end for", "return any(n + 2 < end for", "PINS"),
    Fault(
        f"{TEXT}/state.py",
        "rows = tuple(change_list(change, rows))",
        "pass",
        "PINS ROW_MOVES FORK BEAMS",
    ),
    Fault(
        f"{TEXT}/state.py",
        "offset=end + 1 - earlier - n, counts_columns",
        "offset=end + 1 - earlier, counts_columns",
        "TURNS",
    ),
    Fault(
        f"{TEXT}/pins.py",
        "rows = [row for row in self.spans for",
        "rows = [self.spans[0] for",
        "PINS",
    ),
    Fault(
        f"{STATE}/recurrent_states.py",
        "{name: change(x) for name, x in",
        '{name: x if "conv" in name and x.shape == change(x).shape else change(x) for name, x in',
        "HYBRID ROW_MOVES FORK BEAMS",
    ),
    Fault(
        f"{STATE}/recurrent_states.py",
        "state[row].copy_(taken[name][0])",
        "state[0].copy_(taken[name][0])",
        "HYBRID GENERATE_ALL",
    ),
    Fault(
        f"{STATE}/trace.py",
        "self.real, self.evicted_after = change(self.real), change(self.evicted_after)",
        "self.real, self.evicted_after = change(self.real), self.evicted_after",
        "TRACE ROW_MOVES FORK BEAMS",
    ),
    Fault(
        f"{STATE}/trace.py",
        "columns[columns < 0] = real.shape[1]",
        "columns[columns < 0] = real.shape[1] - 1",
        "TRACE",
    ),
    Fault(
        "hf/attention/attention_call.py",
        "ops.evict(tokens.key, tokens.value, scores, slots, mask=tokens.mask, policy=policy)",
        "ops.evict(tokens.key, tokens.value, scores, slots, policy=policy)",
        "GAPS TURNS",
    ),
    Fault(
        "hf/attention/attention_call.py",
        "is_step = ((tokens.mask.sum(1) == 1)",
        "is_step = ((tokens.mask.sum(1) == 0)",
        test="tests/hf/test_bytes.py::test_a_single_token_among_padding_is_a_decode_step",
    ),
    Fault(
        "hf/layers/named_eviction.py",
        "slots = remove_tokens(layer.slots, sizes, capacity.sizes, removal.rows, layer.policy)",
        """slots = remove_tokens(layer.slots, sizes, capacity.sizes, removal.rows, layer.policy)
    from h2o.quantization import dequantize, stored_like
    for sign in (1, -1) if slots.offsets is not None else ():
        keys = move_forward(layer, dequantize(slots.keys, layer.facts.row_size[0]), sign)
        slots = slots._replace(keys=stored_like(keys, slots.keys))""",
        "NAMED_SPANS FEW_BITS",
    ),
    Fault("hf/layers/crop.py", "    earlier.put(layer)", "    pass", "CROP GROWTH"),
    # ---- prompts ----
    Fault(
        f"{PROMPT}/prompt_budget.py", "prompt_lengths(given, chunked or counts)", "counts", "CHUNKS"
    ),
    Fault(
        f"{PROMPT}/prompt_budget.py", "counts = mask.sum(1).tolist()", "counts = [Q] * B", "PADDING"
    ),
    Fault(
        f"{PROMPT}/cross_head_budget.py",
        "return (positions < sinks) |",
        "return ((positions >= 0) & (positions < sinks)) |",
        test="tests/hf/test_shared_echo.py::test_a_row_is_what_it_is_alone",
    ),
    Fault(
        f"{PROMPT}/cross_head_budget.py",
        "x[b].masked_fill(kept_of[b], -1.0)",
        "x[0].masked_fill(kept_of[b], -1.0)",
        "SHARED_BUDGET",
    ),
    Fault(
        f"{STATE}/slot_layout.py",
        "return (count - 1).masked_fill(~real[:, None], -1), count[..., -1:]",
        "return (count - 1).masked_fill(~real[:, None], -1), torch.full_like(count[..., -1:], K)",
        "SHARED_BUDGET PADDING",
    ),
    Fault(
        f"{PROMPT}/echo_scorer.py",
        "tokens.query[b][:, real], tokens.key[b][:, real]",
        "tokens.query[0][:, real], tokens.key[b][:, real]",
        "ECHO PADDING",
    ),
    # ---- generate_all ----
    Fault(
        f"{BATCHING}/batch_scheduler.py",
        "tokens = [running.prompt_tokens + settings.virtual for",
        "tokens = [running.prompt_tokens + settings.virtual - 1 for",
        "GENERATE_ALL",
    ),
    Fault(
        f"{BATCHING}/batch_scheduler.py",
        "prompt_length=lengths)",
        "prompt_length=max(lengths))",
        "GENERATE_ALL",
    ),
    Fault(
        f"{BATCHING}/row_batch.py",
        "layer.take_rows(rows, other, source_rows, B, longest)",
        "layer.take_rows(rows, other, [0] * len(rows), B, longest)",
        "GENERATE_ALL",
    ),
    Fault(
        f"{BATCHING}/row_batch.py",
        "[[ids.get(row, 0)] for",
        "[[ids.get(rows[0], 0)] for",
        "GENERATE_ALL",
    ),
    # ---- simulation ----
    Fault(
        f"{SIMULATION}/simulation.py",
        "torch.tensor(prompts, dtype=torch.int32, device=device),",
        "torch.tensor([1] * len(prompts), dtype=torch.int32, device=device),",
        "SIMULATED",
    ),
    Fault(
        f"{SIMULATION}/simulated_layer.py",
        "score = pins.score(score, positions[..., i : i + 1])",
        "pass",
        "SIMULATED PINS",
    ),
    Fault(
        f"{SIMULATION}/simulated_layer.py",
        "attends = stored.columns(i, i + 1)._replace(mask=one.mask)",
        "attends = one if removals else stored.columns(i, i + 1)._replace(mask=one.mask)",
        "SIMULATED NAMED_SPANS FEW_BITS",
    ),
    Fault(
        f"{SIMULATION}/removals.py",
        "rows = [without(spans, gone) for spans, gone in zip(due, self._gone, strict=True)]",
        "rows = due",
        "SIMULATED NAMED_SPANS",
    ),
    Fault(
        f"{SIMULATION}/simulation.py",
        "lengths = mask.sum(1).tolist()",
        "lengths = [N] * B",
        "SIMULATED PADDING",
    ),
    # ---- files and caches of transformers ----
    Fault(
        "hf/cache/from_dynamic_cache.py",
        "mask.to(keys.device)",
        "torch.ones_like(mask)",
        "FROM_DYNAMIC PADDING",
    ),
    Fault(
        "hf/cache/cache_file.py",
        'CacheState.from_dict(content["state"])',
        'CacheState.from_dict(content["state"])._replace(waits_for_pins=False)',
        "FILE PINS",
    ),
    # ---- bits and the torch backend ----
    Fault(
        "quantization.py",
        "_most(x), 127), up=True",
        "_most(x), 126), up=True",
        "TORCH_BACKEND BITS",
    ),
    Fault(
        "quantization.py",
        "[pairs & 15, pairs >> 4]",
        "[pairs >> 4, pairs & 15]",
        "TORCH_BACKEND FEW_BITS",
    ),
    Fault(
        f"{TORCH}/ranking.py",
        "(positions < policy.sinks)",
        "(positions <= policy.sinks)",
        "TORCH_BACKEND",
    ),
    Fault(f"{TORCH}/step.py", "seen = lengths + 1", "seen = lengths", "TORCH_BACKEND"),
    Fault(
        f"{TORCH}/step.py",
        "received = received.masked_fill(~real, 0)",
        "pass",
        "TORCH_BACKEND GAPS",
    ),
    Fault(
        f"{TORCH}/evict.py",
        "slots.seen_tokens.add_(tokens[:, 0])",
        "slots.seen_tokens.add_(Q)",
        "TORCH_BACKEND PADDING GAPS",
    ),
    Fault(
        f"{TORCH}/evict.py",
        "lost = all_scores.masked_fill(is_kept | (positions < 0), 0)",
        "lost = all_scores.masked_fill(is_kept, 0)",
        "TORCH_BACKEND",
    ),
)


def find(fault: Fault) -> str:
    """The error with which a program or a test finds a fault, or "" if none does.

    The child of a fork imports the copy, so that torch and transformers are imported once."""
    for name in ("torch", "transformers"):
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("h2o", "tests"):
            hidden = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, Path(folder, name), ignore=hidden)
        path, said = Path(folder, "h2o", fault.file), Path(folder, "said")
        path.write_text(replaced(path.read_text("utf-8"), fault), "utf-8")
        said.touch()
        if (child := os.fork()) == 0:
            try:
                _run_copy(folder, fault)
            except BaseException as error:
                said.write_text(f"{type(error).__name__}: {error}", "utf-8")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        return said.read_text("utf-8")


def _run_copy(folder: str, fault: Fault) -> None:
    """Run a fault's test with the package in a folder, or the programs of one draw until one fails,
    first those with most of the fault's modes."""
    for name in [x for x in sys.modules if x.split(".")[0] in ("h2o", "tests")]:
        del sys.modules[name]
    sys.path[:] = [folder, *(x for x in sys.path if x and Path(x).resolve() != ROOT)]
    os.chdir(folder)
    os.environ["H2O_CHECK"] = "1"
    import pytest
    import torch

    if fault.test:
        failed = pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", fault.test])
        assert failed != pytest.ExitCode.TESTS_FAILED, f"{fault.test} fails"
        return
    from h2o.hf.prompt import echo_scorer
    from tests.hf.draws import draw, modes_of
    from tests.hf.programs import run

    assert echo_scorer.__file__.startswith(folder)
    torch.set_num_threads(1)
    echo_scorer.FEWEST_HEADS = 1  # tiny models have few
    named = {*fault.modes.split()}
    for program in sorted(
        draw(0), key=lambda program: -len(named & {mode.name for mode in modes_of(program)})
    ):
        run(program)


def replaced(text: str, fault: Fault) -> str:
    """A file's text with a fault in it. Raises ValueError unless the line is there once."""
    if text.count(fault.old) != 1:
        raise ValueError(f"{fault.file} has {fault.old!r} {text.count(fault.old)} times, not once")
    return text.replace(fault.old, fault.new)


def main(numbers: list[str]) -> None:
    for number in map(int, numbers) if numbers else range(len(FAULTS)):
        found = find(FAULTS[number]) or "SURVIVES"
        print(
            f"{number}. {FAULTS[number].file}: {FAULTS[number].new}\n    {found:.200}", flush=True
        )


if __name__ == "__main__":
    main(sys.argv[1:])
