"""The task h2o_needles: whether facts from a long text can still be retrieved after eviction.

A sentence (`h2o.evaluation.facts`) is hidden in a passage. The passage is prefilled into an
`H2OCache` (not a simulation), which evicts down to its budget before the question is known. The
question follows, and the answer counts if greedy decoding produces it token by token. Keys that get
little attention during prefill must survive, which is the hard case for any eviction (compare
Kamradt, "Needle in a haystack", 2023). With decoys a text has several facts of each of two kinds;
the facts of a kind differ only in their subjects. All questions use the same cache, so a cache that
keeps only one fact of a kind does not pass.
"""

from __future__ import annotations

import collections
import itertools
import random
import statistics
from collections.abc import Sequence
from typing import Any

from h2o.arguments.plain_values import is_integer
from h2o.errors import UserError
from h2o.evaluation.facts import KINDS, SUBJECTS
from h2o.evaluation.hidden_facts import draw_alike, encode, find_facts, hide
from h2o.evaluation.text_tasks import Samples, TextTask, format_error

LENGTHS = (256, 512, 1024)
DEPTHS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Positions of the sentence in the text. At 0 it is the second sentence, at 1 the last."""


class Needles(TextTask):
    """The task. The answer to each text is which of its facts are found."""

    @staticmethod
    def make_rows(
        text: str,
        tokenizer: Any,
        lengths: int | str | Sequence[int] = LENGTHS,
        each: float = 4,
        facts: str | Sequence[str] = "number",
        decoys: int = 0,
        **_: Any,
    ) -> list[dict[str, Any]]:
        """Hide facts in consecutive pieces of the text, starting over at its end.

        Every call makes the same rows. Each question follows the text alone, without the others.

        Args:
            lengths: lengths of the pieces in tokens, without the hidden sentences, as a list or
                separated by commas.
            each: number of pieces for every length, depth and kind.
            facts: kinds of facts from `h2o.evaluation.facts.KINDS`, separated by commas, or "all".
            decoys: unless 0, each piece has `decoys + 1` facts of the kind and as many of the next
                kind, at random depths, and all of them are asked about.

        Raises: UserError for options out of range, and for a text with fewer tokens than a length,
        or without sentences.
        """
        if each < 1 or each % 1:
            raise UserError(f"--limit {each:g}: must be a number of texts, at least 1")
        chosen, kinds = parse_lengths(lengths), parse_kinds(facts)
        check_decoys(decoys, kinds)
        ids = tokenizer(text, verbose=False)["input_ids"]
        if len(ids) < max(chosen):
            raise UserError(
                f"the text has {len(ids)} tokens, but a length is {max(chosen)}: lower --lengths"
            )
        draw = random.Random(0)
        rows, start = [], 0
        places = itertools.product(chosen, DEPTHS, range(len(kinds)), range(int(each)))
        for length, depth, first, _ in places:
            if start + length > len(ids):
                start = 0
            piece = tokenizer.decode(ids[start : start + length])
            start += length
            of_kinds = [kinds[(first + i) % len(kinds)] for i in range(2 if decoys else 1)]
            hidden = draw_alike(of_kinds, decoys + 1, draw)
            depths = [depth]
            if decoys:
                depths = [i / (len(hidden) - 1) for i in range(len(hidden))]
                draw.shuffle(depths)
            rows.append(
                {
                    "text": hide(piece, hidden, depths),
                    "length": length,
                    "depths": depths,
                    "kinds": [kind for kind in of_kinds for _ in range(decoys + 1)],
                    "asked": {"facts": [[x.question, x.answer] for x in hidden]},
                }
            )
        return rows

    @staticmethod
    def columns(samples: Samples, full: Samples | None) -> dict[str, str]:
        """Shares of facts found: of all facts, of those that the full cache finds, and by length,
        depth and kind. Facts that the model cannot find at all say nothing about a cache."""
        found = [x for sample in samples for x in sample["found"]]
        whole = [x for sample in full or () for x in sample["found"]]
        cells = {"found": format_share(found)}
        if any(whole):
            known = [x for x, is_known in zip(found, whole, strict=True) if is_known]
            cells[f"of full's {sum(whole)}"] = format_share(known)
        lengths, depths, kinds = (collections.defaultdict(list) for _ in range(3))
        for sample in samples:
            doc = sample["doc"]
            for x, depth, kind in zip(sample["found"], doc["depths"], doc["kinds"], strict=True):
                lengths[f"{doc['length']} tokens"].append(x)
                depths[depth].append(x)
                kinds[kind].append(x)
        parts = lengths | {f"depth {depth:.2g}": depths[depth] for depth in sorted(depths)}
        if len(kinds) > 1:
            parts |= kinds
        return cells | {title: f"{statistics.fmean(part):.2f}" for title, part in parts.items()}


def format_share(found: Sequence[bool]) -> str:
    """Format the share of facts that were found, with its standard error."""
    return f"{statistics.fmean(found):.2f}{format_error(found, 2)}"


def parse_lengths(lengths: int | str | Sequence[int]) -> list[int]:
    """Parse lengths of texts in tokens. Raises: UserError unless all are at least 1."""
    parts = [lengths] if isinstance(lengths, int) else lengths
    try:
        numbers = [int(x) for x in (parts.split(",") if isinstance(parts, str) else parts)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UserError(f"--lengths {lengths}: must be numbers of tokens, such as 256,512")
    return numbers


def parse_kinds(facts: str | Sequence[str]) -> list[str]:
    """Parse the kinds of facts. Raises: UserError for an unknown kind."""
    names = facts.split(",") if isinstance(facts, str) else facts
    chosen = list(KINDS) if facts == "all" else [name.strip() for name in names]
    if unknown := [name for name in chosen if name not in KINDS]:
        raise UserError(f"--facts {unknown[0]}: unknown; choose from all, {', '.join(KINDS)}")
    return chosen


def check_decoys(decoys: int, kinds: Sequence[str]) -> None:
    """Raise UserError unless the kinds have enough different questions for so many decoys."""
    if not is_integer(decoys) or decoys < 0:
        raise UserError(f"--decoys {decoys}: must be an integer of at least 0")
    is_twice = any(a == b for a, b in itertools.pairwise([*kinds, kinds[0]]))
    most = SUBJECTS // (2 if is_twice else 1) - 1
    if decoys > most:
        more = f". Up to {SUBJECTS - 1} fit with --facts number,place" if is_twice else ""
        raise UserError(
            f"--decoys {decoys}: must be at most {most} with --facts {','.join(kinds)}, since a "
            f"kind of fact has {SUBJECTS} different questions{more}"
        )


def results(doc: dict[str, Any], answers: Sequence[list[bool]]) -> dict[str, Any]:
    """The metric of a text: which of its facts were found."""
    return {"found": answers[0]}


def share(texts: Sequence[Sequence[bool]]) -> float:
    """The share of facts that were found, over all texts."""
    return statistics.fmean(itertools.chain(*texts))


def answer(lm: Any, document: str, facts: Sequence[tuple[str, str]]) -> list[bool]:
    """Whether an `h2o.evaluation.lm.H2OLM` finds each fact, a pair of question and answer.

    Raises: ValueError for a document that is too long for the model, and for a simulation.
    """
    if lm.protocol == "simulate":
        raise ValueError("needles need a real cache: use --protocol drop")
    ids, asked = encode(lm.tokenizer, document, facts)
    tokens = ids.shape[1] + max(question.shape[1] + x.shape[1] for question, x in asked)
    if tokens > lm.max_length:
        raise ValueError(
            f"a text of {ids.shape[1]} tokens and its question exceed the model's "
            f"{lm.max_length} positions: lower --lengths"
        )
    lm.count_text(ids.shape[1])
    if lm.is_counting:
        return []
    return find_facts(lm, ids, asked)
