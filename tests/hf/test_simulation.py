"""The main proof: one simulated forward pass gives what a real cache gives token by token.

`simulated(prompt_length=P)` over a text must give, at every position, the logits of an `H2OCache`
that is fed the first P tokens at once and then one at a time, and keep the same keys at every step.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

import h2o
from h2o.compat import with_cache
from h2o.evaluation.published_masks import MASKS
from tests.cases import pairs
from tests.hf import tiny
from tests.hf.modes import layers_and_heads
from tests.hf.test_families import STATES_ALIKE
from tests.reference.published_masks import simulation_mask

TEXT, PROMPT = 72, 8
POLICIES = {
    "h2o": {"heavy": 5, "recent": 4},
    "tiny": {"heavy": 1, "recent": 1},
    "one": {"heavy": 0, "recent": 1},
    "local": {"heavy": 0, "recent": 9},
    "heavy-only": {"heavy": 9, "recent": 0},
    "streaming": {"heavy": 0, "recent": 5, "sinks": 4},
    "sinks": {"heavy": 3, "recent": 3, "sinks": 3},
    "decay": {"heavy": 5, "recent": 4, "decay": 0.8},
    "last-query": {"heavy": 5, "recent": 2, "decay": 0.0},
    "mean": {"heavy": 5, "recent": 2, "score_by": "mean"},
    "decayed-mean": {"heavy": 5, "recent": 2, "score_by": "mean", "decay": 0.9},
    "value-weighted": {"heavy": 5, "recent": 2, "value_weighted": True},
    "everything": {
        "heavy": 6,
        "recent": 3,
        "sinks": 2,
        "score_by": "mean",
        "decay": 0.95,
        "value_weighted": True,
    },
    "large": {"heavy": 30, "recent": 20},
    "full": {"heavy": TEXT, "recent": 0},
    "by-layer": {"heavy": [2, 9, 3, 7], "recent": 3},
    "by-head": {"heavy": [2, 9, 3, 7], "recent": lambda layer, layers: [3, 5, 2, 4]},
    "head_shares": {"heavy": 9, "recent": 4, "sinks": 1, "head_shares": [[0.4, 2.5, 1.0, 0.9]] * 4},
    "int8": {"heavy": 5, "recent": 4, "kv_dtype": "int8"},
    "int8 of all": {
        "heavy": 9,
        "recent": 4,
        "sinks": 1,
        "score_by": "mean",
        "value_weighted": True,
        "kv_dtype": "int8",
        "head_shares": [[0.4, 2.5, 1.0, 0.9]] * 4,
    },
    "max": {"heavy": 6, "recent": 3, "score_by": "max"},
    "decayed-max": {
        "heavy": 6,
        "recent": 3,
        "sinks": 1,
        "score_by": "max",
        "decay": 0.97,
        "head_shares": [[0.4, 2.5, 1.0, 0.9]] * 4,
    },
    "shares, fractions": {
        "heavy": 0.2,
        "recent": 0.1,
        "min_tokens": 0,
        "score_by": "mean",
        "value_weighted": True,
        "head_shares": [[1.5, 0.5, 0.4, 1.1], [0.5, 1.9, 2.0, 1.0]] * 2,
    },
    "floor": {"heavy": 0.1, "recent": 0.05, "min_tokens": 13, "sinks": 1},
    "floor of heads": {
        "heavy": 0.2,
        "recent": 0.1,
        "min_tokens": 11,
        "head_shares": [[1.5, 0.5, 0.4, 1.1], [0.5, 1.9, 2.0, 1.0]] * 2,
    },
}


def text(seed: int = 0, tokens: int = TEXT, words: int = 3) -> torch.Tensor:
    """Token ids [1, tokens]. The text uses `words` words at a time and changes them every nine
    tokens, so other keys come to matter."""
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, words, (tokens,), generator=generator)
    return 2 + (words + torch.arange(tokens) // 9 * 7)[None] % (tiny.VOCABULARY - 2)


def policy(name: str, model) -> dict:
    """Settings from POLICIES, for the model's number of layers and heads."""
    return fitted(POLICIES[name], model)


