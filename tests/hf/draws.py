"""Draws programs such that every pair of modes that h2o allows meets in at least one of them.

`h2o.hf.modes.PAIRS` says which pairs are allowed. `modes_of` reads a program's modes off its
content, so a pair counts as met only where the program really has both.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator
from typing import Any

from h2o import H2OConfig
from h2o.hf.modes import PAIRS, PROGRAMS, Mode, Tested, config_modes
from tests.hf import tiny
from tests.hf.modes import uneven
from tests.hf.program_models import FAMILIES, model_of
from tests.hf.programs import ROOM, Call, Program

M = Mode
Pair = frozenset[Mode]

KINDS = {"states": M.HYBRID, "sliding": M.WINDOWS, "none": M.SHARED_KEYS, "latent": M.LATENT}
"""The mode of models with each kind of layers"""
CANDIDATES = (
    "llama", "gpt_neox", "qwen3", "opt", "gpt2", "llama, wide",
    "lfm2", "qwen3_next", "zamba2", "falcon_h1", "nemotron_h", "lfm2, wide",
    "gemma3", "gpt_oss", "qwen2-mixed", "gemma2", "gemma3, wide",
    "deepseek_v3", "longcat_flash", "minicpm3",
    "gemma3n_text", "gemma4_text", "gemma3n_text, full", "gemma3n_text, wide",
    "lfm3", "kimi_linear",
    "llava", "llava, wide", "lfm2_vl", "gemma4",
)  # fmt: skip
NAMES = tuple(name for name in CANDIDATES if name in FAMILIES)
ROTARY = (M.ECHO, M.SHARED_BUDGET, M.CACHE_RELATIVE, M.NAMED_SPANS)
"""Modes that need a model with rotary positions"""


def kinds_of(name: str) -> frozenset[Mode]:
    """The modes of a family's layers."""
    layers = {*FAMILIES[name].layers}
    if name == "nemotron_h":
        layers -= {"none"}
    if name in (*tiny.LATENT, *tiny.LATENT_AND_STATES):
        layers |= {"latent"}
    if name in tiny.WITH_STATES:
        layers |= {"states"}
    return frozenset(KINDS[x] for x in layers if x in KINDS)


def modes_of(program: Program) -> frozenset[Mode]:
    """The modes of a program."""
    names = [name for name, _ in program.calls]
    _, start = program.calls[0]
    later = [given for name, given in program.calls[1:]]
    ways = {given.get("way", "fork") for name, given in program.calls if name in _COPIES}
    chunked = [given for _, given in program.calls if 0 < (given.get("size") or 0) < ROOM]
    have = {
        M.IMAGES: bool(FAMILIES[program.family].image),
        M.PINS: program.pinned is not None,
        M.TRACE: program.trace,
        M.COMPILED: program.compileable,
        M.PATCHED: program.in_patched,
        M.AUTOCAST: program.autocast,
        M.TORCH_BACKEND: program.by_torch,
        M.PADDING: _is_padded(start),
        M.GAPS: any(map(_is_padded, later)) or bool(start.get("holes")),
        M.CHUNKS: any(x["size"] < x.get("columns", ROOM) for x in chunked),
        M.BEAMS: any(given.get("beams", 1) > 1 for _, given in program.calls),
        M.CROP: "crop" in names,
        M.NAMED_SPANS: "evict" in names or bool(start.get("evict")),
        M.TURNS: any(x.get("columns", 0) > 1 for x in later),
        M.FORK: "fork" in ways,
        M.FILE: "file" in names,
        M.ROW_MOVES: "select" in names or "repeat" in names,
        M.FROM_DYNAMIC: "dynamic" in names,
        M.GENERATE_ALL: "all" in names,
        M.SIMULATED: "simulate" in names,
    }
    settings = config_modes(H2OConfig(**program.settings))
    return kinds_of(program.family) | settings | {mode for mode, holds in have.items() if holds}


_COPIES = ("copy", "repeat")


def _is_padded(given: dict[str, Any]) -> bool:
    return any((*given.get("left", ()), *given.get("right", ())))


def pairs_of(modes: Iterable[Mode]) -> set[Pair]:
    return {frozenset(pair) for pair in itertools.combinations(modes, 2)}


ELSEWHERE = {
    frozenset((M.BITS, M.FEW_BITS)): "a cache has one kv_dtype",
    frozenset((M.IMAGES, M.LATENT)): "no tiny family has both",
}
"""Pairs that no program can have, and why"""
WANTED = {
    pair for pair, cell in PAIRS.items() if cell == Tested(PROGRAMS) and pair not in ELSEWHERE
}
"""Pairs that programs must have"""


