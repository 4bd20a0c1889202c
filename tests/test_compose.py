"""examples/compose: the files fit together, and vLLM accepts the service's command."""

from __future__ import annotations

import json
import re
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from h2o import H2OConfig
from h2o.vllm.versions import is_tested

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "examples" / "compose"
VLLM = ROOT / ".venv" / "vllm" / "bin" / "python"

if not FOLDER.is_dir():
    pytest.skip("the examples are not here", allow_module_level=True)
yaml = pytest.importorskip("yaml")

PARSE = """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

options = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[1:])
backend = getattr(options.attention_backend, "name", options.attention_backend)
print("PARSED", json.dumps([options.model_tag, backend, options.additional_config]))
"""


@pytest.fixture
def service():
    return yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))["services"]["vllm"]


def test_the_service_is_built_from_its_dockerfile(service):
    context = (FOLDER / service["build"]["context"]).resolve()
    assert context == ROOT
    dockerfile = context / service["build"]["dockerfile"]
    text = dockerfile.read_text("utf-8")
    assert is_tested(re.search(r"^FROM vllm/vllm-openai:v([\d.]+)$", text, re.M)[1])
    (copied,) = re.findall(r"^COPY (\S+) \S+$", text, re.M)
    wheels = re.findall(r'"(manylinux_\w+)": Platform', (ROOT / "tools/wheels.py").read_text())
    assert len(wheels) == 2
    for platform in wheels:
        assert fnmatch(f"dist/h2o_kv-0.1.0-cp310-abi3-{platform}.whl", copied)
    ignored = dockerfile.with_name("Dockerfile.dockerignore").read_text("utf-8").split()
    assert ignored == ["*", f"!{copied}"]


def test_ports_and_volumes(service):
    """The server is reachable from this machine only, and the health check uses the port that the
    server listens on."""
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    (inside,) = {port.rpartition(":")[2] for port in service["ports"]}
    assert service["healthcheck"]["test"][-1].startswith(f"http://localhost:{inside}/")
    named = yaml.safe_load((FOLDER / "compose.yaml").read_text("utf-8"))["volumes"]
    assert {volume.partition(":")[0] for volume in service["volumes"]} == set(named)


@pytest.mark.skipif(not VLLM.exists(), reason="vLLM has no environment here: make test-vllm")
@pytest.mark.timeout(300)
def test_vllm_accepts_the_command(service):
    assert service["entrypoint"] == ["vllm", "serve"]
    command = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"]]
    out = subprocess.run(
        [VLLM, "-c", PARSE, *command], capture_output=True, text=True, timeout=280, cwd=ROOT
    )
    assert out.returncode == 0, out.stderr
    model, backend, config = json.loads(out.stdout.rpartition("PARSED ")[2])
    assert model == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert backend == "CUSTOM"
    assert H2OConfig(**config.pop("h2o")) == H2OConfig(heavy=128, recent=128, sinks=4)
    assert not config
