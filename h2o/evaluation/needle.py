"""`h2o eval --needle`: whether a fact within a long text can still be told at its end.

A sentence (`h2o.evaluation.facts`) is hidden in a piece of a text. The piece is the prompt of a
real `H2OCache`, which is cut to its budget before the question is known; then the question goes in, and
the answer counts if greedy decoding writes it, token by token. What no token attends to
while the text is read has to survive that cut: the hard case of every eviction (compare Kamradt,
"Needle in a haystack", 2023). With several turns as many sentences are hidden in a piece, and asked
for one after the other in one conversation, in which each question is followed by its right answer.
With decoys a text has several facts of each of two kinds, which differ in their subjects alone, and
each is asked for from the same cut cache: a cache that keeps only one of a kind does not pass.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
import re
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from h2o import models
from h2o.borrowed import with_cache
from h2o.errors import UserError
from h2o.evaluation import kept_bytes
from h2o.evaluation.facts import KINDS, Fact
from h2o.evaluation.fitting import load
from h2o.evaluation.presentation import plot_curves, table, written
from h2o.evaluation.setting import Setting
from h2o.filesystem import read_text
from h2o.hf.cache.new_cache import new_cache
from h2o.hf.document.compress import compress_document
from h2o.hf.rotary.positions import positions_after
from h2o.processes import launched
from h2o.result_cells import Cells, fingerprint, provenance

__all__ = ["DEPTHS", "LENGTHS", "Trial", "compare", "trials"]

LENGTHS = (256, 512, 1024)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Where in the text the sentence stands: at 0 it is the second one, at 1 the last."""
PARTS = {"length": "{} tokens", "depth": "depth {:g}", "kind": "{}", "turn": "turn {}"}
"""What a table has a column for each value of, and its title. Of kinds and turns there may be one
only."""
OF_TURN = ("depth", "kind", "turn")


@dataclasses.dataclass(frozen=True)
class Turn:
    """What is asked about a text."""

    fact: Fact
    depth: float
    """Where in the text its sentence stands."""
    kind: str
    """One of `h2o.evaluation.facts.KINDS`."""
    turn: int
    """Counted from 1."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One text with its sentences, and what is asked about it in one conversation."""

    length: int
    document: str
    turns: tuple[Turn, ...]
    apart: bool = False
    """Whether each turn is a conversation of its own, after the document alone."""


