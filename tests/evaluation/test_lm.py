"""The lm-eval model: its numbers compared with lm-eval's own, in batches and alone."""

from __future__ import annotations

import dataclasses
import logging
import types

import pytest
import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from h2o import H2OConfig
from h2o.evaluation import published_masks
from h2o.evaluation.lm import H2OLM
from h2o.evaluation.setting import Setting, from_config, parse
from tests.evaluation import conftest

CONTEXTS = [
    "The gate was open, therefore",
    "It had not rained since spring and the wells ran dry. The farmers, who had seen worse, waited",
    "Why did nobody ask?",
    "One two three four five six seven eight nine ten eleven twelve thirteen fourteen",
]
ANSWERS = [" the sheep were on the road.", " x", " and", " nobody knew what to do about it then"]
PAIRS = [(context, answer) for context in CONTEXTS for answer in ANSWERS]
SETTINGS = ["h2o:4+4", "h2o:0.1+0.1", "local:0.2", "sink:4+0.1", "h2o:0.2+0", "robust:0.15"]
MASKS = ["mask-local:0.1+0.1", "mask-global:0.1+0.1", "mask-flexgen:0.1+0.1"]


def requests(pairs=PAIRS):
    return [
        Instance("loglikelihood", {}, pair, index, ("task", index, 1))
        for index, pair in enumerate(pairs)
    ]


def numbers(lm, pairs=PAIRS):
    """(log-likelihoods, greedy flags)"""
    answers = lm.loglikelihood(requests(pairs), disable_tqdm=True)
    return torch.tensor([a for a, _ in answers], dtype=torch.float64), [b for _, b in answers]


def make(tokenizer, model_type="llama", batch_size=5, **kwargs):
    return H2OLM(conftest.build(model_type), tokenizer=tokenizer, batch_size=batch_size, **kwargs)


@pytest.fixture(scope="module")
def lm(tokenizer):
    return make(tokenizer)


@pytest.fixture(scope="module")
def hflm(tokenizer):
    return HFLM(conftest.build(), tokenizer=tokenizer, batch_size=5, logits_cache=False)


def close(a, b):
    torch.testing.assert_close(a, b, atol=2e-4, rtol=0)


# ---- Against lm-eval's own model ---------------------------------------------------------------


def test_full_is_hflm_exactly(lm, hflm):
    lm.use(parse("full"))
    assert lm.loglikelihood(requests(), True) == hflm.loglikelihood(requests(), True)
    rolling = [
        Instance("loglikelihood_rolling", {}, ("abc " * n,), n, ("t", n, 1)) for n in (3, 150)
    ]
    assert lm.loglikelihood_rolling(rolling, True) == hflm.loglikelihood_rolling(rolling, True)


@pytest.mark.parametrize("protocol", ["simulate", "drop"])
@pytest.mark.parametrize("setting", ["h2o:500+0", "h2o:1.0+0.0", "local:500", "full"])
def test_a_budget_that_never_bites_is_hflm(lm, hflm, setting, protocol):
    lm.use(parse(setting), protocol)
    likelihood, greedy = numbers(lm)
    want, want_greedy = numbers(hflm)
    if protocol == "drop" and setting == "h2o:1.0+0.0":  # 1.0 of the context is less than the text
        assert not torch.allclose(likelihood, want)
    else:
        close(likelihood, want)
        assert greedy == want_greedy


