"""A fraction means the same all along: the budget of a row follows its own text."""

import itertools

import pytest
import torch
from transformers import GenerationConfig

import h2o
from h2o import H2OCache, H2OConfig, backends
from h2o.budgets import count_text, next_growth
from h2o.compat import with_cache
from tests.hf.tiny import batch, failing, greedy, llama, model, prompts, shared

FLOOR = {"min_tokens": 16}
"""A lower limit that short texts exceed"""
SETTINGS = {
    "default": {"budget": 0.2, **FLOOR},
    "plain": {"heavy": 0.1, "recent": 0.1, **FLOOR},
    "robust": {"h2o_config": H2OConfig(budget=0.25, score_by="mean", **FLOOR)},
    "shares": {"heavy": 0.2, "recent": 0.1, **FLOOR, "head_shares": [[1, 3], [2, 1]]},
    "one part": {"heavy": 0.1, "recent": 12, **FLOOR},
}


def share_of(cache):
    """The smallest and the largest share of a full cache's bytes in any layer, with bookkeeping."""
    layers = cache.report().layers
    shares = [(x.bytes_held + x.bytes_bookkeeping) / x.bytes_full for x in layers]
    return min(shares), max(shares)


def mean_budget(cache):
    """The mean number of keys that a head of the first row may keep, and the number that it should
    have for the tokens that the row's fraction is of."""
    heads = [x for layer in cache.report().layers for x in layer.budget_by_head[0]]
    config = cache.config
    wanted = config.sinks + sum(config.tokens(cache.guard.state.rows[0].counted))
    return sum(heads) / len(heads), wanted


def run(ours, cache, ids, mask=None):
    """Logits of a pass after all that the cache has seen."""
    with torch.no_grad():
        if mask is None:
            return ours(ids, **with_cache(cache)).logits
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        given = {"attention_mask": mask, "position_ids": positions}
        return ours(ids, **given, **with_cache(cache)).logits


# ---- The number of tokens that a fraction is of --------------------------------------------------


@pytest.mark.parametrize("prompt", [1, 20, 79, 100, 639, 1281, 5000])
def test_steps_are_at_most_64_tokens_or_a_twentieth(prompt):
    counted, grown = prompt, {}
    for seen in range(prompt, 12_000):
        new = count_text(prompt, seen)
        assert counted <= new <= seen
        assert new == count_text(counted, seen)
        assert new > seen - max(4, min(64, seen / 10), seen / 20)
        if new > counted:
            assert seen == next_growth(counted) == new
            grown[seen] = new
        counted = new
    assert len(grown) < 300


# ---- The bytes of a cache at every moment --------------------------------------------------------


def test_a_long_answer_after_a_short_question():
    """A fifth of the bytes, from the first token above the lower limit on."""
    ours = shared("llama")
    cache = H2OCache(ours, budget=0.2)
    ids = prompts(2020)[0]
    run(ours, cache, ids[:, :20])
    least, most = 1.0, 0.0
    for i in range(20, 2020):
        run(ours, cache, ids[:, i : i + 1])
        if 900 < i and i % 7 == 0:
            low, high = share_of(cache)
            least, most = min(least, low), max(most, high)
    assert 0.17 <= least <= most <= 0.2
    assert cache.report().layers[0].budget == [cache.config.count_held(2020, 20)]
    assert f"The budget is budget=0.2 of {count_text(20, 2020):,} tokens. " in cache.report().note


@pytest.mark.parametrize("form", ["turns of many tokens", "answers"])
def test_a_chat_of_ten_turns(form):
    ours = shared("llama")
    cache, text = H2OCache(ours, budget=0.2, **FLOOR), prompts(4)[0]
    run(ours, cache, text)
    for turn in range(10):
        new = prompts(70, seed=turn)[0]
        text = torch.cat([text, new], 1)
        if form == "answers":
            mask = torch.ones_like(text)
            given = {"input_ids": text, "attention_mask": mask, "eos_token_id": None}
            answer = greedy(ours, given, 20, **with_cache(cache))
            text = torch.cat([text, answer], 1)
        else:
            run(ours, cache, new)
        if turn:
            low, high = share_of(cache)
            assert 0.17 <= low <= high <= 0.2


