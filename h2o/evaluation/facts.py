"""The kinds of facts that `h2o eval --needle` hides in a text, and the questions about them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple


class Fact(NamedTuple):
    """A sentence to hide, and a question about it."""

    sentence: str
    question: str
    """The question, up to where the answer begins."""
    answer: str
    """The answer, which begins with a space."""


TOWNS = (
    "Harrowick", "Lisbon", "Trondheim", "Calgary", "Odessa", "Kyoto", "Dunedin", "Marseille",
    "Bergamo", "Tartu", "Quito", "Aleppo", "Windhoek", "Tampere", "Cusco", "Galway",
)  # fmt: skip
NAMES = (
    "Agnes", "Bernard", "Clarissa", "Dmitri", "Eleanor", "Fergus", "Gudrun", "Hakim",
    "Ingrid", "Jerome", "Katarina", "Leopold", "Miriam", "Norbert", "Olga", "Percival",
)  # fmt: skip
SUBJECTS = min(len(TOWNS), len(NAMES))
"""Number of different questions of each kind of fact."""
THINGS = (
    "anvil", "barrel", "carpet", "dresser", "flowerpot", "harpsichord", "kettle", "ladder",
    "mattress", "piano", "rug", "statue", "stove", "sundial", "telescope", "wardrobe",
)  # fmt: skip
WORDS = (
    "amber", "badger", "cobalt", "dragon", "ember", "falcon", "garnet", "hazel",
    "indigo", "jasmine", "lobster", "marble", "nutmeg", "onyx", "pepper", "walnut",
)  # fmt: skip


def format_question(question: str, answer_begins: str) -> str:
    """A question with the beginning of the answer."""
    return f"\n\nQuestion: {question}\nAnswer: {answer_begins}"


def state_fact(begins: str, end: str, question: str) -> Fact:
    """A fact whose sentence and answer begin with the same words."""
    return Fact(f"{begins} {end}.", format_question(question, begins), f" {end}")


def number(draw: random.Random) -> Fact:
    town, digits = draw.choice(TOWNS), str(draw.randint(10000, 99999))
    question = f"What is the secret number of {town}?"
    return state_fact(f"The secret number of {town} is", digits, question)


def place(draw: random.Random) -> Fact:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    question = f"Where does {name} keep the spare key?"
    return state_fact(f"{name} keeps the spare key under the", thing, question)


def password(draw: random.Random) -> Fact:
    town, words = draw.choice(TOWNS), " ".join(draw.sample(WORDS, 2))
    question = f"What is the password of the library in {town}?"
    return state_fact(f"The password of the library in {town} is", words, question)


def gate(draw: random.Random) -> Fact:
    town, name = draw.choice(TOWNS), f"{draw.choice('BCDFGHJK')}{draw.randint(11, 99)}"
    question = f"From which gate does the ferry to {town} leave?"
    return state_fact(f"The ferry to {town} leaves from gate", name, question)


def pairs(draw: random.Random) -> Fact:
    """Ten entries in one sentence, and a question about one of them."""
    names, numbers = draw.sample(NAMES, 10), draw.sample(range(100, 1000), 10)
    entries = [f"{name} {digits}" for name, digits in zip(names, numbers, strict=True)]
    name, digits = draw.choice(entries).split()
    question = format_question(f"Which room does {name} have?", f"The rooms of the guests: {name}")
    return Fact(f"The rooms of the guests: {', '.join(entries)}.", question, f" {digits}")


def paraphrase(draw: random.Random) -> Fact:
    """A question that repeats little more than a name from the sentence."""
    name, digits = draw.choice(NAMES), str(draw.randint(1000, 9999))
    question = format_question(f"What must I dial to reach {name}?", f"To reach {name}, dial")
    return Fact(f"Call {name} on the telephone number {digits}.", question, f" {digits}")


KINDS: dict[str, Callable[[random.Random], Fact]] = {
    make.__name__: make for make in (number, place, password, gate, pairs, paraphrase)
}