@pytest.mark.parametrize("setting", ["h2o:4+4", "h2o:0.1+0.1", "local:0.2", *MASKS])
def test_small_budgets_are_not_hflm(lm, hflm, setting):
    """If small budgets changed nothing, the tests here would pass with a model that evicts
    nothing."""
    lm.use(parse(setting))
    want = numbers(hflm)[0]
    longest = max(range(len(PAIRS)), key=lambda i: len("".join(PAIRS[i])))
    assert (numbers(lm)[0] - want)[longest].abs() > 0.05


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # accelerate keeps files open
@pytest.mark.parametrize("protocol", ["simulate", "drop"])
def test_a_model_on_the_disk(lm, folder, tokenizer, tmp_path, protocol):
    """An offloaded model has no device of its own, which must not change its numbers."""
    offloaded = AutoModelForCausalLM.from_pretrained(
        folder, device_map={"": "disk"}, offload_folder=tmp_path
    )
    ours = H2OLM(offloaded, tokenizer=tokenizer, batch_size=5)
    for one in (lm, ours):
        one.use(parse("h2o:4+4"), protocol)
    assert numbers(ours, PAIRS[:5])[0].tolist() == numbers(lm, PAIRS[:5])[0].tolist()


@pytest.mark.parametrize("name", ["recentt", "scoreby", "prompt_len", "protocl"])
def test_a_misspelt_argument(folder, name):
    """transformers' error would name its own model class."""
    with pytest.raises(ValueError, match=rf"'{name}' is unknown: did you mean \w+\?"):
        H2OLM(str(folder), **{name: 0.1})


# ---- Batches and padding -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("protocol", "model_type"),
    [
        *(("simulate", "llama"), ("drop", "llama"), ("simulate", "opt"), ("drop", "gpt_neox")),
        pytest.param("drop", "opt", marks=pytest.mark.slow),
        pytest.param("simulate", "gpt_neox", marks=pytest.mark.slow),
    ],
)
def test_batches_of_8_equal_single_requests(tokenizer, model_type, protocol):
    lm = make(tokenizer, model_type)
    settings = SETTINGS if (model_type, protocol) == ("llama", "simulate") else SETTINGS[:2]
    for setting in settings + (MASKS if protocol == "simulate" else []):
        lm.use(parse(setting), protocol)
        lm.batch_size_per_gpu = 8
        together = numbers(lm)
        lm.batch_size_per_gpu = 1
        alone = numbers(lm)
        close(together[0], alone[0])
        assert together[1] == alone[1]
        if setting == settings[0]:  # the order of requests must not matter for any setting
            one_by_one = torch.cat([numbers(lm, [pair])[0] for pair in PAIRS])
            assert torch.equal(alone[0], one_by_one), "requests in other order"


def test_automatic_batch_size(tokenizer):
    lm = make(tokenizer, batch_size="auto", max_batch_size=4)
    lm.use(parse("h2o:4+4"))
    auto = numbers(lm)[0]
    lm.batch_size_per_gpu = 1
    close(auto, numbers(lm)[0])


# ---- The protocols -----------------------------------------------------------------------------


@pytest.mark.parametrize("setting", [*SETTINGS, "random:9", "random-bytes:0.4"])
def test_drop_is_simulation_with_the_context_as_prompt(lm, tokenizer, setting):
    lm.use(parse(setting), "drop")
    dropped = numbers(lm)
    simulated = []
    for context, answer in PAIRS:
        n = len(tokenizer(context)["input_ids"])
        config = parse(setting).config.for_model(lm.model)
        if config.needs_prompt_length:  # fractions of the context, as numbers of tokens
            heavy, recent = config.tokens(n)
            config = dataclasses.replace(config, heavy=heavy, recent=recent, budget_unit="keys")
        lm.use(from_config(config), "simulate", prompt_length=n)
        simulated.append(numbers(lm, [(context, answer)]))
    close(dropped[0], torch.cat([likelihood for likelihood, _ in simulated]))
    assert dropped[1] == [flag for _, flags in simulated for flag in flags]


