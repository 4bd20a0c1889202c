"""New tokens that contradict what a cache has seen are refused, before anything is stored."""

from __future__ import annotations

import threading

import pytest
import torch
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

import h2o
from h2o import H2OCache, H2OConfig
from h2o.compat import with_cache
from h2o.hf.conversation import state
from tests.hf.test_families import ALIKE
from tests.hf.tiny import FAMILIES, LATENT, batch, greedy, prompts, shared, slow_if

pytestmark = pytest.mark.timeout(120)

SMALL = {"heavy": 6, "recent": 6}
PLAIN = [
    slow_if(name in ALIKE, name)
    for name, x in (FAMILIES | LATENT).items()
    if not (x.image or x.weights)
]
REFUSED = pytest.raises(ValueError, match="input_ids must be everything seen so far")


def asked(ours, ids, **config):
    """A cache after a prompt and its answer."""
    cache = H2OCache(ours.config, **(config or SMALL))
    greedy(ours, {"input_ids": ids}, 5, **with_cache(cache))
    return cache


def held(cache):
    return [layer.slots.keys.clone() for layer in cache.layers if hasattr(layer, "slots")]


@pytest.mark.parametrize("name", PLAIN)
def test_the_same_prompt_again(name):
    """A prompt that comes again, as when a notebook's cell is run twice, must not count as new
    tokens."""
    ours, (ids,) = shared(name), prompts(30)
    cache = asked(ours, ids)
    before = held(cache)
    with REFUSED:
        greedy(ours, {"input_ids": ids}, 5, **with_cache(cache))
    assert cache.get_seq_length() == 34
    assert all(map(torch.equal, held(cache), before))
    cache.reset()
    again = greedy(ours, {"input_ids": ids}, 5, **with_cache(cache))
    expected = greedy(ours, {"input_ids": ids}, 5, **with_cache(H2OCache(ours.config, **SMALL)))
    assert again.tolist() == expected.tolist()


@pytest.mark.parametrize("tokens", [33, 25, 18])
@pytest.mark.parametrize("positions", ["original", "cache_relative"])
def test_a_prompt_shorter_than_what_was_seen(tokens, positions):
    """A template that strips earlier thoughts gives a prompt shorter than the text seen, whose end
    must not count as new tokens. With 18 tokens of 35 a single new token is left."""
    ours, (ids,) = shared("llama"), prompts(31)
    cache = asked(ours, ids, **SMALL, positions=positions)
    with REFUSED:
        greedy(
            ours, {"input_ids": ids[:, :tokens].repeat(1, 2)[:, :tokens]}, 4, **with_cache(cache)
        )
    assert cache.get_seq_length() == 35


@pytest.mark.parametrize("tokens", [20, 17])
@pytest.mark.parametrize("name", ["llama", "jamba"])
def test_chunks_of_a_prompt_that_has_been_read(name, tokens):
    """Where no ids are left, generate() prefills the seen ones again in chunks, at no positions. A
    model without positions would take them for new tokens."""
    ours, (ids,) = shared(name), prompts(20)
    cache = H2OCache(ours.config, **SMALL)
    ours(ids, **with_cache(cache))
    before = held(cache)
    with pytest.raises(ValueError, match="no new tokens: the cache has seen 20"):
        greedy(ours, {"input_ids": ids[:, :tokens]}, 1, **with_cache(cache), prefill_chunk_size=8)
    assert cache.get_seq_length() == 20
    assert all(map(torch.equal, held(cache), before))


def test_embeddings_of_the_same_prompt_again():
    ours, (ids,) = shared("llama"), prompts(30)
    cache, embedded = asked(ours, ids), ours.get_input_embeddings()(ids)
    with REFUSED:
        greedy(ours, {"inputs_embeds": embedded}, 5, **with_cache(cache))


def test_copies_and_files(tmp_path):
    ours, (ids,) = shared("llama"), prompts(30)
    cache = asked(ours, ids)
    cache.save(tmp_path / "cache.safetensors", ours)
    for copy in (cache.fork(), H2OCache.load(tmp_path / "cache.safetensors", ours)):
        with REFUSED:
            greedy(ours, {"input_ids": ids}, 5, **with_cache(copy))


