"""Models whose weights torchao has quantized. h2o sees the keys and reads no quantized weight."""

from __future__ import annotations

import pytest
import torch

from h2o import H2OCache, H2OConfig, patched
from tests.hf.tiny import FAMILIES, greedy, model, prompts

pytest.importorskip("torchao")

NAMES = [name for name, family in FAMILIES.items() if family.weights]


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_quantized(name):
    ours = model(name)
    kinds = {type(x.weight) for x in ours.modules() if isinstance(x, torch.nn.Linear)}
    assert any(issubclass(kind, torch.Tensor) and "Int" in kind.__name__ for kind in kinds)


@pytest.mark.parametrize("name", NAMES)
def test_patched(name):
    ours, theirs = model(name, "sdpa"), model(name, "sdpa")
    (ids,) = prompts(30)
    full = greedy(theirs, {"input_ids": ids}).tolist()
    with patched(ours, H2OConfig.full()):
        assert greedy(ours, {"input_ids": ids}).tolist() == full
    with patched(ours, heavy=5, recent=5) as patch:
        small = greedy(ours, {"input_ids": ids})
        assert patch.cache.report().layers[0].kept == [10]
    assert small.tolist() != full


@pytest.mark.parametrize("name", NAMES)
def test_a_file_is_told_from_that_of_other_weights(name, tmp_path):
    """A fingerprint leaves out quantized weights, and must still notice that the others differ."""
    ours = model(name)
    H2OCache(ours.config, heavy=6, recent=6).save(tmp_path / "document", ours)
    for parameter in ours.parameters():
        if type(parameter) is torch.nn.Parameter:
            parameter.neg_()
    with pytest.raises(ValueError, match=r"the weights of .* differ"):
        H2OCache.load(tmp_path / "document", ours)
