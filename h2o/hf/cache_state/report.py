"""`cache.report()`: what a cache has seen, kept and evicted, as text, dict or plot.

This file imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Any

from h2o.kv_dtype import has_four_bit_keys


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """Report on one layer. Lists have one entry per batch row. Tokens do not include padding."""

    layer: int
    kind: str
    """"h2o" for layers of h2o. For transformers' own layers, of which only the bytes are reported:
    "sliding", "states" (no keys) or "none" (stores nothing)."""
    seen: list[int] = dataclasses.field(default_factory=list)
    """Tokens seen, without those that `H2OCache.evict` has removed."""
    removed: list[int] = dataclasses.field(default_factory=list)
    """Tokens that `H2OCache.evict` has removed."""
    kept_by_head: list[list[int]] = dataclasses.field(default_factory=list)
    """Tokens held now, for each key/value head."""
    pinned_by_head: list[list[int]] = dataclasses.field(default_factory=list)
    """Kept keys that are pinned (`H2OCache(..., pinned=...)`), for each key/value head."""
    budget_by_head: list[list[int]] = dataclasses.field(default_factory=list)
    """k = sinks + heavy + recent, for each key/value head."""
    bytes_held: int = 0
    """Bytes allocated for keys and values."""
    bytes_full: int = 0
    """Bytes of keys and values that a full cache (a DynamicCache) would hold, including padding.
    A sliding window takes the same in both."""
    bytes_bookkeeping: int = 0
    """Bytes of scores, positions and counters."""
    bytes_states: int = 0
    """Bytes of convolution and recurrent states, which a full cache would hold as well."""
    mass_evicted: float = 0.0
    """Attention that evicted keys had received until their eviction, summed over rows and heads."""
    mass_kept: float = 0.0
    """Attention that the kept keys have received, excluding pinned ones. With decay 1 and no pins
    the two masses add up to the number of queries times query heads. With score_by="max" each mass
    is a sum of the keys' largest attention."""
    raised: bool = False
    """Whether a fraction of some row's prompt was less than one token and was rounded up to one."""
    floored: bool = False
    """Whether `H2OConfig.min_tokens` is more than some head's fraction of some row's prompt, so
    that the head may keep `min_tokens` keys."""
    unscored: bool = False
    """Whether all keys were converted from a DynamicCache and wait for the forward pass that scores
    them and evicts down to the budget."""

    @property
    def kept(self) -> list[int]:
        """Tokens held now per key/value head (rounded mean if heads differ)."""
        return _means(self.kept_by_head)

    @property
    def pinned(self) -> list[int]:
        """Pinned tokens per key/value head (rounded mean if heads differ)."""
        return _means(self.pinned_by_head)

    @property
    def budget(self) -> list[int]:
        """k per key/value head (rounded mean if heads differ)."""
        return _means(self.budget_by_head)

    @property
    def evicted(self) -> list[int]:
        """Tokens that the policy has evicted per key/value head (rounded mean if heads differ)."""
        return [seen - kept for seen, kept in zip(self.seen, self.kept, strict=True)]

    @property
    def share_evicted(self) -> float:
        """Share of the attention mass, 0 to 1, that belongs to evicted keys. Attention to pinned
        keys is excluded."""
        total = self.mass_evicted + self.mass_kept
        return self.mass_evicted / total if total else 0.0

    def as_dict(self) -> dict[str, Any]:
        """Convert to plain numbers and lists, for JSON."""
        derived = ("kept", "pinned", "budget", "evicted", "share_evicted")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in derived}