def pairs_tested(modes: Iterable[Mode]) -> set[Pair]:
    """The pairs of these modes that a program with all of them tests.

    Some modes hide others: under autocast logits are not compared, a simulation has no cache, and
    the torch backend runs instead of the core. Such a program tests the pairs of these modes alone.
    Nor does it test echo if attention alone scores its prompt."""
    asked = {*modes}
    alone = asked & {M.AUTOCAST, M.SIMULATED, M.TORCH_BACKEND}
    without_echo = asked & {M.CACHE_RELATIVE, M.FROM_DYNAMIC, M.LATENT}
    return {
        pair
        for pair in pairs_of(asked)
        if alone <= pair
        and (not without_echo or pair & without_echo or not pair & {M.ECHO, M.SHARED_BUDGET})
    }


TOGETHER: tuple[frozenset[Mode], ...] = (
    frozenset((M.SIMULATED, M.NAMED_SPANS, M.BITS)),
    frozenset((M.SIMULATED, M.NAMED_SPANS, M.FEW_BITS)),
    frozenset((M.SIMULATED, M.NAMED_SPANS, M.GROWTH)),
    frozenset((M.NAMED_SPANS, M.FEW_BITS, M.FILE)),
    frozenset((M.NAMED_SPANS, M.FEW_BITS, M.GROWTH)),
    frozenset((M.NAMED_SPANS, M.CROP, M.GROWTH)),
    frozenset((M.FEW_BITS, M.CROP, M.GROWTH)),
)
"""Three modes that have met in a fault, or are likely to"""


def draw(seed: int, modes: int = 8) -> Iterator[Program]:
    """Programs that together test every pair in `WANTED`, each with up to so many modes, and one
    for each entry of `TOGETHER`."""
    chosen = random.Random(seed)
    order = sorted(Mode, key=lambda mode: mode.name)
    chosen.shuffle(order)
    unmet = sorted(WANTED, key=lambda pair: sorted(mode.name for mode in pair))
    chosen.shuffle(unmet)
    number = seed
    for three in TOGETHER:
        program = build(_with_kinds({*three}), number, with_room=seed % 3 == 1)
        assert three <= modes_of(program), f"{program} was to have {sorted(three)}"
        met = pairs_tested(modes_of(program))
        unmet = [pair for pair in unmet if pair not in met]
        number += 1
        yield program
    while unmet:
        asked = _with_kinds({*unmet[0]})
        gain = pairs_tested(asked) & {*unmet}
        while len(asked) < modes:
            more = [asked | {mode} for mode in order if mode not in asked]
            gains = {frozenset(x): pairs_tested(x) & {*unmet} for x in more if _fits(x)}
            best = max(gains, key=lambda x: len(gains[x]) * (unmet[0] in gains[x]), default=None)
            if best is None or unmet[0] not in gains[best] or len(gains[best]) <= len(gain):
                break
            asked, gain = {*best}, gains[best]
        program = build(asked, number, with_room=seed % 3 == 1)
        met = pairs_tested(modes_of(program))
        if unmet[0] not in met:
            raise AssertionError(f"{program} was to have {sorted(asked)}")
        unmet = [pair for pair in unmet if pair not in met]
        number += 1
        yield program


def _with_kinds(modes: set[Mode]) -> set[Mode]:
    """These modes, with as few kinds of layers as a family needs to have them."""
    for count in range(len(KINDS)):
        for more in itertools.combinations(KINDS.values(), count):
            if _fits(modes | {*more}):
                return modes | {*more}
    raise AssertionError(f"no family has {sorted(modes)}")


def _fits(modes: set[Mode]) -> bool:
    """Whether h2o allows all pairs of these modes, and some family has exactly their layers."""
    return pairs_of(modes) <= WANTED and bool(_families(modes))


def _families(modes: set[Mode]) -> list[str]:
    kinds = frozenset(modes & {*KINDS.values()})
    return [
        name
        for name in NAMES
        if kinds_of(name) == kinds
        and bool(FAMILIES[name].image) == (M.IMAGES in modes)
        and not (name == "lfm2_vl" and M.CACHE_RELATIVE in modes)
        and not (name == "kimi_linear" and M.SIMULATED in modes)  # rounding flips its experts
        and (M.FEW_BITS not in modes or name.endswith("wide"))
        and not (modes & {*ROTARY} and name in tiny.WITHOUT_ROTARY)
    ]


BUDGETS: tuple[dict[str, Any], ...] = (
    {"heavy": 5, "recent": 4},
    {"heavy": 0.3, "recent": 0.1, "min_tokens": 8},
    {"heavy": 0.4, "recent": 0.2, "min_tokens": 0},
    {"heavy": 4, "recent": 3, "sinks": 2, "score_by": "mean", "decay": 0.9, "value_weighted": True},
    {"heavy": 0.5, "recent": 0.2, "budget_unit": "bytes", "min_tokens": 4, "decay": 0.95},
    {"heavy": 6, "recent": 3, "score_by": "max"},
    {"budget": 12, "min_tokens": 0},
    {"heavy": ROOM, "recent": 5},
)
PINS: tuple[Any, ...] = (
    [(1, 3)],
    [(0, 1), (17, 20)],
    [[(2, 3)], [(0, 2), (28, 30)], [(4, 5), (26, 27)]],
)
"""Spans for all rows, or for each of up to three"""


