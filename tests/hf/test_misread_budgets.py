"""Budgets that are easily misread: percentages, fractions of a first turn, and `min_tokens`.

Each is accepted, and a UserWarning at the user's own line says what it means.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings

import pytest
import torch

import h2o
from h2o import H2OCache, H2OConfig
from h2o.cli import main
from h2o.compat import with_cache
from h2o.evaluation.setting import from_config, parse
from tests.hf.tiny import greedy, model, prompts
from tests.test_cli import tiny  # noqa: F401

FEW = "an int is a number of keys"


@contextlib.contextmanager
def warned_once(words: str):
    """The block must give a single warning with these words, which points to this file."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    found = [(x.category, x.filename, str(x.message)) for x in caught]
    assert found == [(UserWarning, __file__, found[0][2])] if found else False, found
    assert words in found[0][2]


@contextlib.contextmanager
def without_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# ---- Percentages ---------------------------------------------------------------------------------

PERCENTAGES = {
    "budget": lambda ours, ids: H2OConfig(budget=20),
    "heavy, recent": lambda ours, ids: H2OConfig(heavy=10, recent=10),
    "robust": lambda ours, ids: H2OConfig.robust(20),
    "authors": lambda ours, ids: H2OConfig.authors(20),
    "calibrated": lambda ours, ids: H2OConfig.calibrated(20),
    "echo": lambda ours, ids: H2OConfig.preset("echo", 20),
    "setting": lambda ours, ids: parse("budget:20"),
    "cache": lambda ours, ids: ours(ids, **with_cache(H2OCache(ours, budget=20))),
    "patched": lambda ours, ids: h2o.patched(ours, budget=20).__enter__(),
    "simulated": lambda ours, ids: h2o.simulated(ours, budget=20).__enter__(),
    "generate_all": lambda ours, ids: [*h2o.generate_all(
        ours, ids.tolist(), rows=1, budget=20, max_new_tokens=2)],
    "document": lambda ours, ids: h2o.compress_document(ours, ids, budget=20),
}  # fmt: skip


@pytest.mark.parametrize("call", PERCENTAGES)
def test_a_percentage_is_noticed(call):
    ours, (ids,) = model("llama"), prompts(60)
    with warned_once("20: an int is a number of keys, so each head keeps 20 keys. For 20% write "
                     if call != "heavy, recent" else "write heavy=0.1, recent=0.1"):  # fmt: skip
        PERCENTAGES[call](ours, ids)


def test_budgets_that_are_meant_are_not_noticed(tmp_path):
    ours, (ids,) = model("llama"), prompts(60)
    with without_warning():
        for fields in (
            {"budget": 32}, {"budget": 0.2}, {"heavy": 16, "recent": 16}, {"heavy": 0, "recent": 8},
            {"heavy": 8, "recent": 0}, {"heavy": [8, 8], "recent": 8}, {"heavy": 0.1, "recent": 8},
        ):  # fmt: skip
            H2OConfig(**fields)
        H2OConfig.local(8), H2OConfig.streaming(8), H2OConfig.heavy_only(8)
    with pytest.warns(UserWarning, match=FEW):
        config = H2OConfig(budget=20)
    with without_warning():  # the config has said it already
        cache = H2OCache(ours, dataclasses.replace(config, decay=0.9))
        ours(ids, **with_cache(cache))
        repr(cache), str(cache.report()), from_config(config)
        cache.save(tmp_path / "cache", ours)
        H2OCache.load(tmp_path / "cache", ours)


@pytest.mark.parametrize("option", ["--budget 20", "--preset robust --budget 20"])
def test_the_command_notices_a_percentage(tiny, option, capsys):  # noqa: F811
    words = ["generate", "--model", tiny, "--prompt", "abcabc" * 12, "--max-new-tokens", "2"]
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        assert main([*words, *option.split()]) == 0
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith("h2o generate: warning: budget=20: an int is a number of keys")


# ---- The lower limit of fractions ----------------------------------------------------------------