@dataclasses.dataclass(frozen=True)
class Report:
    """Report on all layers. `print` it, or call `as_dict()`."""

    layers: list[LayerReport]
    broken: bool = False
    """Whether the last pass has not ended, so that layers may have seen different tokens."""
    echo_replacement: str = ""
    """What replaces `H2OConfig.echo`, or `score_by="mean-echo"`, and why, if the model or the
    positions do not support it."""
    budget: str = ""
    """The budget as the user wrote it, such as "budget=0.2" or "heavy=0.1, recent=0.1"."""
    budget_tokens: int = 0
    """Tokens of the longest row that the budget is a fraction of; 0 for a budget in tokens."""
    kv_dtype: str | None = None
    """Format of stored keys and values, as in `H2OConfig`. "auto" is resolved."""

    @property
    def total(self) -> LayerReport:
        """Sums over the layers, as a `LayerReport` with `layer` -1.

        Each list has one entry, the sum over all rows and the layers of h2o.
        """
        h2o_layers = self._h2o_layers()

        def rows(name: str) -> list[int]:
            return [sum(sum(getattr(layer, name)) for layer in h2o_layers)]

        by_head = {f"{name}_by_head": [rows(name)] for name in ("kept", "pinned", "budget")}
        sums = {name: sum(getattr(layer, name) for layer in self.layers) for name in _SUMS}
        flags = {name: any(getattr(layer, name) for layer in h2o_layers) for name in _FLAGS}
        tokens = {name: rows(name) for name in ("seen", "removed")}
        return LayerReport(-1, "total", **tokens, **by_head, **sums, **flags)

    def as_dict(self) -> dict[str, Any]:
        """Convert to {"layers": [...], "total": {...}, "kv_dtype": name, "note": text}."""
        return {
            "layers": [layer.as_dict() for layer in self.layers],
            "total": self.total.as_dict(),
            "kv_dtype": self.kv_dtype,
            "note": self.note,
        }

    @property
    def note(self) -> str:
        """What the numbers mean, in a sentence or two."""
        if self.broken:
            return (
                "The last forward pass has not ended, and only some layers have seen its tokens. "
                "If it was interrupted, call cache.reset() and start over."
            )
        h2o_layers, total = self._h2o_layers(), self.total
        if not h2o_layers:
            return "No layer has full attention, so there is nothing for h2o to evict."
        if not any(layer.seen for layer in h2o_layers):
            return "The cache is empty."
        if total.unscored:
            return (
                "Converted from a DynamicCache: the next forward pass scores the keys and evicts."
            )
        short = ""
        if self.echo_replacement:
            is_preset = self.budget.startswith("budget=")
            short = f"{self.budget if is_preset else 'Instead of echo'}: {self.echo_replacement}. "
        if total.floored:
            short += "Some heads keep min_tokens keys, more than their fraction. "
        elif total.raised:
            short += "The prompt is short: a fraction of it was rounded up to one token. "
        longest = max(max(layer.seen, default=0) for layer in h2o_layers)
        if any(total.evicted) and has_outgrown(longest, self.budget_tokens):
            short += f"{explain_growth(self.budget, self.budget_tokens, longest)}. "
        elif any(total.evicted) and self.budget_tokens:
            short += f"The budget is {self.budget} of {self.budget_tokens:,} tokens. "
        if any(total.removed):
            removed = sum(h2o_layers[0].removed)
            short += f"evict() has removed {removed} tokens, which count nowhere else. "
        if any(total.pinned):
            short += f"{total.pinned[0] / total.kept[0]:.1%} of the held tokens are pinned. "
        has_free_slots = total.bytes_held > total.bytes_full
        if not any(total.evicted):
            return (
                f"{short}The budget was never reached: every token is held, as in a full cache."
                + (" The bytes include free slots." if has_free_slots else "")
            )
        share = total.bytes_held / total.bytes_full
        held = (
            f"{short}The cache holds {total.kept[0] / total.seen[0]:.1%} of the tokens in "
            f"{share:.1%} of the bytes of a full cache"
            f"{', free slots included' if has_free_slots else ''}"
            f"{', keys and values in four bits' if has_four_bit_keys(self.kv_dtype) else ''}. "
        )
        return f"{held}Evicted tokens had received {total.share_evicted:.1%} of the attention" + (
            " to tokens that are not pinned." if any(total.pinned) else "."
        )

    def __str__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1], self.note])

    def _repr_html_(self) -> str:
        """HTML table for notebooks. The last column is shaded by the mass evicted."""

        def line(cells: Sequence[str], tag: str, share: float = 0.0) -> str:
            shade = f";background:rgb(255 140 0/{share:.2f})" if share > 0 else ""
            styles = [_CELL] * (len(cells) - 1) + [_CELL + shade]
            inner = [
                f'<{tag} style="{style}">{html.escape(cell)}</{tag}>'
                for cell, style in zip(cells, styles, strict=True)
            ]
            return f"<tr>{''.join(inner)}</tr>"

        head, *cells = self._table()
        shares = [x.share_evicted for x in [*self.layers, self.total]]
        rows = [line(row, "td", share) for row, share in zip(cells, shares, strict=True)]
        return (
            f"<table><thead>{line(head, 'th')}</thead><tbody>{''.join(rows)}</tbody></table>"
            f"<p>{html.escape(self.note)}</p>"
        )

    def plot(self, ax: Any = None) -> Any:
        """Plot the keys held and the attention of evicted keys, in % per layer.

        Draws on matplotlib axes (new ones by default) and returns them. Layers without full
        attention are left out.
        """
        from h2o.utils.draw import axes_or_new

        ax = axes_or_new(ax)
        read = [x for x in self._h2o_layers() if sum(x.seen)]
        names = [x.layer for x in read]
        ax.bar(names, [100 * sum(x.kept) / sum(x.seen) for x in read], label="keys held")
        evicted = [100 * x.share_evicted for x in read]
        ax.plot(names, evicted, "o-", color="C1", label="attention of evicted keys")
        ax.set(xlabel="layer", ylabel="%", ylim=(0, 100), title="What the cache holds")
        ax.legend(fontsize="small")
        return ax

    def _table(self) -> list[tuple[str, ...]]:
        """Header, layers and total. Removed and pinned tokens and states have columns only if there
        are any."""
        layers = [*self.layers, self.total]
        table = [_HEAD, *map(_row, layers)]
        if any(self.total.removed):
            table = _with_column(table, 2, ["removed", *(_span(x.removed) for x in layers)])
        if any(self.total.pinned):
            at = table[0].index("kept") + 1
            table = _with_column(table, at, ["pinned", *(_span(x.pinned) for x in layers)])
        if self.total.bytes_states:
            states = [f"{x.bytes_states:,}" for x in layers]
            table = _with_column(table, -1, ["state bytes", *states])
        return table

    def _h2o_layers(self) -> list[LayerReport]:
        return [layer for layer in self.layers if layer.kind == "h2o"]


