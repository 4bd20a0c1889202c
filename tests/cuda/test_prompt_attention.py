"""Prompts whose outputs are those of torch's own attention, and whose scores the kernels for GPUs
make of its log sums. torch's flash attention for CPUs stands for those of CUDA."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from h2o import backends, ops
from h2o.backends import cuda, prompt_attention
from h2o.backends.prompt_attention import AttendOperands, attend_by
from h2o.policy import Policy
from tests import inputs
from tests.cuda.carry import flash
from tests.cuda.device import carried
from tests.cuda.test_serving import device, forget, serving  # noqa: F401
from tests.reference import operations as reference

HOLES = [[0, 1, 2, 40, 41, 99], [], [128, 129]]


def text(B, D, N):
    """In double precision, before it is rounded."""
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


def answers(attend, call):
    """Outputs and scores of a call."""
    call = call._replace(out=call.out.clone(), scores=call.scores.clone())
    attend(*call)
    return call.out, call.scores


def errors(attend, call):
    """The largest error of outputs and of scores, beside the oracle over the exact text."""
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
    """As exact as the kernels' own way, and not by it: its forward kernels answer wrongly."""
    call = prompt(**CALLS[what])
    own = carried(driver, kernels).attend
    before = errors(own, call)
    name = str(call.query.dtype).removeprefix("torch.").replace("float", "f")
    driver.flip(f"h2o_cuda_forward_{name}_{prompt_attention.depth_of(call.query.shape[3])}")
    try:
        assert errors(own, call)[0] > 0.1
        after = errors(attend_by(flash, own, least_tokens=130), call)
    finally:
        driver.flip("")
    assert after[0] <= 2 * before[0]
    assert after[1] <= 2 * before[1]


def test_pads_have_no_outputs_and_no_scores(driver, kernels):
    call = prompt(pads=True)
    out, scores = answers(attend_by(flash, carried(driver, kernels).attend, least_tokens=1), call)
    assert (out[~call.mask] == 0).all()
    assert (scores[~call.mask[:, None].expand_as(scores)] == 0).all()


def shifted(x):
    """The same numbers at an address that is no multiple of 16."""
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
    "few tokens": lambda: prompt(N=129),
    "an odd address": lambda: prompt()._replace(query=shifted(prompt().query)),
    "transposed keys": lambda: prompt()._replace(keys=prompt().keys.mT.contiguous().mT),
}


@pytest.mark.parametrize("what", LACKING)
def test_what_flash_attention_lacks_goes_the_kernels_way(what):
    seen = []
    call = LACKING[what]()
    attend_by(flash, lambda *operands: seen.append(operands), least_tokens=130)(*call)
    assert seen == [tuple(call)]


def test_stored_keys_go_the_kernels_way():
    call, seen = prompt(), []
    slots = ops.new_slots(call.keys, 140, 60, 70)
    call = call._replace(slots=slots)
    attend_by(flash, lambda *operands: seen.append(operands), least_tokens=1)(*call)
    assert seen == [tuple(call)]


def test_what_torchs_attention_cannot_goes_the_kernels_way():
    call, seen = prompt(), []
    with pytest.warns(RuntimeWarning, match=r"so h2o's kernels do \(no plan\)"):
        attend_by(unable, lambda *operands: seen.append(operands), least_tokens=1)(*call)
    assert seen == [tuple(call)]
    assert (call.out == 7).all()


# ---- Which way ---------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Seconds that calls have taken; small prompts are measured."""
    passed = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(prompt_attention, "MEASURED", (1, 2, 1, 20))
    monkeypatch.setattr(prompt_attention, "LAYERS", 2)
    monkeypatch.setattr(prompt_attention, "DEPTHS", (64, 128))
    monkeypatch.setattr(prompt_attention.time, "perf_counter", lambda: passed.seconds)
    return passed


def taking(clock, seconds, attention=flash):
    def run(*operands):
        clock.seconds += seconds
        return attention(*operands)

    return run


def wrong(*operands):
    out, log_sums = flash(*operands)
    return out + 0.5, log_sums


def absent(*operands):
    return torch.ops.aten._no_such_attention(*operands)


def unable(*operands):
    raise RuntimeError("no plan\nfor this shape")


def own(clock, wide, narrow):
    """The operations, where h2o's attention takes longer than its sums alone, which take 1."""

    def attend(*operands):
        call = AttendOperands(*operands)
        alone = wide if call.query.shape[3] > 64 else narrow
        if call.known_log_sums is not None:  # out stays as it is
            alone, call = 1.0, call._replace(out=call.out.clone())
        clock.seconds += alone
        backends.core.attend(*call)

    return SimpleNamespace(**vars(backends.core) | {"attend": attend})


def chosen(kernels):
    return prompt_attention.fastest(kernels, backends._portable(), "cpu", lambda: None)


def test_the_fastest_that_is_right_is_chosen(clock, monkeypatch):
    ways = {"slow": taking(clock, 4.0), "quick": taking(clock, 2.0)}
    ways |= {"wrong": taking(clock, 0.0, wrong), "absent": absent, "unable": unable}
    monkeypatch.setattr(prompt_attention, "WAYS", ways)
    assert chosen(own(clock, wide=4.0, narrow=2.5)) == {128: "quick"}
    monkeypatch.setattr(prompt_attention, "WAYS", {"absent": absent, "unable": unable})
    assert chosen(own(clock, wide=4.0, narrow=2.5)) == {}


def test_a_choice_is_remembered_described_and_used(device, built, monkeypatch):  # noqa: F811
    calls = []

    def noted(*operands):
        calls.append(operands[0].shape)
        return flash(*operands)

    monkeypatch.setattr(prompt_attention, "WAYS", {"noted": noted})
    monkeypatch.setattr(prompt_attention, "fastest", lambda *_: {64: "noted"})
    assert serving() == "C"
    (file,) = (built.parent / "cache" / "h2o").iterdir()
    assert json.loads(file.read_text())["prompts"] == {"64": "noted"}
    said = ops.info()["backends"]["cuda"]
    assert "outputs of prompts by noted up to head dimension 64" in said
    forget()
    monkeypatch.setattr(prompt_attention, "fastest", None)  # an earlier process has chosen
    assert serving() == "C"
    call = prompt(B=1, N=prompt_attention.LEAST_TOKENS)
    operations = cuda.serving(0, backends._portable())
    for got, most in zip(
        errors(operations.attend, call), errors(backends._portable().attend, call), strict=True
    ):
        assert got <= 2 * most
    assert calls == [call.query.shape]
    file.write_text(json.dumps(json.loads(file.read_text()) | {"prompts": {"64": "unknown"}}))
    forget()
    monkeypatch.setattr(prompt_attention, "fastest", lambda *_: {})
    assert serving() == "C"
    assert json.loads(file.read_text())["prompts"] == {}


def test_an_operand_that_is_wrong_is_refused_before_anything_is_written(device, built, monkeypatch):  # noqa: F811
    monkeypatch.setattr(prompt_attention, "WAYS", {"flash": flash})
    monkeypatch.setattr(prompt_attention, "fastest", lambda *_: {64: "flash"})
    assert serving() == "C"
    call = prompt(N=prompt_attention.LEAST_TOKENS)
    call = call._replace(scores=call.scores[:, :, 1:])
    with pytest.raises(ValueError, match="scores: has shape"):
        cuda.serving(0, backends._portable()).attend(*call)
    assert (call.out == 7).all()
