"""No budget at all means budget=0.2, and a config remembers the budget that it was made with."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import pickle

import pytest
import torch
from transformers import GenerationConfig

import h2o
from h2o import H2OCache, H2OConfig
from h2o.budgets import DEFAULT_BUDGET
from h2o.cli import cache_options
from h2o.compat import with_cache
from h2o.config import PRESETS
from h2o.evaluation.setting import from_options
from h2o.vllm.config_entry import config_of_entry
from h2o.vllm.paged_request import with_budget
from tests.hf.tiny import greedy, model, prompts, shared

OTHER_FIELDS = [
    {},
    {"budget": None},
    {"min_tokens": 0},
    {"score_by": "sum"},
    {"sinks": 0, "kv_dtype": None},
    {"budget_unit": "keys"},
    {"positions": "cache_relative"},
]


def parts(config: H2OConfig) -> tuple:
    return config, config.budget


@pytest.mark.parametrize("fields", OTHER_FIELDS, ids=str)
def test_no_budget_is_the_default_budget(fields):
    named = fields | {"budget": DEFAULT_BUDGET}
    assert parts(H2OConfig(**fields)) == parts(H2OConfig(**named))
    config = model("llama").config
    assert parts(H2OCache(config, **fields).config) == parts(H2OCache(config, **named).config)


def test_no_budget_means_the_same_in_every_call():
    ours, (ids,) = model("llama"), prompts(60)
    fields = {"min_tokens": 0}
    wanted = H2OConfig(budget=0.2, min_tokens=0).for_model(ours)
    patch = h2o.enable(ours, **fields)
    answer = greedy(ours, {"input_ids": ids}, 9)
    assert patch.cache.config == wanted
    h2o.disable(ours)
    with h2o.patched(ours, **fields) as patch:
        assert greedy(ours, {"input_ids": ids}, 9).tolist() == answer.tolist()
        assert patch.cache.config == wanted
    (one,) = h2o.generate_all(ours, [ids[0].tolist()], rows=1, max_new_tokens=9, **fields,
        generation_config=GenerationConfig(eos_token_id=None, pad_token_id=0))  # fmt: skip
    assert one.ids == answer[0].tolist()
    assert h2o.compress_document(ours, ids, **fields).config == wanted
    assert h2o.analyze(ours, ids, **fields).config == wanted
    logits = []
    for budget in ({}, {"budget": 0.2}, {"heavy": 0.1, "recent": 0.1}):
        with h2o.simulated(ours, **fields, **budget), torch.no_grad():
            logits.append(ours(ids, use_cache=False).logits)
    assert torch.equal(logits[0], logits[1])
    assert not torch.equal(logits[0], logits[2])


def test_no_budget_means_the_same_in_commands_lm_eval_and_vllm():
    wanted = H2OConfig(budget=0.2)
    for defaults in ({}, {"min_tokens": 0}):
        parser = argparse.ArgumentParser()
        cache_options.add_cache_options(parser, **defaults)
        setting = cache_options.make_setting(parser.parse_args([]))
        named = cache_options.make_setting(parser.parse_args(["--budget", "0.2"]))
        assert setting == named
        assert parts(setting.config) == parts(dataclasses.replace(wanted, **defaults))
        help_text = " ".join(parser.format_help().split())
        assert "(default 0.2, unless --heavy or --recent is given)" in help_text
        assert "never evicted (4; 0 with --heavy or --recent)" in help_text
    assert from_options() == from_options(budget=0.2)
    assert config_of_entry({}) == config_of_entry({"budget": 0.2})
    with pytest.raises(ValueError, match=r"variant local needs heavy and recent, such as heavy="):
        from_options("local")


def test_a_config_keeps_the_budget_that_it_was_made_with(tmp_path):
    ours, (ids,) = model("llama"), prompts(200)
    config = H2OConfig(budget=0.2, min_tokens=0)
    resolved = config.for_model(ours)
    others = [copy.copy(resolved), pickle.loads(pickle.dumps(resolved))]
    for one in [resolved, dataclasses.replace(resolved, decay=0.5), *others]:
        assert one.budget == 0.2
        assert "_given" not in vars(one)
    echo = dataclasses.replace(H2OConfig.echo(0.2, "bytes"), min_tokens=0).for_model(ours)
    assert (resolved, echo.budget) == (echo, None)
    cache = H2OCache(ours, config)
    ours(ids, **with_cache(cache))
    cache.save(tmp_path / "cache", ours)
    loaded = H2OCache.load(tmp_path / "cache", ours)
    assert loaded.config.budget == 0.2
    assert repr(loaded) == repr(cache)
    assert loaded.report().as_dict() == cache.report().as_dict()
    with pytest.raises(ValueError, match="already determines heavy and recent"):
        dataclasses.replace(resolved, heavy=0.3)
    assert dataclasses.replace(resolved, budget=None, heavy=0.3).heavy == 0.3


def test_equal_settings_written_in_two_ways_are_equal():
    """A cache made with `budget=` must serve calls that name the same preset, and the words of each
    must stay its own, although the plan of a model is remembered."""
    ours, (ids,) = model("llama"), prompts(60)
    assert H2OConfig(budget=40) == H2OConfig.echo(40)
    assert hash(H2OConfig(budget=40)) == hash(H2OConfig.echo(40))
    assert "budget=40" in repr(H2OCache(ours, budget=40))
    assert "budget" not in repr(H2OCache(ours, H2OConfig.echo(40)))
    prefix = h2o.compress_document(ours, ids, budget=40)
    document = ids[0].tolist()
    (one,) = h2o.generate_all(
        ours, [[*document, 5, 6]], H2OConfig.echo(40), rows=1, prefix=prefix, max_new_tokens=3
    )
    assert one.finish_reason == "length", one.error


def test_a_request_of_vllm_has_its_own_budget_beside_one_number():
    server = config_of_entry({"budget": 64}, model("llama").config)
    assert server.budget == 64
    own = with_budget(server, {"h2o_heavy": 50, "h2o_recent": 20})
    assert (own.budget, own.heavy, own.recent, own.sinks) == (None, 50, 20, server.sinks)


@pytest.mark.parametrize("entry", [{}, {"budget": 0.2}])
def test_a_request_of_vllm_has_a_budget_in_tokens_beside_a_share_of_bytes(entry):
    server = config_of_entry(entry, model("llama").config)
    assert server.budget_unit == "bytes"
    own = with_budget(server, {"h2o_heavy": 50, "h2o_recent": 20})
    assert (own.budget_unit, own.heavy, own.recent) == ("keys", 50, 20)
    assert with_budget(server, {"h2o_heavy": 0.1}).budget_unit == "bytes"


@pytest.mark.parametrize("name", PRESETS)
def test_parts_of_a_budget_have_few_digits(name):
    """0.15000000000000002 in result files and messages is a distraction."""
    for budget in (0.04, 0.1, 0.15, 0.2, 0.3, 0.4, 0.6):
        config = H2OConfig.preset(name, budget)
        assert config.heavy + config.recent == pytest.approx(budget, abs=1e-12)
        numbers = json.dumps([config.heavy, config.recent])
        assert len(numbers) <= len("[0.0375, 0.0125]"), numbers


def test_models_without_echo_do_with_the_default_what_they_do_with_its_number():
    for name in ("opt", "gemma3"):
        made = [H2OCache(shared(name), **budget) for budget in ({}, {"budget": 0.2})]
        assert parts(made[0].config) == parts(made[1].config)
        assert made[0].echo_replacement == made[1].echo_replacement