def test_direct_passes_at_earlier_positions():
    ours, (ids,) = shared("llama"), prompts(30)
    cache = asked(ours, ids)
    with REFUSED:
        ours(ids[:, :1], position_ids=torch.tensor([[3]]), **with_cache(cache))
    ours(ids[:, :1], position_ids=torch.tensor([[34]]), **with_cache(cache))
    assert cache.get_seq_length() == 35


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
def test_a_later_turn_with_drafts(name):
    """Assisted decoding begins with a pass over the whole text, part of which the cache would then
    see twice. Such a turn must be refused."""
    ours, (ids,) = shared(name), prompts(30)
    cache = H2OCache(ours.config, **SMALL)
    cache.activate_past_recording()  # older versions of transformers do not call this
    greedy(ours, {"input_ids": ids}, 5, **with_cache(cache), prompt_lookup_num_tokens=2)
    seen = cache.get_seq_length()
    turn = {"input_ids": torch.cat([ids, ids], dim=1)}
    with pytest.raises(ValueError, match=f"has already seen {seen} tokens of it"):
        greedy(ours, turn, 5, **with_cache(cache), prompt_lookup_num_tokens=2)
    assert cache.get_seq_length() == seen


def test_generate_with_padding_on_the_right():
    """generate() numbers new tokens from the last column on, which is padding here. A cache must
    refuse these wrong positions."""
    ours, inputs = shared("llama"), batch(prompts(9, 5), side="right")
    cache = H2OCache(ours.config, **SMALL)
    with pytest.raises(ValueError, match=r"row 1 is padded on the right.*continue at 5"):
        greedy(ours, inputs, 5, **with_cache(cache))
    assert cache.get_seq_length() == 9


def test_positions_that_begin_again_beside_a_mask_of_the_new_tokens():
    ours, (ids,) = shared("llama"), prompts(6)
    cache = H2OCache(ours.config, **SMALL)
    ours(ids, **with_cache(cache))
    again = {"attention_mask": torch.ones_like(ids), "position_ids": torch.arange(6)[None]}
    with pytest.raises(ValueError, match="has seen 6 tokens, and the new ones begin at position 0"):
        ours(ids, **with_cache(cache), **again)


def test_a_mask_with_other_pads():
    ours, rows = shared("llama"), prompts(20, 12)
    padded, cache = batch(rows), H2OCache(shared("llama").config, **SMALL)
    mask = padded["attention_mask"]
    new = greedy(ours, padded, 5, **with_cache(cache))
    ids = torch.cat([padded["input_ids"], new, *[new] * 2], 1)
    more = torch.ones_like(ids)
    with pytest.raises(ValueError, match="attention_mask"):
        greedy(ours, {"input_ids": ids, "attention_mask": more}, 3, **with_cache(cache))
    moved = torch.cat([mask.roll(1, 1), more[:, 20:]], 1)
    moved[:, 3] = 0
    with pytest.raises(ValueError, match="attention_mask has"):
        greedy(ours, {"input_ids": ids, "attention_mask": moved}, 3, **with_cache(cache))
    assert cache.get_seq_length() == 24
    right = torch.cat([mask, more[:, 20:]], 1)
    greedy(ours, {"input_ids": ids, "attention_mask": right}, 3, **with_cache(cache))
    assert cache.get_seq_length() == 37


OTHERS = pytest.raises(ValueError, match="are not the ones that the cache has seen")


