"""Requests that come and go in a batch over pages: each must get the answers it would get alone.

`traffic` plays the part of vLLM: prompts whole or in chunks together with decode steps, pages that
are used again, requests that leave. tests/vllm runs the same with vLLM.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import threading
import time

import numpy as np
import pytest
import torch

from h2o import H2OConfig, backends, ops, quantization
from h2o.hf.cache_state import slot_layout
from h2o.hf.cache_state.slot_removal import remove_tokens
from h2o.quantization import set_smoothing
from h2o.vllm import metrics, page_budget
from h2o.vllm.config_entry import config_of_entry, whole_prompts_of
from h2o.vllm.page_budget import PageBudget
from h2o.vllm.page_store import PageStore, page_bytes
from h2o.vllm.paged_request import (
    PagedRequest,
    evicted_spans,
    prefix_tokens,
    with_budget,
    with_pins,
)
from h2o.vllm.paged_rows import PagedLayer, PartialPrompts, plan
from h2o.vllm.worker_prompts import WorkerPrompts
from tests import inputs
from tests.devices import on_fake_device

H, G, D = 4, 2, 32
LAYERS, LAYER, LONGEST, PAGES, SCALE = 3, 1, 90, 40, 0.3

CONFIGS = {
    "tokens": H2OConfig(heavy=9, recent=7),
    "fractions": H2OConfig(heavy=0.3, recent=0.2, sinks=2, min_tokens=0),
    "everything": H2OConfig(
        heavy=9,
        recent=7,
        sinks=4,
        score_by="mean",
        decay=0.9,
        value_weighted=True,
        kv_dtype="int8-int4",
    ),
    "of heads": H2OConfig(heavy=[[4, 12]] * LAYERS, recent=[[9, 3]] * LAYERS, kv_dtype="int8"),
    "of layers": H2OConfig(heavy=[30, 6, 2], recent=[3, 8, 1], kv_dtype="int4"),
    "all keys": H2OConfig.full(),
}


@dataclasses.dataclass(eq=False)
class Talk:
    """A request: its tokens, and the number of them that form the prompt."""

    text: inputs.Text
    prompt: int
    pinned: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    evicted: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    page: int = -1
    seen: int = 0
    answer: list[torch.Tensor] = dataclasses.field(default_factory=list)
    kept: torch.Tensor | None = None

    @property
    def tokens(self) -> int:
        return self.text.keys.shape[2]


def talk(seed: int, prompt: int, tokens: int) -> Talk:
    return Talk(inputs.drifting(seed, B=1, H=H, G=G, N=tokens, D=D, sink=True), prompt)


def paged(config: H2OConfig, prompt_scores=None) -> PagedLayer:
    budget = PageBudget(config, LAYERS, LONGEST)
    page = budget.empty_page(LAYER, torch.empty(1, G, 1, D))
    memory = apart(0, PAGES, page_bytes(page), dtype=torch.int8).fill_(7)
    known = PageStore(memory, page), budget, LAYER, SCALE, 0.0, WorkerPrompts()
    return PagedLayer(*known, prompt_scores)


def apart(labels: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Uninitialized tensor. On a device that does not exist all tensors begin at one address, so
    `labels` shifts a tensor away from those of other places."""
    count, before = math.prod(shape), (labels + 1) << 22
    return torch.empty(before + count, dtype=dtype)[before:].view(shape)


def held(layer: PagedLayer, page: int) -> torch.Tensor:
    """Positions held in a page."""
    return layer.store.pages.positions[page : page + 1].clone()


def feed(layer: PagedLayer, begun: PartialPrompts, rows: list[tuple[Talk, int]]) -> None:
    """Run a forward pass with n tokens of each request."""
    parts = [talk.text.cut(talk.seen, talk.seen + n) for talk, n in rows]
    query, key, value = (
        torch.from_numpy(np.concatenate([part[i][0].swapaxes(0, 1) for part in parts]))
        for i in range(3)
    )
    starts = np.cumsum([0, *(n for _, n in rows)]).tolist()
    for each, n in rows:
        each.seen += n
    batch = plan(
        starts,
        [each.seen for each, _ in rows],
        [each.page for each, _ in rows],
        {
            each.page: PagedRequest(each.prompt, None, each.pinned, evicted=each.evicted)
            for each, _ in rows
        },
        begun,
    )
    out = torch.full(query.shape, torch.nan)
    layer.forward(query, key, value, batch, out)
    for (each, _), begin, end in zip(rows, starts, starts[1:], strict=False):
        each.answer.append(out[begin:end])