def fitted(settings: dict, model) -> dict:
    chosen = dict(settings)
    layers, heads = layers_and_heads(model)
    if isinstance(chosen["heavy"], list):
        chosen["heavy"] = chosen["heavy"][:layers]
    if callable(each := chosen["recent"]):
        chosen["recent"] = [each(layer, layers)[:heads] for layer in range(layers)]
    if "head_shares" in chosen:
        chosen["head_shares"] = [row[:heads] for row in chosen["head_shares"][:layers]]
    return chosen


def prove(
    model,
    ids: torch.Tensor,
    prompt_length: int,
    atol: float = 2e-4,
    base: dict | None = None,
    **chosen,
) -> int:
    """Run a text [1, N] through a simulation and through a cache, and compare the two. Returns how
    often a heavy key was evicted for another one."""
    N = ids.shape[1]
    with h2o.simulated(
        model, prompt_length=prompt_length, trace=True, **(base or {}), **chosen
    ) as simulation:
        simulated = model(ids, use_cache=False).logits
    layers = simulation.layers()
    evicted_at = {layer: simulation.evicted_at(layer) for layer in layers}
    model.set_attn_implementation("h2o")
    cache = h2o.H2OCache(model.config, **chosen)
    column = torch.arange(N)
    for start, stop in [(0, prompt_length), *((i, i + 1) for i in range(prompt_length, N))]:
        # Bamba does not count positions itself
        positions = {"position_ids": torch.arange(start, stop)[None]}
        logits = model(ids[:, start:stop], **positions, **with_cache(cache)).logits
        torch.testing.assert_close(logits, simulated[:, start:stop], atol=atol, rtol=0)
        for layer in layers:
            kept, _ = cache.kept(layer)
            seen = (column < stop) & (evicted_at[layer][0] > stop)
            for head, positions in enumerate(kept[0]):
                held = positions[positions >= 0]
                if stop < N:  # what the last row evicts is not in evicted_at
                    assert torch.equal(held, column[seen[head]]), stop
                else:
                    assert (evicted_at[layer][0, head, held] == N).all()
    for layer in layers:
        kept, scores = (x[0] for x in cache.kept(layer))
        assert kept.shape[1] > 0
        want = simulation.scores(layer)[0].gather(1, kept.clamp(min=0)).masked_fill(kept < 0, 0)
        torch.testing.assert_close(
            scores, want, atol=max(1e-4, atol / 10), rtol=max(1e-4, atol / 4)
        )
    assert not any(getattr(x, "_forward_pre_hooks", None) for x in model.modules())
    recent = chosen["recent"] if isinstance(chosen["recent"], int) else 3
    left = torch.cat([evicted_at[layer].reshape(-1, N) for layer in layers])
    return int(((left > prompt_length) & (left < N) & (left - column - 1 != recent)).sum())


def check_rows_alone(model, rows, prompts, side: str = "left", **chosen):
    """Simulate texts [1, N] as a padded batch and one by one, each with its prompt length. Check
    that logits, evictions and, with mass=True, retained attention are the same. Returns the logits
    and the inputs of the batch."""
    padded = tiny.batch(rows, side)
    padded["position_ids"] = (padded["attention_mask"].cumsum(1) - 1).clamp(min=0)
    with h2o.simulated(model, prompt_length=prompts, trace=True, **chosen) as together:
        batched = model(**padded, use_cache=False).logits
    for b, row in enumerate(rows):
        with h2o.simulated(model, prompt_length=prompts[b], trace=True, **chosen) as alone:
            logits = model(row, use_cache=False).logits[0]
        real = padded["attention_mask"][b].bool()
        torch.testing.assert_close(batched[b, real], logits, atol=2e-4, rtol=0)
        first, n = int(real.nonzero()[0]), row.shape[1]
        for layer in together.layers():
            left = together.evicted_at(layer)[b]
            assert (left[:, ~real] == 0).all() or chosen.get("masks")
            ordinals = torch.where(left[:, real] == len(real), n, left[:, real] - first)
            assert torch.equal(ordinals, alone.evicted_at(layer)[0].long())
            if chosen.get("mass"):
                retained, wanted = together.retained_mass(layer), alone.retained_mass(layer)
                torch.testing.assert_close(retained[b], wanted[0])
                by_token = together.retained_mass(layer, per_token=True)[b]
                wanted = alone.retained_mass(layer, per_token=True)[0]
                torch.testing.assert_close(by_token[:, real], wanted)
                assert by_token[:, ~real].isnan().all()
    return batched, padded


