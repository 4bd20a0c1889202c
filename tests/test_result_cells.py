"""Files of results that an interrupted run goes on with, and what they depend on."""

from __future__ import annotations

import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from h2o import model_identity  # noqa: E402
from h2o.errors import UserError  # noqa: E402
from h2o.result_cells import Cells  # noqa: E402
from tests.evaluation import conftest  # noqa: E402


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT's
def test_fingerprints_of_models():
    """Adapters and quantized weights count; the name and how the weights are stored do not."""
    peft = pytest.importorskip("peft")
    model = conftest.build()
    plain = model_identity.model_fingerprint(model)
    twin = conftest.build()
    twin.config._name_or_path = "elsewhere"
    assert (
        model_identity.model_fingerprint(twin) == plain == model_identity.model_fingerprint(model)
    )
    with torch.no_grad():
        twin.model.layers[1].mlp.up_proj.weight[3] += 1
    identities = {
        plain,
        model_identity.model_fingerprint(twin),
        model_identity.model_fingerprint(conftest.build("opt")),
    }
    identities.add(model_identity.model_fingerprint(conftest.build().to(torch.bfloat16)))
    for seed in (0, 1):
        base = conftest.build()
        torch.manual_seed(seed)
        lora = peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False)
        identities.add(model_identity.model_fingerprint(peft.get_peft_model(base, lora)))
    assert len(identities) == 6


def test_two_runs_into_one_folder_lose_nothing(tmp_path):
    one, two = (Cells(tmp_path / "cells.json", "test") for _ in range(2))
    one.put({"setting": "a"}, {"value": 1})
    two.put({"setting": "b"}, {"value": 2})
    one.put({"setting": "c"}, {"value": 3})
    again = Cells(tmp_path / "cells.json", "test")
    assert [again.find({"setting": name}) for name in "abc"] == [{"value": i} for i in (1, 2, 3)]
    assert one.find({"setting": "b"}) == {"value": 2}


def test_many_processes_write_at_once(tmp_path):
    """Whoever reads, adds a cell and writes holds the lock for all of that."""
    program = (
        "import sys; from pathlib import Path; from h2o.result_cells import Cells\n"
        "cells = Cells(Path(sys.argv[1]), 'test')\n"
        "for i in range(20): cells.put({'by': sys.argv[2], 'i': i}, {'value': i})"
    )
    arguments = [sys.executable, "-c", program, str(tmp_path / "cells.json")]
    running = [subprocess.Popen([*arguments, name]) for name in "ab"]
    assert [process.wait(60) for process in running] == [0, 0]
    assert len(Cells(tmp_path / "cells.json", "test").cells) == 40


def test_results_of_something_else_are_not_overwritten(tmp_path):
    file = tmp_path / "cells.json"
    file.write_text('{"mine": true}')
    with pytest.raises(UserError, match="no result file of 'test'"):
        Cells(file, "test")
    assert file.read_text() == '{"mine": true}'