def alone(config: H2OConfig, each: Talk, prompt_scores=None) -> tuple[torch.Tensor, ops.Slots]:
    """The answers to the request alone, from the operations called one after the other."""
    query, keys, values = map(torch.from_numpy, each.text)
    budget = PageBudget(config, LAYERS, LONGEST)
    slots = budget.empty_page(LAYER, keys)
    wanted = budget.by_head(LAYER, keys, PagedRequest(each.prompt, None, each.pinned))
    slots.budget.copy_(torch.tensor(wanted, dtype=torch.int32).view_as(slots.budget))
    q, k, v = (x[:, :, : each.prompt] for x in (query, keys, values))
    set_smoothing(slots.smoothing, slots.seen_tokens, q, k, None)
    out, scores = ops.attend(q, k, v, scale=SCALE, policy=config.policy)
    if prompt_scores is not None:
        scores = prompt_scores(q, k, v, scores)[0]
    for start, stop in each.pinned:
        scores[..., start:stop] = torch.inf
    ops.evict(k, v, scores, slots, policy=config.policy)
    if each.evicted:
        sizes = slot_layout.sizes(slots)
        slots = remove_tokens(slots, sizes, sizes, [each.evicted], config.policy)
    answer = [out[0]]
    for i in range(each.prompt, each.seen):
        q, k, v = (x[:, :, i : i + 1] for x in (query, keys, values))
        answer.append(ops.step(q, k, v, slots, scale=SCALE, policy=config.policy)[0])
    return torch.cat(answer), slots


def traffic(
    layer: PagedLayer, talks: list[Talk], seed: int, room: int, most: int = LONGEST, held=held
) -> int:
    """Serve the requests, with at most `room` tokens per pass and `most` of one request, and as
    many requests at once as there are pages and buffers. Returns the number of passes whose prompt
    was cut into chunks."""
    rng = np.random.default_rng(seed)
    free, waiting, running = list(range(1, PAGES)), list(talks), []
    begun = PartialPrompts(layer.budget.buffers)
    rng.shuffle(free)
    cut = 0
    while waiting or running:
        if waiting and free and len(running) < 6:
            running.append(waiting.pop(0))
            running[-1].page = free.pop(0)
        left, rows = room, []
        whole = [each for each in running if 0 < each.seen < each.prompt]
        for each in running:
            n = min(left, most, each.prompt - each.seen if each.seen < each.prompt else 1)
            if each.seen + n < each.prompt and each not in whole:
                n = n if len(whole) < begun.buffers else 0
                whole += [each] if n else []
            if n > 0:
                rows.append((each, n))
                left -= n
                cut += each.seen + n < each.prompt
        rng.shuffle(rows)
        feed(layer, begun, rows)
        for each in [each for each in running if each.seen == each.tokens]:
            each.kept = held(layer, each.page)
            running.remove(each)
            free.append(each.page)
    assert not begun.by_page
    return cut


def talks() -> list[Talk]:
    lengths = [
        (1, 30),
        (40, 70),
        (17, 50),
        (33, 33),
        (64, 90),
        (2, 40),
        (50, 80),
        (21, 60),
        (9, 64),
    ]
    return [talk(seed, *length) for seed, length in enumerate(lengths)]


@pytest.mark.parametrize("name", CONFIGS)
def test_each_request_as_if_it_were_alone(name):
    """With whole prompts the answers are equal to the bit, even if pages are used again."""
    layer, served = paged(CONFIGS[name]), talks() + talks()
    assert traffic(layer, served, seed=3, room=1000) == 0
    for each in served:
        wanted, slots = alone(CONFIGS[name], each)
        assert torch.equal(torch.cat(each.answer), wanted)
        assert torch.equal(each.kept, slots.positions)


@pytest.mark.parametrize("name", CONFIGS)
def test_pages_by_the_torch_backend(name):
    """Without the core, requests in pages answer as if they were alone."""
    layer, served = paged(CONFIGS[name]), talks()
    with backends.by_torch():
        assert traffic(layer, served, seed=3, room=1000) == 0
        expected = [alone(CONFIGS[name], each) for each in served]
    for each, (wanted, slots) in zip(served, expected, strict=True):
        torch.testing.assert_close(torch.cat(each.answer), wanted, rtol=2e-4, atol=2e-4)
        assert torch.equal(each.kept.sort().values, slots.positions.sort().values)