@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        tiny.slow_if(family != "llama" and (2 * i + j) % 4 > 0, family, chosen)
        for i, family in enumerate(["llama", "opt", "gpt_neox"])
        for j, chosen in enumerate(POLICIES)
    ],
)
def test_equals_the_cache(family, chosen):
    model = tiny.model(family, "sdpa")
    settings = policy(chosen, model)
    base = {"ratio_of": "seen"} if isinstance(settings["heavy"], float) else {}
    prompt = 40 if base else PROMPT
    # The keys differ by float32 rounding, which sometimes leads to different quantized values.
    atol = 2e-2 if "kv_dtype" in settings else 2e-4
    swaps = prove(model, text(), prompt, atol, base=base, **settings)
    if chosen not in ("local", "streaming", "tiny", "one", "full", "large"):
        assert swaps >= 3, "the heavy set of this text never changes: a test of nothing"


WINDOWS_AND_STATES = ["gemma2", "qwen2-mixed", *tiny.WITH_STATES, *tiny.LATENT_AND_STATES]
OTHER_KEYS = [*tiny.LATENT, *(x for x in ("gemma3n_text", "gemma4_text") if x in tiny.FAMILIES)]
"""Families with latents, and with keys that other layers attend to."""
EVERYWHERE = ("h2o", "streaming", "decay", "everything", "int8", "max", "floor")


@pytest.mark.parametrize(
    ("family", "chosen"),
    [
        *[tiny.slow_if(name in STATES_ALIKE, name, "h2o") for name in WINDOWS_AND_STATES],
        *[
            tiny.slow_if((i + j) % 3 > 0 and chosen != "h2o", name, chosen)
            for i, name in enumerate(OTHER_KEYS)
            for j, chosen in enumerate(EVERYWHERE)
        ],
    ],
)
def test_equals_the_cache_where_layers_are_of_other_kinds(family, chosen):
    """The simulation must equal the cache with windows, states, latents and shared keys. A single
    pass sums states in another order than single steps do, hence the tolerance."""
    # In other texts the largest attention of two keys may differ by its last bit only.
    model, (ids,) = tiny.model(family), tiny.prompts(36, seed=4 if chosen == "max" else 3)
    atol = 2e-2 if chosen == "int8" else 5e-3 if family in WINDOWS_AND_STATES else 2e-4
    prove(model, ids, 20, atol, base={"ratio_of": "seen"}, **policy(chosen, model))


@pytest.mark.parametrize("prompt_length", [1, 2, 40, TEXT - 1, TEXT])
def test_any_prompt_length(prompt_length):
    prove(tiny.model("llama", "sdpa"), text(1), prompt_length, heavy=4, recent=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompt_length", "chosen"),
    [
        (1, {"heavy": 10, "recent": 10}),
        (1, {"heavy": 0, "recent": 12, "sinks": 4}),
        (40, {"heavy": 16, "recent": 8, "sinks": 4, "score_by": "mean", "value_weighted": True}),
        (40, {"heavy": 12, "recent": 12, "decay": 0.9}),
        (60, {"heavy": 200, "recent": 0}),
    ],
)
def test_equals_the_cache_smollm2(smollm2, prompt_length, chosen):
    model, tokenizer = smollm2
    ids = tokenizer(PROSE, return_tensors="pt")["input_ids"][:, :140]
    assert ids.shape[1] == 140
    swaps = prove(model, ids, prompt_length, atol=2e-3, **chosen)
    assert swaps > 100 or chosen["heavy"] in (0, 200)