GROWTH = 4
"""A text has outgrown a budget that is a fraction of its prompt if it has more than this many times
the prompt's tokens."""


def has_outgrown(seen: int, budget_tokens: int) -> bool:
    """Whether a text of `seen` tokens has outgrown a fraction of `budget_tokens` tokens. False if
    `budget_tokens` is 0."""
    return seen > GROWTH * budget_tokens > 0


def explain_growth(budget: str, budget_tokens: int, seen: int) -> str:
    """Explain that a budget is a fraction of the prompt only."""
    return (
        f"{budget} was a fraction of the first {budget_tokens} tokens, and the text now has {seen}:"
        ' for several turns or chunks write ratio_of="seen", or give a number of tokens, such as '
        "budget=256"
    )


def _means(by_head: list[list[int]]) -> list[int]:
    return [round(sum(heads) / len(heads)) for heads in by_head]


def _with_column(
    table: list[tuple[str, ...]], at: int, cells: Sequence[str]
) -> list[tuple[str, ...]]:
    return [(*row[:at], cell, *row[at:]) for row, cell in zip(table, cells, strict=True)]


_SUMS = ("bytes_held", "bytes_full", "bytes_bookkeeping", "bytes_states", "mass_evicted",
         "mass_kept")  # fmt: skip
_FLAGS = ("raised", "floored", "unscored")
_CELL = "text-align:right;padding:2px 8px"
_HEAD = ("layer", "seen", "kept", "evicted", "budget", "KV bytes", "full cache", "mass evicted")


def _row(layer: LayerReport) -> tuple[str, ...]:
    name = layer.kind if layer.layer < 0 else str(layer.layer)
    if layer.kind not in ("h2o", "total"):
        name, seen, share = f"{name} ({layer.kind})", ["", "", "", ""], ""
    else:
        seen = [_span(x) for x in (layer.seen, layer.kept, layer.evicted, layer.budget)]
        share = f"{layer.share_evicted:.1%}"
    return (name, *seen, f"{layer.bytes_held:,}", f"{layer.bytes_full:,}", share)


def _span(values: list[int]) -> str:
    """Format one number, or the range over the rows of a batch."""
    if not values:
        return "0"
    low, high = (
        "unlimited" if value > 2**31 - 2 else f"{value:,}" for value in (min(values), max(values))
    )
    return low if low == high else f"{low} to {high}"
