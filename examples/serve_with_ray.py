"""Serve several vLLM engines with h2o behind one address, with Ray Serve LLM.

    pip install 'ray[serve]==2.60.0'     # where vLLM and h2o are installed
    python examples/serve_with_ray.py --model NAME --replicas 2 --h2o '{"budget": 256}'

Clients then use http://127.0.0.1:8000/v1 and the model's NAME. Ray starts on this machine, or joins
a cluster that already runs on it (`ray start`). Requests whose texts begin alike go to the replica
that has stored their prefix, as long as the replicas are about equally busy. Prompts must be text:
for token ids this router of Ray 2.60 raises ZeroDivisionError. On GPUs add
`--engine '{"attention_backend": "CUSTOM"}'`. If replicas share the CPUs of a machine, set
VLLM_CPU_OMP_THREADS_BIND=nobind, and OMP_NUM_THREADS to the cores of one replica.
"""

from __future__ import annotations

import argparse
import json

import ray
import torch
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
from ray.serve.llm.request_router import PrefixCacheAffinityRouter

NO_CPUS = {"ray_actor_options": {"num_cpus": 0}}
"""Ray reserves a CPU or GPU for each engine, and none for the processes that forward requests."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a name on the Hub, or a folder")
    parser.add_argument("--name", help="name that clients use (default: that of --model)")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--h2o", default='{"budget": 256}', help="entry of additional_config")
    parser.add_argument("--engine", default="{}", help="other options of vLLM's engine, in JSON")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    entry = {"additional_config": {"h2o": json.loads(options.h2o)}}
    router = {"request_router_config": {"request_router_class": PrefixCacheAffinityRouter}}
    config = LLMConfig(
        model_loading_config={
            "model_id": options.name or options.model,
            "model_source": options.model,
        },
        accelerator_config={"kind": "gpu" if torch.cuda.is_available() else "cpu"},
        engine_kwargs=entry | json.loads(options.engine),
        deployment_config={"num_replicas": options.replicas} | router | NO_CPUS,
    )
    ray.init(ignore_reinit_error=True)
    serve.start(http_options={"host": options.host, "port": options.port})
    ingress = {"num_replicas": 1} | NO_CPUS
    app = build_openai_app({"llm_configs": [config], "ingress_deployment_config": ingress})
    serve.run(app, blocking=True)


if __name__ == "__main__":
    main()