Asked = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Token ids [1, n] of the question and the answer of each turn."""


def trials(
    text: str, tokenizer: Any, lengths: Sequence[int], each: int,
    kinds: Sequence[str] = ("number",), turns: int = 1, decoys: int = 0,
) -> list[Trial]:  # fmt: skip
    """`each` trials of every length, and of every depth and kind of the fact that is asked for
    first, always the same ones.

    Pieces of the text are taken one after the other, from its start again where it ends; a
    length counts the piece's tokens, to which those of the sentences come. What later turns ask
    for is of other kinds and stands elsewhere; over all trials each turn has all depths and kinds.
    With `decoys` a text has so many facts more of the kind and of the next one, all asked apart.

    Raises: UserError for a text with fewer tokens than a length, or without sentences, and for
    fewer kinds than turns.
    """
    if turns > len(kinds):
        raise UserError(
            f"{turns} turns ask for facts of as many kinds, and there are {len(kinds)}: "
            "name more with --facts"
        )
    ids = tokenizer(text, verbose=False)["input_ids"]
    if len(ids) < max(lengths):
        raise UserError(
            f"the text has {len(ids)} tokens, a length is {max(lengths)}: lower --lengths"
        )
    draw = random.Random(0)
    chosen, start = [], 0
    places = itertools.product(lengths, range(len(DEPTHS)), range(len(kinds)), range(each))
    for length, place, first, _ in places:
        if start + length > len(ids):
            start = 0
        piece = tokenizer.decode(ids[start : start + length])
        start += length
        if decoys:
            asked = alike([kinds[(first + i) % len(kinds)] for i in (0, 1)], decoys + 1, draw)
        else:
            each_kind = [kinds[(first + turn) % len(kinds)] for turn in range(turns)]
            asked = [
                Turn(KINDS[kind](draw), DEPTHS[(place + 2 * turn) % 5], kind, turn + 1)
                for turn, kind in enumerate(each_kind)
            ]
        chosen.append(Trial(length, hidden(piece, asked), tuple(asked), apart=bool(decoys)))
    return chosen


def alike(kinds: Sequence[str], each: int, draw: random.Random) -> list[Turn]:
    """So many facts of each kind, no two with the same question, spread over a text at random."""
    facts: dict[str, tuple[str, Fact]] = {}
    for count, kind in enumerate(kinds, 1):
        while len(facts) < count * each:
            fact = KINDS[kind](draw)
            facts.setdefault(fact.question, (kind, fact))
    depths = [i / (len(facts) - 1) for i in range(len(facts))]
    draw.shuffle(depths)
    return [
        Turn(fact, depth, kind, 1)
        for depth, (kind, fact) in zip(depths, facts.values(), strict=True)
    ]


def hidden(piece: str, turns: Sequence[Turn]) -> str:
    """The piece with the sentence of each turn between its own ones."""
    ends = [match.end() for match in re.finditer(r"[.!?;]\s+|\n+", piece)]
    if not ends:
        raise UserError("a piece of the text has no end of a sentence: nowhere to hide a fact")
    for turn in sorted(turns, key=lambda turn: -turn.depth):  # places before it stay what they are
        at = ends[round(turn.depth * (len(ends) - 1))]
        piece = f"{piece[:at]}{turn.fact.sentence} {piece[at:]}"
    return piece


def compare(
    file: Path,
    settings: Sequence[Setting],
    output: Path,
    *,
    model_name: str | None = None,
    dtype: str = "auto",
    device: str = "cpu",
    lengths: Sequence[int] = LENGTHS,
    kinds: Sequence[str] = ("number",),
    turns: int = 1,
    decoys: int = 0,
    limit: int | None = None,
    as_json: bool = False,
) -> str:
    """How many facts each setting finds.

    Args:
        file: plain text, UTF-8, to hide them in.
        settings: what to compare; fractions are of the text with the fact, without the question.
        output: folder for needle.json, which a second run completes, and needle.png.
        lengths: tokens of the texts.
        kinds: of facts, names of `h2o.evaluation.facts.KINDS`.
        turns: questions to each text, one after the other in one conversation.
        decoys: further facts of the kind that is asked for, and of another one, in each text.
        limit: trials of every length, depth and kind; None is 4.
        as_json: return the results as the file has them, those of this call.

    Returns:
        the table, as text.
    """
    for setting in settings:
        if not setting.has_cache:
            raise UserError(f"{setting.why_not_dropping}; it cannot answer")
    text = read_text(file)
    cells = Cells(output / "needle.json", "h2o eval --needle", launched())
    model, tokenizer = load(model_name, settings, dtype=dtype, device=device)
    rows = trials(text, tokenizer, lengths, limit or 4, kinds, turns, decoys)
    encoded = [encode(tokenizer, model.config, row) for row in rows]
    origin = provenance(model, tokenizer, model_name or models.DEFAULT_MODEL)
    work = []
    for row, ids in zip(rows, encoded, strict=True):
        facts = origin | {
            "file": file.name,
            "content": fingerprint(dataclasses.asdict(row)),
            "length": row.length,
            "turns": [{"depth": turn.depth, "kind": turn.kind} for turn in row.turns],
            "decoys": decoys,
            "protocol": "drop",
            "ratio_of": "prompt",
        }
        work.append(
            [
                (facts | x.describe(), partial(answered, model, x, *ids, tokenizer, row.apart))
                for x in settings
            ]
        )
    results: dict[str, list[dict[str, Any]]] = {setting.name: [] for setting in settings}
    for row, row_results in zip(rows, cells.complete(work, "needles"), strict=True):
        for setting, result in zip(settings, row_results, strict=True):
            seconds = result["seconds"] / len(row.turns)
            same = result | {"length": row.length, "seconds": seconds}
            results[setting.name] += [
                same | {name: getattr(turn, name) for name in OF_TURN} | {"found": is_found}
                for turn, is_found in zip(row.turns, result["found"], strict=True)
            ]
    sizes = {x.name: kept_bytes.of_rows(x, model, results[x.name]) for x in settings}
    in_bytes = kept_bytes.by_bytes(settings)
    curves: dict[str, list[tuple[float, float, float]]] = {}
    for setting in settings:
        each = results[setting.name]
        share = (in_bytes and sizes[setting.name]) or share_kept(each)
        curves.setdefault(setting.curve, []).append((share, *found_share(each)))
    drawn = plot_curves(
        output / "needle.png", [(file.name, curves)], "facts found", kept_bytes.axis(in_bytes)
    )
    if as_json:
        return cells.as_json(facts for row in work for facts, _ in row)
    facts_hidden = sum(len(row.turns) for row in rows)
    first = (
        f"{origin['model']}, {facts_hidden} facts in pieces of {file.name}, cut before the "
        "question; fractions of the piece"
    )
    return "\n".join([first, "", as_table(results, sizes), "", written(cells.path, drawn)])


def encode(tokenizer: Any, config: Any, row: Trial) -> tuple[torch.Tensor, Asked]:
    """Token ids [1, n] of the document, and what is asked. Raises: UserError if they do not fit."""

    def ids_of(text: str, **how: Any) -> torch.Tensor:
        ids: torch.Tensor = tokenizer(text, return_tensors="pt", **how)["input_ids"]
        return ids

    document = ids_of(row.document)
    parts = [(turn.fact.question, turn.fact.answer) for turn in row.turns]
    asked = [tuple(ids_of(x, add_special_tokens=False) for x in part) for part in parts]
    tokens = document.shape[1] + sum(x.shape[1] for turn in asked for x in turn)
    positions = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None)
    if positions and tokens > positions:
        raise UserError(
            f"a text of {row.length} tokens and its question are more than the model's "
            f"{positions} positions: lower --lengths"
        )
    return document, asked


def fed(answer: torch.Tensor) -> list[torch.Tensor]:
    """The tokens [1, 1] of an answer [1, m] but the last, which are read while it is decoded."""
    return [answer[:, i : i + 1] for i in range(answer.shape[1] - 1)]


def answered(
    model: Any, setting: Setting, document: torch.Tensor, asked: Asked, tokenizer: Any = None,
    apart: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Whether greedy decoding would write each answer: as long as it does, feeding the answer is
    the same as feeding what was decoded. `tokenizer`: for a second reading. `apart`: each question
    to a cache that has read the document alone."""
    config = None if setting.variant == "full" else setting.config
    document = document.to(model.device)
    n = document.shape[1]
    cache = new_cache(model, config, n)
    start = time.perf_counter()
    found, unread = [], document[:, :0]
    with torch.no_grad():
        if setting.reads_twice:
            cache = compress_document(
                model, document, setting.config, readings=2, tokenizer=tokenizer
            )
        else:
            model.base_model(document, use_cache=True, **with_cache(cache))  # no logits needed
        cut = cache
        for question, answer in ([x.to(document.device) for x in turn] for turn in asked):
            if apart:
                cache, unread = copy.deepcopy(cut), document[:, :0]
            decoded = []
            for ids in (torch.cat([unread, question], dim=1), *fed(answer)):
                where = positions_after(model, int(cache.get_seq_length()), ids)
                out = model(ids, use_cache=True, **with_cache(cache), **where)
                decoded.append(out.logits[0, -1].argmax().item())
            found.append(decoded == answer[0].tolist())
            unread = answer[:, -1:]
    return {
        "found": found,
        "seen": n,
        "kept": setting.holding.for_model(model).held(n),
        "seconds": time.perf_counter() - start,
    }