def build(modes: set[Mode], number: int, *, with_room: bool = False) -> Program:
    """A program with these modes. With room for all keys, where modes allow it, it must answer as
    transformers does."""
    chosen = random.Random(number)
    name = chosen.choice(_families(modes))
    # Graphs cannot have payload, and generate_all counts positions that payload sets to 0. Nor are
    # its positions those of generate() in requests that forget tokens.
    is_real = M.GENERATE_ALL in modes and modes & {M.COMPILED, M.CACHE_RELATIVE, M.NAMED_SPANS}
    rounds = modes & {M.AUTOCAST, M.BITS, M.FEW_BITS}
    settings = dict(BUDGETS[number % len(BUDGETS)])
    if modes & {M.ECHO, M.SHARED_BUDGET, M.HEAD_BUDGETS, M.PINS}:
        settings = {"heavy": 16 if M.PINS in modes else 7, "recent": 3, "sinks": number % 2}
        if chosen.random() < 0.5 and not (
            M.PINS in modes and modes & {M.SIMULATED, M.GENERATE_ALL}
        ):
            settings["heavy"], settings["recent"] = 0.8 if M.PINS in modes else 0.35, 0.15
            settings["min_tokens"] = 0
    if M.SIMULATED in modes and (settings.get("heavy") == ROOM or modes & {M.PADDING, M.GAPS}):
        settings = dict(BUDGETS[2])
    with_room = with_room and not rounds and not modes & {M.SIMULATED, M.GENERATE_ALL}
    if with_room:
        settings = {"heavy": ROOM, "recent": 5}
    has_fractions = any(isinstance(settings.get(x), float) for x in ("heavy", "recent"))
    if M.GROWTH in modes and not has_fractions:
        settings = dict(BUDGETS[1]) if "budget" in settings else settings
        settings |= {"recent": 0.15, "min_tokens": 4}
    elif M.GROWTH not in modes and has_fractions:
        settings["ratio_of"] = "prompt"
    if M.SHARED_BUDGET in modes:
        settings["head_shares"] = "echo"
    if modes & {M.ECHO, M.SHARED_BUDGET}:
        settings["score_by"] = "mean-echo"
    if M.BITS in modes:
        settings["kv_dtype"] = "int8"
    if M.FEW_BITS in modes:
        settings["kv_dtype"] = chosen.choice(["int8-int4", "int4"])
    if M.CACHE_RELATIVE in modes:
        settings["positions"] = "cache_relative"
    rows = 1 if M.GENERATE_ALL in modes else chosen.choice([2, 3])
    if M.CROP in modes and not modes & {M.PADDING, M.BITS, M.FEW_BITS}:
        rows = chosen.choice([1, 1, 2])  # drafts need a single row
    is_exact = not (is_real or with_room or M.SIMULATED in modes)
    which = (
        0 if M.GENERATE_ALL in modes else 1 if M.SIMULATED in modes else chosen.randrange(len(PINS))
    )
    drawn_for = modes | {M.ECHO} if "budget" in settings else modes  # `budget` ranks by echo
    program = Program(
        name, settings, _calls(drawn_for, rows, chosen), rows=rows,
        pinned=_pins(modes, rows, which),
        trace=M.TRACE in modes, compileable=M.COMPILED in modes, in_patched=M.PATCHED in modes,
        autocast=M.AUTOCAST in modes, by_torch=M.TORCH_BACKEND in modes,
        exact=is_exact and (bool(rounds) or number % 2 == 0), used=number % 3 == 0,
        factor=0.9 if modes & {M.BITS, M.FEW_BITS} and number % 3 else 1.0, seed=number,
    )  # fmt: skip
    if M.HEAD_BUDGETS in modes and M.SHARED_BUDGET not in modes:
        settings["head_shares"] = uneven(model_of(program.family))
    return program


def _pins(modes: set[Mode], rows: int, which: int) -> Any:
    if M.PINS not in modes:
        return None
    pins = PINS[which]
    return pins[:rows] if isinstance(pins[0], list) and rows > 1 else PINS[which % 2]


