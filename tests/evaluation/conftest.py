"""A byte tokenizer and tiny models to evaluate, made here without network."""

from __future__ import annotations

import functools
import json
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

POSITIONS = 320
ENDED, PADDED = 256, 257


def exit_code(run, *arguments):
    """Exit code of a command. Wrong arguments end it by SystemExit."""
    try:
        return run(*arguments)
    except SystemExit as exit_:
        return exit_.code


def measured(folder):
    """Results that lm-eval has written, by setting. Only the newest counts."""
    files = sorted(folder.rglob("results_*.json"), key=lambda file: file.name)
    contents = [json.loads(file.read_text()) for file in files]
    return {content["config"]["h2o"]["setting"]: content for content in contents}


def table_of(text):
    """Rows of a printed table by setting, as {title: cell}. Titles have no two blanks in a row."""
    lines = text.splitlines()
    under = next(i for i, line in enumerate(lines) if line.startswith("---"))
    ends = [match.span() for match in re.finditer("-+", lines[under])]
    cells = [
        [line[a:b].strip() for a, b in ends]
        for line in [lines[under - 1], *lines[under + 1 : lines.index("", under)]]
    ]
    return {row[0]: dict(zip(cells[0], row, strict=True)) for row in cells[1:] if row[0][:1] != "*"}


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def lm_eval_apart(tmp_path, monkeypatch):
    """lm-eval with its caches in a folder of the test, and without its slow parts."""
    lm_eval_tasks = pytest.importorskip("lm_eval.tasks")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "datasets"))
    # Once set up, lm-eval logs to the stderr of the test that came first.
    monkeypatch.setattr("lm_eval.utils._LOGGING_CONFIGURED", True)
    # Listing tasks that could be downloaded takes ten seconds, listing the environment two.
    only_own = functools.partial(lm_eval_tasks.TaskManager, include_defaults=False)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", only_own)
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)


@pytest.fixture(scope="session")
def tokenizer():
    """A tokenizer with one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(alphabet)}
    vocabulary |= {"<end>": ENDED, "<pad>": PADDED}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<end>", pad_token="<pad>", model_max_length=POSITIONS
    )


def build(model_type: str = "llama"):
    """A model with sharp attention, so that evicted keys make a difference."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(
        model_type,
        vocab_size=258,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        ffn_dim=48,
        word_embed_proj_dim=32,
        max_position_embeddings=POSITIONS,
        initializer_range=0.4,
        init_std=0.4,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=ENDED,
        pad_token_id=PADDED,
    )
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def passes(monkeypatch):
    """Number of batch rows of each forward pass of a Llama."""
    rows, original = [], LlamaForCausalLM.forward

    @functools.wraps(original)
    def forward(self, input_ids=None, **kwargs):
        rows.append(input_ids.shape[0])
        return original(self, input_ids, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "forward", forward)
    return rows


@pytest.fixture(scope="session")
def folder(tmp_path_factory, tokenizer):
    """Folder of the saved Llama, for --model."""
    path = tmp_path_factory.mktemp("model")
    model = build()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path