@pytest.mark.parametrize("name", CONFIGS)
def test_prompts_in_chunks_are_cut_at_their_end(name):
    layer, served = paged(CONFIGS[name]), talks()
    assert traffic(layer, served, seed=3, room=16) > 10
    for each in served:
        wanted, slots = alone(CONFIGS[name], each)
        torch.testing.assert_close(torch.cat(each.answer), wanted, rtol=2e-4, atol=2e-4)
        assert torch.equal(each.kept, slots.positions)


def test_the_first_queries_of_a_prompt_in_chunks_determine_its_smoothing(monkeypatch):
    """Only these queries are kept, and here they are in two chunks of 16."""
    for module in (quantization, page_budget):
        monkeypatch.setattr(module, "SMOOTHING_TOKENS", 20)
    layer, served = paged(CONFIGS["of layers"]), talks()
    assert traffic(layer, served, seed=3, room=16) > 10
    assert layer.queries.shape == (layer.budget.buffers, H, 20, D)
    for each in served:
        wanted, slots = alone(CONFIGS["of layers"], each)
        torch.testing.assert_close(torch.cat(each.answer), wanted, rtol=2e-4, atol=2e-4)
        assert torch.equal(each.kept, slots.positions)


def last_first(query, key, value, received):
    """Scores computed from the queries instead of attention. They show whether all queries are
    there."""
    scores = query.abs().amax(-1).unflatten(1, (G, -1)).amax(2) + key[..., 0] + 0 * received
    return scores, scores


@pytest.mark.parametrize("room", [1000, 16])
def test_scores_of_prompts_that_are_not_their_attention(room):
    """The scores are computed once, at the end of a prompt, for the whole prompt."""
    config = CONFIGS["everything"]
    layer, served = paged(config, last_first), talks()
    assert (traffic(layer, served, seed=3, room=room) > 10) == (room < 1000)
    for each in served:
        wanted, slots = alone(config, each, last_first)
        torch.testing.assert_close(torch.cat(each.answer), wanted, rtol=2e-4, atol=2e-4)
        assert torch.equal(each.kept, slots.positions)
        assert len(each.answer) > 20 or not torch.equal(
            slots.positions, alone(config, each)[1].positions
        )


@pytest.mark.parametrize("name", ["tokens", "of heads", "fractions"])
@pytest.mark.parametrize("room", [1000, 16])
def test_pinned_keys_stay(name, room):
    """Pinned keys of some requests stay, whether prompts come whole or in chunks."""
    layer, served, spans = paged(CONFIGS[name]), talks(), [(3, 6), (8, 9)]
    for each in served[::2]:
        each.pinned = [span for span in spans if span[1] <= each.prompt]
    traffic(layer, served, seed=3, room=room)
    assert sum(map(len, (each.pinned for each in served))) >= 4
    for each in served:
        wanted, slots = alone(CONFIGS[name], each)
        torch.testing.assert_close(torch.cat(each.answer), wanted, rtol=2e-4, atol=2e-4)
        assert torch.equal(each.kept, slots.positions)
        (heads,) = slot_layout.by_head(slots, slot_layout.sizes(slots), "positions", -1).tolist()
        for span in each.pinned:
            assert all(set(range(*span)) <= set(head) for head in heads)
    assert math.isfinite(layer.store.eviction().kept)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("room", [1000, 16])
def test_requests_that_forget_tokens_of_their_prompt(name, room):
    """They are removed once, before the first token after the prompt, and from no other page."""
    layer, served, spans = paged(CONFIGS[name]), talks(), [(3, 6), (8, 14)]
    for each in served[::2]:
        each.evicted = [span for span in spans if span[1] < each.prompt]
    assert sum(map(len, (each.evicted for each in served))) >= 5
    traffic(layer, served, seed=3, room=room)
    for each in served:
        wanted, slots = alone(CONFIGS[name], each)
        torch.testing.assert_close(torch.cat(each.answer), wanted, rtol=2e-4, atol=2e-4)
        assert torch.equal(each.kept, slots.positions)
    evicted = layer.store.eviction().keys
    for each in served[::2]:
        each.evicted = []
    again = paged(CONFIGS[name])
    for each in served:
        each.seen, each.answer = 0, []
    traffic(again, served, seed=3, room=room)
    assert 0 <= evicted <= again.store.eviction().keys  # what was removed was not evicted


