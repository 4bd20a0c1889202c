"""What a cache knows of a conversation has one place, and every copy carries all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from h2o import H2OCache
from h2o.compat import with_cache
from h2o.hf.conversation.state import NO_TEXT, CacheState, NewColumns, RowState, SeenText
from tests.hf.tiny import prompts, shared

HF = Path(__file__).parents[2] / "h2o" / "hf"
SMALL = {"heavy": 6, "recent": 6}


def unlike_any_other():
    """A state in which each field differs from its default, and each row from the others."""
    text = SeenText(torch.tensor([[5, 6, 7], [20, 17, 20]]))
    rows = tuple(
        RowState(-n, False, n == 1, 30 + n, [(n, n + 2)], n, 40 + n, 60 + n, 70 + n)
        for n in range(1, 4)
    )
    return CacheState(20, 19, 18, True, True, 50, rows, text)


def filled():
    ours = shared("llama")
    cache = H2OCache(ours.config, **SMALL)
    ours(torch.cat(prompts(20) * 3), **with_cache(cache))
    cache.guard.put(unlike_any_other())
    return ours, cache


def facts(state):
    """A state as plain numbers."""
    return state.as_dict()


def test_the_state_differs_from_the_default_in_every_field():
    state, rows = unlike_any_other()._asdict(), unlike_any_other().rows
    default = CacheState()._asdict()
    changed = {name for name, x in state.items() if name == "text" or x != default[name]}
    assert changed == set(CacheState._fields) - {"last_pass"}
    assert state["text"] is not NO_TEXT
    for name in RowState._fields:
        values = [getattr(row, name) for row in rows]
        assert any(x != RowState._field_defaults[name] for x in values), name


def test_a_fork_has_it():
    _, cache = filled()
    assert facts(cache.fork().guard.state) == facts(unlike_any_other())


def test_a_file_has_it(tmp_path):
    ours, cache = filled()
    cache.save(tmp_path / "cache")
    assert facts(H2OCache.load(tmp_path / "cache", ours).guard.state) == facts(unlike_any_other())


@pytest.mark.parametrize("rows", [[2, 0], [1, 1, 0, 2]])
def test_selected_rows_have_it(rows):
    _, cache = filled()
    cache.batch_select_indices(rows)
    got, wanted = facts(cache.guard.state), facts(unlike_any_other())
    wanted["rows"] = [wanted["rows"][row] for row in rows]
    wanted["text"] = {name: [x[row] for row in rows] for name, x in wanted["text"].items()}
    assert got == wanted


def test_repeated_rows_have_it():
    _, cache = filled()
    copies = cache.fork(rows=2).guard.state
    assert [row.offset for row in copies.rows] == [-1, -1, -2, -2, -3, -3]
    assert copies.text.counts() == [20, 20, 17, 17, 20, 20]


def test_a_taken_back_pass_gives_the_state_before_it():
    ours, (ids,) = shared("llama"), prompts(24)
    cache = H2OCache(ours.config, **SMALL)
    ours(ids[:, :20], **with_cache(cache))
    before = facts(cache.guard.state)
    cache.activate_past_recording()
    ours(ids[:, 20:], **with_cache(cache))
    assert facts(cache.guard.state) != before
    cache.crop(-4)
    assert facts(cache.guard.state) == before


def test_a_failed_pass_leaves_the_state_before_it():
    ours, (ids,) = shared("llama"), prompts(24)
    cache = H2OCache(ours.config, **SMALL)
    ours(ids[:, :20], **with_cache(cache))
    before = cache.guard.state
    hook = ours.model.layers[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ours(ids[:, 20:], **with_cache(cache))
    hook.remove()
    assert cache.guard.state is before
    assert cache.report().broken


def test_records_do_not_hold_all_earlier_ones():
    ours, (ids,) = shared("llama"), prompts(30)
    cache = H2OCache(ours.config, **SMALL)
    cache.activate_past_recording()
    for piece in ids.split([20, 5, 5], 1):
        ours(piece, **with_cache(cache))
    assert cache.guard.state.last_pass.before.last_pass is None


STATE = r"(\bguard|\bthe_pass|self\.current)\.(state|current|planned|finished|pins|after|stored|waiting|prompt|accesses|counter|only_scores|records_passes|checked_config|has_independent_rows)\b"  # noqa: E501


def test_two_files_write_the_state():
    """Only the guard may change the state of a conversation, and a pass its own."""
    written = re.compile(rf"{STATE}(\[[^]]*\])? (=|\+=) |{STATE}\.(append|add)\(")
    writers = {
        path.relative_to(HF).as_posix()
        for path in HF.rglob("*.py")
        if written.search(path.read_text(encoding="utf-8"))
    }
    assert writers == {"conversation/pass_guard.py"}


def test_a_step_is_recorded_without_its_tokens():
    """No numbers are read of a step on a GPU, and it must not make offsets unknown."""
    before = unlike_any_other()
    then = NewColumns(1).advance(before, None, records=True, is_step=True)
    assert then.rows == before.rows
    assert then.last_pass.before[:-1] == before[:-1]