def two_turns(ours, change=(), between=lambda cache: cache, tokens=20, **first):
    """Tokens of the second of two turns on a cache. In the last row it has other ids in the columns
    `change`."""
    rows = batch(prompts(tokens, tokens - 4))
    cache = H2OCache(ours.config, **SMALL)
    settings = {"max_new_tokens": 6, "do_sample": False, **first}
    with torch.random.fork_rng():
        ids = ours.generate(**rows, **settings, **with_cache(cache))
    mask = rows["attention_mask"].repeat_interleave(len(ids) // 2, 0)
    ids = torch.cat([ids, prompts(4)[0].expand(len(ids), -1)], 1)
    mask = torch.cat([mask, mask.new_ones(len(ids), 10)], 1)
    for column in change:
        ids[-1, column] = (ids[-1, column] + 1) % 90 + 3
    settings = {"max_new_tokens": 3, "prefill_chunk_size": first.get("prefill_chunk_size")}
    turn = {"input_ids": ids, "attention_mask": mask, **settings}
    return ours.generate(**turn, do_sample=False, **with_cache(between(cache))).tolist()


class Disconnected(BaseStreamer):
    """A client that goes away after some tokens of the answer."""

    def __init__(self, tokens):
        self.left = tokens

    def put(self, value):
        self.left -= 1
        if self.left < 0:
            raise ConnectionError

    def end(self): ...


def test_a_turn_that_an_error_ended_leaves_a_copy_as_it_was():
    """The ids of the answer are lost. The next turn's error names the remedy, which works."""
    ours, (first, new) = shared("llama"), prompts(20, 4)
    turn = {"max_new_tokens": 8, "do_sample": False}
    cache = H2OCache(ours.config, **SMALL)
    ids = ours.generate(first, **turn, **with_cache(cache))
    ids = torch.cat([ids, new], 1)
    kept = cache.fork()
    with pytest.raises(ConnectionError):
        ours.generate(ids, **turn, streamer=Disconnected(4), **with_cache(cache))
    again = torch.cat([ids, new.flip(1)], 1)
    with OTHERS as error:
        ours.generate(again, **turn, **with_cache(cache))
    assert "turn = cache.fork()" in str(error.value)
    with pytest.raises(NotImplementedError, match="not recorded") as error:
        cache.crop(-2)
    assert "cache.fork()" in str(error.value)
    fresh = H2OCache(ours.config, **SMALL)
    ours.generate(first, **turn, **with_cache(fresh))
    wanted = ours.generate(again, **turn, **with_cache(fresh))
    assert torch.equal(ours.generate(again, **turn, **with_cache(kept)), wanted)


WAYS = {
    "one pass": {},
    "chunks": {"prefill_chunk_size": 7},
    "samples": {"do_sample": True, "num_return_sequences": 2},
    "more steps than are noted together": {"max_new_tokens": 6, "tokens": 12},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("change", [[8], [-6], [9, 10]])
def test_a_turn_with_other_ids(way, change, monkeypatch):
    """A turn whose ids differ from those seen must be refused. This happens when a template drops
    as many tokens as it adds, or when an answer is tokenized again."""
    if "more" in way:
        monkeypatch.setattr(state, "PENDING", 2)
    ours = shared("llama")
    with OTHERS:
        two_turns(ours, change, **WAYS[way])
    before = two_turns(ours, **WAYS[way])
    assert len(before[0]) == len(two_turns(ours, [-5], **WAYS[way])[0])  # this column is new
    assert two_turns(ours, [], **WAYS[way]) == before


@pytest.mark.parametrize("name", PLAIN)
def test_other_ids_of_the_same_length(name):
    ours, (ids,) = shared(name), prompts(30)
    cache = asked(ours, ids)
    before = held(cache)
    other = torch.cat([ids.flip(1), *[ids] * 2], 1)
    with OTHERS:
        greedy(ours, {"input_ids": other}, 5, **with_cache(cache))
    assert cache.get_seq_length() == 34
    assert all(map(torch.equal, held(cache), before))


def test_new_tokens_alone_that_are_more_than_were_seen():
    """generate() would drop the beginning of such tokens. With the mask of all columns they must be
    accepted."""
    ours, (ids, new) = shared("llama"), prompts(10, 30)
    cache = H2OCache(ours.config, **SMALL)
    ours(ids, **with_cache(cache))
    with OTHERS:
        ours.generate(new, max_new_tokens=3, **with_cache(cache))
    told = {"attention_mask": torch.ones(1, 40, dtype=torch.long)}
    ours.generate(new, **told, max_new_tokens=3, do_sample=False, **with_cache(cache))
    assert cache.get_seq_length() == 42


def test_ids_of_copies_and_files(tmp_path):
    ours, path = shared("llama"), tmp_path / "cache.safetensors"

    def saved(cache):
        cache.save(path, ours)
        return H2OCache.load(path, ours)

    for between in (H2OCache.fork, saved, lambda cache: saved(saved(cache))):
        two_turns(ours, [], between)
        with OTHERS:
            two_turns(ours, [8], between)


def test_ids_of_moved_rows():
    ours, rows = shared("llama"), prompts(20, 20)
    cache = H2OCache(ours.config, **SMALL)
    with torch.no_grad():
        ours(torch.cat(rows), **with_cache(cache))
    text = torch.cat([torch.cat(rows), torch.cat(prompts(4, 4))], 1)
    moved = cache.fork()
    moved.batch_select_indices([1, 1, 0])
    moved.batch_repeat_interleave(2)
    order = torch.tensor([1, 1, 1, 1, 0, 0])
    greedy(ours, {"input_ids": text[order]}, 3, **with_cache(moved.fork()))
    with OTHERS:
        greedy(ours, {"input_ids": text[order.flip(0)]}, 3, **with_cache(moved))
    reordered = cache.fork()
    reordered.reorder_cache(torch.tensor([1, 0]))
    with OTHERS:
        greedy(ours, {"input_ids": text}, 3, **with_cache(reordered))
    greedy(ours, {"input_ids": text}, 3, **with_cache(cache))


def test_sequences_of_a_beam_search_are_not_the_caches_rows():
    ours, (ids,) = shared("llama"), prompts(20)
    cache = H2OCache(ours.config, **SMALL)
    beams = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 6, "do_sample": False}
    out = ours.generate(ids, **beams, **with_cache(cache))
    turn = torch.cat([out, prompts(4)[0].expand(3, -1)], 1)
    with OTHERS:
        greedy(ours, {"input_ids": turn}, 3, **with_cache(cache))


def test_a_pass_that_failed_is_no_part_of_the_text():
    ours, (ids, more) = shared("llama"), prompts(20, 9)
    turn = torch.cat([ids, more], 1)

    def stop(*_):
        raise OSError("stopped")

    cache = H2OCache(ours.config, **SMALL)
    ours(ids, **with_cache(cache))
    hook = ours.model.layers[0].register_forward_pre_hook(stop)
    with pytest.raises(OSError, match="stopped"):
        greedy(ours, {"input_ids": turn}, 3, **with_cache(cache))
    hook.remove()
    other = turn.clone()
    other[0, 3] += 1
    with OTHERS:
        greedy(ours, {"input_ids": other}, 3, **with_cache(cache))
    greedy(ours, {"input_ids": turn}, 3, **with_cache(cache))


def test_a_refused_thread_leaves_no_ids():
    """A refused thread must leave no ids in the cache, although both threads make their masks
    before the first layer admits one of them."""
    ours, (ids, more) = shared("llama"), prompts(20, 4)
    cache, errors = H2OCache(ours.config, **SMALL), []

    def enter():
        try:
            cache.guard.planned = None
            cache.guard.enter(0, 20)
        except RuntimeError as error:
            errors.append(error)

    def intrude(*_):
        hook.remove()
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()

    hook = ours.model.layers[1].register_forward_pre_hook(intrude)
    ours(ids, **with_cache(cache))
    assert "another thread" in str(errors[0])
    greedy(ours, {"input_ids": torch.cat([ids, more], 1)}, 3, **with_cache(cache))


def turns_after_drafts(ours, ids):
    """A cache that has answered with drafts, most of which it took back."""
    cache = H2OCache(ours.config, **SMALL)
    turn = {"input_ids": ids.repeat(1, 3)}
    out = ours.generate(
        **turn, max_new_tokens=6, do_sample=False, prompt_lookup_num_tokens=3, **with_cache(cache)
    )
    return cache, out


def turns_after_crop(ours, ids):
    cache = H2OCache(ours.config, **SMALL)
    ids = torch.cat([ids, *prompts(20)], 1)
    cache.activate_past_recording()
    ours(ids, **with_cache(cache))
    cache.crop(-13)
    return cache, ids[:, :27]


@pytest.mark.parametrize("removed", [turns_after_drafts, turns_after_crop])
@pytest.mark.parametrize("column", [3, 25])
def test_other_ids_after_tokens_were_removed(removed, column, tmp_path):
    """`column`: in the pass of which nothing or a part was removed."""
    ours, (ids, more) = shared("llama"), prompts(20, 4)
    cache, seen = removed(ours, ids)
    turn = torch.cat([seen, more], 1)
    other = turn.clone()
    other[0, column] += 1
    with OTHERS:
        greedy(ours, {"input_ids": other}, 3, **with_cache(cache))
    cache.save(tmp_path / "cache", ours)
    loaded = H2OCache.load(tmp_path / "cache", ours)
    for each in (cache, loaded):
        greedy(ours, {"input_ids": turn}, 3, **with_cache(each))
        assert each.get_seq_length() == turn.shape[1] + 2


@pytest.mark.parametrize("how", ["embeddings", "a DynamicCache"])
def test_ids_that_are_not_known(how):
    """A cache that does not know the ids it has seen has nothing to compare, so it must accept any
    turn."""
    ours, (ids,) = shared("llama"), prompts(20)
    cache = H2OCache(ours.config, heavy=40, recent=40)
    if how == "embeddings":
        ours(inputs_embeds=ours.get_input_embeddings()(ids), **with_cache(cache))
    else:
        full = DynamicCache(config=ours.config)
        ours(ids, **with_cache(full))
        cache = H2OCache.from_dynamic_cache(full, ours.config, **SMALL)
    turn = torch.cat([ids + 1, ids], 1)
    greedy(ours, {"input_ids": turn}, 3, **with_cache(cache))
    assert cache.get_seq_length() == 42


@pytest.mark.parametrize("readings", [1, 2])
def test_questions_about_another_document(readings):
    ours, (ids, repeat, question) = shared("llama"), prompts(30, 3, 5)
    more = {"readings": 2, "repeat": repeat} if readings == 2 else {}
    cache = h2o.compress_document(ours, ids, **SMALL, **more)
    other = ids.clone()
    other[0, 2] += 1
    prompt, wrong = (torch.cat([x, question], 1) for x in (ids, other))
    with OTHERS:
        greedy(ours, {"input_ids": wrong}, 3, **with_cache(cache.fork()))
    greedy(ours, {"input_ids": prompt}, 3, **with_cache(cache.fork()))
    asking = [prompt[0].tolist(), wrong[0].tolist(), prompt[0].tolist()]
    first, second, third = h2o.generate_all(
        ours, asking, cache.config, rows=2, prefix=cache, max_new_tokens=3
    )
    assert first.ids == third.ids
    assert "are not those that the prefix has read" in str(second.error)


@pytest.mark.parametrize("name", ["llama", *LATENT])
@pytest.mark.parametrize("tokens", [1, 9])
def test_a_turn_of_one_token_more_than_the_prompt(name, tokens):
    """A turn one token longer than the prompt must not be taken for the prompt and its first new
    token, which a model without a cache would get."""
    ours = shared(name)
    ids, more = prompts(tokens, tokens + 1)
    text = torch.cat([ids, more], dim=1)
    cache, whole = (H2OCache(ours.config, H2OConfig.full()) for _ in range(2))
    with torch.no_grad():
        expected = ours(text, **with_cache(whole)).logits[:, tokens:]
        ours(ids, **with_cache(cache))
        found = ours(more, **with_cache(cache)).logits
    torch.testing.assert_close(found, expected, atol=2e-3, rtol=2e-3)


def test_what_is_found_once_a_pass_is_of_no_other_pass():
    """A prompt must not get the lengths of an interrupted prompt, or those from before a crop."""
    model, settings = shared("llama"), {"heavy": 0.2, "recent": 0.2, "min_tokens": 0}

    def assert_as_fresh(cache, texts):
        fresh = H2OCache(model, **settings)
        model(**texts, **with_cache(fresh))
        for layer in range(len(cache.layers)):
            assert torch.equal(cache.kept(layer).positions, fresh.kept(layer).positions)

    def interrupt(tokens):
        raise KeyboardInterrupt

    cache, last = H2OCache(model, **settings), len(model.model.layers) - 1
    cache.layers[last].forward = interrupt
    with pytest.raises(KeyboardInterrupt):
        model(**batch(prompts(40, 25)), **with_cache(cache))
    del cache.layers[last].forward
    cache.reset()
    texts = batch(prompts(22, 31))
    model(**texts, **with_cache(cache))
    assert_as_fresh(cache, texts)

    cache = H2OCache(model, **settings)
    cache.activate_past_recording()
    ids = prompts(40)[0]
    model(ids, **with_cache(cache))
    cache.crop(-19)
    assert cache.guard.current is None
    assert_as_fresh(cache, {"input_ids": ids[:, :21]})
