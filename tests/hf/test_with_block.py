"""h2o's context managers warn if `with` is forgotten."""

from __future__ import annotations

import gc
import warnings

import pytest

import h2o
from tests.hf.tiny import model

BLOCKS = {
    "patched": lambda ours: h2o.patched(ours, heavy=40, recent=40),
    "simulated": lambda ours: h2o.simulated(ours, heavy=40, recent=40),
    "packed_weights": h2o.packed_weights,
}
every_block = pytest.mark.parametrize("name", BLOCKS)


@every_block
def test_a_block_without_with(name):
    with pytest.warns(UserWarning, match=rf"h2o.{name}\(\) was called without `with`"):
        BLOCKS[name](model("llama"))


@every_block
def test_blocks_and_decorators_do_not_warn(name):
    ours = model("llama")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with BLOCKS[name](ours):
            pass
        decorated = BLOCKS[name](ours)(lambda: "done")
        assert decorated() == decorated() == "done"
        del decorated


@every_block
def test_wrong_arguments_are_an_error_only(name):
    with pytest.raises(TypeError, match="required positional argument"):
        getattr(h2o, name)()
    gc.collect()  # an exception of __del__ would be a warning, and so an error, here