def test_a_simulation_says_that_min_tokens_decides():
    ours, (ids,) = model("llama"), prompts(300)
    with warned_once("heavy=0.1, recent=0.1 of 300 tokens is 60 keys per head, but min_tokens=128"):
        with h2o.simulated(ours, heavy=0.1, recent=0.1), torch.no_grad():
            for _ in range(2):
                ours(ids, use_cache=False)
    with warned_once("budget=0.2 of 300 tokens is"), torch.no_grad():
        with h2o.simulated(ours):
            ours(ids, use_cache=False)


def test_an_analysis_says_that_min_tokens_decides():
    ours, (ids,) = model("llama"), prompts(100)
    with warned_once("heavy=0.1, recent=0.1 of 100 tokens is 20 keys per head, but min_tokens=128"):
        analysis = h2o.analyze(ours, ids, heavy=0.1, recent=0.1)
        analysis.simulate_cache()
    with warned_once("heavy=0.2, recent=0.1 of 100 tokens is 30 keys per head"):
        analysis.retained_mass(0, heavy=0.2, recent=0.1)


@pytest.mark.parametrize(
    "given",
    [
        {"heavy": 0.1, "recent": 0.1, "min_tokens": 0},
        {"heavy": 0.1, "recent": 0.1, "min_tokens": 128},
        {"h2o_config": H2OConfig(heavy=0.1, recent=0.1, min_tokens=128)},
        {"heavy": 30, "recent": 30},
        {"heavy": 0.3, "recent": 0.3},
    ],
    ids=str,
)
def test_a_limit_that_is_given_or_has_no_effect_is_not_noticed(given):
    ours, (ids,) = model("llama"), prompts(300)
    with without_warning(), torch.no_grad():
        with h2o.simulated(ours, **given):
            ours(ids, use_cache=False)
        h2o.analyze(ours, ids, **given).simulate_cache()


# ---- Fractions of a first turn -------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"budget": 0.2}, {"heavy": 0.1, "recent": 0.1}], ids=str)
@pytest.mark.parametrize("min_tokens", [0, 24])
def test_a_text_that_outgrows_its_first_turn_is_noticed(settings, min_tokens):
    ours, (first, *turns) = model("llama"), prompts(25, 40, 40, 40)
    words = ", ".join(f"{name}={x}" for name, x in settings.items())
    cache = H2OCache(ours, **settings, min_tokens=min_tokens, ratio_of="prompt")
    with without_warning(), torch.no_grad():
        greedy(ours, {"input_ids": first}, 4, **with_cache(cache))  # 28 tokens
        ours(turns[0], **with_cache(cache))
        assert "was a fraction" not in cache.report().note
    with warned_once(f"{words} was a fraction of the first 25 tokens, and the text now has 108"):
        with torch.no_grad():
            for turn in turns[1:]:
                ours(turn, **with_cache(cache))
    note = cache.report().note
    assert f"{words} was a fraction of the first 25 tokens, and the text now has 148: " in note


def test_texts_that_do_not_outgrow_their_prompt_are_not_noticed():
    """Budgets in tokens, texts that are held whole, a long answer, and a known length."""
    ours, (first, turn) = model("llama"), prompts(25, 90)
    for settings in ({"heavy": 8, "recent": 8}, {"budget": 0.2}, {"prompt_length": 400}):
        cache = H2OCache(ours, **settings)
        with without_warning(), torch.no_grad():
            ours(first, **with_cache(cache))
            ours(turn, **with_cache(cache))
        assert "was a fraction" not in cache.report().note
    cache = H2OCache(ours, budget=0.2, min_tokens=0, ratio_of="prompt")
    with without_warning():
        greedy(ours, {"input_ids": first}, 120, **with_cache(cache))
    assert "the text now has 144" in cache.report().note


def test_bytes_of_free_slots_are_explained():
    ours, (ids,) = model("llama"), prompts(40)
    cache = H2OCache(ours, heavy=60, recent=60)
    ours(ids, **with_cache(cache))
    total = cache.report().total
    assert total.bytes_held > total.bytes_full
    assert cache.report().note.endswith("as in a full cache. The bytes include free slots.")