@pytest.mark.parametrize("chunks", [[16, 8, 16], [16, 9, *[1] * 15]])
def test_pinned_keys_where_prompts_are_cut_after_each_chunk(chunks):
    """A chunk of one token is not a decode step, since its key may be pinned."""
    layer, begun, each = paged(CONFIGS["tokens"]), PartialPrompts(0), talk(7, 40, 70)
    each.page, each.pinned = 3, [(6, 10), (25, 29)]
    for tokens in [*chunks, *[1] * 30]:
        feed(layer, begun, [(each, tokens)])
    positions = held(layer, 3)[0]
    assert all({*range(6, 10), *range(25, 29)} <= {*head.tolist()} for head in positions)


def test_room_for_pinned_keys():
    """Recent keys make room for pins until only the newest is left. More pins are an error."""
    keys, config = torch.empty(1, G, 1, D), CONFIGS["tokens"]
    budget = PageBudget(config, LAYERS, LONGEST)
    for pins, wanted in ((5, (9, 7)), (12, (12, 4)), (15, (15, 1))):
        assert budget.by_head(LAYER, keys, PagedRequest(40, None, [(2, 2 + pins)])) == [wanted]
        budget.check_room(keys, [(2, 2 + pins)])
    with pytest.raises(ValueError, match=r"16 pinned keys do not fit in a page, .* 16 keys"):
        budget.check_room(keys, [(2, 18)])


def test_room_for_pinned_keys_is_that_of_all_ranks():
    """All ranks must compute the same room. Otherwise a request would have its pins on some of
    them."""
    keys = torch.empty(1, 2, 1, D)
    shares = H2OConfig(heavy=10, recent=2, head_shares=[[1, 1, 4, 4]] * LAYERS)
    for rank in (0, 1):
        budget = PageBudget(shares, LAYERS, LONGEST, part=(rank, 2))
        budget.check_room(keys, [(0, 7)])
        with pytest.raises(ValueError, match="8 pinned keys do not fit in a page"):
            budget.check_room(keys, [(0, 8)])


def test_pins_that_requests_ask_for():
    config = CONFIGS["tokens"]
    for asked, wanted in (
        ("0:4,9:12", [(0, 4), (9, 12)]),
        ([[0, 4], [9, 12]], [(0, 4), (9, 12)]),
        ("prompt", [(0, 20)]),
    ):
        assert with_pins(config, {"h2o_pinned": asked}, 20) == wanted
    assert with_pins(config, {"other": 1}, 20) == []
    assert with_budget(config, {"h2o_pinned": "0:4"}) is None
    for asked, word in (
        ("system", "does not see chats"),
        ("4", "spans of tokens"),
        ([[4, 4]], "span"),
        ([[True, 4]], r"is \[\[True, 4\]\]; expected spans"),
        ("0:21", "the prompt has 20"),
    ):
        with pytest.raises((TypeError, ValueError), match=word):
            with_pins(config, {"h2o_pinned": asked}, 20)
    with pytest.raises(ValueError, match="decay=1"):
        with_pins(CONFIGS["everything"], {"h2o_pinned": "0:4"}, 20)


def test_a_request_that_left_in_its_prompt_leaves_nothing():
    """A request that left during its prompt must leave nothing in a page that another request
    takes. Its memory is freed after some more requests."""
    layer, begun, worker_prompts = paged(CONFIGS["tokens"]), PartialPrompts(2), WorkerPrompts()
    worker_prompts.partial.append(begun.by_page)
    left = [talk(seed, 40, 40) for seed in range(5)]
    for page, each in enumerate(left, start=1):
        each.page = page
        worker_prompts.leave([page - 2])
        feed(layer, begun, [(each, 20)])
    assert [*begun.by_page] == [4, 5]
    assert layer.whole.keys.shape == (2, G, LONGEST, D)
    assert held(layer, 1).max() == -1
    other = talk(50, 30, 60)
    other.page = 5
    feed(layer, begun, [(other, 30)])
    while other.seen < other.tokens:
        feed(layer, begun, [(other, 1)])
    assert torch.equal(torch.cat(other.answer), alone(CONFIGS["tokens"], other)[0])
    assert [*begun.by_page] == [4]


def test_more_prompts_at_once_than_there_is_room_for():
    """More prompts in chunks than there are buffers are an error, because none may be cut before
    its end. The scheduler makes them wait."""
    layer, begun = paged(CONFIGS["tokens"]), PartialPrompts(2)
    rows = [(talk(seed, 60, 65), 9) for seed in range(3)]
    for page, (each, _) in enumerate(rows, start=1):
        each.page = page
    with pytest.raises(RuntimeError, match="more than 2 prompts in chunks at once: the scheduler"):
        feed(layer, begun, rows)


