"""Pinned keys: an instruction survives every budget, policy, mode and family."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache

import h2o
from h2o import H2OCache, H2OConfig, UnsupportedError
from h2o.compat import with_cache
from h2o.hf.layers.layer import H2OLayer
from tests.cases import pairs
from tests.hf.modes import MODES
from tests.hf.test_compiled import compiling
from tests.hf.test_cross_head_budget import as_if_all_were_held, deep
from tests.hf.test_families import ALIKE
from tests.hf.test_simulation import prove, text
from tests.hf.test_wrapped import tuned_prompt
from tests.hf.tiny import (
    FAMILIES,
    HYBRID,
    LATENT,
    PURE,
    WITH_STATES,
    batch,
    greedy,
    model,
    needs_compiler,
    prompts,
    shared,
    slow_if,
    with_image,
)

SPAN = (5, 12)
INSTRUCTION = set(range(*SPAN))
PINS = {"pinned": [SPAN]}
SMALL = {"heavy": 9, "recent": 4, "sinks": 2, "score_by": "mean", "value_weighted": True}


def held(cache, row: int = 0) -> list[set[int]]:
    """Positions that each head of each H2O layer holds."""
    layers = [x for x in cache.layers if isinstance(x, H2OLayer)]
    return [set(head.tolist()) - {-1} for x in layers for head in x.kept().positions[row]]


def survives(cache, rows=(0,), span=SPAN) -> bool:
    wanted = set(range(*span))
    return all(wanted <= head for row in rows for head in held(cache, row))


def read(ours, rows, cache):
    inputs = batch(rows)
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    ours(**inputs, position_ids=positions, **with_cache(cache))
    return cache


# ---- An instruction of 40 tokens at 4% ---------------------------------------------------------

LONG = 2100
LATE = (300, 340)


@pytest.fixture(scope="module")
def long_reader():
    return deep(head_dim=32, max_position_embeddings=4096), prompts(LONG)[0]


@pytest.mark.parametrize(
    ("preset", "kv_dtype"),
    [*dict.fromkeys(h2o.config.PRESETS).items(), ("echo", "int8-int4")],
)
def test_forty_tokens_at_four_percent(preset, kv_dtype, long_reader):
    """Every head must keep the pinned keys, in the prompt and through later steps, within its
    budget. Without pins the keys are evicted."""
    ours, document = long_reader
    uneven = [[3.0, 0.2], [1.0, 0.4], [0.3, 1.2], [2.0, 0.5], [0.4, 1.0], [1.0, 1.0]]
    if preset == "calibrated":
        config = replace(H2OConfig.robust(0.04), score_by="mean-echo", head_shares=uneven)
    else:
        config = H2OConfig.preset(preset, 0.04)
    config, kept = replace(config, min_tokens=0, kv_dtype=kv_dtype), []
    for pins in ({}, {"pinned": [LATE]}):
        cache = read(ours, [document], H2OCache(ours, config, **pins))
        kept.append(sum(map(len, held(cache))))
        assert survives(cache, span=LATE) == bool(pins)
        assert not pins or survives(cache, span=(LONG - 8, LONG)), "recent keys stay"
        whole = torch.cat([document, document[:, :9]], 1)
        greedy(ours, {"input_ids": whole}, tokens=11, **with_cache(cache))
        assert survives(cache, span=LATE) == bool(pins)
    assert kept[0] == kept[1]


# ---- Families and modes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *[slow_if(name in ALIKE, name) for name in PURE + HYBRID + WITH_STATES],
        *[name for name in LATENT if name in ("deepseek_v3", "youtu")],
    ],
)
def test_families(name):
    """Each family must keep the pinned keys, and no others, in a padded batch whose rows have
    different spans."""
    ours = shared(name)
    inputs = with_image(name, batch(prompts(30, 41)))
    spans = [[SPAN], [(20, 27)]]
    cache = H2OCache(ours, **SMALL, pinned=spans)
    bare = H2OCache(ours, **SMALL)
    for each in (cache, bare):
        greedy(ours, inputs, tokens=8, **with_cache(each))
    for row, [span] in enumerate(spans):
        assert survives(cache, [row], span)
        assert not survives(bare, [row], span)
    assert list(map(len, held(cache))) == list(map(len, held(bare)))
    scores = cache.kept(next(i for i, x in enumerate(cache.layers) if isinstance(x, H2OLayer)))
    assert (scores.scores == torch.inf).sum(-1).eq(7).all(), "and nothing else is pinned"


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode):
    """A mode that selects or repeats rows must not lose the span that all of them pin."""
    ours, inputs = shared("llama"), batch(prompts(30, 41, 24))
    caches = []

    def make():
        caches.append(H2OCache(ours, **SMALL, **PINS))
        return caches[-1]

    MODES[mode](ours, inputs, make)
    for cache in caches:
        if rows := cache.layers[0].batch_size:
            assert survives(cache, range(rows)), mode


@pytest.mark.parametrize(
    ("chunk", "pins", "more"),
    pairs(
        [1, 7, 16],
        [[(20, 27)], "prompt"],
        [{}, {"recent": 0, "kv_dtype": "int8"}, {"decay": 0.5}],
    ),
    ids=str,
)
def test_spans_beyond_the_first_chunk(chunk, pins, more):
    """Pins beyond the first chunk of a prompt must not be lost."""
    ours, inputs = shared("llama"), batch(prompts(30, 41))
    size = {"heavy": 50} if pins == "prompt" else {"heavy": 9}
    with h2o.patched(ours, **SMALL | size | more, pinned=pins) as patch:
        ours.generate(**inputs, max_new_tokens=40, prefill_chunk_size=chunk, do_sample=False)
    for row, length in enumerate((30, 41)):
        assert survives(patch.cache, [row], (0, length) if pins == "prompt" else pins[0])
    assert not patch.cache.guard.state.waits_for_pins


@pytest.mark.parametrize(
    "more",
    [
        {"score_by": "mean-echo", "head_shares": "echo"},
        {"head_shares": [[0.2, 3.0], [1.0, 0.3]]},
        {"positions": "cache_relative"},
        {"score_by": "max", "decay": 0.9},
        {"decay": 1e-6},
        {"kv_dtype": "int8"},
        {"recent": 0, "heavy": 20},
    ],
    ids=str,
)
def test_policies(more):
    """No policy may evict pinned keys in chunks of a prompt, in chat turns or in a second
    conversation."""
    ours = shared("llama") if more.get("head_shares") != "echo" else deep()
    cache = H2OCache(ours, **SMALL | more, **PINS, prompt_length=40)
    document, question = prompts(40, 9)
    for piece in document.split(8, dim=1):
        ours(piece, **with_cache(cache))
    assert survives(cache)
    assert survives(cache, span=(38, 40)) or cache.config.recent == 0
    for _ in range(3):
        ours(question, **with_cache(cache))
        for token in question.split(1, dim=1):
            ours(token, **with_cache(cache))
    assert survives(cache)
    cache.reset()
    assert survives(read(ours, prompts(40), cache))


def test_forks_files_and_rows(tmp_path):
    ours, spans = shared("llama"), [[(5, 12)], [(20, 27)]]
    cache = read(ours, prompts(41, 41), H2OCache(ours, **SMALL, pinned=spans))
    cache.save(tmp_path / "a.safetensors", ours)
    loaded = H2OCache.load(tmp_path / "a.safetensors", ours)
    fork = cache.fork(rows=2)
    fork.batch_select_indices(torch.tensor([3, 0]))
    swapped = copy.deepcopy(cache)
    swapped.reorder_cache(torch.tensor([1, 0]))
    for each in (loaded, fork, swapped):
        for token in torch.arange(2, 42).view(1, -1).expand(2, -1).split(1, dim=1):
            ours(token, **with_cache(each))
    assert survives(loaded, [0], (5, 12))
    assert survives(loaded, [1], (20, 27))
    for each in (fork, swapped):
        assert survives(each, [0], (20, 27))
        assert survives(each, [1], (5, 12))
    loaded.reset()
    assert survives(read(ours, prompts(41, 41), loaded), [1], (20, 27))


def test_a_fork_in_the_middle_of_a_prompt_waits_on(tmp_path):
    ours, (document,) = shared("llama"), prompts(40)
    cache = H2OCache(ours, **SMALL, pinned=[[(20, 27)]])
    ours(document[:, :16], **with_cache(cache))
    cache.save(tmp_path / "a.safetensors", ours)
    loaded = H2OCache.load(tmp_path / "a.safetensors", ours)
    for each in (cache.fork(rows=2), loaded):
        ours(document[:, 16:].expand(each.layers[0].batch_size, -1), **with_cache(each))
        assert survives(each, range(each.layers[0].batch_size), (20, 27))


def test_a_cropped_pass():
    ours, (document, more) = shared("llama"), prompts(24, 8)
    cache = H2OCache(ours, **SMALL, pinned=[(22, 27)])
    cache.activate_past_recording()
    ours(document, **with_cache(cache))
    ours(more, **with_cache(cache))
    cache.crop(-6)
    assert survives(cache, span=(22, 26))
    assert cache.guard.state.waits_for_pins
    ours(more[:, 2:], **with_cache(cache))
    ours(more, **with_cache(cache))
    assert survives(cache, span=(22, 27))


def test_a_mask_of_columns():
    ours, inputs = shared("llama"), batch(prompts(30, 41))
    mask = torch.zeros(2, 41, dtype=torch.bool)
    mask[:, 14:21] = True
    mask[0, :3] = True  # pads
    cache = H2OCache(ours, **SMALL, pinned=mask)
    greedy(ours, inputs, tokens=8, **with_cache(cache))
    assert survives(cache, [0], (3, 10))
    assert survives(cache, [1], (14, 21))
    assert (cache.kept(0).scores == torch.inf).sum(-1).eq(7).all()


def test_what_a_dynamic_cache_held():
    ours, (document, question) = shared("llama"), prompts(40, 8)
    full = DynamicCache(config=ours.config)
    plain = shared("llama", "sdpa")
    plain(document, **with_cache(full))
    cache = H2OCache.from_dynamic_cache(full, ours, **SMALL, pinned=[SPAN, (42, 44)])
    ours(question, **with_cache(cache))
    assert survives(cache)
    assert survives(cache, span=(42, 44))
    with pytest.raises(ValueError, match="mask, but a DynamicCache"):
        H2OCache.from_dynamic_cache(full, ours, **SMALL, pinned=torch.ones(1, 40) > 0)


@needs_compiler
def test_compiled_steps():
    ours, (document,) = model("llama"), prompts(40)
    cache = H2OCache(ours, **SMALL, **PINS, compileable=True)
    eager = H2OCache(ours, **SMALL, **PINS)
    out = greedy(ours, {"input_ids": document}, tokens=12, **with_cache(cache), **compiling())
    assert torch.equal(out, greedy(ours, {"input_ids": document}, 12, **with_cache(eager)))
    assert survives(cache)
    assert survives(eager)


@needs_compiler
def test_compiled_steps_that_would_have_to_pin():
    """Compiled steps cannot pin tokens, so they must raise an error instead of losing pins."""
    ours, (document,) = model("llama"), prompts(20)
    cache = H2OCache(ours, **SMALL, pinned=[(18, 25)], compileable=True)
    with pytest.raises(Exception, match="compiled steps cannot pin new tokens"):
        greedy(ours, {"input_ids": document}, tokens=12, **with_cache(cache), **compiling())


def test_dropping_early_changes_nothing():
    """Pinned keys must not be dropped early with other keys while layers share one budget by
    echo."""
    echo = {"heavy": 12, "recent": 4, "sinks": 2, "score_by": "mean-echo", "head_shares": "echo"}
    for documents in (prompts(60, 25, 44), prompts(60)):
        held_, of = as_if_all_were_held(deep(), documents, **echo, pinned=[SPAN])
        assert held_ < 0.8 * of


@pytest.mark.parametrize("pins", [[], [[], []]], ids=str)
def test_no_spans_pin_nothing(pins):
    ours, inputs = shared("llama"), batch(prompts(30, 41))
    bare, cache = H2OCache(ours, **SMALL), H2OCache(ours, **SMALL, pinned=pins)
    out, wanted = (
        greedy(ours, inputs, tokens=8, num_beams=2, **with_cache(each)) for each in (cache, bare)
    )
    assert torch.equal(out, wanted)


# ---- Simulation ----------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt_length", [8, 40])
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"head_shares": [[0.4, 2.5], [1.0, 0.9]], "decay": 0.9, "kv_dtype": "int8"},
        {"score_by": "mean-echo", "head_shares": "echo"},
    ],
    ids=str,
)
def test_simulation_equals_the_cache(more, prompt_length):
    name = deep() if "echo" in str(more) else shared("llama", "sdpa")
    atol = 2e-2 if "kv_dtype" in more else 2e-4
    prove(name, text(tokens=64), prompt_length, atol, **SMALL | more, pinned=[(4, 9), (30, 34)])


@pytest.mark.parametrize("name", ["gemma2", "gemma4_text", "deepseek_v3"])
def test_simulated_families(name):
    if name not in FAMILIES | LATENT:
        pytest.skip("not in this version of transformers")
    prove(model(name), text(tokens=50), 8, **SMALL, pinned=[(4, 9), (30, 34)])


# ---- What is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [5, "system", [5], [(3, 3)], [(-4, -1)], [(0.5, 2)], [[True, 1]], [(1, 2, 3)]], ids=str
)
def test_what_is_no_span(wrong):
    with pytest.raises((TypeError, ValueError), match="pinned"):
        H2OCache(shared("llama"), **SMALL, pinned=wrong)


@pytest.mark.parametrize(
    ("more", "pins"),
    [
        ({}, [(2, 12)]),
        ({"heavy": [12, 9]}, [(0, 12)]),
        ({"heavy": 0.2, "recent": 0.1, "min_tokens": 0}, "prompt"),
        ({"head_shares": [[0.5, 1.5]] * 2}, [(2, 12)]),
        ({"heavy": 0, "recent": 9}, [(2, 4)]),
    ],
    ids=str,
)
def test_a_budget_too_small_is_refused_before_anything_is_stored(more, pins):
    ours = shared("llama")
    cache = H2OCache(ours, **SMALL | more, pinned=pins)
    with pytest.raises(ValueError, match=r"pinned keys do not fit .* Sinks take 2 .* give budget="):
        read(ours, prompts(40), cache)
    assert not any(layer.is_initialized for layer in cache.layers)


def test_what_a_larger_budget_makes_of_it():
    """The budget that the error names must be large enough, and hardly larger than needed."""
    ours = shared("llama")
    for preset in ("robust", "authors"):
        with pytest.raises(ValueError, match="give budget=") as refused:
            read(ours, prompts(90), H2OCache(ours, H2OConfig.preset(preset, 20), pinned=[(9, 40)]))
        enough = int(str(refused.value).partition("budget=")[2].split()[0])
        cache = H2OCache(ours, H2OConfig.preset(preset, enough), pinned=[(9, 40)])
        assert survives(read(ours, prompts(90), cache), span=(9, 40))
        small = H2OCache(ours, H2OConfig.preset(preset, enough - 2), pinned=[(9, 40)])
        with pytest.raises(ValueError, match="pinned keys"):
            read(ours, prompts(90), small)


def test_rows_and_masks_that_do_not_fit():
    ours = shared("llama")
    two_rows = H2OCache(ours, **SMALL, pinned=[[SPAN], [SPAN]])
    with pytest.raises(ValueError, match="spans for 2 rows, but the batch has 3"):
        read(ours, prompts(30, 30, 30), two_rows)
    with pytest.raises(
        ValueError, match="pins column 39, but the first forward pass has 30 columns"
    ):
        read(ours, prompts(30), H2OCache(ours, **SMALL, pinned=torch.ones(1, 40) > 0))
    without_padding = torch.ones(2, 30, dtype=torch.bool)
    with pytest.raises(ValueError, match="30 columns, but the prompt has 41"):
        read(ours, prompts(30, 41), H2OCache(ours, **SMALL, pinned=without_padding))
    whole = H2OCache(ours, heavy=40, recent=4, pinned=torch.ones(1, 30) > 0)
    assert survives(read(ours, prompts(30), whole), span=(0, 30))
    with pytest.raises(ValueError, match="decay=0"):
        H2OCache(ours, heavy=9, recent=4, decay=0, **PINS)


def test_a_whole_prompt_in_chunks():
    ours, (ids,) = shared("llama"), prompts(30)
    cache = H2OCache(ours, heavy=40, recent=4, pinned="prompt")
    greedy(ours, {"input_ids": ids}, 30, prefill_chunk_size=8, **with_cache(cache))
    assert survives(cache, [0], (0, 30))


# ---- Reports -------------------------------------------------------------------------------------


def test_reports_and_pictures():
    ours, (document,) = shared("llama"), prompts(40)
    cache = read(ours, [document], H2OCache(ours, **SMALL, **PINS))
    report = cache.report()
    assert report.total.pinned == [14]
    assert report.layers[0].pinned_by_head == [[7, 7]]
    assert 0 < report.total.mass_kept < torch.inf
    assert 0 < report.total.share_evicted < 1
    assert "pinned" in str(report)
    assert "inf" not in str(report).replace("infinity", "")
    assert "46.7% of the held tokens are pinned" in report.note
    kept = cache.kept(0)
    assert "<svg" in kept._repr_html_()
    assert "inf" not in kept._repr_html_()
    assert "nan" not in kept._repr_html_()
    bare = read(ours, [document], H2OCache(ours, **SMALL)).report()
    assert "pinned" not in str(bare)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_prompt_tuning():
    """The embeddings of prompt tuning come before the text and shift its positions, so spans would
    pin other tokens. The error must say how to shift them."""
    wrapped = tuned_prompt("PromptTuningConfig")
    for refuse in (
        lambda: H2OCache(wrapped, **SMALL, **PINS),
        lambda: h2o.enable(wrapped, **SMALL, **PINS),
        lambda: list(h2o.generate_all(wrapped, prompts(20), rows=1, **SMALL, **PINS)),
    ):
        with pytest.raises(UnsupportedError, match=r"\(start \+ 4, stop \+ 4\)"):
            refuse()


def test_patches_with_other_pins():
    """A nested patch must use its own pins and leave those of the outer one unchanged."""
    ours, inputs = model("llama", "sdpa"), batch(prompts(40))
    with h2o.patched(ours, **SMALL, **PINS) as outer:
        ours.generate(**inputs, max_new_tokens=8)
        assert survives(outer.cache)
        with h2o.patched(ours, **SMALL, pinned=[(20, 27)]) as inner:
            ours.generate(**inputs, max_new_tokens=8)
            assert survives(inner.cache, span=(20, 27))
            assert not survives(inner.cache)
        ours.generate(**inputs, max_new_tokens=8)
        assert survives(outer.cache)
        assert outer.settings != inner.settings
    enabled = h2o.enable(ours, **SMALL, pinned=[(20, 27)])
    ours.generate(**inputs, max_new_tokens=8)
    assert survives(enabled.cache, span=(20, 27))
    h2o.disable(ours)
