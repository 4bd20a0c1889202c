"""What must be equal after a random program: layers row by row, logits, and the trace."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from h2o.hf.cache_state.slot_layout import gather_held_keys
from h2o.hf.layers.layer import H2OLayer
from h2o.spans import Row, size


def same(layer: H2OLayer, other: H2OLayer, row: int) -> None:
    """Check that a layer holds in a row what another layer holds in its only row."""
    (positions, scores), (want, expected) = layer.kept(), other.kept()
    which = f"layer {layer.layer_idx}, row {row}"
    for head, (got, wanted) in enumerate(zip(positions[row], want[0], strict=True)):
        got, wanted = got[got >= 0].tolist(), wanted[wanted >= 0].tolist()
        assert got == wanted, f"{which}, head {head} holds {got}, not {wanted}"
    budget, alone = layer.slots.budget[row].tolist(), other.slots.budget[0].tolist()
    assert budget == alone, f"{which} has the budget {budget}, not {alone}"
    held = want.shape[-1]
    lost = layer.slots.evicted_score[row], other.slots.evicted_score[0]
    near(*lost, f"scores lost by {which}")
    near(scores[row, :, :held], expected[0], f"scores of {which}")
    for got, wanted in zip(layer.kept_rows(), other.kept_rows(), strict=True):
        near(got[row, :, :held], wanted[0], f"keys or values of {which}")


def near(got: Tensor, want: Tensor, what: str, about: float = 1e-3) -> None:
    torch.testing.assert_close(
        got, want, rtol=about, atol=about, msg=lambda text: f"{what}: {text}"
    )


def near_in_most(got: Tensor, want: Tensor, what: str) -> None:
    """Check that most elements are near, where single keys may be rounded otherwise, which moves
    all later logits a little."""
    error, size = (got - want).abs(), want.abs().mean()
    assert error.median() < 1e-3 * size, f"most of {what} differ"
    assert error.mean() < 0.05 * size, f"{what} differ by {error.mean() / size:.3f}"


def check_evictions(cache: Any, other: Any, mask: Tensor, row: int) -> None:
    """Check that keys of a row left after as many tokens as in the trace of another cache, which
    has this row alone. The mask [B, N] is False at padding."""
    seen = torch.nn.functional.pad(mask[row].cumsum(0), (1, 0))
    for layer, alike in zip(cache.layers, other.layers, strict=True):
        if isinstance(layer, H2OLayer) and alike.slots is not None:
            got = seen[cache.evicted_at(layer.layer_idx)[row][:, mask[row]].long()]
            want = other.evicted_at(layer.layer_idx)[0]
            assert torch.equal(got, want.long()), f"trace of layer {layer.layer_idx}, row {row}"


def check_budgets(cache: Any, other: Any, row: int) -> None:
    """Check that each layer has as much room in a row as in the only row of another cache."""
    for layer, alike in zip(cache.layers, other.layers, strict=True):
        if isinstance(layer, H2OLayer) and alike.slots is not None:
            got, want = layer.slots.budget[row].tolist(), alike.slots.budget[0].tolist()
            assert got == want, (
                f"layer {layer.layer_idx}, row {row} has the budget {got}, not {want}"
            )


def check_report(report: dict[str, int], cache: Any) -> None:
    """Check what a result of generate_all says of the keys against a cache with a single row."""
    layers = [layer for layer in cache.layers if isinstance(layer, H2OLayer)]
    held = [layer.kept().positions[0] >= 0 for layer in layers if layer.slots is not None]
    kept = round(sum(int(x.sum()) for x in held) / sum(map(len, held)))
    got, want = (report["seen"], report["kept"]), (int(cache.get_seq_length()), kept)
    assert got == want, f"generate_all has seen and kept {got} tokens, not {want}"


def check_trace(cache: Any, mask: Tensor) -> None:
    """Check that the trace of a cache says of all held keys that they are held, and nothing of
    padding (False in the mask [B, N])."""
    for layer in cache.layers:
        if not isinstance(layer, H2OLayer):
            continue
        kept, at = layer.kept().positions, cache.evicted_at(layer.layer_idx)
        for row, real in enumerate(mask):
            for head, positions in enumerate(kept[row]):
                held = at[row, head][real][positions[positions >= 0]]
                assert bool((held == at.shape[-1]).all()), f"trace of row {row}, head {head}"
        assert not bool(at[~mask[:, None].expand_as(at)].any()), "padding in the trace"


Stored = dict[tuple[int, int, int], list[Tensor]]
"""Key and value as they are stored, by layer, head and position"""


def stored_bytes(cache: Any, row: int) -> Stored:
    """What the slots of a row hold, as it is stored."""
    found: Stored = {}
    for layer in cache.layers:
        if not isinstance(layer, H2OLayer) or layer.slots is None:
            continue
        fields = dict.fromkeys(layer.row_fields, 0)
        positions, *rows = gather_held_keys(
            layer.slots, layer.capacity.sizes, positions=-1, **fields
        )
        for head, slot in (positions[row] >= 0).nonzero().tolist():
            at = layer.layer_idx, head, int(positions[row, head, slot])
            found[at] = [x[row, head, slot] for x in rows]
    return found


def check_stored(cache: Any, row: int, before: Stored, removed: Row) -> None:
    """Check that a row holds what it held before these spans were removed, without any rounding."""
    want = {
        (layer, head, at - size([x for x in removed if x[1] <= at])): rows
        for (layer, head, at), rows in before.items()
        if not any(a <= at < b for a, b in removed)
    }
    got = stored_bytes(cache, row)
    assert got.keys() == want.keys(), f"row {row} holds other keys after {removed} were removed"
    for which, rows in got.items():
        for x, y in zip(rows, want[which], strict=True):
            assert torch.equal(x, y), f"row {row}: {which} is stored otherwise after a removal"