def test_without_room_each_chunk_is_an_end():
    """With "cut": "chunk", every chunk of a prompt ends with an eviction."""
    config = CONFIGS["everything"]
    layer, served, begun = paged(config), [talk(seed, 40, 50) for seed in (1, 2)], PartialPrompts(0)
    for page, each in enumerate(served, start=1):
        each.page = page
    for n in (17, 13, 10, *[1] * 10):
        feed(layer, begun, [(each, n) for each in served])
    assert layer.whole is None
    for each in served:
        query, keys, values = map(torch.from_numpy, each.text)
        slots = PageBudget(config, LAYERS, LONGEST).empty_page(LAYER, keys)
        slots.budget.copy_(torch.tensor([9, 7]))
        answers, begin = [], 0
        for n in (17, 13, 10):
            q, k, v = (x[:, :, begin : begin + n] for x in (query, keys, values))
            out, scores = ops.attend(q, k, v, slots, scale=SCALE, policy=config.policy)
            ops.evict(k, v, scores, slots, policy=config.policy)
            answers.append(out[0])
            begin += n
        assert torch.equal(torch.cat(each.answer[:3]), torch.cat(answers))


@pytest.mark.parametrize("name", ["tokens", "everything"])
def test_a_request_that_is_read_again_with_its_answer(name):
    """vLLM feeds a preempted request again with its answer, so more tokens come than the prompt
    has."""
    layer, begun, each = paged(CONFIGS[name]), PartialPrompts(1), talk(7, 40, 80)
    each.page = 4
    for n in (30, 30, *[1] * 20):
        feed(layer, begun, [(each, n)])
    each.prompt = 60
    wanted, slots = alone(CONFIGS[name], each)
    torch.testing.assert_close(torch.cat(each.answer), wanted, rtol=2e-4, atol=2e-4)
    assert torch.equal(held(layer, 4), slots.positions)


@pytest.mark.parametrize("name", CONFIGS)
def test_evictions_are_counted_where_pages_are_used_again(name):
    """Evicted keys and their attention must add up to what the requests alone have lost."""
    layer, served = paged(CONFIGS[name]), talks()
    traffic(layer, served, seed=3, room=1000)
    slots = [alone(CONFIGS[name], each)[1] for each in served]
    eviction = layer.store.eviction()
    assert eviction.lost == pytest.approx(sum(float(x.evicted_score.sum()) for x in slots))
    kept = sum(float(x.scores[x.positions >= 0].double().sum()) for x in slots)
    assert eviction.kept == pytest.approx(kept)

    served = [talk(seed, each.prompt, each.tokens) for seed, each in enumerate(talks() * 5)]
    assert len(served) > PAGES
    before = eviction.keys
    traffic(layer, served, seed=3, room=1000)
    kept = sum(int((each.kept >= 0).sum()) for each in served)
    evicted = G * sum(each.tokens for each in served) - kept
    assert layer.store.eviction().keys == before + evicted
    assert evicted == 0 if name == "all keys" else evicted > 500


def test_a_meter_leaves_its_numbers_for_the_servers_first_process(tmp_path, monkeypatch):
    layer, labels = paged(CONFIGS["tokens"]), ("tiny", "0", "1")
    monkeypatch.setenv(metrics.FOLDER, str(tmp_path / "numbers"))
    monkeypatch.setattr(metrics, "SECONDS", 0.01)
    meter = metrics.Meter(labels, 4096, 12, lambda: [layer.store], WorkerPrompts())
    meter.write()
    (file,) = (tmp_path / "numbers").iterdir()
    numbers = {"h2o:request_bytes": 4096, "h2o:requests_that_fit": 12}
    numbers |= {f"h2o:{name}": 0 for name in ("stored_prompts", "stored_prompt_bytes")}
    numbers |= {f"h2o:forked_{name}": 0 for name in ("requests", "tokens")}
    nothing = {"h2o:evicted_keys": 0, "h2o:share_held": None}
    assert json.loads(file.read_text()) == [list(labels), numbers | nothing]
    traffic(layer, talks(), seed=3, room=1000)
    meter.schedule_write()
    while json.loads(file.read_text())[1] == numbers | nothing:
        time.sleep(0.01)
    assert json.loads(file.read_text())[1]["h2o:evicted_keys"] == layer.store.eviction().keys
    assert [x.name for x in file.parent.iterdir()] == ["0-1.json"]


