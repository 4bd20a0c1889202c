"""Hide facts in a text, and ask a model that has read it with some cache about each of them.

A sentence (`h2o.evaluation.facts`) is hidden in a passage. The passage is prefilled into an
`H2OCache`, which evicts down to its budget before the question is known. The question follows, and
the answer counts if greedy decoding produces it token by token.
"""

from __future__ import annotations

import copy
import random
import re
from collections.abc import Sequence
from typing import Any

import torch

from h2o.errors import UserError
from h2o.evaluation import protocols
from h2o.evaluation.facts import KINDS, Fact

Asked = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Token ids [1, n] of the question and the answer for each fact"""


def draw_alike(kinds: Sequence[str], each: int, draw: random.Random) -> list[Fact]:
    """Draw `each` facts of every kind, no two with the same question."""
    facts: dict[str, Fact] = {}
    for count, kind in enumerate(kinds, 1):
        while len(facts) < count * each:
            fact = KINDS[kind](draw)
            facts.setdefault(fact.question, fact)
    return list(facts.values())


def hide(piece: str, facts: Sequence[Fact], depths: Sequence[float]) -> str:
    """Put the sentence of each fact between the sentences of the piece."""
    ends = [match.end() for match in re.finditer(r"[.!?;]\s+|\n+", piece)]
    if not ends:
        raise UserError("a piece of the text has no end of a sentence: nowhere to hide a fact")
    places = zip(depths, facts, strict=True)
    for depth, fact in sorted(places, key=lambda place: -place[0]):  # earlier positions stay valid
        at = ends[round(depth * (len(ends) - 1))]
        piece = f"{piece[:at]}{fact.sentence} {piece[at:]}"
    return piece


def encode(
    tokenizer: Any, document: str, asked: Sequence[tuple[str, str]]
) -> tuple[torch.Tensor, Asked]:
    """Token ids [1, n] of a document, and of questions and answers."""

    def ids_of(text: str, **how: Any) -> torch.Tensor:
        ids: torch.Tensor = tokenizer(text, return_tensors="pt", **how)["input_ids"]
        return ids

    pairs = [tuple(ids_of(x, add_special_tokens=False) for x in pair) for pair in asked]
    return ids_of(document), pairs


def find_facts(lm: Any, document: torch.Tensor, asked: Asked) -> list[bool]:
    """Whether greedy decoding would produce each answer.

    The answer's own tokens are fed. As long as each is the greedy choice, this is the same as
    decoding. Each question is asked with a cache that holds the document only.

    Args:
        lm: an `h2o.evaluation.lm.H2OLM` or an `h2o.evaluation.recommendation.Reader`.
    """
    if lm.simulates:
        context, n = document[0].tolist(), document.shape[1]
        pairs = [(context + x[0].tolist(), y[0].tolist()) for x, y in asked]
        with lm.begin_forward():
            each = [lm.simulate([pair], [n])[0] for pair in pairs]
        return [x.argmax(-1).tolist() == y for x, (_, y) in zip(each, pairs, strict=True)]
    with lm.begin_forward():
        read = protocols.read_documents(
            lm.model, lm.setting, document, torch.ones_like(document), lm.tokenizer
        )
    found = []
    for number, (question, answer) in enumerate(asked, 1):
        cache = read if number == len(asked) else copy.deepcopy(read)
        prompt = torch.cat([document, question], 1)
        prompts = prompt, torch.ones_like(prompt)
        with lm.begin_forward():
            (logits,) = protocols.by_cache(lm.model, prompts, answer.tolist(), cache)
        found.append(torch.equal(logits.argmax(-1).cpu(), answer[0]))
    return found