def _calls(modes: set[Mode], rows: int, chosen: random.Random) -> list[Call]:
    columns = 24 if M.IMAGES in modes else chosen.randint(14, 24)
    least = 14 if M.IMAGES in modes else 10 if M.PINS in modes else 4
    fewest = columns - least if M.SHARED_BUDGET in modes else 1  # short prompts leave room
    left = (
        0,
        *(chosen.randint(fewest, columns - least) for _ in range(rows - 1)),
    )
    start: dict[str, Any] = {"columns": columns}
    size = chosen.choice([4, 6]) if M.CHUNKS in modes else None
    if M.PADDING in modes:
        start["left"] = left
        if size is not None and modes & {M.ECHO, M.SHARED_BUDGET} and M.FROM_DYNAMIC not in modes:
            start["left"] = tuple(min(pads, size - 1) for pads in left)  # else rows are refused
    if M.SIMULATED in modes:
        start |= {"columns": columns + 12, "holes": (12, 13, 14) if M.GAPS in modes else ()}
        start["prompt"] = 30 if M.IMAGES in modes else 4  # an image comes in one pass
        ratio_of = "text" if modes & {M.PADDING, M.GAPS} else chosen.choice(["prompt", "text"])
        if M.NAMED_SPANS in modes:
            n, more = start["prompt"] + chosen.randint(9, 12), chosen.randint(1, 4)
            n = min(n, start["columns"] - more - 1)
            early = (n, chosen.randint(0, 3), chosen.randint(1, 3))
            start["evict"] = [early, (n + more, chosen.randint(2, 6), chosen.randint(1, 3))]
        return [("simulate", {**start, "ratio_of": ratio_of})]
    if M.PATCHED in modes:
        beams = {"beams": 2} if M.BEAMS in modes else {}
        calls = [("answer", {**start, "size": size, **beams})]
    elif M.FROM_DYNAMIC in modes:
        calls = [("dynamic", {**start, "size": size or columns})]
    elif M.CHUNKS in modes:
        calls = [("chunks", {**start, "size": size})]
    elif M.CROP in modes and rows == 1 and not modes & {M.BITS, M.FEW_BITS, M.GENERATE_ALL}:
        calls = [("answer", {**start, "tokens": 12, "drafts": 3})]
    else:
        calls = [("read", start)]
    return calls + _later_calls(modes, size, chosen)


def _later_calls(modes: set[Mode], size: int | None, chosen: random.Random) -> list[Call]:
    step: Call = ("read", {"columns": 1})
    parts: list[list[Call]] = [[step], [step, step], [("look", {})]]
    parts += [[("reject", {"rows": chosen.randint(0, 1)})]]
    parts += [[("fail", {"share": round(chosen.uniform(0.3, 1) ** 0.5, 3) * 0.999, "columns": 2})]]
    parts = chosen.sample(parts, 3)
    if M.FILE in modes:
        parts.append([("file", {})])
    if M.FORK in modes:
        parts.append([("copy", {"way": "fork"})])
    if M.ROW_MOVES in modes and M.GENERATE_ALL not in modes:
        rows = [chosen.randrange(3) for _ in range(chosen.randint(1, 3))]
        parts.append([chosen.choice([("select", {"rows": rows}), ("repeat", {})])])
    if M.CROP in modes:
        # A single token is rounded before it is attended to, and the four were not.
        most = 2 if modes & {M.BITS, M.FEW_BITS} else 3
        parts.append([("crop", {"columns": 4, "back": chosen.randint(1, most)})])
    if M.NAMED_SPANS in modes:
        span = {"start": chosen.randint(0, 6), "tokens": chosen.randint(1, 3)}
        parts.append([("evict", {**span, "apart": chosen.randint(0, 3)}), step])
        parts.append([("evict", {"start": 2, "tokens": 1})])
        late = {"start": chosen.randint(7, 20), "tokens": chosen.randint(1, 6)}
        parts.append([step, ("evict", late)])
    if M.BEAMS in modes and M.PATCHED not in modes:
        parts.append([("answer", {"columns": 2, "tokens": 4, "beams": 2})])
    if M.GAPS in modes:
        gap = {"columns": 4, "left": (chosen.randint(0, 2), 2), "right": (1,)}
        parts.append([("read", gap), step, ("read", {"columns": 1, "right": (1,)})])
    if M.TURNS in modes:
        parts.append([chosen.choice([("read", {"columns": 5}), ("answer", {"columns": 3})])])
        parts.append([("copy", {"way": chosen.choice(["copy", "deepcopy", "pickle"])})])
    chosen.shuffle(parts)
    calls = [call for part in parts for call in part]
    if M.GENERATE_ALL in modes:
        lengths = [chosen.randint(3 if M.PINS in modes else 1, 9) for _ in range(4)]
        whole = {M.FILE, M.FORK, M.NAMED_SPANS} & modes
        forgets = {"forgets": True} if M.NAMED_SPANS in modes else {}
        calls.append(("all", {"lengths": lengths, "prefix": bool(whole), "size": size, **forgets}))
        if not modes & {M.PINS, M.COMPILED}:  # prompts that are prefilled together
            calls.append(("all", {"lengths": [5, 16, 11, 8], "prefix": False}))
    return calls
