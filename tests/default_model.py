"""Small stand-ins for the default model, for tests that do not look at the answers."""

from __future__ import annotations

from typing import Any

import pytest

from h2o import models


def narrow_default_model(layers: int) -> tuple[Any, Any]:
    """Make (model, tokenizer) with the default model's heads, positions and vocabulary, and random
    weights.

    A forward pass takes a hundredth of the default model's time. Attention is sharp.
    """
    model, tokenizer = random_default_model(
        num_hidden_layers=layers,
        head_dim=32,
        hidden_size=144,
        intermediate_size=128,
        initializer_range=0.3,
    )
    model.set_attn_implementation("h2o")
    return model, tokenizer


def random_default_model(**sizes: Any) -> tuple[Any, Any]:
    """Make (model, tokenizer) from the default model's config with other sizes, and random
    weights."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    try:
        folder = models.embedded_folder()
    except models.UserError as error:
        pytest.skip(str(error))
    config = transformers.AutoConfig.from_pretrained(folder, **sizes)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    return model, transformers.AutoTokenizer.from_pretrained(folder)
