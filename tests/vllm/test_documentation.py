"""docs/how_to/serve_with_vllm.md is correct as it stands, except for model names, ports and
compiling."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from textwrap import indent

import torch

from h2o import H2OCache, H2OConfig, models, without_spans
from h2o.compat import with_cache
from tests.launch import ROOT, launch
from tests.vllm.engines import alone, tiny
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


SESSION = """
import sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

async def main():
    args = AsyncEngineArgs(
        model=sys.argv[1], dtype="float32", enforce_eager=True, skip_tokenizer_init=True,
        max_model_len=256, max_num_batched_tokens=256, kv_cache_memory_bytes=8 << 20,
        additional_config={"h2o": {"heavy": 8, "recent": 8}},
    )
    llm = AsyncLLM.from_engine_args(args)
    answers = await two_turns(llm, [*range(2, 42)], [*range(42, 62)])
    llm.shutdown()
    print("\\nTOKENS", answers)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_a_session_that_forgets(tmp_path):
    """The page's session answers as an H2OCache does."""
    model, code = tiny("llama", tmp_path / "model", head_dim=32), block("import asyncio")
    first, second = [*range(2, 42)], [*range(42, 62)]
    config, new = H2OConfig(heavy=8, recent=8), 20
    (told,) = alone(model, [first], config, new)
    cache = H2OCache(model.config, config)
    text = torch.tensor([first + told[:-1]])
    with torch.no_grad():
        for part in (text[:, :40], *text[:, 40:].split(1, dim=1)):
            model(part, **with_cache(cache))
    cache.evict([(5, 20)], ids=text)
    ids = torch.cat([without_spans(text, [(5, 20)]), torch.tensor([second])], 1)
    known = {"attention_mask": torch.ones_like(ids), **with_cache(cache)}
    out = model.generate(ids, **known, max_new_tokens=new, do_sample=False)
    greedy = "temperature=0, ignore_eos=True, detokenize=False, max_tokens=20,"
    (tmp_path / "script.py").write_text(code.replace("max_tokens=20,", greedy) + SESSION)
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    printed, _ = launch([tmp_path / "script.py", tmp_path / "model"], launcher=[], **environment)
    (answers,) = re.findall("^TOKENS (.*)$", printed, re.M)
    assert json.loads(answers) == [told, out[0, -new:].tolist()]
