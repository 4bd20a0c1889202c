"""Which modes of h2o can be combined: one cell for every pair of modes.

A mode is a kind of model, a setting, a way to run a cache, or a call with a cache of its own. A
pair is `Refused` with the reason that users see, `Apart` if no user can ask for both, `Tested`, or
`Untested`. Pairs that no row below names are tested by the random programs, which draw every such
pair of modes.

The constructors and calls ask `check_modes`. Checks of one mode's values stay with that mode. This
file imports neither torch nor transformers, so that the plugin for vLLM can read it too.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable

from h2o.config import H2OConfig
from h2o.errors import UnsupportedError
from h2o.hf.mode import Mode as Mode
from h2o.kv_dtype import has_four_bit_values


@dataclasses.dataclass(frozen=True)
class Refused:
    """The pair raises an error with `reason` before anything changes: an `UnsupportedError`, or the
    documented error of the call."""

    first: Mode
    second: Mode
    why: str
    """Why, and what to do instead"""

    @property
    def reason(self) -> str:
        return f"{self.first} cannot be combined with {self.second}: {self.why}"


@dataclasses.dataclass(frozen=True)
class Apart:
    """No user can ask for both modes, for this reason."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Tested:
    """The pair is tested here: a file of tests, or `file::test`."""

    where: str


@dataclasses.dataclass(frozen=True)
class Untested:
    """The pair is allowed, and no test combines the two."""


Cell = Refused | Apart | Tested | Untested

PROGRAMS = "tests/hf/test_random_programs.py"
"""The random programs"""
SPANS = "tests/hf/test_named_eviction.py"
GROWING = "tests/hf/test_growing_budgets.py"

COUNTS_PADDING = (
    "this model's sliding windows or states would count it as text. Pad on the left "
    '(tokenizer.padding_side = "left"), or give each row its own cache'
)
"""Also said of masks that a forward pass or a call gets"""

REREAD = "Use a new H2OCache and prefill the text without the spans"

M = Mode