def test_keys_are_never_taken_back():
    ours, (ids,) = shared("llama"), prompts(200)
    cache = H2OCache(ours, heavy=0.1, recent=0.1, **FLOOR)
    run(ours, cache, ids[:, :30])
    budgets = []
    for i in range(30, 200):
        run(ours, cache, ids[:, i : i + 1])
        budgets.append(cache.report().layers[0].budget[0])
    assert budgets == sorted(budgets)
    assert budgets[0] == 16
    assert budgets[-1] == int(0.1 * 192) * 2


def test_numbers_of_tokens_and_fractions_of_prompts_do_not_grow():
    ours, (ids,) = shared("llama"), prompts(200)
    for config in (
        H2OConfig(budget=24),
        H2OConfig(heavy=0.2, recent=0.1, min_tokens=0, ratio_of="prompt"),
        H2OConfig.authors(0.4),
    ):
        cache = H2OCache(ours, config)
        run(ours, cache, ids[:, :60])
        before = cache.report().total.budget
        for i in range(60, 130):
            run(ours, cache, ids[:, i : i + 1])
        run(ours, cache, ids[:, 130:])
        assert cache.report().total.budget == before
    assert H2OConfig.authors(0.2).ratio_of == "prompt"


@pytest.mark.parametrize(
    "settings",
    [{"heavy": 0.5, "recent": 0.5}, {"heavy": 1.0, "recent": 0}, {"heavy": 1 / 3, "recent": 2 / 3}],
)
def test_all_of_the_text_is_all_of_it(settings):
    """Nothing is evicted between two growths, whatever the passes."""
    ours, (ids,) = model("llama"), prompts(171)
    plain = model("llama", "sdpa")(ids).logits
    cache = H2OCache(ours, sinks=0, **settings)
    logits = [run(ours, cache, ids[:, :130])]
    for start, end in itertools.pairwise([130, *range(131, 150), 168, 169, 170, 171]):
        logits.append(run(ours, cache, ids[:, start:end]))
        assert cache.report().total.evicted == [0]
    torch.testing.assert_close(torch.cat(logits, 1), plain, atol=2e-2, rtol=0)
    assert cache.config.count_held(171, 130) == 171
    assert not cache.report().total.raised
    for ratio_of in ("seen", "text"):
        with h2o.simulated(ours, sinks=0, prompt_length=130, ratio_of=ratio_of, **settings):
            same = ours(ids, use_cache=False).logits
        torch.testing.assert_close(same, plain, atol=2e-2, rtol=0)


# ---- The same everywhere -------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_a_simulation_equals_the_cache(name):
    """Token by token, in rows of different lengths."""
    ours, settings, prompt = model("llama"), SETTINGS[name], 30
    cache = H2OCache(ours, trace=True, **settings)
    inputs = batch(prompts(120, 111, 95))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    pads = (mask == 0).sum(1).tolist()
    logits = [run(ours, cache, ids[:, :prompt], mask[:, :prompt])]
    for i in range(prompt, 120):
        logits.append(run(ours, cache, ids[:, i : i + 1], mask[:, : i + 1]))
    how = {"prompt_length": [prompt - n for n in pads], "ratio_of": "seen", "trace": True}
    with h2o.simulated(ours, **settings, **how) as simulation:
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        given = {"attention_mask": mask, "position_ids": positions, "use_cache": False}
        want = ours(ids, **given).logits
    real = mask.bool()
    torch.testing.assert_close(torch.cat(logits, 1)[real], want[real], atol=2e-2, rtol=0)
    for layer in range(2):
        assert torch.equal(cache.evicted_at(layer), simulation.evicted_at(layer))
    grown = [row.counted for row in cache.guard.state.rows]
    assert grown == [count_text(prompt - n, 120 - n) for n in pads]