PROSE = """\
The harbour of the old town lies where the river meets the sea, and for four hundred years its
people have lived from both. In spring the fishermen paint their boats; in summer the boats go
out before sunrise and come home at noon, followed by gulls. Nobody could say who built the
first pier. The mayor believed that it was a monk, the teacher that it was a merchant from the
north who needed a place to unload salt. The fishermen did not care. They knew that the third
post from the left was loose, that the water under it was deep enough for a keel, and that
children should not play there when the wind came from the west. One winter the pier burned."""


@pytest.fixture(scope="module")
def smollm2():
    from h2o import models

    try:
        model, tokenizer = models.load_model(dtype="float32")
    except models.UserError as error:
        pytest.skip(str(error))
    return model, tokenizer


# ---- Fractions, padding, batches ---------------------------------------------------------------


VARIANTS = [(variant, "text") for variant in ("h2o", *MASKS)]
VARIANTS += [("h2o", "prompt"), ("flexgen", "prompt")]


@pytest.mark.parametrize(
    ("family", "how", "side"), pairs(["llama", "opt"], VARIANTS, ["left", "right"])
)
def test_rows_of_a_batch_are_alone(family, how, side):
    variant, ratio_of = how
    model = tiny.model(family, "sdpa")
    rows = [text(seed, tokens) for seed, tokens in enumerate([50, 23, 64, 31])]
    prompts = [20, 9, 30, 12] if ratio_of == "prompt" else [1] * 4
    chosen = {"heavy": 0.2, "recent": 0.15, "min_tokens": 0, "ratio_of": ratio_of}
    masks = MASKS.get(variant)
    check_rows_alone(model, rows, prompts, side, mass=True, masks=masks, **chosen)


def test_fractions_of_text_and_prompt():
    model, ids = tiny.model("llama", "sdpa"), text()
    for ratio_of, base in (("text", TEXT), ("prompt", PROMPT)):
        tokens = {"heavy": int(0.3 * base), "recent": max(1, int(0.1 * base))}
        with h2o.simulated(
            model, heavy=0.3, recent=0.1, min_tokens=0, prompt_length=PROMPT, ratio_of=ratio_of
        ):
            fraction = model(ids, use_cache=False).logits
        with h2o.simulated(model, prompt_length=PROMPT, **tokens):
            exact = model(ids, use_cache=False).logits
        assert torch.equal(fraction, exact)


def test_full_budget_is_dense():
    model, ids = tiny.model("llama", "sdpa"), text()
    dense = model(ids, use_cache=False).logits
    for chosen in ({"heavy": TEXT, "recent": 0}, {"heavy": 0, "recent": 1.0, "min_tokens": 0}):
        for variant in ("h2o", "local", "global", "flexgen"):
            with h2o.simulated(model, masks=MASKS.get(variant), mass=True, **chosen) as simulation:
                logits = model(ids, use_cache=False).logits
            torch.testing.assert_close(logits, dense, atol=1e-4, rtol=0)
            mass = simulation.retained_mass(1)
            torch.testing.assert_close(mass, torch.ones_like(mass))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """A simulation in 16 bits must be about as accurate as the dense model in the same dtype."""
    ids = text()
    exact, half = tiny.model("llama", "sdpa"), tiny.model("llama", "sdpa").to(dtype)
    errors = {}
    for name, chosen in {"dense": {"heavy": TEXT}, "small": {"heavy": 0, "recent": 8}}.items():
        with h2o.simulated(exact, **{"recent": 0, **chosen}):
            want = exact(ids, use_cache=False).logits
        with h2o.simulated(half, **{"recent": 0, **chosen}):
            got = half(ids, use_cache=False).logits
        assert got.dtype == dtype
        errors[name] = (got.float() - want).abs().mean() / want.abs().mean()
    want, got = (m(ids, use_cache=False).logits.float() for m in (exact, half))
    errors["sdpa"] = (got - want).abs().mean() / want.abs().mean()
    assert errors["dense"] <= 2 * errors["sdpa"]
    assert errors["small"] <= 3 * errors["sdpa"]