REFUSED: tuple[tuple[Mode, Mode, str], ...] = (
    (
        M.CACHE_RELATIVE,
        M.SHARED_KEYS,
        'the cache does not rotate the queries of later layers. Use positions="original"',
    ),
    (
        M.CACHE_RELATIVE,
        M.WINDOWS,
        'windows keep their keys at original positions. Use positions="original"',
    ),
    (M.CACHE_RELATIVE, M.LATENT, 'only a part of a row is rotated. Use positions="original"'),
    (
        M.LATENT,
        M.FEW_BITS,
        'a latent is key and value in one row, which needs eight bits. Use kv_dtype="int8"',
    ),
    (
        M.LATENT,
        M.RANDOM,
        "heads share their keys, so none can draw its own. Use H2OConfig.local(64)",
    ),
    (
        M.COMPILED,
        M.LATENT,
        "a captured step has keys and values, and a latent is both. Leave out compileable",
    ),
    (
        M.COMPILED,
        M.SHARED_KEYS,
        "later layers need a copy of the slots, which a graph has not. Leave out compileable",
    ),
    (M.COMPILED, M.WINDOWS, "the tensors of windows grow with each step. Leave out compileable"),
    (
        M.COMPILED,
        M.CACHE_RELATIVE,
        'each step looks angles up. Leave out compileable, or use positions="original"',
    ),
    (
        M.COMPILED,
        M.GROWTH,
        'the slots of a graph do not grow with the text. Write ratio_of="prompt" for a fraction of '
        "the prompt, or give a number of tokens, such as budget=512",
    ),
    (M.COMPILED, M.TRACE, "the record grows with each step. Leave out one of them"),
    (
        M.CROP,
        M.HYBRID,
        "recurrent states are sums over all tokens, from which no token can be removed. Call "
        "cache.fork() before you add tokens that you may have to remove",
    ),
    (M.NAMED_SPANS, M.HYBRID, "recurrent states are sums over all tokens. " + REREAD),
    (M.NAMED_SPANS, M.LATENT, "h2o cannot rotate a part of a latent row. " + REREAD),
    (M.NAMED_SPANS, M.TRACE, "it records columns that would be gone. Leave out trace"),
    (M.NAMED_SPANS, M.COMPILED, "captured steps fill no freed slots. Leave out compileable"),
    (M.GAPS, M.WINDOWS, COUNTS_PADDING),
    (M.GAPS, M.HYBRID, COUNTS_PADDING),
    (
        M.FROM_DYNAMIC,
        M.CACHE_RELATIVE,
        "a DynamicCache does not record the positions at which its keys were rotated. Process the "
        "text with an H2OCache",
    ),
    (
        M.SIMULATED,
        M.CACHE_RELATIVE,
        'in one forward pass every key has one position. Use positions="original", or a real '
        "cache (h2o.patched, --protocol drop)",
    ),
    (
        M.REREADING,
        M.CACHE_RELATIVE,
        "both readings store keys at original positions. Pass readings=1",
    ),
    (
        M.GENERATE_ALL,
        M.WINDOWS,
        "rows come and go, and transformers' windows have one length for all rows. Call "
        "model.generate() with an H2OCache for each batch of prompts",
    ),
    (
        M.GENERATE_ALL,
        M.BEAMS,
        "each row is one answer. Call model.generate() with an H2OCache",
    ),
    (
        M.TENSOR_PARALLEL,
        M.SHARED_BUDGET,
        "no process has all heads, which share one budget. Use "
        'H2OConfig.robust(budget, budget_unit="bytes")',
    ),
    (
        M.TENSOR_PARALLEL,
        M.SHARED_KEYS,
        "no test has shown that each process finds the right keys. Load the whole model, without "
        "tp_plan",
    ),
    (
        M.TENSOR_PARALLEL,
        M.REREADING,
        "the last cut compares the keys of all heads. Pass readings=1",
    ),
    (
        M.VLLM,
        M.HYBRID,
        "the pages of states were not tested together with h2o's. Use h2o.generate_all",
    ),
    (M.VLLM, M.LATENT, "pages store keys by head. Use h2o.generate_all"),
    (M.VLLM, M.SHARED_KEYS, "a page has the keys of its own layer. Use an H2OCache"),
    (M.VLLM, M.CACHE_RELATIVE, 'keys come rotated. Use positions="original"'),
    (M.VLLM, M.RANDOM, "it is a baseline. Use h2o eval"),
    (
        M.VLLM,
        M.GROWTH,
        "a request has a page of one size. Leave out ratio_of, so that a fraction is one of the "
        "prompt, or give a number of tokens",
    ),
)
"""Pairs that raise an error: (mode, other mode, why, and what to do instead)."""

_SERVER = "a server's requests have no such thing"
_NO_CACHE = "a simulation is one forward pass over whole texts, without a cache"
_FRESH = "each call gets a cache of its own"

APART: tuple[tuple[Mode, tuple[Mode, ...], str], ...] = (
    (
        M.SIMULATED,
        (M.CHUNKS, M.BEAMS, M.CROP, M.TURNS, M.FORK, M.FILE, M.ROW_MOVES,
         M.COMPILED, M.FROM_DYNAMIC, M.GENERATE_ALL, M.REREADING),
        _NO_CACHE,
    ),
    (
        M.RANDOM,
        (M.CHUNKS, M.BEAMS, M.CROP, M.NAMED_SPANS, M.TURNS, M.FORK, M.FILE, M.ROW_MOVES,
         M.COMPILED, M.FROM_DYNAMIC, M.GENERATE_ALL, M.REREADING, M.PATCHED, M.CACHE_RELATIVE,
         M.GROWTH),
        "only a simulation draws keys at random, with constant budgets",
    ),
    (M.RANDOM, (M.ECHO, M.SHARED_BUDGET), "a cache has one ranking"),
    (M.PATCHED, (M.TURNS, M.FROM_DYNAMIC, M.REREADING, M.GENERATE_ALL), _FRESH),
    (M.PATCHED, (M.COMPILED,), "h2o.patched has no argument compileable"),
    (M.GENERATE_ALL, (M.TRACE,), "h2o.generate_all has no argument trace"),
    (
        M.GENERATE_ALL,
        (M.CROP, M.ROW_MOVES, M.PADDING, M.GAPS, M.FROM_DYNAMIC, M.REREADING, M.IMAGES, M.TURNS),
        "h2o.generate_all fills and moves its rows itself, from prompts of token ids",
    ),
    (M.REREADING, (M.CHUNKS, M.BEAMS, M.FROM_DYNAMIC, M.COMPILED, M.TRACE, M.IMAGES),
     "h2o.compress_document reads one text of token ids, and has no such argument"),
    (
        M.VLLM,
        (M.PADDING, M.GAPS, M.CROP, M.TRACE, M.COMPILED, M.FORK, M.FILE, M.ROW_MOVES, M.AUTOCAST,
         M.FROM_DYNAMIC, M.GENERATE_ALL, M.PATCHED, M.REREADING, M.SIMULATED),
        _SERVER,
    ),
    (M.VLLM, (M.BEAMS,), "vLLM prefills each beam again for every token, so nothing is evicted"),
    (M.LATENT, (M.SHARED_KEYS,), "no model has both"),
    (M.SHARED_KEYS, (M.HYBRID,), "no model has both"),
    (M.LATENT, (M.WINDOWS,), "no model has both"),
)  # fmt: skip
"""Pairs that no user can ask for: (mode, other modes, why)."""