@pytest.mark.parametrize("name", SETTINGS)
def test_rows_of_a_batch_grow_alone(name):
    ours, settings, prompt = model("llama"), SETTINGS[name], 30
    inputs = batch(prompts(140, 121, 113))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    ends = [prompt, *range(prompt + 1, 60), 100, *range(101, 141)]
    together = H2OCache(ours, **settings)
    for start, end in itertools.pairwise([0, *ends]):
        run(ours, together, ids[:, start:end], mask[:, :end])
    for row, pads in enumerate((mask == 0).sum(1).tolist()):
        alone = H2OCache(ours, **settings)
        for start, end in itertools.pairwise([pads, *ends]):
            run(ours, alone, ids[row : row + 1, start:end])
        for layer in range(2):
            held, want = together.kept(layer).positions[row], alone.kept(layer).positions[0]
            for got, wanted in zip(held, want, strict=True):
                assert got[got >= 0].tolist() == wanted[wanted >= 0].tolist()


def test_a_row_whose_answer_is_over_does_not_grow():
    """Its columns are masked, and may have any positions."""
    ours, (ids,) = model("llama"), prompts(160)
    ids, alone = ids.repeat(2, 1), H2OCache(ours, heavy=0.1, recent=0.1, **FLOOR)
    run(ours, alone, ids[:1, :100])
    cache, mask = H2OCache(ours, heavy=0.1, recent=0.1, **FLOOR), torch.ones_like(ids)
    run(ours, cache, ids[:, :100], mask[:, :100])
    mask[1, 100:150] = 0
    for i in range(100, 160):
        last = 100 if i < 150 else i - 50
        given = {"attention_mask": mask[:, : i + 1], "position_ids": torch.tensor([[i], [last]])}
        with torch.no_grad():
            ours(ids[:, i : i + 1], **given, **with_cache(cache))
        if i >= 150:
            run(ours, alone, ids[:1, i : i + 1])
    longer, over = cache.report().layers[0].budget
    assert (longer, over) == (32, alone.report().layers[0].budget[0])
    assert torch.equal(cache.kept(0).positions[1, :, :over], alone.kept(0).positions[0])


@pytest.mark.parametrize("way", ["fork", "file", "rows", "pickle"])
def test_copies_go_on_growing(way, tmp_path):
    ours, (ids, other) = shared("llama"), prompts(160, 160)
    rows = torch.cat([other, ids])
    cache = H2OCache(ours, budget=0.3, **FLOOR)
    run(ours, cache, rows[:, :30])
    for i in range(30, 90):
        run(ours, cache, rows[:, i : i + 1])
    if way == "file":
        cache.save(tmp_path / "cache", ours)
        copy = H2OCache.load(tmp_path / "cache", ours)
    else:
        copy = cache.fork()
    if way == "rows":
        copy.batch_select_indices([1])
    for one, text in ((copy, rows[1:] if way == "rows" else rows), (cache, rows)):
        for i in range(90, 160):
            run(ours, one, text[:, i : i + 1])
    for layer in range(2):
        positions = [x.kept(layer).positions for x in (cache, copy)]
        assert torch.equal(positions[0][-1:], positions[1][-1:])
    assert copy.report().layers[0].budget[-1:] == cache.report().layers[0].budget[-1:]


@pytest.mark.parametrize("name", SETTINGS)
def test_generate_all_answers_as_generate(name):
    ours, settings = model("llama"), SETTINGS[name]
    texts = prompts(20, 45, 33)
    more = {"generation_config": GenerationConfig(eos_token_id=None, pad_token_id=0)}
    results = h2o.generate_all(
        ours, [x[0].tolist() for x in texts], rows=2, max_new_tokens=70, **settings, **more
    )
    for text, result in zip(texts, results, strict=True):
        cache = H2OCache(ours, **settings)
        want = greedy(ours, {"input_ids": text}, 70, **with_cache(cache), **more)[0].tolist()
        assert result.ids == want
        assert result.report["kept"] == round(cache.report().total.kept[0] / 2)