def test_answers_of_one_token_cannot_feel_a_real_cache(lm, hflm, caplog):
    pairs = [(context, answer) for context in CONTEXTS for answer in ("x", "y")]
    lm.use(parse("h2o:2+2"), "drop")
    close(numbers(lm, pairs)[0], numbers(hflm, pairs)[0])
    assert lm.tally.one_token_answers == lm.tally.requests == 8
    with caplog.at_level(logging.WARNING):
        info = lm.get_model_info()["h2o"]
    assert "8 of 8 requests have answers of one token" in caplog.text
    assert info["protocol"] == "drop"
    assert info["one_token_answers"] == 8
    lm.use(parse("h2o:2+2"), "simulate")
    assert not torch.allclose(numbers(lm, pairs)[0], numbers(hflm, pairs)[0], atol=1e-2)


def test_what_a_result_says(lm, tokenizer):
    lm.use(parse("h2o:0.1+0.2/sinks=3"), "simulate")
    numbers(lm)
    facts = lm.get_model_info()["h2o"]
    lengths = [len(tokenizer(a + b)["input_ids"]) - 1 for a, b in PAIRS]
    assert facts["tokens_seen"] == sum(lengths)
    assert facts["tokens_kept"] == sum(min(n, 3 + int(0.1 * n) + int(0.2 * n)) for n in lengths)
    want = {
        "protocol": "simulate", "variant": "h2o", "ratio_of": "text", "prompt_len": 1,
        "heavy": 0.1, "recent": 0.2, "sinks": 3, "score_by": "sum", "decay": 1.0,
        "value_weighted": False, "requests": 16, "truncated": 0,
    }  # fmt: skip
    assert want.items() <= facts.items()
    lm.use(parse("h2o:0.1+0.2"), "drop")
    numbers(lm)
    facts = lm.get_model_info()["h2o"]
    contexts = [len(tokenizer(a)["input_ids"]) for a, _ in PAIRS]
    assert facts["ratio_of"] == "prompt"
    assert facts["prompt_len"] == "context"
    assert facts["tokens_seen"] == sum(contexts)


# ---- Long and odd requests ---------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["simulate", "drop"])
def test_contexts_longer_than_the_model(lm, hflm, caplog, protocol):
    pairs = [("long " * 100 + context, " answer") for context in CONTEXTS] + PAIRS[:2]
    lm.use(parse("full"), protocol)
    with caplog.at_level(logging.WARNING, logger="h2o.evaluation.lm"):
        likelihood = numbers(lm, pairs)[0]
    close(likelihood, numbers(hflm, pairs)[0])
    assert lm.tally.truncated == 4
    warnings = [record for record in caplog.records if record.name == "h2o.evaluation.lm"]
    assert len(warnings) == 1
    assert "exceeds the model's 320" in warnings[0].getMessage()
    lm.use(parse("h2o:0.1+0.1"), protocol)
    assert torch.isfinite(numbers(lm, pairs)[0]).all()


def test_requests_that_cannot_be(lm):
    lm.use(parse("h2o:4+4"))
    with pytest.raises(ValueError, match="0 continuation tokens"):
        lm._loglikelihood_tokens([(None, [1, 2], [])])
    with pytest.raises(ValueError, match="400 continuation"):
        lm._loglikelihood_tokens([(None, [1, 2], [3] * 400)])


def test_a_ranking_that_is_not_in_the_masks(lm, monkeypatch):
    """The numbers of h2o's own eviction must not get the name of a ranking of the user."""
    own = Setting("own", "own", H2OConfig(heavy=4, recent=4))
    with pytest.raises(ValueError, match=r"there are no masks 'own' .* only local, global"):
        lm.use(own)
    monkeypatch.setitem(published_masks.MASKS, "own", published_masks.MASKS["flexgen"])
    lm.use(own)
    ours, _ = numbers(lm)
    lm.use(parse("mask-flexgen:4+4"))
    close(ours, numbers(lm)[0])
    with pytest.raises(ValueError, match="own: a mask, not a cache; use protocol=simulate"):
        lm.use(own, "drop")


@pytest.mark.parametrize("setting", ["robust:0.2", H2OConfig(heavy=4, recent=4)])
def test_something_else_than_a_setting(lm, setting):
    with pytest.raises(TypeError, match=r"expected a Setting, such as h2o.evaluation"):
        lm.use(setting)


