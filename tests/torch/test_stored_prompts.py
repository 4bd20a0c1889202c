"""Choice of the stored prompt that a vLLM request begins with. This part needs no vLLM."""

from __future__ import annotations

import torch

from h2o import ops
from h2o.vllm.page_store import PageStore, page_bytes
from h2o.vllm.stored_prompts import Prefill, StoredPrompts, identify

TOKENS = list(range(100, 140))


def of(n: int, prefix: int = 0, salt=None, name: str = "h2o_prefix", **arguments):
    said = {name: prefix} if prefix else {}
    return identify(TOKENS[:n], prefix, said | arguments, salt)


def whole(*args, **kwargs) -> bytes:
    """The key of a whole prompt."""
    return of(*args, **kwargs)[0].key


def test_what_requests_have_in_common():
    """Two requests share a page if tokens, settings and cuts are equal. Arguments of others do not
    count."""
    assert whole(30, other=3) == whole(30)
    others = [
        whole(29),
        whole(30, salt="a"),
        whole(30, h2o_heavy=3),
        whole(30, h2o_pinned="0:4"),
        whole(30, 20),
        whole(30, 20, name="h2o_context"),
        whole(30, 21),
    ]
    assert len({whole(30), *others}) == 8
    forgets = {"h2o_evict": "2:4"}
    assert whole(30, 20, **forgets) not in {whole(30, 20), whole(30, 20, h2o_evict="2:5")}
    assert of(30, 20, **forgets)[1] == of(30, 20)[1]  # the prefix is stored before
    assert of(30, 20)[1] == of(40, 20, name="h2o_context")[1] == of(20)[0]


def test_the_longest_beginning_is_found():
    prompts = StoredPrompts()
    assert prompts.find(of(30, 20)) is None
    prompts.put(whole(20), 7)
    assert prompts.find(of(30, 20)) == (7, 20, False)
    assert prompts.find(of(30)) is None
    prompts.put(whole(30, 20), 8)
    assert prompts.find(of(30, 20)) == (8, 29, True)
    assert prompts.find(of(20)) == (7, 19, True)
    prompts.drop(8)
    prompts.drop(9)  # not the page of any prompt
    assert prompts.find(of(30, 20)) == (7, 20, False)
    assert prompts.clear() == [7]
    assert prompts.find(of(30, 20)) is None


def test_who_reads_what_others_want():
    prompts = StoredPrompts()
    prompts.prefilling["a"] = Prefill(of(30, 20), 0)
    assert prompts.is_being_prefilled("b", of(40, 20))
    assert prompts.is_being_prefilled("b", of(30, 20))
    assert not prompts.is_being_prefilled("a", of(30, 20))
    assert not prompts.is_being_prefilled("b", of(30))
    assert prompts.advance({"a": 12}) == []
    assert prompts.advance({"a": 8}) == [("a", whole(20))]
    assert not prompts.is_being_prefilled("b", of(40, 20))
    assert prompts.advance({"a": 10}) == [("a", whole(30, 20))]
    assert not prompts.prefilling


def test_a_step_that_ends_a_prompt_stores_nothing():
    prompts = StoredPrompts()
    prompts.prefilling["a"] = Prefill(of(21, 20), 20)
    assert prompts.advance({"a": 1}) == []


def test_prompts_that_began_with_other_weights_are_not_stored():
    prompts = StoredPrompts()
    prompts.prefilling["a"] = Prefill(of(30), 0)
    prompts.advance({"a": 8})
    assert prompts.clear() == []
    assert not prompts.is_being_prefilled("b", of(30))
    assert prompts.advance({"a": 22}) == []
    prompts.prefilling["c"] = Prefill(of(30), 0)
    prompts.advance({"c": 8})
    assert prompts.advance({"c": 22}) == [("c", whole(30))]


def test_keys_that_a_stored_prompt_has_evicted_count_once():
    """Evicted keys count once, however often a prompt's page is copied and whoever takes the
    copies."""
    page = ops.new_slots(torch.empty(1, 2, 1, 8), 5, heavy=2, recent=2)
    store = PageStore(torch.zeros(4, page_bytes(page), dtype=torch.uint8), page)
    store.empty(1, [(2, 2)])
    keys, scores = torch.randn(1, 2, 10, 8), torch.rand(1, 2, 10)
    rows = [store.rows(torch.tensor([n], dtype=torch.int32)) for n in range(4)]
    ops.evict(keys, keys, scores, rows[1])
    evicted = store.eviction().keys
    assert evicted == 2 * (10 - 4)
    for other in (2, 3, 2):
        store.copy(1, other)
        assert store.eviction().keys == evicted
    ops.evict(keys[:, :, :1], keys[:, :, :1], scores[:, :, :1], rows[3])
    assert store.eviction().keys == evicted + 2
    for gone in (1, 2, 3):
        store.empty(gone, [(2, 2)])
        assert store.eviction().keys == evicted + 2