def test_autocast():
    """Under autocast queries and keys come in float32 and values do not. The simulation and the
    analysis must support this."""
    ours, ids = tiny.model("llama"), text(tokens=40)
    small = {"heavy": 4, "recent": 4}
    cache = h2o.H2OCache(ours.config, **small)
    with torch.autocast("cpu", torch.bfloat16):
        with h2o.simulated(ours, **small, mass=True) as simulation:
            got = ours(ids, use_cache=False).logits
        steps = [ours(token, **with_cache(cache)).logits for token in ids.split(1, dim=1)]
        analysis = h2o.analyze(ours, ids, **small)
    assert simulation.retained_mass(0).mean() < 1
    want = torch.cat(steps, dim=1)
    assert (got - want).abs().mean() < 0.05 * want.abs().mean()
    assert analysis.scores(0).sum() == pytest.approx(40 * analysis.heads, rel=1e-3)


class Own:
    """A rule that returns what a test says."""

    name, has_prompt = "own", True

    def __init__(self, returned):
        self.attend_rows = lambda query, *_: returned(query)


WRONG_MASKS = {
    "the class": (Own, TypeError, r"masks is the class Own; .* masks=Own\(\.\.\.\)"),
    "no name": (SimpleNamespace(attend_rows=print), TypeError, "which has no name"),
    "None": (Own(lambda query: None), TypeError, "'own' returned None; expected the tensors"),
    "no tensors": (Own(lambda query: (query, 3)), TypeError, "returned a tuple; expected"),
    "heads first": (
        Own(lambda query: (query, query[..., 0].int())),
        ValueError, r"returned out of shape \[1, 4, 20, 8\]; expected \[1, 20, 4, 8\]",
    ),
    "groups": (
        Own(lambda query: (query.transpose(1, 2), query[:, :2, :, 0].int())),
        ValueError, r"evicted_at of shape \[1, 2, 20\]; expected \[1, 4, 20\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG_MASKS)
def test_masks_that_are_wrong(case):
    masks, error, words = WRONG_MASKS[case]
    ours = tiny.shared("llama")
    with pytest.raises(error, match=words):
        with h2o.simulated(ours, heavy=3, recent=3, masks=masks):
            ours(tiny.prompts(20)[0], use_cache=False)


# ---- Variants against the readable masks, in a model -------------------------------------------


@pytest.mark.parametrize("variant", ["h2o", "local", "global", "flexgen"])
def test_masks_in_a_model(variant, monkeypatch):
    """A simulation must hide the keys that the reference mask hides. The first layer's queries and
    keys do not depend on evictions, so its mask can be computed from dense logits."""
    model, ids = tiny.model("opt", "eager"), text()
    seen = {}
    projected = torch.nn.Linear.forward

    def forward(self, x):
        out = seen[self] = projected(self, x)
        return out

    attention = model.model.decoder.layers[0].self_attn
    monkeypatch.setattr(torch.nn.Linear, "forward", forward)
    chosen = {"heavy": 6, "recent": 5}
    with h2o.simulated(model, masks=MASKS.get(variant), trace=True, **chosen) as simulation:
        model(ids, use_cache=False)
    H, D = attention.num_heads, attention.head_dim
    q, k = (seen[x].view(TEXT, H, D).transpose(0, 1) for x in (attention.q_proj, attention.k_proj))
    logits = (q @ k.mT)[None] * D**-0.5
    want = simulation_mask(logits, variant=variant, **chosen)
    row = torch.arange(TEXT)
    left = simulation.evicted_at(0)[:, :, None]
    assert torch.equal((row <= row[:, None]) & (row[:, None] < left), want)


# ---- Where columns and tokens differ ------------------------------------------------------------

NO_PADS, LEFT, RIGHT = [1] * 9, [0, 0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 0, 0, 0]


def padded(*rows: list[int]) -> dict[str, torch.Tensor]:
    """Inputs of a model for rows with these masks."""
    mask = torch.tensor(rows)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    ids = text(tokens=mask.shape[1]) * mask
    return {"input_ids": ids, "attention_mask": mask, "position_ids": positions}


@pytest.mark.parametrize("variant", ["h2o", "local", "global", "flexgen"])
def test_columns_of_evictions(variant):
    """Evictions must be counted in padded columns, not in tokens. With a window of 3, token i
    evicts key i - 3."""
    model = tiny.model("llama", "sdpa")
    policy = {"heavy": 0, "recent": 3, "masks": MASKS.get(variant)}
    with h2o.simulated(model, trace=True, **policy) as simulation:
        model(**padded(NO_PADS, LEFT, RIGHT), use_cache=False)
    by_last = 6 if variant == "h2o" else 9  # key 2 of the row padded on the right
    want = [
        [4, 5, 6, 7, 8, 9, 9, 9, 9],
        [0, 0, 0, 7, 8, 9, 9, 9, 9],
        [4, 5, by_last, 9, 9, 9, 0, 0, 0],
    ]
    evicted_at = simulation.evicted_at(0)
    assert evicted_at.shape[1] == (2 if variant == "h2o" else 4)
    for head in evicted_at.unbind(1):
        assert head.tolist() == want


@pytest.mark.parametrize(
    ("columns", "want"),
    [
        ([1] * 9, [[4, 5, 6, 7, 8, 9, 9, 9, 9], [0, 0, 0, 7, 8, 9, 9, 9, 9],
                   [4, 5, 6, 9, 9, 9, 0, 0, 0], [4, 7, 8, 9, 0, 0, 9, 9, 9]]),
        ([6, 1, 1, 1], [[6, 6, 6, 7, 8, 9, 9, 9, 9], [0, 0, 0, 7, 8, 9, 9, 9, 9],
                        [6, 6, 6, 9, 9, 9, 0, 0, 0], [6, 7, 8, 9, 0, 0, 9, 9, 9]]),
        ([9], [[9, 9, 9, 9, 9, 9, 9, 9, 9], [0, 0, 0, 9, 9, 9, 9, 9, 9],
               [9, 9, 9, 9, 9, 9, 0, 0, 0], [9, 9, 9, 9, 0, 0, 9, 9, 9]]),
    ],
)  # fmt: skip
def test_columns_of_evictions_of_a_cache(columns, want):
    """The trace of a cache must count columns as well, here with the same window. A forward pass
    evicts after all its columns, padding included."""
    model = tiny.model("llama", "h2o")
    inputs = padded(NO_PADS, LEFT, RIGHT, [1, 1, 1, 1, 0, 0, 1, 1, 1])
    cache = h2o.H2OCache(model.config, heavy=0, recent=3, trace=True)
    stop = 0
    for count in columns:
        start, stop = stop, stop + count
        now = {name: x[:, start:stop] for name, x in inputs.items()}
        now["attention_mask"] = inputs["attention_mask"][:, :stop]
        model(**now, **with_cache(cache))
    for head in cache.evicted_at(0).unbind(1):
        assert head.tolist() == want


# ---- What simulated() leaves behind, and what it refuses ---------------------------------------


def state(model) -> tuple:
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    return (
        model.config._attn_implementation,
        sorted(model.__dict__),
        len(model._forward_hooks) + len(model._forward_pre_hooks),
        sorted(AttentionInterface()),
        sorted(AttentionMaskInterface._global_mapping),
    )


def test_everything_is_put_back():
    model, ids = tiny.model("llama", "sdpa"), text()
    before, dense = state(model), model(ids).logits
    with h2o.simulated(model, heavy=2, recent=2):
        outer = model(ids, use_cache=False).logits
        with h2o.simulated(model, heavy=9, recent=9):
            inner = model(ids, use_cache=False).logits
        assert torch.equal(outer, model(ids, use_cache=False).logits)
        assert not torch.allclose(outer, inner)
    assert state(model) == before
    with pytest.raises(KeyError, match="on purpose"), h2o.simulated(model, heavy=2, recent=2):
        raise KeyError("on purpose")
    assert state(model) == before
    assert torch.equal(dense, model(ids).logits)


@pytest.mark.parametrize("name", ["llama", "deepseek_v2"])
def test_a_copy_made_within_the_block(name):
    """A copy must be simulated within the block like the original, and after it be as the model was
    before. Its hooks must not run a pass of their own, which would fill a cache twice."""
    model, ids = tiny.model(name, "sdpa"), text()
    dense, tokens = model(ids).logits, tiny.greedy(model, {"input_ids": ids}).tolist()
    echo = {"score_by": "mean-echo", "head_shares": "echo"} if name == "llama" else {}
    with h2o.simulated(model, heavy=2, recent=2, prompt_length=9, **echo):
        copies = [copy.deepcopy(model)]
        copies.append(copy.deepcopy(copies[0]))
        simulated = model(ids, use_cache=False).logits
        assert all(torch.equal(x(ids, use_cache=False).logits, simulated) for x in copies)
    for twin in copies:
        assert torch.equal(twin(ids).logits, dense)
        assert tiny.greedy(twin, {"input_ids": ids}).tolist() == tokens
        with h2o.simulated(twin, heavy=2, recent=2, prompt_length=9, **echo):
            assert torch.equal(twin(ids, use_cache=False).logits, simulated)
        assert torch.equal(twin(ids).logits, dense)


def test_threads_with_models_of_their_own():
    ids, budgets = text(), [(2, 2), (5, 3), (0, 7), (11, 1)]
    models = [tiny.model("llama", "sdpa") for _ in budgets]

    @torch.no_grad()
    def answers(model, budget):
        found = []
        for _ in range(5):
            with h2o.simulated(model, heavy=budget[0], recent=budget[1]):
                found.append(model(ids, use_cache=False).logits)
        return torch.stack(found)

    want = list(map(answers, models, budgets))
    with ThreadPoolExecutor(4) as pool:
        assert all(map(torch.equal, pool.map(answers, models, budgets), want))


def test_threads_within_one_block():
    model = tiny.model("llama", "sdpa")
    texts = [text(seed, 30 + 7 * seed) for seed in range(4)]

    @torch.no_grad()
    def answer(ids):
        return model(ids, use_cache=False).logits

    with h2o.simulated(model, heavy=0.1, recent=0.1, min_tokens=0), ThreadPoolExecutor(4) as pool:
        want = [answer(ids) for ids in texts]
        assert all(map(torch.equal, pool.map(answer, texts), want))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_models():
    peft = pytest.importorskip("peft")
    base, ids = tiny.model("llama", "sdpa"), text()
    with h2o.simulated(base, heavy=3, recent=3):
        want = base(ids, use_cache=False).logits
    wrapped = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", r=2)).eval()
    with h2o.simulated(wrapped, heavy=3, recent=3):
        assert torch.equal(wrapped(ids, use_cache=False).logits, want)


@pytest.mark.parametrize(
    ("chosen", "error", "words"),
    [
        ({"masks": MASKS["local"], "heavy": 9, "sinks": 2}, ValueError, "heavy and recent only"),
        ({"masks": MASKS["local"]}, ValueError, "such as heavy=0.1, recent=0.1, not budget"),
        ({"masks": MASKS["global"], "heavy": 9, "prompt_length": 5}, ValueError, "no prompt"),
        ({"masks": MASKS["global"], "heavy": 9, "ratio_of": "prompt"}, ValueError, "ratio_of at"),
        ({"masks": MASKS["local"], "heavy": 9, "ratio_of": "prompt"}, ValueError, "ratio_of at"),
        ({"masks": "mask-local"}, TypeError, r'such as masks=MASKS\["local"\].* not .mask-local'),
        ({"prompt_length": 0}, ValueError, "prompt_length is 0; expected an integer from 1"),
        ({"prompt_length": [4, 0]}, ValueError, "prompt_length is 0; expected an integer"),
        ({"prompt_length": 2.5}, TypeError, "prompt_length is 2.5; expected an integer"),
        ({"prompt_length": True}, TypeError, "prompt_length is True; expected an integer"),
        ({"prompt_length": 2**31}, ValueError, "from 1 to 2147483647"),
        ({"ratio_of": "page"}, ValueError, 'expected "text", "seen" or "prompt"'),
        ({"heavy": 0, "recent": 0}, ValueError, "budget of 0"),
        ({"heavier": 1}, TypeError, "unknown parameter"),
        ({"heavy": [1, 2, 3]}, ValueError, "each needs one per layer|amounts"),
    ],
)
def test_arguments_that_do_not_fit(chosen, error, words):
    model = tiny.model("llama", "sdpa")
    with pytest.raises(error, match=words), h2o.simulated(model, **chosen):
        pass
    assert model.config._attn_implementation == "sdpa"


def test_a_config_has_no_weights_to_simulate():
    with pytest.raises(TypeError, match="not LlamaConfig, which has no weights: write model, tok"):
        with h2o.simulated(tiny.model("llama").config):
            pass


def test_calls_that_are_no_whole_text():
    model, ids = tiny.model("llama", "sdpa"), text()
    with h2o.simulated(model, heavy=3, recent=3):
        past = DynamicCache(config=model.config)
        model(ids[:, :5], **with_cache(past))  # the first chunk counts as a whole text
        with pytest.raises(ValueError, match="whole texts"):
            model(ids[:, 5:], **with_cache(past))
        with pytest.raises(ValueError, match="whole texts"):
            model(ids, **with_cache(h2o.H2OCache(model.config, heavy=2, recent=2)))
        with pytest.raises(ValueError, match="whole texts"):
            model.generate(ids, max_new_tokens=3, do_sample=False)
        with pytest.raises(h2o.UnsupportedError, match="4-D masks"):
            model(ids, attention_mask=torch.ones(1, 1, TEXT, TEXT, dtype=torch.bool))
        with (
            pytest.raises(ValueError, match="budget of 0"),
            h2o.simulated(model, heavy=0.01, recent=0.01, min_tokens=0, masks=MASKS["flexgen"]),
        ):
            model(ids, use_cache=False)
        with (
            pytest.raises(ValueError, match="2 entries for a batch of 1"),
            h2o.simulated(model, heavy=2, recent=2, prompt_length=[3, 4]),
        ):
            model(ids, use_cache=False)
        model.train()
        with pytest.raises(RuntimeError, match="inference"):
            model(ids, use_cache=False)


@pytest.mark.filterwarnings("ignore")
def test_a_compiled_model():
    """torch.compile makes transformers pass a 4-D mask. The error must not blame the mask, which
    the user did not give."""
    model = tiny.model("llama")
    compiled = torch.compile(model, backend="eager")
    with h2o.simulated(model, heavy=2, recent=2):
        with pytest.raises(h2o.UnsupportedError, match=r"do not support torch\.compile"):
            compiled(text(), use_cache=False)
        model(text(), use_cache=False)
        for uncompiled in (model, torch.compiler.disable(model)):
            with pytest.raises(h2o.UnsupportedError, match="4-D masks"):
                uncompiled(text(), use_cache=False, attention_mask=torch.ones(1, 1, 40, 40).bool())
    torch._dynamo.reset()  # dynamo would not compile the outer part of any model's forward again


def test_models_that_cannot_be_served():
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=9, hidden_size=8, n_layer=1, n_head=2)).eval()
    with pytest.raises(h2o.UnsupportedError, match="attention code of its own"):
        with h2o.simulated(model, heavy=2, recent=2):
            pass


def test_what_was_not_recorded():
    model, ids = tiny.model("llama", "sdpa"), text()
    with h2o.simulated(model, heavy=3, recent=3) as simulation:
        model(ids, use_cache=False)
    for method, argument in (
        ("evicted_at", "trace"),
        ("scores", "trace"),
        ("retained_mass", "mass"),
    ):
        with pytest.raises(ValueError, match=f"{argument}=True"):
            getattr(simulation, method)(0)


def test_nothing_was_recorded_before_a_pass():
    ours = tiny.model("llama")
    with h2o.simulated(ours, heavy=6, recent=6, trace=True) as simulation:
        with pytest.raises(ValueError, match="call the model within the block first"):
            simulation.evicted_at(0)
        ours(tiny.prompts(20)[0])
        with pytest.raises(ValueError, match=r"recorded for layer 7: only for \[0, 1\]"):
            simulation.scores(7)