@pytest.mark.parametrize("protocol", ["simulate", "drop"])
def test_a_fraction_of_a_short_question_is_one_token(lm, protocol):
    """A fraction below one token keeps one token, even of a question with a single token."""
    got = []
    for setting in ("h2o:0.02+0.02", "h2o:1+1"):
        lm.use(parse(setting), protocol)
        values, greedy = numbers(lm, [("a", "bc"), ("abc", "de")])
        got.append((values.tolist(), greedy))
    assert got[0] == got[1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"protocol": "guess"}, 'expected "simulate", "drop" or "read"'),
        ({"protocol": "drop", "variant": "local", "heavy": 4}, "a mask, not a cache"),
        ({"protocol": "drop", "prompt_length": 4}, "requires protocol=simulate"),
        ({"variant": "best"}, 'expected "full", "h2o", "local"'),
        ({"batch_size": -1}, "batch_size must be a number from 1 or auto, not -1"),
        ({"batch_size": "0"}, "batch_size must be a number from 1 or auto, not 0"),
        ({"batch_size": "many"}, "batch_size must be a number from 1 or auto, not many"),
        ({"heavy": 0, "recent": 0}, "budget of 0"),
    ],
)
def test_arguments_that_do_not_fit(tokenizer, arguments, words):
    with pytest.raises(ValueError, match=words):
        make(tokenizer, **arguments)


def test_arguments_as_lm_eval_gives_them(tokenizer):
    lm = make(
        tokenizer, protocol="drop", heavy=6, recent=0.25, sinks=2, score_by="mean",
        decay=0.5, value_weighted=True,
    )  # fmt: skip
    assert lm.protocol == "drop"
    assert lm.setting.config == H2OConfig(
        heavy=6,
        recent=0.25,
        sinks=2,
        score_by="mean",
        decay=0.5,
        value_weighted=True,
        ratio_of="prompt",
        min_tokens=0,
    )
    assert make(tokenizer, variant="full").setting.variant == "full"


# ---- Generation --------------------------------------------------------------------------------


def generation(context, tokens=12):
    arguments = {"until": ["\n\n"], "max_gen_toks": tokens, "do_sample": False}
    return Instance("generate_until", {}, (context, arguments), 0, ("t", 0, 1))


def test_generation_goes_through_a_real_cache(lm, hflm):
    tasks = [generation(context) for context in CONTEXTS]
    want = hflm.generate_until(tasks, disable_tqdm=True)
    lm.use(parse("h2o:500+0"), "drop")
    assert lm.generate_until(tasks, disable_tqdm=True) == want
    lm.use(parse("h2o:2+2"), "drop")
    assert lm.generate_until(tasks, disable_tqdm=True) != want
    lm.use(parse("full"))
    assert lm.generate_until(tasks, disable_tqdm=True) == want
    lm.use(parse("h2o:2+2"))
    with pytest.raises(ValueError, match="use protocol=drop"):
        lm.generate_until(tasks, disable_tqdm=True)
    lm.use(parse("random:9"), "drop")
    with pytest.raises(ValueError, match="needs a cache: leave out random:9, which is simulated"):
        lm.generate_until(tasks, disable_tqdm=True)


def test_random_eviction_begins_before_the_question(lm):
    """Under protocol=read the question must be answered with the keys that are left of the
    document, and a budget for all keys must change nothing."""
    pairs = [(f"{context}\n{context}?", answer) for context, answer in PAIRS]
    found = {}
    for setting, protocol in (("full", "read"), ("random:400", "read"), ("random:9", "read"),
                              ("random:9", "drop")):  # fmt: skip
        lm.use(parse(setting), protocol)
        found[setting, protocol] = numbers(lm, pairs)[0]
    close(found["random:400", "read"], found["full", "read"])
    assert not torch.allclose(found["random:9", "read"], found["full", "read"], atol=1e-2)
    assert not torch.allclose(found["random:9", "read"], found["random:9", "drop"], atol=1e-2)