TESTED: tuple[tuple[Mode, tuple[Mode, ...], str], ...] = (
    (
        M.TENSOR_PARALLEL,
        (M.HYBRID, M.WINDOWS, M.IMAGES, M.HEAD_BUDGETS, M.GROWTH, M.ECHO, M.RANDOM, M.BITS,
         M.FEW_BITS, M.CACHE_RELATIVE, M.PINS, M.TRACE, M.COMPILED, M.PADDING, M.GAPS, M.BEAMS,
         M.CROP, M.NAMED_SPANS, M.TURNS, M.FORK, M.FILE, M.ROW_MOVES, M.AUTOCAST, M.TORCH_BACKEND,
         M.GENERATE_ALL, M.PATCHED, M.SIMULATED),
        "tests/hf/test_parallel.py::test_two_processes_give_what_one_gives",
    ),
    (
        M.TENSOR_PARALLEL,
        (M.LATENT, M.CHUNKS, M.FROM_DYNAMIC),
        "tests/hf/test_parallel.py::test_two_processes_hold_the_same_latents",
    ),
    (M.TENSOR_PARALLEL, (M.VLLM,), "tests/vllm/test_ranks.py::test_two_ranks_answer_as_one"),
    (
        M.RANDOM,
        (M.HYBRID, M.WINDOWS, M.SHARED_KEYS, M.IMAGES, M.BITS, M.FEW_BITS, M.PINS, M.AUTOCAST),
        "tests/hf/test_random_eviction.py::test_ranks_alone_decide_in_any_model",
    ),
    (
        M.RANDOM,
        (M.HEAD_BUDGETS, M.TRACE, M.SIMULATED, M.TORCH_BACKEND),
        "tests/hf/test_random_eviction.py::test_the_lowest_ranks_leave",
    ),
    (M.RANDOM, (M.PADDING,), "tests/hf/test_random_eviction.py::test_rows_of_a_batch_are_alone"),
    (M.RANDOM, (M.GAPS,), "tests/hf/test_random_eviction.py::test_padding_between_tokens"),
    (
        M.REREADING,
        (M.HYBRID, M.WINDOWS, M.LATENT, M.SHARED_KEYS),
        "tests/hf/test_compress.py::test_with_room_for_all_it_answers_as_the_full_cache",
    ),
    (
        M.REREADING,
        (M.SHARED_BUDGET, M.ECHO, M.BITS, M.FEW_BITS, M.PADDING, M.GAPS),
        "tests/hf/test_compress.py::test_rows_of_a_batch_are_readings_of_their_own",
    ),
    (M.REREADING, (M.GROWTH,), f"{GROWING}::test_a_document_that_was_compressed"),
    (
        M.REREADING,
        (M.HEAD_BUDGETS,),
        "tests/hf/test_compress.py::test_a_profile_shares_what_goes_by_attention",
    ),
    (M.REREADING, (M.PINS,), "tests/hf/test_compress.py::test_pins_are_kept"),
    (
        M.REREADING,
        (M.TORCH_BACKEND,),
        "tests/hf/test_compress.py::test_by_the_torch_backend_it_keeps_the_same_keys",
    ),
    (
        M.REREADING,
        (M.AUTOCAST,),
        "tests/hf/test_compress.py::test_under_autocast_it_keeps_what_it_attended_to",
    ),
    (
        M.REREADING,
        (M.CROP, M.TURNS, M.FORK, M.FILE, M.ROW_MOVES),
        "tests/hf/test_compress.py::test_it_goes_on_as_any_other_cache",
    ),
    (M.NAMED_SPANS, (M.REREADING,), f"{SPANS}::test_a_compressed_document"),
    (
        M.VLLM,
        (M.HEAD_BUDGETS, M.SHARED_BUDGET, M.ECHO, M.BITS, M.FEW_BITS),
        "tests/vllm/test_engine.py::test_policies_and_stored_dtypes",
    ),
    (
        M.VLLM,
        (M.WINDOWS,),
        "tests/vllm/test_engine.py::test_full_attention_beside_sliding_windows",
    ),
    (M.VLLM, (M.PINS,), "tests/vllm/test_engine.py::test_pins_of_requests"),
    (
        M.VLLM,
        (M.NAMED_SPANS,),
        "tests/vllm/test_sharing.py::test_a_request_forgets_a_part_of_its_prefix",
    ),
    (
        M.VLLM,
        (M.TORCH_BACKEND,),
        "tests/torch/test_paged_rows.py::test_pages_by_the_torch_backend",
    ),
    (
        M.VLLM,
        (M.CHUNKS,),
        "tests/vllm/test_engine.py::test_prompts_in_chunks_are_cut_at_their_end",
    ),
    (
        M.VLLM,
        (M.TURNS,),
        "tests/vllm/test_async_scheduling.py::test_the_next_turn_of_a_session",
    ),
)  # fmt: skip
"""Pairs with a test of their own: (mode, other modes, test)."""