def test_numbers_are_counted_between_two_passes_of_a_layer():
    """Another thread counts all the time. The number of evicted keys must never decrease, and a
    page that the next request takes must not be counted twice."""
    layer, counts, done = paged(CONFIGS["tokens"]), [], threading.Event()
    served = [talk(seed, each.prompt, each.tokens) for seed, each in enumerate(talks() * 5)]

    def count() -> None:
        while not done.is_set():
            counts.append(layer.store.eviction().keys)

    thread, interval = threading.Thread(target=count), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # so that the threads take turns even on a busy machine
    thread.start()
    try:
        traffic(layer, served, seed=3, room=1000)
    finally:
        done.set()
        thread.join()
        sys.setswitchinterval(interval)
    counts.append(layer.store.eviction().keys)
    assert len(set(counts)) > 3  # some counts were made between the first and the last pass
    assert counts == sorted(counts)


def test_a_folder_that_takes_no_numbers_is_a_warning(tmp_path, monkeypatch):
    """A folder that cannot be made, or whose name is taken, causes a warning."""
    for folder in (tmp_path / "missing" / "numbers", tmp_path / "file"):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv(metrics.FOLDER, str(folder))
        meter = metrics.Meter(("tiny", "0", "0"), 1, 1, list, WorkerPrompts())
        with pytest.warns(RuntimeWarning, match="/metrics is incomplete: .*(missing|file)"):
            meter.write()


def test_a_meter_that_nobody_reads_writes_nothing(monkeypatch):
    monkeypatch.delenv(metrics.FOLDER, raising=False)
    labels = ("tiny", "0", "0")
    meter = metrics.Meter(labels, 1, 1, lambda: pytest.fail("asked"), WorkerPrompts())
    meter.schedule_write()
    meter.write()


@pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="before torch 2.10 a tensor without memory cannot be shown",
)
@pytest.mark.parametrize("name", CONFIGS)
def test_on_a_device_the_host_waits_for_nothing(name):
    """On a device no pass may wait: with whole and chunked prompts, steps in any order, and pages
    used again."""
    with on_fake_device():
        layer, begun = paged(CONFIGS[name]), PartialPrompts(1)
        requests = {1: PagedRequest(40), 2: PagedRequest(12), 3: PagedRequest(33)}
        for starts, lengths, pages in [
            ([0, 20, 32], [20, 12], [1, 2]),
            ([0, 1, 21], [13, 40], [2, 1]),
            ([0, 1, 18, 19], [14, 17, 41], [2, 3, 1]),
            ([0, 1, 13], [42, 12], [1, 2]),
            ([0, 1, 2], [43, 13], [1, 2]),
        ]:
            query, key, value, out = (
                apart(i, starts[-1], heads, D) for i, heads in enumerate((H, G, G, H), start=1)
            )
            batch = plan(starts, lengths, pages, requests, begun, device="cuda")
            layer.forward(query, key, value, batch, out)
        assert layer.store.pages.keys.device.type == layer.whole.keys.device.type == "cuda"
        assert batch.steps.pages.device.type == "cuda"


def test_steps_are_one_call_wherever_their_pages_are():
    starts, lengths, pages = [0, 1, 2, 9, 10], [50, 60, 7, 80], [300, 3, 5, 200]
    batch = plan(starts, lengths, pages, {}, PartialPrompts(1))
    assert batch.steps.pages.tolist() == [300, 3, 200]
    assert batch.steps.tokens.tolist() == [0, 1, 9]
    assert [chunk.page for chunk in batch.chunks] == [5]
    batch = plan([0, 7, 8, 9], [7, 50, 60], [5, 300, 3], {}, PartialPrompts(1))
    assert batch.steps.tokens == slice(7, 9)


def test_a_request_has_its_own_budget_within_its_page():
    keys = torch.empty(1, G, 1, D)
    budget = PageBudget(H2OConfig(heavy=9, recent=7, sinks=2), LAYERS, LONGEST)
    for asked, kept in (((3, 4), (3, 4)), ((50, 4), (12, 4)), ((9, 50), (0, 16)), ((0, 0), (0, 0))):
        config = H2OConfig(heavy=asked[0], recent=asked[1], sinks=2)
        assert budget.by_head(LAYER, keys, PagedRequest(40, config)) == [kept]
    of_heads = PageBudget(CONFIGS["of heads"], LAYERS, LONGEST)
    request = PagedRequest(40, H2OConfig(heavy=8, recent=6))
    assert of_heads.by_head(LAYER, keys, request) == [(7, 6), (8, 6)]


