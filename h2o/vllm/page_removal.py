"""Removal of named tokens from the page of a request, which shares its prefix with others.

vLLM counts the whole prompt, and rotates new keys by its positions. The keys that stay keep their
rotation, so that their distances to later tokens are what they were. In the page they are numbered
as if the removed tokens had never been there.
"""

from __future__ import annotations

from h2o.hf.cache_state.slot_removal import remove_tokens
from h2o.policy import Policy
from h2o.slots import PER_ROW
from h2o.spans import Row
from h2o.vllm.page_store import PageStore


def remove_spans(store: PageStore, page: int, layer: int, spans: Row, policy: Policy) -> None:
    """Remove tokens from a layer's slots in a page.

    Args:
        layer: number of the layer among those of the store.
    """
    slots, sizes = store.row(page, layer)
    removed = remove_tokens(slots, sizes, sizes, [spans], policy)
    with store.keeping_evictions(page):
        for name in PER_ROW:
            if (field := getattr(slots, name)) is not None and name != "budget":
                field.copy_(getattr(removed, name))