_NOT_DRAWN = (M.TENSOR_PARALLEL, M.REREADING, M.RANDOM, M.VLLM)
"""Modes that the random programs do not draw"""


def _cells() -> dict[frozenset[Mode], Cell]:
    cells: dict[frozenset[Mode], Cell] = {
        frozenset(pair): Untested() if {*pair} & {*_NOT_DRAWN} else Tested(PROGRAMS)
        for pair in itertools.combinations(Mode, 2)
    }
    for rows, kind in ((APART, Apart), (TESTED, Tested)):
        cells |= {frozenset((a, b)): kind(text) for a, others, text in rows for b in others}
    return cells | {frozenset(row[:2]): Refused(*row) for row in REFUSED}


PAIRS = _cells()
"""The cell of every unordered pair of modes"""


def refusal(modes: Iterable[Mode]) -> str:
    """Why these modes cannot be combined, with what to do instead; "" if they can."""
    asked = {*modes}
    return next((Refused(*row).reason for row in REFUSED if {*row[:2]} <= asked), "")


def why_not(mode: Mode, others: Iterable[Mode]) -> str:
    """The reason of `refusal` alone, for a mode with one of the others; "" if there is none."""
    asked = {*others}
    return next((why for *pair, why in REFUSED if mode in pair and asked & {*pair} - {mode}), "")


def check_modes(modes: Iterable[Mode]) -> None:
    """Raise `UnsupportedError` if two of these modes cannot be combined."""
    if reason := refusal(modes):
        raise UnsupportedError(reason)


def config_modes(config: H2OConfig) -> frozenset[Mode]:
    """The modes that a config asks for. What "auto" and "shipped" stand for is known of a config
    for a model only (`H2OConfig.for_model`)."""
    layers = (x for x in (config.heavy, config.recent) if not isinstance(x, int | float))
    has_few_bits = has_four_bit_values(config.kv_dtype)
    asked = {
        M.HEAD_BUDGETS: any(layers) or config.head_shares is not None,
        M.SHARED_BUDGET: config.shares_by_echo,
        M.ECHO: config.score_by == "mean-echo",
        M.RANDOM: config.score_by == "random",
        M.BITS: config.kv_dtype is not None and not has_few_bits,
        M.FEW_BITS: has_few_bits,
        M.CACHE_RELATIVE: config.positions == "cache_relative",
        M.GROWTH: config.grows,
    }
    return frozenset(mode for mode, holds in asked.items() if holds)
