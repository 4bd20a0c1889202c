"""examples/kvpress_press.py, run in kvpress' own environment, keeps what an H2OCache keeps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoTokenizer  # noqa: E402

import h2o  # noqa: E402
from h2o.compat import with_cache  # noqa: E402
from h2o.utils.filesystem import cache_folder  # noqa: E402
from tests.test_cli import tiny  # noqa: E402, F401

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "examples" / "kvpress_press.py"
ENVIRONMENT = cache_folder() / "bench" / "kvpress"

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not SCRIPT.exists(), reason="the examples are not here"),
    pytest.mark.skipif(
        not (ENVIRONMENT / "installed").exists(),
        reason="kvpress has no environment here: python -m benchmarks kvpress makes one",
    ),
]

PRESSED = """
import json, sys, torch
from kvpress_press import H2OPress
from transformers import DynamicCache, LlamaForCausalLM

folder, ids, settings = json.loads(sys.argv[1])
model = LlamaForCausalLM.from_pretrained(folder).eval()

def read(press, **more):
    cache = DynamicCache()
    with torch.no_grad(), press(model):
        model(torch.tensor([ids]), past_key_values=cache, **more)
    return [layer.keys for layer in cache.layers]

whole, held = read(H2OPress()), []
for setting in settings:
    cut = read(H2OPress(**setting))
    same = [(x[0, :, :, None] == y[0, :, None]).all(-1).any(-1) for x, y in zip(whole, cut)]
    held.append([[head.nonzero()[:, 0].tolist() for head in layer] for layer in same])
refused = []
for setting, more in (
    ({"compression_ratio": 0.9, "sinks": 4, "recent": 1.0}, {}),
    ({"compression_ratio": 0.5}, {"attention_mask": torch.tensor([[0] + [1] * (len(ids) - 1)])}),
):
    try:
        read(H2OPress(**setting), **more)
    except ValueError as error:
        refused.append(str(error))
print(json.dumps([held, refused]))
"""

SETTINGS = {  # for a prompt of 60 tokens: the press's settings, and those of an equal cache
    "sum": ({"compression_ratio": 0.7}, {"heavy": 9, "recent": 9}),
    "mean": (
        {"compression_ratio": 0.5, "recent": 0.2, "sinks": 3, "score_by": "mean"},
        {"heavy": 21, "recent": 6, "sinks": 3, "score_by": "mean"},
    ),
    "max": (
        {"compression_ratio": 0.7, "recent": 0.5, "sinks": 2, "score_by": "max"},
        {"heavy": 7, "recent": 9, "sinks": 2, "score_by": "max"},
    ),
}


def kvpress(*arguments: str) -> str:
    """Output of a program run in kvpress' environment, with this checkout and its examples on the
    path."""
    done = subprocess.run(
        [ENVIRONMENT / "bin" / "python", *arguments],
        capture_output=True, text=True, timeout=240, check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}:{SCRIPT.parent}", "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_keeps_what_a_cache_keeps(tiny):  # noqa: F811
    ids = torch.randint(2, 250, (60,), generator=torch.Generator().manual_seed(3)).tolist()
    pressed = [press for press, _ in SETTINGS.values()]
    held, refused = json.loads(kvpress("-c", PRESSED, json.dumps([tiny, ids, pressed])))
    model, _ = h2o.load_model(tiny)
    for ours, theirs in zip((ours for _, ours in SETTINGS.values()), held, strict=True):
        cache = h2o.H2OCache(model, **ours, min_tokens=0)
        with torch.no_grad():
            model(torch.tensor([ids]), **with_cache(cache))
        kept = [cache.kept(layer).positions[0].tolist() for layer in range(len(theirs))]
        assert theirs == kept
        assert len({tuple(head) for layer in kept for head in layer}) > 1, "heads differ"
    assert "lower one of the three" in refused[0]
    assert "padding" in refused[1]


def test_the_pipeline_takes_it(tiny, tmp_path):  # noqa: F811
    model = shutil.copytree(tiny, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.bos_token = "a"  # the pipeline needs it where there is no chat template
    tokenizer.save_pretrained(model)
    text = tmp_path / "text.txt"
    text.write_text("The tower was built by Brandt in 1846. " * 9, "utf-8")
    out = kvpress(
        str(SCRIPT), "--model", str(model), "--context", str(text), "--question", "Who built it?",
        "--max-new-tokens", "4",
    )  # fmt: skip
    assert [line.split(":")[0].strip() for line in out.splitlines()[-2:]] == [
        "100% of the keys",
        "20% of the keys",
    ]
