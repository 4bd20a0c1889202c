"""Fixtures shared by the tests of engines."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """(folder, model): a tiny model without a tokenizer."""
    from tests.vllm.engines import tiny  # this import needs vLLM

    folder = tmp_path_factory.mktemp("llama")
    return folder, tiny("llama", folder, head_dim=32)
