"""Result files that an interrupted run continues, and the fingerprints they depend on."""

from __future__ import annotations

import json
import os

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from h2o import model_identity  # noqa: E402
from h2o.errors import UserError  # noqa: E402
from h2o.model_identity import files  # noqa: E402
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


@pytest.fixture
def stored(monkeypatch, tmp_path):
    """The folder of stored digests. Digests are stored for files that have just been written."""
    monkeypatch.setenv("H2O_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SETTLED", 0)
    return tmp_path / "cache" / "digests"


def overwritten(path, *, keep_times=False):
    """Change one byte in the file, between the bytes that a sample would take."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(files.LARGE // 4)
        byte = file.read(1)[0]
        file.seek(files.LARGE // 4)
        file.write(bytes([byte ^ 1]))
    if keep_times:  # as rsync and cp can
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("size", [files.LARGE // 2, files.LARGE + 1])
@pytest.mark.parametrize("keep_times", [False, True])
def test_one_byte_changes_the_fingerprint_of_a_file(stored, tmp_path, size, keep_times):
    path = tmp_path / "weights"
    path.write_bytes(bytes(size))
    seen = [model_identity.files_fingerprint([str(path)]) for _ in range(2)]
    overwritten(path, keep_times=keep_times)
    seen.append(model_identity.files_fingerprint([str(path)]))
    assert seen[0] == seen[1] != seen[2]


@pytest.mark.skipif(os.name == "nt", reason="Windows lets few users make links")
def test_files_behind_links(stored, tmp_path):
    """Snapshots of models are folders of links."""
    blobs, snapshot = [tmp_path / "a", tmp_path / "b"], tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "weights").symlink_to(blobs[0])
    for blob, content in zip(blobs, (b"a", b"b"), strict=True):
        blob.write_bytes(content * files.LARGE)
    seen = [model_identity.files_fingerprint([str(snapshot)])]
    (snapshot / "weights").unlink()
    (snapshot / "weights").symlink_to(blobs[1])
    seen.append(model_identity.files_fingerprint([str(snapshot)]))
    os.link(blobs[1], tmp_path / "another name")
    overwritten(tmp_path / "another name")
    seen.append(model_identity.files_fingerprint([str(snapshot)]))
    assert len(set(seen)) == 3


def test_the_digest_of_a_large_file_is_stored(stored, monkeypatch, tmp_path):
    """The next run reads the digest. A file that has just been written could be written again
    without another time, so its digest is not stored. Nor is that of a small file."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(files.LARGE))
    first = model_identity.files_fingerprint([str(path)])
    (file,) = stored.iterdir()
    state, _ = json.loads(file.read_text())
    for content in (json.dumps([state, "0" * 64]), "", "[1]"):
        file.write_text(content)
        assert (model_identity.files_fingerprint([str(path)]) == first) == (len(content) < 64)
    file.unlink()
    monkeypatch.setattr(files, "SETTLED", 10**12)
    assert model_identity.files_fingerprint([str(path)]) == first
    monkeypatch.setattr(files, "SETTLED", 0)
    path.write_bytes(b"small")
    model_identity.files_fingerprint([str(path)])
    assert not list(stored.iterdir())
    monkeypatch.setenv("H2O_CACHE", str(path))  # no folder, so nothing can be stored
    path.with_name("large").write_bytes(bytes(files.LARGE))
    assert model_identity.files_fingerprint([str(path.with_name("large"))])


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs a device without an end")
def test_devices_are_not_read():
    assert model_identity.files_fingerprint(["/dev/zero"]) == ""


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