def test_pages_are_as_large_as_the_widest_layer_needs_on_any_rank():
    keys = torch.empty(1, G, 1, D)
    config = H2OConfig(heavy=[[9, 9, 2, 2], [1, 1, 30, 40], [9, 9, 2, 2]], recent=4)
    ranks = [PageBudget(config, LAYERS, LONGEST, part=(rank, 2)) for rank in range(2)]
    widest = ranks[1].empty_page(1, keys)
    assert widest.starts.tolist() == [0, 35, 80]
    assert {rank.page_bytes(keys) for rank in ranks} == {page_bytes(widest)}


def test_a_page_is_as_large_as_its_fields():
    page = PageBudget(CONFIGS["everything"], LAYERS, LONGEST).empty_page(0, torch.empty(1, G, 1, D))
    assert sum(x.nbytes for x in page if x is not None) <= page_bytes(page)
    assert page_bytes(page) % 16 == 0
    assert page.keys.shape == (1, G, 21, D + 2)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ([64, 64], r'must be an object such as \{"heavy": 64'),
        ({"heavy": "a lot"}, "heavy is 'a lot'; expected"),
        ({"heavy": 64, "window": 3}, "unknown parameter 'window'"),
        ({"heavy": 0, "recent": 0}, "keeps nothing"),
        (
            {"heavy": 64, "positions": "cache_relative"},
            "in vLLM cannot be combined with .*cache_relative.*: keys come",
        ),
        (
            {"heavy": 64, "score_by": "mean-echo", "cut": "chunk"},
            "mean-echo.* its end; use score_by",
        ),
        ({"preset": "calibrated", "budget": 64, "cut": "chunk"}, "mean-echo.* is not supported"),
        (
            {"heavy": 64, "score_by": "random"},
            "in vLLM cannot be combined with .*random.*: it is a base",
        ),
        ({"preset": "robust", "budget": 64, "window": 3}, "unknown parameter 'window'"),
        ({"heavy": 64, "cut": "often"}, 'expected "prompt" or "chunk"'),
        ({"heavy": 64, "score_by": ["mean"]}, r"score_by is \['mean'\]; expected"),
        ({"preset": ["robust"], "budget": [64]}, r"preset is \['robust'\]; expected"),
        ({"heavy": 64, "whole_prompts": 0}, "whole_prompts is 0; expected"),
        ({"heavy": 64, "whole_prompts": "2"}, "whole_prompts is '2'; expected"),
        ({"preset": "best", "budget": 64}, "preset is 'best'; expected"),
    ],
)
def test_wrong_entries_are_refused(entry, message):
    with pytest.raises((TypeError, ValueError), match=message):
        config_of_entry(entry)


def test_entries_are_configs():
    of_prompt = {"ratio_of": "prompt"}
    wanted = H2OConfig(heavy=8, recent=[1, 2], **of_prompt)
    assert config_of_entry({"heavy": 8, "recent": [1, 2]}) == wanted
    wanted = dataclasses.replace(H2OConfig.robust(64), **of_prompt)
    assert config_of_entry({"preset": "robust", "budget": 64}) == wanted
    chunk = {"preset": "calibrated", "budget": 64, "score_by": "mean", "cut": "chunk"}
    calibrated = dataclasses.replace(H2OConfig.calibrated(64), **of_prompt)
    assert config_of_entry(chunk) == dataclasses.replace(calibrated, score_by="mean")
    assert config_of_entry({"preset": "calibrated", "budget": 64}).score_by == "mean-echo"
    assert [whole_prompts_of(x) for x in ({}, {"whole_prompts": 5}, chunk)] == [2, 5, 0]


def test_one_number_and_the_floor_of_fractions():
    transformers = pytest.importorskip("transformers")
    llama = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    of_prompt = {"ratio_of": "prompt"}
    by_echo = {"score_by": "mean-echo"} | of_prompt  # in a head, as all layers have equal pages
    assert config_of_entry({"budget": 64}, llama) == dataclasses.replace(
        H2OConfig.robust(64), **by_echo
    )
    in_bytes = config_of_entry({"budget": 0.2}, llama)
    assert in_bytes == dataclasses.replace(
        H2OConfig.robust(0.2, budget_unit="bytes").for_model(llama), **by_echo
    )
    wanted = dataclasses.replace(H2OConfig.robust(64), **of_prompt)
    assert config_of_entry({"budget": 64, "cut": "chunk"}, llama) == wanted
    keys = torch.empty(1, 2, 1, 16)
    for config in (
        in_bytes,
        config_of_entry({"heavy": 0.1, "recent": 0.1, "sinks": 4}, llama),
    ):
        budget = PageBudget(config, LAYERS, 1000)
        ((heavy, recent),) = budget.by_head(LAYER, keys, PagedRequest(40))
        assert config.sinks + heavy + recent == 128
        assert recent >= 32
        exact = PageBudget(dataclasses.replace(config, min_tokens=0), LAYERS, 1000)
        assert sum(*exact.by_head(LAYER, keys, PagedRequest(40))) < 20
        assert budget.empty_page(LAYER, keys).keys.shape[2] >= 129


