"""Prompts whose outputs come from torch's own attention. The GPU kernels compute the scores from
its log sums. Here torch's flash attention for CPUs stands in for that of CUDA."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from h2o import backends, ops
from h2o.backends import cuda, prompt_attention
from h2o.backends.check_result import CheckResult
from h2o.backends.prompt_attention import AttendOperands, TimedPrompt, attend_by
from h2o.policy import Policy
from tests import inputs
from tests.cuda.carry import flash
from tests.cuda.device import carried
from tests.cuda.test_serving import device, forget, serving  # noqa: F401
from tests.reference import operations as reference

HOLES = [[0, 1, 2, 40, 41, 99], [], [128, 129]]


def text(B, D, N):
    """Query, keys and values in float64, before rounding."""
    drifting = inputs.drifting(5, B=B, H=6, G=2, N=N, D=D, sharp=3.0, sink=True)
    return [torch.from_numpy(x).double() for x in drifting]


def prompt(dtype=torch.bfloat16, B=3, D=64, N=130, pads=False, **changes) -> AttendOperands:
    H, G = 6, 2
    query, keys, values = (x.to(dtype) for x in text(B, D, N))
    mask = None
    if pads:
        mask = torch.ones(B, N, dtype=torch.bool)
        for row, columns in enumerate(HOLES):
            mask[row, columns] = False
        values = values.masked_fill(~mask[:, None, :, None], torch.nan)
    out, scores = query.new_full((B, N, H, D), 7.0), torch.full((B, G, N), 7.0)
    call = AttendOperands(
        query, keys, values, mask, None, out, scores, D**-0.5, 0.0, Policy(), None, None, None
    )
    return call._replace(**changes)


def always(attention):
    return lambda call: attention


def answers(attend, call):
    """Outputs and scores of a call."""
    call = call._replace(out=call.out.clone(), scores=call.scores.clone())
    attend(*call)
    return call.out, call.scores


def errors(attend, call):
    """Largest error of outputs and of scores, compared with the reference on the exact text."""
    B, _, N, D = call.query.shape
    query, keys, values = text(B, D, N)
    values = keys if call.values is None else values
    wanted = reference.attend(
        query, keys, values, mask=call.mask, scale=call.scale, policy=call.policy
    )
    got = answers(attend, call)
    return [(a.double() - b).abs().max().item() for a, b in zip(got, wanted, strict=True)]


CALLS = {
    "plain": {},
    "pads": {"pads": True},
    "largest": {"policy": Policy(score_by="max", decay=0.98), "dtype": torch.float16},
    "decay": {"policy": Policy(decay=0.9), "pads": True, "D": 40, "scale": 0.3},
    "wide": {"D": 136},
    "keys for values": {"values": None},
}


@pytest.mark.parametrize("what", CALLS)
def test_outputs_are_torchs_and_scores_those_of_its_log_sums(driver, kernels, what):
    """The answers are as exact as the kernels' own. The forward kernels are made to answer wrongly,
    so that they cannot be what computes the outputs."""
    call = prompt(**CALLS[what])
    own = carried(driver, kernels).attend
    before = errors(own, call)
    name = str(call.query.dtype).removeprefix("torch.").replace("float", "f")
    driver.flip(f"h2o_cuda_forward_{name}_{prompt_attention.depth_of(call.query.shape[3])}")
    try:
        assert errors(own, call)[0] > 0.1
        after = errors(attend_by(always(flash), own), call)
    finally:
        driver.flip("")
    assert after[0] <= 2 * before[0]
    assert after[1] <= 2 * before[1]


def test_pads_have_no_outputs_and_no_scores(driver, kernels):
    call = prompt(pads=True)
    out, scores = answers(attend_by(always(flash), carried(driver, kernels).attend), call)
    assert (out[~call.mask] == 0).all()
    assert (scores[~call.mask[:, None].expand_as(scores)] == 0).all()


def shifted(x):
    """Copy a tensor to an address that is not a multiple of 16."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


LACKING = {
    "float32": lambda: prompt(torch.float32),
    "a softcap": lambda: prompt(softcap=5.0),
    "learned sinks": lambda: prompt(sink_logits=torch.zeros(6)),
    "log sums": lambda: prompt(log_sums=torch.zeros(3, 6, 130)),
    "a head dimension that is no multiple of 8": lambda: prompt(D=60),
    "a wide head": lambda: prompt(D=264),
    "no scale": lambda: prompt(scale=0.0),
    "a negative scale": lambda: prompt(scale=-0.1),
    "an odd address": lambda: prompt()._replace(query=shifted(prompt().query)),
    "transposed keys": lambda: prompt()._replace(keys=prompt().keys.mT.contiguous().mT),
}


