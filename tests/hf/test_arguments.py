"""Every argument of every public function meets every odd value of its kind.

The answer is that of the plain value, or an error of the class that the kind has, which comes
before anything has changed. `docs/reference/arguments.md` lists the kinds.
"""

from __future__ import annotations

import inspect
import warnings

import pytest

import h2o
from h2o import H2OCache, H2OConfig, Profile, ops
from h2o.analysis.result import Analysis
from h2o.hf.cache_state.kept_keys import Kept
from h2o.hf.simulation.simulation import Simulation
from tests.hf.entries import ENTRIES
from tests.hf.entry_calls import Current

PLAIN = {"UnsupportedError", "__version__", "ops", "Result", "H2OLayer"}
"""Names that h2o exports, and that users do not call"""

BY_TRANSFORMERS = {
    "get_mask_sizes", "update", "get_conv_state", "update_conv_state", "update_recurrent_state",
    "get_seq_length", "attend", "budget_pass", "layers", "max_cache_len", "is_updated",
}  # fmt: skip
"""Methods that transformers or h2o calls"""


def public() -> dict[str, object]:
    """Every function that users call, by the name that it has in `ENTRIES`."""
    named = {name: getattr(h2o, name) for name in h2o.__all__ if name not in PLAIN}
    for name in ops.__all__:
        if inspect.isfunction(getattr(ops, name)):
            named[f"ops.{name}"] = getattr(ops, name)
    for owner in (H2OConfig, Profile, H2OCache, Kept, Simulation, Analysis):
        for base in owner.__mro__:
            if not base.__module__.startswith("h2o."):
                continue
            for name, method in vars(base).items():
                is_method = inspect.isfunction(method) or isinstance(method, classmethod)
                if is_method and not name.startswith("_") and name not in BY_TRANSFORMERS:
                    named[f"{owner.__name__}.{name}"] = getattr(owner, name)
    return named


@pytest.mark.parametrize("name", sorted(public()))
def test_every_argument_of_every_public_function_has_a_kind(name):
    assert name in ENTRIES, f"list {name} and the kinds of its arguments in tests/hf/entries.py"
    entry = ENTRIES[name]
    parameters = inspect.signature(public()[name]).parameters.values()
    fixed = {x.name for x in parameters if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)}
    missing = {x for x in fixed if not x.startswith("_")} - {"self"}
    missing -= {*entry.arguments, *entry.others}
    assert not missing, f"list {sorted(missing)} of {name} in tests/hf/entries.py"


CASES = [(name, x) for name, entry in ENTRIES.items() for x in entry.arguments]


@pytest.mark.parametrize(("name", "argument"), CASES, ids=[".".join(x) for x in CASES])
def test_an_odd_value_is_taken_for_its_plain_one_or_refused(name, argument):
    entry = ENTRIES[name]
    good, values = entry.arguments[argument]
    wanted = _call(entry, {argument: good})
    found = [
        f"{name}({argument}={value!r:.80}) {fault}"
        for odd in values
        for value in [odd.make()]
        if (fault := _fault(entry, {argument: value}, odd.raises, wanted))
    ]
    assert not found, "\n".join(found)


def _fault(entry, argument, error, wanted):
    """What is wrong with the answer to an odd value; empty if nothing is. A subclass of the error,
    such as UnicodeError or UnsupportedError, is wrong too."""
    expected = error and (entry.error or error)
    try:
        returned = _call(entry, argument)
    except Exception as raised:
        if type(raised) is not expected or not str(raised):
            return f"raised {raised!r:.300}, wanted {expected and expected.__name__}"
        return ""
    if expected:
        return f"returned {returned!r:.100}, wanted {expected.__name__}"
    return "" if returned == wanted else f"returned {returned!r:.100}, wanted {wanted!r:.100}"


def _call(entry, argument):
    """Call a function with one argument, and check that an error changes nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Current.begin()
        before = entry.state and entry.state()
        try:
            return entry.call(**argument)
        except Exception:
            assert entry.state is None or entry.state() == before, argument
            raise