def test_a_request_may_grow_where_the_call_does_not():
    ours, (text,) = model("llama"), prompts(20)
    own = H2OConfig(heavy=0.3, recent=0.2, **FLOOR)
    config, more = H2OConfig(heavy=6, recent=3, **FLOOR), {"max_new_tokens": 40}
    requests = [h2o.Request(text, config=x) for x in (own, None)]
    settings = {"generation_config": GenerationConfig(eos_token_id=None, pad_token_id=0)}
    results = h2o.generate_all(ours, requests, config, rows=2, **more, **settings)
    for one, result in zip((own, config), results, strict=True):
        cache = H2OCache(ours, one)
        want = greedy(ours, {"input_ids": text}, 40, **with_cache(cache), **settings)
        assert result.ids == want[0].tolist()


def test_the_torch_backend_holds_the_same_keys():
    ours, (ids,) = shared("llama"), prompts(130)
    caches = [H2OCache(ours, heavy=0.15, recent=0.1, **FLOOR) for _ in range(2)]
    for start, end in itertools.pairwise([0, 30, *range(31, 90), 110, *range(111, 130)]):
        run(ours, caches[0], ids[:, start:end])
        with backends.by_torch():
            run(ours, caches[1], ids[:, start:end])
    for layer in range(2):
        assert torch.equal(*(x.kept(layer).positions for x in caches))


def test_a_first_pass_longer_than_the_prompt_that_was_announced():
    """The budget follows the text from the first pass on."""
    ours, (ids,) = shared("llama"), prompts(60)
    cache, plain = (
        H2OCache(ours, heavy=0.2, recent=0.2, min_tokens=0, prompt_length=n) for n in (10, None)
    )
    for start, stop in ((0, 40), (40, 48), (48, 60)):
        for one in (cache, plain):
            run(ours, one, ids[:, start:stop])
        assert cache.report().layers == plain.report().layers
        assert cache.guard.state.rows[0].counted == plain.guard.state.rows[0].counted
    share = {"heavy": 0.2, "recent": 0.2, "min_tokens": 0}
    pinned = H2OCache(ours, **share, prompt_length=10, pinned=[(0, 12)])
    run(ours, pinned, ids)  # a budget of 10 tokens would have no room for the pins
    assert pinned.report().layers[0].budget == [24]
    fixed = H2OCache(ours, **share, prompt_length=10, ratio_of="prompt")
    run(ours, fixed, ids)
    assert fixed.report().layers[0].budget == [4]


@pytest.mark.parametrize("way", ["cache", "fork"])
def test_drafts_that_are_rejected_let_no_budget_grow(way):
    """Cropping a pass in which the budget grew leaves what the cache without these tokens has."""
    ours, (ids,) = shared("llama"), prompts(120)
    cache, plain = (H2OCache(ours, budget=0.3, **FLOOR) for _ in range(2))
    run(ours, cache, ids[:, :40])
    run(ours, plain, ids[:, :40])
    cache.activate_past_recording()
    for start in range(40, 115, 3):
        run(ours, cache, torch.cat([ids[:, start : start + 3], ids[:, :2]], 1))
        if way == "fork":
            fork = cache.fork()
            cache.crop(-5)
            cache = fork
        cache.crop(-2)
        run(ours, plain, ids[:, start : start + 3])
        held, wanted = ([x.budget_by_head for x in y.report().layers] for y in (cache, plain))
        assert held == wanted
        assert cache.guard.state.rows == plain.guard.state.rows
        for layer in range(2):
            assert torch.equal(*(x.kept(layer).positions for x in (cache, plain)))