# ---- Counting, tuned prompts, angles -----------------------------------------------------------


@pytest.mark.parametrize("protocol", ["simulate", "drop", "read"])
def test_requests_are_counted_without_asking_the_model(lm, protocol):
    lm.use(parse("h2o:0.1+0.2"), protocol)
    numbers(lm)
    asked = lm.tally
    model = lm.model
    try:
        lm._model = types.SimpleNamespace(config=model.config)
        counted = lm.count("loglikelihood", PAIRS)
    finally:
        lm._model = model
    assert counted == asked
    assert lm.tally is asked
    if protocol == "simulate":
        rolling = lm.count("loglikelihood_rolling", [("abc " * 150,)])
        assert rolling.requests == 2
    else:
        task = generation(CONTEXTS[1])
        assert lm.count("generate_until", [task.args]).tokens_seen > 0


@pytest.mark.parametrize(("setting", "kept"), [("full", 41), ("h2o:4+4", 8), ("h2o:0.5+0.5", 2)])
def test_a_whole_text_under_drop_is_counted_at_its_end(lm, setting, kept):
    """Its prompt is a single token. A table that counted the prompt would show that all of a long
    text is kept."""
    lm.use(parse(setting), "drop")
    counted = lm.count("loglikelihood_rolling", [("a" * 41,)])
    assert (counted.tokens_seen, counted.tokens_kept) == (41, kept)
    assert counted.one_token_contexts == 1


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("protocol", ["drop", "read"])
def test_a_tuned_prompt_would_be_repeated(tokenizer, protocol):
    """PEFT would put the tuned prompt before each token that is fed. The error must leave the
    setting unchanged."""
    peft = pytest.importorskip("peft")
    tuned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    lm = make(tokenizer, heavy=6, recent=6)
    lm._model = peft.get_peft_model(lm.model, tuned).eval()
    before = lm.describe()
    with pytest.raises(ValueError, match="prompt tuning"):
        lm.use(lm.setting, protocol)
    assert lm.describe() == before


LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": [1.0] * 4,
    "long_factor": [2.0, 3.0, 4.0, 5.0], "original_max_position_embeddings": 20,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def with_rotary(tokenizer, rotary):
    lm = make(tokenizer)
    if rotary["rope_type"] == "dynamic":
        lm.model.config.max_position_embeddings = 20
    lm.model.config.rope_parameters = rotary
    torch.manual_seed(1)
    lm._model = type(lm.model)(lm.model.config).eval()
    return lm


@pytest.mark.parametrize("protocol", ["simulate", "drop"])
def test_the_longest_text_does_not_choose_the_angles_of_others(tokenizer, protocol):
    lm = with_rotary(tokenizer, LONGROPE)
    lm.use(parse("h2o:6+6"), protocol)
    lm.batch_size_per_gpu = 8
    together = numbers(lm)
    lm.batch_size_per_gpu = 1
    close(together[0], numbers(lm)[0])


@pytest.mark.parametrize("size", [1, 8])
@pytest.mark.parametrize("rotary", [LONGROPE, DYNAMIC], ids=["longrope", "dynamic"])
def test_the_longest_prompt_does_not_choose_the_angles_of_other_answers(tokenizer, rotary, size):
    asked = [generation("Rain", 8), generation(CONTEXTS[1], 8), generation("Why", 8)]

    def answers(requests):
        lm = with_rotary(tokenizer, rotary)
        lm.use(parse("h2o:500+0"), "drop")
        lm.batch_size_per_gpu = size
        return lm.generate_until(requests)

    alone = [answers([one])[0] for one in asked]
    assert answers(asked + asked[:2]) == alone + alone[:2]
    assert answers([]) == []
