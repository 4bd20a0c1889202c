"""Result files that an interrupted run continues, and the fingerprints they depend on."""

from __future__ import annotations

import json

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from h2o import model_identity  # noqa: E402
from h2o.errors import UserError  # noqa: E402
from h2o.result_file import ResultFile  # noqa: E402
from tests.evaluation import conftest  # noqa: E402


@pytest.mark.filterwarnings("ignore::FutureWarning")  # from PEFT
def test_fingerprints_of_models():
    """Weights, their rounding, the architecture and adapters change the fingerprint. The model's
    name does not."""
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


@pytest.mark.parametrize("name", ["plain", "lr=0.1", "step=1,seed=2", "a,b", 'the "best" one'])
def test_fingerprints_of_files(tmp_path, name):
    """A file that changes must change the fingerprint of every argument that names its folder."""
    folder = tmp_path / name
    folder.mkdir()
    texts = [f"{folder}", json.dumps({"pretrained": f"{folder}", "more": [{"dtype": "auto"}, 1]})]
    if "," not in name:
        texts.append(f"dtype=auto,pretrained={folder}")
    seen = set()
    for content in ("one", "two"):
        (folder / "weights").write_text(content)
        seen |= {(i, model_identity.files_fingerprint([text])) for i, text in enumerate(texts)}
    assert len(seen) == 2 * len(texts)
    assert model_identity.files_fingerprint(["a system prompt " * 500, "", "[]", "5"]) == ""


def test_two_runs_into_one_folder_lose_nothing(tmp_path):
    file = tmp_path / "new" / "cells.jsonl"
    one, two = (ResultFile(file) for _ in range(2))
    one.put({"setting": "a"}, {"value": 1})
    two.put({"setting": "b"}, {"value": 2})
    one.put({"setting": "c"}, {"value": 3})
    with file.open("a") as unfinished:
        unfinished.write('\n{"facts": {"setting": "d"}, "res')
    again = ResultFile(file)
    assert [again.find({"setting": name}) for name in "abc"] == [{"value": i} for i in (1, 2, 3)]
    assert again.find({"setting": "d"}) is None
    again.put({"setting": "d"}, {"value": 4})
    assert ResultFile(file).find({"setting": "d"}) == {"value": 4}


@pytest.mark.parametrize("content", ["\n", '\n{"fac', '\n{"facts": {"setting'])
def test_a_run_that_ended_in_its_first_result_goes_on(tmp_path, content):
    file = tmp_path / "cells.jsonl"
    file.write_text(content)
    ResultFile(file).put({"setting": "a"}, {"value": 1})
    assert ResultFile(file).find({"setting": "a"}) == {"value": 1}


@pytest.mark.parametrize(
    "content", [b'{"mine": true}', b"a text", b"\xff\xfe", b'{"facts": {}}\nx']
)
def test_results_of_something_else_are_not_overwritten(tmp_path, content):
    file = tmp_path / "cells.jsonl"
    file.write_bytes(content)
    with pytest.raises(UserError, match="is not a file of results"):
        ResultFile(file)
    assert file.read_bytes() == content
