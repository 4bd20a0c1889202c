"""Odd values of every kind of argument, and what a function that takes the kind must make of them.

A value is either another way to write a plain one, so that the answer must be the same, or an error
of the class that `docs/reference/arguments.md` says.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

NAN, INF = float("nan"), float("inf")
META = torch.device("meta")


class Odd(NamedTuple):
    """An odd value. It is made anew for each call, because a generator can be read only once."""

    make: Callable[[], Any]
    raises: type[Exception] | None
    """None: the answer must be that of the plain value"""


def same(*makers: Callable[[], Any]) -> list[Odd]:
    return [Odd(make, None) for make in makers]


def wrong_kind(*values: Any) -> list[Odd]:
    return [Odd(lambda value=value: value, TypeError) for value in values]


def wrong_value(*values: Any) -> list[Odd]:
    return [Odd(lambda value=value: value, ValueError) for value in values]


NO_NUMBERS = (True, False, np.True_, torch.tensor(True), [], {}, object(), b"1", 1j)
GENERATOR = Odd(lambda: (x for x in (1, 2)), TypeError)


def integer(good: int, *, least: int = 1, single: bool = True) -> list[Odd]:
    """`single`: whether lists are wrong too."""
    lists = [[good], (good,), torch.tensor([good]), np.array([good])] if single else []
    return [
        *same(lambda: np.int64(good), lambda: np.int16(good), lambda: np.array(good)),
        *same(lambda: torch.tensor(good), lambda: torch.tensor(good, dtype=torch.int32)),
        *wrong_kind(float(good), np.float32(good), torch.tensor(float(good)), NAN, INF),
        *wrong_kind(f"{good}", "", "many", *(NO_NUMBERS if single else NO_NUMBERS[:4]), *lists),
        *([GENERATOR] if single else []),
        *wrong_value(torch.tensor(good, device=META), least - 1, -(10**30)),
    ]


def seed(good: int) -> list[Odd]:
    return [*integer(good, least=-(2**63)), *wrong_value(2**63)]


def fraction(good: float) -> list[Odd]:
    return [
        *same(lambda: np.float64(good), lambda: np.float32(good), lambda: np.float16(good)),
        *same(lambda: torch.tensor(good), lambda: torch.tensor(good, dtype=torch.float64)),
        *wrong_kind(f"{good}", "half", *NO_NUMBERS, [good], torch.tensor([good]), GENERATOR.make()),
        *wrong_value(NAN, INF, -0.1, 1.5, np.float32(1.5), torch.tensor(0.5, device=META)),
    ]


def amount(good: float | int) -> list[Odd]:
    """A single budget, in tokens or as a fraction."""
    if isinstance(good, int):
        odd = integer(good, least=0)
        kinds = {float, np.float32, torch.Tensor}
        # A float is a fraction, which a number of tokens exceeds.
        return [
            Odd(x.make, ValueError) if _is_float(x.make()) and type(x.make()) in kinds else x
            for x in odd
        ]
    return [*fraction(good), *wrong_value(2**31)]


def _is_float(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.ndim == 0 and value.is_floating_point()
    return isinstance(value, float | np.floating)


def flag(good: bool) -> list[Odd]:
    return [
        *same(lambda: np.bool_(good), lambda: torch.tensor(good), lambda: np.array(good)),
        *wrong_kind("no", "false", "", 0, 1, None, 0.0, [], [good], np.int64(1), torch.tensor(1)),
        *wrong_kind(torch.tensor([good]), object()),
        *wrong_value(torch.tensor(good, device=META)),
    ]


def choice(good: str | int) -> list[Odd]:
    equal = [lambda: np.str_(good)] if isinstance(good, str) else [lambda: np.int64(good)]
    return [
        *same(*equal),
        *wrong_value("nope", "", 77, NAN, True, [], [good], {}, object(), torch.tensor([1, 2])),
        *wrong_value(np.array(["a", "b"]), b"x", f" {good}", torch.tensor(1, device=META)),
    ]


def numbers(good: list[float]) -> list[Odd]:
    """A list of fractions."""
    return [
        *same(lambda: tuple(good), lambda: np.array(good), lambda: torch.tensor(good)),
        *same(lambda: [np.float32(x) for x in good], lambda: [torch.tensor(x) for x in good]),
        *same(lambda: (x for x in good)),
        *wrong_kind("0.2", 0.2, None, True, {}, {0.2}, ["0.2"], [True], [None], [[0.2]]),
        *wrong_value([], (), np.array([]), [NAN], [INF], [-0.1], [1.5], [2]),
        *wrong_value(torch.tensor(good, device=META)),
    ]


def ids(good: list[int], *, texts: bool = False, vocabulary: bool = True) -> list[Odd]:
    """Token ids of one row.

    Args:
        texts: whether a list is one of texts.
        vocabulary: whether the function knows the vocabulary.
    """
    good = good if isinstance(good, list) else good[0].tolist()
    one = torch.tensor([good])
    equal = [
        lambda: torch.tensor(good),
        lambda: one.int(),
        lambda: np.array(good, dtype=np.int32),
        lambda: np.array(good, dtype=np.uint16),
    ]
    lists = [*same(lambda: tuple(good), lambda: [good], lambda: good)]
    odd: list[Odd] = [
        *same(*equal),
        *wrong_kind(one.float(), one.bool(), np.array(good, dtype=float), 5, object(), 1j),
        *wrong_kind([float(x) for x in good], [f"{x}" for x in good], [None], GENERATOR.make()),
        *wrong_value(torch.tensor([], dtype=torch.long), one[:, :0], one[None], one.to(META)),
        *wrong_value(torch.tensor(5), [], one - 50, [[]]),
        *(wrong_value(one + 10**6) if vocabulary else []),
    ]
    if not texts:
        odd += [*lists, *wrong_value([*good, 10**30], [good, good[:-1]], [*good, -1])]
    if not texts:
        odd += wrong_value(torch.cat([one, one]), [good, good])
    return odd


def mask(good: torch.Tensor) -> list[Odd]:
    """A mask [B, n] bool."""
    two = good.int()
    two[0, 0] = 2
    return [
        *same(
            lambda: good.int(), lambda: good.float(), lambda: good.numpy(), lambda: good.tolist()
        ),
        *same(lambda: good.to(torch.uint8), lambda: good.int().tolist(), lambda: good.double()),
        *wrong_kind("mask", 5, True, object(), {}, GENERATOR.make(), [["1"] * good.shape[1]]),
        *wrong_value(two, good.float() * NAN, good.float() / 2, -good.int(), torch.tensor(True)),
        *wrong_value(good[:, :-1], good[None], good.to(META), [], [[]], good[:0]),
    ]


def spans(good: list[tuple[int, int]]) -> list[Odd]:
    """Pins of one row."""
    return [
        *same(lambda: tuple(good), lambda: torch.tensor(good), lambda: np.array(good)),
        *same(lambda: [[np.int64(x) for x in span] for span in good], lambda: [good]),
        *same(lambda: [[torch.tensor(x) for x in span] for span in good]),
        *wrong_kind(5, 0.5, True, object(), {}, [1, 2], [(0, 1.0)], [("0", "1")], [(True, 2)]),
        *wrong_kind(GENERATOR.make(), [(0, 1, 2)], [None], torch.tensor([0.0, 1.0]), [(0, NAN)]),
        *wrong_kind(torch.ones(1, 3, dtype=torch.int), torch.ones(2, dtype=torch.bool)),
        *wrong_value("nope", "", [(3, 1)], [(-1, 2)], [(2, 2)], [(0, 10**30)]),
        *wrong_value(torch.tensor(good, device=META)),
    ]


def unnamed_spans(good: list[tuple[int, int]], several: bool = True) -> list[Odd]:
    """Spans, and no name such as "prompt". `several`: whether each row may have its own."""
    plain = [x for x in spans(good) if not isinstance(x.make(), str)]
    return [*(x for x in plain if several or x.raises), *wrong_kind("nope", "")]


def batch_of_ids_or_none(good: Any) -> list[Odd]:
    return [x for x in batch_of_ids(good) if x.make() is not None]


def lengths(good: int) -> list[Odd]:
    """The length of a prompt, or a list with that of each row."""
    return [*integer(good, single=False), *wrong_kind({}, object(), ["4"], [True], [4.0])]


def rows(good: list[int]) -> list[Odd]:
    """Numbers of batch rows."""
    return [
        *same(lambda: tuple(good), lambda: np.array(good), lambda: torch.tensor(good)),
        *same(lambda: torch.tensor(good, dtype=torch.int32)),
        *wrong_kind("0", 0, None, object(), {}, [0.0], ["0"], [None], GENERATOR.make()),
        *wrong_value([[0]], torch.tensor(0), torch.tensor(good, device=META), [10**30]),
        Odd(lambda: [5], IndexError),
    ]


def index(good: int, length: int) -> list[Odd]:
    """The number of one of `length` things. Numbers below 0 count from the end."""
    odd = any_integer(good)
    out = [Odd(lambda n=n: n, IndexError) for n in (length, -length - 1, 10**30)]
    return [*odd, *out, *same(lambda: good - length), *wrong_kind(slice(0, 1))]


def device(good: str) -> list[Odd]:
    return [
        *same(lambda: torch.device(good), lambda: np.str_(good)),
        *wrong_kind(1.5, [], {}, object(), True, b"cpu", ["cpu"], torch.tensor([0])),
        *wrong_value("", "nope", "meta", "cpu:x", torch.device("meta"), 10**9),
    ]


def config(good: Any) -> list[Odd]:
    """An H2OConfig."""
    return [*wrong_kind(0, 0.2, 64, "robust", {}, {"budget": 0.2}, [], True, object(), int)]


def model(good: Any) -> list[Odd]:
    return [*wrong_kind(None, "name", 5, (object(), object()), {}, object(), torch.nn.Linear)]


def mapping(good: Any) -> list[Odd]:
    """Arguments of a chat template."""
    return [*wrong_kind([], "tools", 5, True, object(), [("a", 1)])]


def function(good: Any) -> list[Odd]:
    return [*wrong_kind(5, "print", [], True, object())]


def amount_or_list(good: float | int) -> list[Odd]:
    """A budget that may differ by layer and by head."""
    lists = [
        *wrong_value([], [[]], np.array([])),
        *wrong_kind({}, {0.5}, ["0.5"], [[True]], [None]),
    ]
    alone = [x for x in amount(good) if not _is_list_like(x.make())]
    return [*alone, *lists, *wrong_kind(object(), 1j, b"1")]


def _is_list_like(value: Any) -> bool:
    return isinstance(value, list | tuple) or getattr(value, "ndim", 0) > 0


def table(good: list[list[float]]) -> list[Odd]:
    """Shares [layers, heads]."""
    return [
        *same(lambda: np.array(good), lambda: torch.tensor(good), lambda: tuple(map(tuple, good))),
        *same(lambda: [np.array(x, dtype=np.float32) for x in good]),
        *wrong_kind(5, 0.5, True, {}, object(), [1.0, 2.0], "ab", [["1", "2"]], [[True, 1.0]]),
        *wrong_value([], [[]], [[1.0], [1.0, 2.0]], [[0.0]], [[-1.0]], [[NAN]], [[INF]]),
        *wrong_value(torch.tensor(good, device=META)),
    ]


def positive(good: float) -> list[Odd]:
    """A number above 0."""
    return [
        *same(lambda: np.float32(good), lambda: torch.tensor(good), lambda: np.array(good)),
        *wrong_kind(f"{good}", *NO_NUMBERS, None, GENERATOR.make()),
        *wrong_value(0, -1.0, NAN, torch.tensor(good, device=META)),
    ]


def any_integer(good: int) -> list[Odd]:
    """An integer of any size."""
    return [x for x in integer(good) if x.raises is not ValueError]


def mask_of_any_length(good: torch.Tensor) -> list[Odd]:
    return [x for x in mask(good) if not _has_rows(x.make(), len(good))]


def _has_rows(value: Any, rows: int) -> bool:
    """Whether a value is a mask of another length, which is fine."""
    is_mask = isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.ndim == 2
    return is_mask and len(value) == rows and value.device != META


def batch_of_ids(good: list[list[int]]) -> list[Odd]:
    """Token ids [B, n]."""
    whole = torch.tensor(good)
    return [
        *same(lambda: whole, lambda: whole.int(), lambda: whole.numpy(), lambda: tuple(good)),
        *wrong_kind(whole.float(), whole.bool(), "text", None, {}, 5, object(), GENERATOR.make()),
        *wrong_value([], [[]], whole[:, :0], whole[None], whole - 50, whole.to(META)),
        *wrong_value(torch.tensor(5), [[*good[0], 10**30]], [good[0], good[0][:-1]]),
    ]


def module(good: Any) -> list[Odd]:
    """A model, or any module of torch."""
    return [*same(lambda: good), *model(good)]


def dtype(good: str) -> list[Odd]:
    return [
        *same(lambda: getattr(torch, good), lambda: np.str_(good)),
        *wrong_value("", "int8", "nope", None, 5, True, torch.int8, float, [good]),
    ]


def prompts(good: list[list[int]]) -> list[Odd]:
    return [
        *same(lambda: tuple(good), lambda: (x for x in good), lambda: [*map(torch.tensor, good)]),
        *wrong_kind(5, None, True, object()),
        *wrong_value("text", {}),
    ]


def end_tokens(good: int) -> list[Odd]:
    """A token id, or a list of them."""
    return [
        *integer(good, least=0, single=False),
        *same(
            lambda: [good], lambda: (good,), lambda: torch.tensor([good]), lambda: [np.int64(good)]
        ),
        *wrong_kind(["3"], [True], [3.0], object(), {}),
    ]


def messages(good: list[dict[str, str]]) -> list[Odd]:
    return [
        *same(lambda: tuple(good)),
        *wrong_kind("text", 5, None, {}, good[0], ["text"], [5], [*good, "text"], GENERATOR.make()),
        *wrong_value([], good[1:]),
    ]


def spans_of_one_row(good: list[tuple[int, int]]) -> list[Odd]:
    text = ",".join(f"{start}:{stop}" for start, stop in good)
    return [*same(lambda: text), *[x for x in spans(good) if x.raises is not None]]


def functions(good: list[Any]) -> list[Odd]:
    return [*same(lambda: tuple(good)), *wrong_kind(5, "print", None, True, [5], ["x"], print, {})]
