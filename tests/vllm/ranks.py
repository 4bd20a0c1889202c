"""python tests/vllm/ranks.py FOLDER RANKS ENTRY: answers of a model on this many tensor parallel
ranks, as a line of JSON with their tokens, printed twice."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path


def main() -> None:
    folder, ranks, entry = sys.argv[1:]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # vLLM would compile a rank's part of the embedding
    from tests.vllm import engines

    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    options = {"tensor_parallel_size": int(ranks), "distributed_executor_backend": "mp"}
    with engines.engine(Path(folder), json.loads(entry), **options) as llm:
        for _ in range(2):  # the second time each rank uses its stored prompts
            print("\n" + json.dumps(engines.served(llm, engines.prompts())))


if __name__ == "__main__":
    main()