def test_a_request_says_a_budget_of_its_own():
    config = H2OConfig(heavy=64, recent=32, sinks=4)
    assert with_budget(config, {}) is with_budget(config, {"other": 3}) is None
    assert with_budget(config, {"h2o_heavy": 8}) == H2OConfig(heavy=8, recent=32, sinks=4)
    assert with_budget(config, {"h2o_heavy": 0.1, "h2o_recent": 3}) == H2OConfig(
        heavy=0.1, recent=3, sinks=4
    )


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"h2o_heavy": "a lot"}, "h2o_heavy is 'a lot'; expected"),
        ({"h2o_heavy": -3}, "h2o_heavy is -3; expected"),
        ({"h2o_recent": 1.5}, "h2o_recent is .*; expected a number of tokens"),
        ({"h2o_heav": 3}, "h2o_heav: unknown; a request can have h2o_heavy, h2o_recent, "),
        ({"h2o_prefix": "40"}, "h2o_prefix is .*; expected an integer of at least 1"),
        ({"h2o_prefix": 0}, "h2o_prefix is .*; expected an integer of at least 1"),
        ({"h2o_pinned": "system"}, "h2o_pinned: this process does not see chats"),
        ({"h2o_pinned": "4:x"}, "'4:x' is neither system nor prompt nor spans of tokens"),
        ({"h2o_pinned": 4}, "h2o_pinned is .*; expected spans"),
        ({"h2o_pinned": [0, 40]}, "h2o_pinned is .*; expected spans"),
        ({"h2o_pinned": ["12"]}, "h2o_pinned is .*; expected spans"),
        ({"h2o_recent": True}, "h2o_recent is True; expected"),
        ({"h2o_prefix": 4, "h2o_context": 4}, "pass only one"),
        ({"h2o_evict": "0:4"}, "h2o_evict names tokens of a prefix: pass h2o_prefix too"),
        ({"h2o_evict": "0:9", "h2o_prefix": 8}, "ends at token 9, but the prefix has 8"),
        ({"h2o_evict": "0:8", "h2o_prefix": 8}, "h2o_evict leaves nothing of the prefix"),
        ({"h2o_evict": "prompt", "h2o_prefix": 8}, "h2o_evict is 'prompt'; expected spans"),
        ({"h2o_evict": "4:x", "h2o_context": 8}, "h2o_evict is '4:x'; expected spans"),
        ({"h2o_evict": [0, 4], "h2o_prefix": 8}, r"h2o_evict is \[0, 4\]; expected spans"),
        (
            {"h2o_evict": "3:5", "h2o_prefix": 8, "h2o_pinned": "0:2,4:6"},
            "h2o_evict names token 4, which h2o_pinned pins",
        ),
        ({"h2o_evict": "3:5", "h2o_prefix": 8, "h2o_pinned": "prompt"}, "h2o_evict names token 3"),
    ],
)
def test_wrong_arguments_of_requests(arguments, reason):
    def read() -> None:
        with_budget(H2OConfig(), arguments)
        with_pins(H2OConfig(), arguments)
        prefix_tokens(arguments, 9)
        evicted_spans(arguments)

    with pytest.raises((TypeError, ValueError), match=reason):
        read()


def test_spans_that_requests_forget():
    for asked in ("0:4,9:12", [[9, 12], [0, 4]], torch.tensor([[0, 4], [9, 12]])):
        assert evicted_spans({"h2o_evict": asked, "h2o_prefix": 20}) == [(0, 4), (9, 12)]
    assert evicted_spans({"h2o_evict": [], "h2o_prefix": 20}) == []
    assert evicted_spans({"h2o_prefix": 20}) == []
    apart = {"h2o_evict": "3:5", "h2o_prefix": 20, "h2o_pinned": "0:3,5:6"}
    assert evicted_spans(apart) == [(3, 5)]
    with pytest.raises(ValueError, match="ends at token 12, but the prefix has 11"):
        evicted_spans({"h2o_evict": "9:12", "h2o_prefix": 20}, 11)