@pytest.mark.parametrize("what", LACKING)
def test_what_flash_attention_lacks_goes_the_kernels_way(what):
    seen = []
    call = LACKING[what]()
    attend_by(always(flash), lambda *operands: seen.append(operands))(*call)
    assert seen == [tuple(call)]


def test_stored_keys_go_the_kernels_way():
    call, seen = prompt(), []
    slots = ops.new_slots(call.keys, 140, 60, 70)
    call = call._replace(slots=slots)
    attend_by(always(flash), lambda *operands: seen.append(operands))(*call)
    assert seen == [tuple(call)]


def test_what_torchs_attention_cannot_goes_the_kernels_way():
    call, seen = prompt(), []
    with pytest.warns(RuntimeWarning, match=r"so h2o's kernels do \(no plan\)"):
        attend_by(always(unable), lambda *operands: seen.append(operands))(*call)
    assert seen == [tuple(call)]
    assert (call.out == 7).all()


# ---- Which way ---------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Seconds that calls have taken. Two small lengths are measured, with 10 calls each."""
    passed = SimpleNamespace(seconds=0.0)
    short, long = (TimedPrompt(least, tokens, 2, 1, 10) for least, tokens in ((7, 20), (40, 40)))
    monkeypatch.setattr(prompt_attention, "TIMED_PROMPTS", (short, long))
    monkeypatch.setattr(prompt_attention.time, "perf_counter", lambda: passed.seconds)
    return passed


def taking(clock, seconds, attention=flash, plan=0.0):
    """An attention that takes `seconds` per token, and `plan` more for a length it has not seen."""
    met = set()

    def run(query, *operands):
        tokens = query.shape[2]
        clock.seconds += seconds * tokens + plan * (tokens not in met)
        met.add(tokens)
        return attention(query, *operands)

    return run


def wrong(*operands):
    out, log_sums = flash(*operands)
    return out + 0.5, log_sums


def absent(*operands):
    return torch.ops.aten._no_such_attention(*operands)


def unable(*operands):
    raise RuntimeError("no plan\nfor this shape")


def own(clock, seconds):
    """The operations. h2o's attention takes `seconds` per token, and its sums alone one second per
    token."""

    def attend(*operands):
        call = AttendOperands(*operands)
        alone = seconds
        if call.known_log_sums is not None:  # out does not change
            alone, call = 1.0, call._replace(out=call.out.clone())
        clock.seconds += alone * call.query.shape[2]
        backends.core.attend(*call)

    return SimpleNamespace(**vars(backends.core) | {"attend": attend})


def chosen(kernels):
    return prompt_attention.fastest(kernels, backends._torch_backend(), 64, "cpu", lambda: None)


def test_the_fastest_that_is_right_is_chosen(clock, monkeypatch):
    ways = {"slow": taking(clock, 4.0), "quick": taking(clock, 2.0)}
    ways |= {"wrong": taking(clock, 0.0, wrong), "absent": absent, "unable": unable}
    monkeypatch.setattr(prompt_attention, "TORCH_ATTENTIONS", ways)
    assert chosen(own(clock, 4.0)) == {7: "quick"}
    assert chosen(own(clock, 2.5)) == {}
    monkeypatch.setattr(prompt_attention, "TORCH_ATTENTIONS", {"absent": absent, "unable": unable})
    assert chosen(own(clock, 4.0)) == {}


@pytest.mark.parametrize(("seconds", "first"), [(9.0, {7: "even"}), (1.9, {})])
def test_what_plans_for_each_length_is_chosen_for_long_prompts(clock, monkeypatch, seconds, first):
    """An attention that plans for each length must be chosen only for long prompts, where the plan
    pays. With the sums, ten calls of the even way take 400 seconds for 20 tokens and 800 for 40.
    The other way takes half as long, plus 250 for its plan."""
    ways = {"even": taking(clock, 1.0), "planned": taking(clock, 0.0, plan=250.0)}
    monkeypatch.setattr(prompt_attention, "TORCH_ATTENTIONS", ways)
    assert chosen(own(clock, seconds)) == first | {40: "planned"}


def test_a_measurement_leaves_the_programs_generator_alone(clock, monkeypatch):
    monkeypatch.setattr(prompt_attention, "TORCH_ATTENTIONS", {"flash": taking(clock, 1.0)})
    before = torch.get_rng_state()
    assert chosen(own(clock, 9.0)) == {7: "flash"}
    assert torch.equal(torch.get_rng_state(), before)


