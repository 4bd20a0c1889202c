"""Whether h2o supports each family of transformers' own mapping, and why not.

    python -m tests.hf.families                              prints it
    python -m tests.hf.families docs/reference/families.txt  writes it

Write it after a change of transformers or h2o.

The verdict is about a family's default config. For the few families whose defaults no released
model has, it is about a config like that of a released model.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import transformers
from transformers.models.auto import modeling_auto
from transformers.utils import logging

from h2o import supports
from h2o.hf.support import Support

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.txt"
MAPPINGS = {
    "causal language models": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "models that read images too": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
_SPARSE = {"sparse_attention_config": {"sparse_attention_freq": [0] * 3 + [1] * 57}}
_KINDS = ["full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)]
AS_RELEASED = {
    "bamba": {"attn_layer_indices": [9, 18, 27]},
    "granitemoehybrid": {
        "layer_types": ["attention" if layer % 8 == 5 else "mamba" for layer in range(32)]
    },
    "lfm2": {"num_hidden_layers": 16, "layer_types": _KINDS},
    "lfm2_vl": {"text_config": {"num_hidden_layers": 16, "layer_types": _KINDS}},
    "minimax_m3_vl": {"text_config": _SPARSE},
    "minimax_m3_vl_text": _SPARSE,
}

AS_DECODERS = (
    "bert bert-generation camembert data2vec-text electra ernie roberta roberta-prelayernorm "
    "roc_bert xlm-roberta xlm-roberta-xl xmod"
).split()
"""Encoders that config.is_decoder=True turns into causal language models; see test_support.py."""


def verdict(name: str) -> str:
    """One line that says whether h2o supports a family, or why not."""
    try:
        config = transformers.CONFIG_MAPPING[name](**AS_RELEASED.get(name, {}))
    except Exception:  # each config raises a type of its own
        return "not supported: its config has no defaults of which a model could be made"
    support = supports(config)
    if support:
        return f"supported, {_layers(support)}"
    if name in AS_DECODERS:
        config.is_decoder = True
        if as_decoder := supports(config):
            return f"supported with config.is_decoder=True, {_layers(as_decoder)}"
    return f"not supported: {support.reason}"


def _layers(support: Support) -> str:
    return str(support).partition("supported, ")[2].partition(";")[0]


def said(mapping: str) -> dict[str, str]:
    """{family: `verdict`} for all families of a mapping in this version of transformers."""
    return {name: verdict(name) for name in MAPPINGS[mapping]}


def lines() -> Iterator[str]:
    yield f"transformers {transformers.__version__}"
    for mapping in MAPPINGS:
        families = said(mapping)
        supported = sum(text.startswith("supported,") for text in families.values())
        decoders = sum(text.startswith("supported with") for text in families.values())
        more = f", {decoders} more as decoders" if decoders else ""
        yield ""
        yield f"{mapping}: {supported} of {len(families)} families are supported{more}"
        yield ""
        for name, text in families.items():
            yield f"{name}: {text}"


def written(page: Path) -> dict[str, dict[str, str]]:
    """The verdicts in a file, as {mapping: {family: verdict}}."""
    verdicts: dict[str, dict[str, str]] = {}
    for line in page.read_text("utf-8").splitlines():
        name, _, text = line.partition(": ")
        if name in MAPPINGS:
            families = verdicts.setdefault(name, {})
        elif text:
            families[name] = text
    return verdicts


def main() -> None:
    logging.set_verbosity_error()
    text = "\n".join(lines()) + "\n"
    if len(sys.argv) == 1:
        print(text, end="")
    else:
        Path(sys.argv[1]).write_text(text, "utf-8")


if __name__ == "__main__":
    main()
