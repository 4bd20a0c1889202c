"""Caches of one model share a plan, which is made once, and again when a config has changed."""

import copy

import pytest
import torch
from transformers import MistralConfig

from h2o import H2OCache, H2OConfig, UnsupportedError
from h2o.compat import with_cache
from h2o.hf.cache import cache_plan
from h2o.hf.cache.cache_plan import get_plan
from tests.hf.tiny import greedy, model, prompts


@pytest.fixture
def config():
    return copy.deepcopy(model("llama").config)


def test_caches_of_equal_configs_share_a_plan(config):
    h2o_config = H2OConfig(budget=0.2)
    plan = get_plan(config, config, h2o_config)
    assert get_plan(config, config, H2OConfig(budget=0.2)) is plan
    assert get_plan(config, copy.deepcopy(config), h2o_config) is plan
    caches = [H2OCache(config, h2o_config) for _ in range(2)]
    for first, second in zip(*(cache.layers for cache in caches), strict=True):
        assert first is not second
        assert first.config is second.config


def test_a_config_that_was_changed_is_another_one(config):
    h2o_config = H2OConfig(heavy=4, recent=4)
    before = H2OCache(config, h2o_config)
    config.num_hidden_layers += 1
    if getattr(config, "layer_types", None):
        config.layer_types = [*config.layer_types, config.layer_types[-1]]
    assert len(H2OCache(config, h2o_config).layers) == len(before.layers) + 1
    config.is_causal = False
    with pytest.raises(UnsupportedError, match="not causal"):
        H2OCache(config, h2o_config)


def test_one_token_is_not_the_whole_prompt(config):
    """A lookup by equality would confuse one token with the whole prompt, because 1 == 1.0."""
    one, whole = ({"heavy": x, "recent": 1, "min_tokens": 0, "sinks": 0} for x in (1, 1.0))
    tokens = [
        get_plan(config, config, H2OConfig(**fields)).plans[0].tokens(50)
        for fields in (one, whole, one)
    ]
    assert tokens[0] == tokens[2] != tokens[1]


def test_budgets_that_are_computed_are_computed_for_each_cache(config):
    amounts = iter(range(1, 100))
    computed = H2OConfig(heavy=lambda layer, layers: next(amounts), recent=1)
    heavy = [[x.plan.heavy for x in H2OCache(config, computed).layers] for _ in range(2)]
    assert heavy[1] == [x + len(heavy[0]) for x in heavy[0]]


@pytest.mark.filterwarnings("ignore:.*h2o:UserWarning")
def test_budgets_of_a_model_without_h2o_layers_may_be_computed():
    config = MistralConfig(
        num_hidden_layers=2, num_attention_heads=2, hidden_size=32, sliding_window=8
    )
    cache = H2OCache(config, heavy=lambda layer, layers: 4, recent=lambda layer, layers: 4)
    assert len(cache.layers) == 2


def test_shares_of_a_users_own_class_are_asked_each_time(config):
    class Shares:
        window = 32

        def __eq__(self, other):
            raise ValueError("the truth value of an array is ambiguous")

        def shares_for(self, fraction):
            return ((1.0,) * config.num_key_value_heads,) * config.num_hidden_layers

        def check_attention(self, attention, layer):
            pass

    caches = [H2OCache(config, heavy=4, recent=4, head_shares=Shares()) for _ in range(2)]
    assert caches[0].layers[0].config is not caches[1].layers[0].config


def test_few_plans_are_remembered(config):
    for heavy in range(1, 3 * cache_plan.REMEMBERED):
        get_plan(config, config, H2OConfig(heavy=heavy, recent=1))
    assert len(cache_plan._recent) == cache_plan.REMEMBERED


def test_a_plan_made_in_inference_mode_serves_outside_of_it():
    ours, inputs = model("llama"), {"input_ids": prompts(40)[0]}
    h2o_config = H2OConfig.echo(0.5)
    with torch.inference_mode():
        H2OCache(ours.config, h2o_config)
    with torch.enable_grad():
        answer = greedy(ours, inputs, 4, **with_cache(H2OCache(ours.config, h2o_config)))
    cache_plan._recent = []
    fresh = greedy(ours, inputs, 4, **with_cache(H2OCache(ours.config, h2o_config)))
    assert answer.tolist() == fresh.tolist()