def found_share(rows: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Share of the facts found and its standard error."""
    share = statistics.fmean(row["found"] for row in rows)
    return share, (share * (1 - share) / max(1, len(rows) - 1)) ** 0.5


def share_kept(rows: Sequence[dict[str, Any]]) -> float:
    return 100 * sum(row["kept"] for row in rows) / sum(row["seen"] for row in rows)


def as_table(results: dict[str, list[dict[str, Any]]], sizes: dict[str, float | None]) -> str:
    """Settings down; lengths, depths and, if there are several, kinds of facts and turns across.

    With the full cache among the settings there is a column of what is found of the facts that it
    finds: what the model cannot do tells nothing of a cache.
    """
    first = next(iter(results.values()))
    values = {name: dict.fromkeys(row[name] for row in first) for name in PARTS}
    alone = [name for name in ("kind", "turn") if len(values[name]) == 1]
    columns = [(name, value) for name in PARTS if name not in alone for value in values[name]]
    full = [row["found"] for row in results.get("full", [])]
    lines = []
    for setting, rows in results.items():
        parts = [[row for row in rows if row[name] == value] for name, value in columns]
        counted = [rows]
        if any(full):
            counted += [[row for row, is_found in zip(rows, full, strict=True) if is_found]]
        lines.append(
            [
                setting,
                f"{share_kept(rows):.1f}%",
                kept_bytes.shown(sizes[setting]),
                *("{:.2f} ±{:.2f}".format(*found_share(x)) for x in counted),
                *(f"{found_share(part)[0]:.2f}" for part in parts),
                f"{sum(row['seconds'] for row in rows):.0f} s",
            ]
        )
    titles = [f"of full's {sum(full)}"] * any(full)
    titles += [PARTS[name].format(value) for name, value in columns]
    return table(["setting", "kept", "bytes", "found", *titles, "time"], lines)
