"""docs/how_to/serve_with_vllm.md is correct as it stands, except for model names, ports and
compiling."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from textwrap import indent

from h2o import models
from tests.launch import ROOT, launch
from tests.vllm.servers import answering, free_port, launched, openai

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
PAGE = (ROOT / "docs/how_to/serve_with_vllm.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(?:bash|python)\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE)
FOLDER = str(models.embedded_folder())


def block(beginning: str) -> str:
    (found,) = [text for text in BLOCKS if text.startswith(beginning)]
    return found.replace("\\\n", "")  # a shell line that continues


def test_the_server_and_its_clients(tmp_path):
    """The page's requests work, by curl and by the `openai` client with its own budget."""
    port, log = free_port(), tmp_path / "log"
    lines = block(f"python -m vllm.entrypoints.openai.api_server --model {MODEL}").replace(
        "localhost:8000", f"127.0.0.1:{port}"
    )
    command, _, asked = lines.partition("curl")
    command = shlex.split(command.replace(MODEL, FOLDER))
    assert command[0] == "python"
    own = ["--served-model-name", MODEL, "--port", str(port), "--enforce-eager"]
    process = launched([sys.executable, *command[1:], *own], log)
    with answering(process, port, log):
        out = subprocess.run(shlex.split("curl -sS" + asked), capture_output=True, text=True)
        assert 0 < json.loads(out.stdout)["usage"]["completion_tokens"] <= 50
        names = {"openai": openai, "NAME": MODEL, "text": "A lighthouse is"}
        code = block("import openai").replace("localhost:8000", f"127.0.0.1:{port}")
        exec(code, names)
        assert 0 < names["answer"].usage.completion_tokens <= 50
    assert re.search(r"h2o: \d+ requests fit, and \d+ of the longest ", log.read_text())


BATCH = f"""
if __name__ == "__main__":  # where vLLM starts its engine anew, it imports this
    name, prompts = {FOLDER!r}, ["A lighthouse is", "Once"]
%s
    print("\\nTOKENS", *(len(one.outputs[0].token_ids) for one in answers))
"""


def test_batches_without_a_server(tmp_path):
    """The page's batch works as a script."""
    code = block("import vllm").replace("name,\n", "name,\n    enforce_eager=True,\n", 1)
    assert "enforce_eager" in code
    (tmp_path / "script.py").write_text(BATCH % indent(code, "    "))
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    out, _ = launch([tmp_path / "script.py"], launcher=[], **environment)
    (tokens,) = re.findall("^TOKENS (.*)$", out, re.M)
    assert all(0 < int(n) <= 100 for n in tokens.split())
    assert len(tokens.split()) == 2
