"""How the benchmarks measure time: contenders take turns, A B A B, and medians are compared.

A machine's speed drifts during a measurement, with its clock, its neighbors and its page cache.
Contenders are therefore not timed one after the other. Each round times every contender once, and
only times of the same round are compared.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SAMPLE_SECONDS = 0.02
"""Short calls are repeated within a round until they take this time."""


class Clock:
    """The host's clock, for work that is done when its call returns. Devices override it."""

    def seconds(self, run: Callable[[], Any], calls: int) -> tuple[float, Any]:
        """Run a function `calls` times. Returns the seconds, and the result of the last call."""
        start = time.perf_counter()
        for _ in range(calls):
            answer = run()
        return time.perf_counter() - start, answer


HOST = Clock()


@dataclass
class Contender:
    """One way of doing the work of a row.

    Attributes:
        name: name in the table.
        run: does the work once.
        before: called before each call of `run`, without being timed.
        work: floating-point operations or bytes of one call, for the roofline.
        own_clock: whether `run` returns its time in seconds, because it is measured elsewhere (in
            another process) or only in part.
    """

    name: str
    run: Callable[[], Any]
    before: Callable[[], Any] | None = None
    work: float | None = None
    own_clock: bool = False


@dataclass
class Times:
    """Times of a contender in seconds per call, with one sample for each round."""

    name: str
    samples: list[float]
    work: float | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    def rate(self) -> float | None:
        """Operations or bytes per second."""
        return None if self.work is None else self.work / self.median

    def to_dict(self) -> dict[str, Any]:
        low, high = quartiles(self.samples)
        return {
            "name": self.name,
            "median_s": self.median,
            "quartiles_s": [low, high],
            "min_s": min(self.samples),
            "max_s": max(self.samples),
            "rate": self.rate(),
            "samples_s": self.samples,
        }


def quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    cuts = statistics.quantiles(values, n=4, method="inclusive")
    return cuts[0], cuts[2]


def race(contenders: list[Contender], rounds: int, clock: Clock = HOST) -> dict[str, Times]:
    """Time contenders in turn, after one or two untimed calls of each."""
    calls = []
    for contender in contenders:
        seconds = sample(contender, 1, clock)
        if seconds < 1:
            seconds = sample(contender, 1, clock)
        once = contender.before or contender.own_clock
        calls.append(1 if once else math.ceil(SAMPLE_SECONDS / max(seconds, 1e-7)))
    times = {c.name: Times(c.name, [], c.work) for c in contenders}
    pairs = list(zip(contenders, calls, strict=True))
    collecting = gc.isenabled()
    gc.disable()
    try:
        for i in range(rounds):
            first = i % len(contenders)  # garbage collection leaves cold caches to the first one
            for contender, count in pairs[first:] + pairs[:first]:
                times[contender.name].samples.append(sample(contender, count, clock))
            gc.collect()
    finally:
        if collecting:
            gc.enable()
    return times


def sample(contender: Contender, calls: int, clock: Clock) -> float:
    """Mean seconds per call, over `calls` calls."""
    if contender.before:
        contender.before()
    spent, answer = clock.seconds(contender.run, calls)
    return answer if contender.own_clock else spent / calls


@dataclass
class Row:
    """One line of the table: h2o and one peer at the same work, in the same rounds.

    Attributes:
        row: identifier: "P1", ...
        what: the work, for the reader.
        case: dtype, prompt length and so on, for the reader.
        command: the command that runs it again.
        ours, peer: times. `peer` is None if there is nothing to compare with.
        bound: kind of the roofline: "FMA" or "matmul", "read" or "copy". None without a roofline.
        peak: times of the plain loop in the same rounds.
        error: error against the reference, which is checked before anything is timed.
        facts: other figures (bytes, fractions) by name.
    """

    row: str
    what: str
    case: str
    ours: Times
    peer: Times | None = None
    bound: str | None = None
    peak: Times | None = None
    error: str = ""
    command: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    def ratios(self) -> list[float]:
        """The peer's time divided by ours, for each round. Above 1 h2o is faster."""
        if self.peer is None:
            return []
        return [p / o for p, o in zip(self.peer.samples, self.ours.samples, strict=True)]

    def fraction(self) -> float | None:
        """Our rate divided by the plain loop's."""
        if self.peak is None or self.ours.work is None:
            return None
        rate, peak = self.ours.rate(), self.peak.rate()
        assert rate is not None
        assert peak is not None
        return rate / peak

    def to_dict(self) -> dict[str, Any]:
        ratios = self.ratios()
        return {
            "row": self.row,
            "what": self.what,
            "case": self.case,
            "command": self.command,
            "ours": self.ours.to_dict(),
            "peer": self.peer.to_dict() if self.peer else None,
            "ratio": statistics.median(ratios) if ratios else None,
            "ratio_quartiles": quartiles(ratios) if ratios else None,
            "bound": self.bound,
            "peak_rate": self.peak.rate() if self.peak else None,
            "roofline_fraction": self.fraction(),
            "error": self.error,
            "facts": self.facts,
        }