def test_compiled_steps_say_what_to_write():
    ours = shared("llama")
    for settings in ({"budget": 0.2}, {"heavy": 0.1, "recent": 16}, {}):
        with pytest.raises(h2o.UnsupportedError, match='Write ratio_of="prompt"'):
            H2OCache(ours, compileable=True, **settings)
    H2OCache(ours, compileable=True, budget=0.2, ratio_of="prompt")
    H2OCache(ours, compileable=True, budget=64)


def test_a_document_that_was_compressed():
    ours, (document, question) = model("llama"), prompts(120, 60)
    settings = {"budget": 0.3, **FLOOR, "readings": 2, "repeat": torch.tensor([[5, 6]])}
    cache = h2o.compress_document(ours, document, **settings)
    before = cache.report().total.budget[0]
    run(ours, cache, question)
    gained = cache.report().total.budget[0] - before
    more = sum(cache.config.tokens(176)) - sum(cache.config.tokens(120))
    assert gained == 2 * more > 0


def test_a_pass_of_another_batch_size_changes_nothing():
    ours, (ids,) = model("llama"), prompts(90)
    cache = H2OCache(ours, budget=0.3, **FLOOR)
    run(ours, cache, ids[:, :40])
    before = cache.report().as_dict()
    with pytest.raises(ValueError, match="batch"):
        run(ours, cache, ids[:, 40:].repeat(2, 1), torch.ones(2, 90, dtype=torch.long))
    assert cache.report().as_dict() == before


@pytest.mark.parametrize("family", ["qwen3", "gpt_oss", "olmo_hybrid"])
def test_masks_that_were_made_before(family):
    """The model then does not say that a pass begins."""
    ours, (ids,) = model(family), prompts(160)
    caches = [H2OCache(ours, heavy=0.1, recent=0.1, **FLOOR) for _ in range(2)]
    masks = dict.fromkeys(("full_attention", "sliding_attention", "linear_attention"))
    for start, end in itertools.pairwise([0, 60, *range(61, 110), 160]):
        run(ours, caches[0], ids[:, start:end])
        given = {"attention_mask": masks, "position_ids": torch.arange(start, end)[None]}
        with torch.no_grad():
            ours(ids[:, start:end], **given, **with_cache(caches[1]))
    budgets, same = ([x.budget_by_head for x in cache.report().layers] for cache in caches)
    assert budgets == same
    assert caches[1].guard.state.rows[0].counted == count_text(60, 160)


@pytest.mark.parametrize("rejected", [False, True])
def test_a_pass_that_fails_leaves_no_larger_budget(rejected):
    """Before a layer gets its keys, or because a layer rejects them."""
    ours, (ids,) = model("llama"), prompts(140)
    cache, plain = (H2OCache(ours, heavy=0.2, recent=0.2, **FLOOR) for _ in range(2))
    for one in (cache, plain):
        run(ours, one, ids[:, :76])
    if rejected:
        with pytest.raises(RuntimeError, match="is for inference"):
            run(ours.train(), cache, ids[:, 76:])
        ours.eval()
        assert cache.report().as_dict() == plain.report().as_dict()
    else:
        with failing(ours.model.layers[0].input_layernorm):
            run(ours, cache, ids[:, 76:])
    for i in range(76, 79):
        run(ours, cache, ids[:, i : i + 1])
        run(ours, plain, ids[:, i : i + 1])
    assert cache.report().as_dict() == plain.report().as_dict()


def test_a_model_of_many_layers_shares_one_budget():
    ours, (ids,) = llama(4), prompts(150)
    cache = H2OCache(ours, budget=0.3, **FLOOR)
    run(ours, cache, ids[:, :60])
    for i in range(60, 150):
        run(ours, cache, ids[:, i : i + 1])
    held, wanted = mean_budget(cache)
    assert held == wanted == cache.config.count_held(150, 60)
    assert len({x for layer in cache.report().layers for x in layer.budget_by_head[0]}) > 1