WORDS = [
    ({}, ""),
    ({64: {}, 128: {}}, ""),
    ({128: {1024: "flash", 16384: "cuDNN"}}, "flash, from 16,384 tokens by cuDNN"),
    ({64: {1024: "flash"}, 128: {1024: "flash"}, 256: {1024: "flash"}}, "flash"),
    ({64: {16384: "cuDNN"}}, "h2o's kernels, from 16,384 tokens by cuDNN"),
    ({64: {1024: "flash", 16384: ""}}, "flash, from 16,384 tokens by h2o's kernels"),
    (
        {64: {1024: "flash"}, 128: {1024: "flash"}, 256: {}},
        "flash (head dimensions up to 128), h2o's kernels (head dimensions up to 256)",
    ),
]


@pytest.mark.parametrize(("prompts", "words"), WORDS)
def test_ways_are_said_in_words(prompts, words):
    assert CheckResult([], prompts).prompts_in_words == words


LEAST = 70
"""Shortest prompt for torch's attention. Here it is small, since emulating 1024 tokens takes
long."""


@pytest.fixture
def measured(device, monkeypatch):  # noqa: F811
    """Depths that were measured, and calls that used torch's attention."""
    seen = SimpleNamespace(depths=[], calls=[])

    def noted(*operands):
        seen.calls.append(operands[0].shape[2])
        return flash(*operands)

    def fastest(kernels, by_torch, depth, device, wait):
        seen.depths.append(depth)
        return {LEAST: "noted", LEAST + 1: "", LEAST + 2: "noted"}

    monkeypatch.setattr(prompt_attention, "LEAST_TOKENS", LEAST)
    monkeypatch.setattr(prompt_attention, "TORCH_ATTENTIONS", {"noted": noted})
    monkeypatch.setattr(prompt_attention, "fastest", fastest)
    return seen


def attend(call):
    assert serving() == "C"
    cuda.backend_for(0, backends._torch_backend()).attend(*call)


def remembered(built):
    (file,) = (built.parent / "cache" / "h2o").iterdir()
    return file


def test_ways_are_measured_when_asked_for_remembered_and_described(measured, built):
    attend(prompt(B=1, N=LEAST - 1))
    attend(prompt(torch.float32, B=1, N=LEAST))
    assert measured.depths == []
    call = prompt(B=1, N=LEAST)
    for got, most in zip(
        errors(lambda *operands: attend(operands), call),
        errors(backends._torch_backend().attend, call),
        strict=True,
    ):
        assert got <= 2 * most
    assert (measured.depths, measured.calls) == ([64], [LEAST])
    forget()
    attend(call)  # uses the measurement of an earlier process
    assert measured.depths == [64]
    attend(prompt(B=1, D=72, N=LEAST))
    assert measured.depths == [64, 128]
    prompts = json.loads(remembered(built).read_text())["prompts"]
    assert prompts["64"] == prompts["128"] == {"70": "noted", "71": "", "72": "noted"}
    said = ops.info()["backends"]["cuda"]
    assert "outputs of prompts by noted, from 71 tokens by h2o's kernels, from 72" in said


def test_a_prompts_length_says_by_which_way_it_goes(measured):
    for N in (LEAST - 1, LEAST, LEAST + 1, LEAST + 3):
        attend(prompt(B=1, N=N))
    assert measured.calls == [LEAST, LEAST + 3]


def test_ways_that_another_version_remembered_are_measured_anew(measured, built):
    call = prompt(B=1, N=LEAST)
    attend(call)
    file = remembered(built)
    for count, prompts in enumerate(
        ({"64": "noted"}, {"64": {"70": "unknown"}}, [], {"64": {"x": ""}}), 2
    ):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"prompts": prompts}))
        forget()
        attend(call)
        assert measured.depths == [64] * count


def test_nothing_is_measured_while_a_graph_is_captured(measured, monkeypatch):
    assert serving() == "C"
    monkeypatch.setattr(cuda, "_is_capturing", lambda: True)
    call = prompt(B=1, N=LEAST)
    attend(call)
    assert measured.calls == measured.depths == []
    monkeypatch.setattr(cuda, "_is_capturing", lambda: False)
    attend(call)
    assert (measured.depths, measured.calls) == ([64], [LEAST])


def test_what_could_not_be_measured_is_said_and_not_remembered(measured, built, monkeypatch):
    def fastest(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory")

    call = prompt(B=1, N=LEAST)
    with monkeypatch.context() as patch:
        patch.setattr(prompt_attention, "fastest", fastest)
        with pytest.warns(RuntimeWarning, match=r"could not be measured.*out of memory"):
            attend(call)
    attend(call)
    assert measured.calls == []
    forget()
    attend(call)
    assert measured.calls == [LEAST]


def test_an_operand_that_is_wrong_is_refused_before_anything_is_written(measured):
    call = prompt(N=LEAST)
    attend(call)
    call = call._replace(scores=call.scores[:, :, 1:], out=call.out.fill_(7))
    with pytest.raises(ValueError, match="scores: has shape"):
        attend(call)
    assert (call.out == 7).all()
