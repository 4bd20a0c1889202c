"""What only a GPU has: graphs, streams, its own compiler, and a host that need not wait.

`make test-gpu` runs these tests on a GPU. Elsewhere they run on the CPU, where a replay calls the
function again and streams do nothing. This shows at least that their code runs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from h2o import H2OCache, backends, ops
from h2o.backends import cuda, prompt_attention
from h2o.compat import with_cache
from h2o.hf.model_traits.layer_kinds import kind_of
from h2o.policy import Policy
from tests.cuda.carry import flash
from tests.hf.modes import POLICIES, TOKENS, policy
from tests.hf.tiny import DEVICE, FAMILIES, TWINS, batch, greedy, model, prompts, slow_if
from tests.inputs import drifting

ON_GPU = DEVICE.type == "cuda"
STEPS = 12


def recorded(function: Callable[[], Any]) -> Any:
    """The device work of one call, which `replay()` repeats."""
    if not ON_GPU:
        return SimpleNamespace(replay=function)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph


def aside() -> contextlib.AbstractContextManager[Any]:
    """Another stream, which is not ordered after the usual one."""
    return torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else contextlib.nullcontext()


@contextlib.contextmanager
def unwaiting() -> Iterator[None]:
    """torch raises an error if the host waits for the device."""
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")


# ---- The operations ----------------------------------------------------------------------------

STORES = {
    "plain": {},
    "value-weighted": {"value_weighted": True},
    "int8": {"kv_dtype": "int8"},
}


class Talk:
    """A store after a prompt, and the tokens that follow, always in the same three tensors."""

    def __init__(self, kind: str, capacity: int | list[int], dtype: torch.dtype) -> None:
        text = drifting(3, B=2, H=4, G=2, N=40 + STEPS, D=64)
        self.text = [torch.from_numpy(x).to(DEVICE, dtype) for x in text]
        self.policy = {"value_weighted": kind == "value-weighted"}
        prompt = [x[:, :, :40] for x in self.text]
        self.slots = ops.new_slots(prompt[1], capacity, 6, 6, **STORES[kind])
        _, scores = ops.attend(*prompt)
        ops.evict(*prompt[1:], scores, self.slots, **self.policy)
        self.token = [x[:, :, :1].clone() for x in self.text]
        self.out = torch.zeros(2, 1, 4, 64, dtype=dtype, device=DEVICE)

    def give(self, t: int) -> None:
        for x, tensor in zip(self.text, self.token, strict=True):
            tensor.copy_(x[:, :, 40 + t : 41 + t])

    def step(self) -> None:
        ops.step(*self.token, self.slots, out=self.out, **self.policy)

    def held(self) -> list[Tensor]:
        return [x.clone() for x in (*self.slots, self.out) if x is not None]


def assert_equal(got: list[Tensor], wanted: list[Tensor]) -> None:
    for x, y in zip(got, wanted, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("capacity", [13, [13, 20]], ids=["even", "uneven"])
@pytest.mark.parametrize("kind", STORES)
def test_one_captured_step_serves_all_tokens(kind, capacity):
    """A replay runs the same kernels, and no kernel argument depends on the step, so results must
    be equal to the last bit."""
    eager, captured = (Talk(kind, capacity, torch.bfloat16) for _ in range(2))
    first = eager.held()
    graph = recorded(captured.step)
    for t in range(STEPS):
        for talk in (eager, captured):
            talk.give(t)
        eager.step()
        graph.replay()
        assert_equal(captured.held(), eager.held())
    assert not torch.equal(eager.slots.positions, first[3])


WAYS = prompt_attention.TORCH_ATTENTIONS if ON_GPU else {"flash": flash}


@pytest.mark.parametrize("pads", [False, True], ids=["whole", "pads"])
@pytest.mark.parametrize("D", [64, 72, 128])
@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_by_torchs_attention_waits_for_nothing_and_is_captured(way, D, pads):
    """The answers must be those of the torch backend, without waiting, and from a captured graph
    too."""
    text = drifting(3, B=2, H=4, G=2, N=200, D=D)
    query, keys, values = (torch.from_numpy(x).to(DEVICE, torch.bfloat16) for x in text)
    mask = torch.ones(2, 200, dtype=torch.bool, device=DEVICE)
    mask[1, :7] = mask[1, 50] = False
    call = prompt_attention.AttendOperands(
        query, keys, values, mask if pads else None, None, query.new_zeros(2, 200, 4, D),
        torch.zeros(2, 2, 200, device=DEVICE), D**-0.5, 0.0, Policy(), None, None, None,
    )  # fmt: skip
    operations = cuda._kernels(backends._torch_backend()) if ON_GPU else backends.core
    attend = prompt_attention.attend_by(lambda _: WAYS[way], operations.attend, strict=True)
    try:
        attend(*call)
    except (AttributeError, RuntimeError) as error:
        pytest.skip(f"torch has it not here: {error}")
    with unwaiting():
        attend(*call)
    wanted = call._replace(out=call.out.clone(), scores=call.scores.clone())
    backends._torch_backend().attend(*wanted)
    for x in (call.out, call.scores):
        x.fill_(7.0)
    recorded(lambda: attend(*call)).replay()
    torch.testing.assert_close(call.out, wanted.out, rtol=0.02, atol=0.02)
    torch.testing.assert_close(call.scores, wanted.scores, rtol=1e-3, atol=1e-3)


def test_a_measurement_of_torchs_attention_takes_little_memory():
    if not ON_GPU:
        pytest.skip("make test-gpu")
    by_torch, before = backends._torch_backend(), torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    ways = prompt_attention.fastest(
        cuda._kernels(by_torch), by_torch, 128, DEVICE, torch.cuda.synchronize
    )
    assert torch.cuda.max_memory_allocated() - before < 150e6
    assert {*ways.values()} <= {*WAYS, ""}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_work_goes_on_the_current_stream(dtype):
    """A step on another stream would read the previous token."""
    usual, other = (Talk("plain", 13, dtype) for _ in range(2))
    for t in range(STEPS):
        usual.give(t)
        usual.step()
    if ON_GPU:
        torch.cuda.synchronize()
    with aside():
        for t in range(STEPS):
            if ON_GPU:
                torch.cuda._sleep(1_000_000)
            other.give(t)
            other.step()
        held = other.held()
    if ON_GPU:
        torch.cuda.synchronize()
    assert_equal(held, usual.held())


def test_the_check_finds_nothing_wrong():
    if not ON_GPU:
        pytest.skip("make test-gpu")
    for index in range(torch.cuda.device_count()):
        assert cuda.check(index, backends._torch_backend()) == []


# ---- Models ------------------------------------------------------------------------------------


class Decoding:
    """A model's decoding after a prompt. Each step reads and writes the same tensors."""

    def __init__(self, name: str, chosen: str, **parameters: Any) -> None:
        self.model = model(name)
        self.cache = H2OCache(self.model.config, policy(chosen, self.model), **parameters)
        (ids,) = prompts(23)
        with torch.no_grad():
            logits = self.model(ids, **with_cache(self.cache)).logits
        self.token = logits[:, -1:].argmax(-1)
        self.position = torch.tensor([[23]], device=DEVICE)
        self.steps: list[Tensor] = []

    def step(self) -> None:
        with torch.no_grad():
            out = self.model(
                input_ids=self.token, position_ids=self.position, **with_cache(self.cache)
            )
            self.token.copy_(out.logits[:, -1:].argmax(-1))
            self.position.add_(1)

    def run(self, step: Callable[[], None], steps: int) -> None:
        for _ in range(steps):
            step()
            self.steps.append(self.token.clone())

    def tokens(self) -> list[int]:
        return torch.cat(self.steps).flatten().tolist()

    def positions(self) -> list[list[int]]:
        """Positions of the keys held, from the slots. The host's own counts miss replays."""
        return [
            sorted(layer.slots.positions.flatten().tolist())
            for layer in self.cache.layers
            if not layer.is_sliding
        ]


@pytest.mark.parametrize("chosen", ["h2o", "sinks, mean", "value-weighted", "head_shares", "int8"])
@pytest.mark.parametrize("name", ["llama", "gpt_neox"])
def test_one_captured_pass_of_a_model_serves_a_generation(name, chosen):
    eager, captured = Decoding(name, chosen), Decoding(name, chosen)
    eager.run(eager.step, 1 + STEPS)
    captured.run(captured.step, 1)  # libraries initialize themselves here
    captured.run(recorded(captured.step).replay, STEPS)
    assert captured.tokens() == eager.tokens()
    assert captured.positions() == eager.positions()


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("llama", "h2o"),
        ("llama", "head_shares"),
        ("llama", "int8"),
        ("opt", "h2o"),
        ("gpt_neox", "h2o"),
    ],
)
def test_no_decode_step_waits_for_the_device(name, chosen):
    decoding = Decoding(name, chosen)
    decoding.run(decoding.step, 1)
    with unwaiting():
        decoding.run(decoding.step, STEPS)
    assert len(set(decoding.tokens())) > 3


def test_generate_compiles_the_step():
    """On a GPU transformers compiles the step by itself, with graphs, if the cache allows it."""
    ours = model("llama")
    (ids,) = prompts(20)
    caches = [H2OCache(ours.config, POLICIES["h2o"], compileable=x) for x in (False, True)]
    plain, compiled = (
        greedy(ours, {"input_ids": ids}, 24, **with_cache(cache)).tolist() for cache in caches
    )
    assert compiled == plain
    assert str(caches[1].report()) == str(caches[0].report())


@pytest.mark.parametrize(
    "name", [slow_if(x in TWINS and not ON_GPU, x) for x in FAMILIES if "h2o" in FAMILIES[x].layers]
)
def test_families_keep_what_they_keep_by_the_torch_backend(name):
    ours = model(name)
    rows = batch(prompts(5, 17, 23, 30))

    def run() -> Any:
        cache = H2OCache(ours.config, POLICIES["h2o"])
        tokens = greedy(ours, rows, TOKENS, **with_cache(cache)).tolist()
        served = [i for i, layer in enumerate(cache.layers) if kind_of(layer) == "h2o"]
        return tokens, [cache.kept(i)[0].tolist() for i in served]

    with backends.by_torch():
        wanted = run()
    assert run() == wanted
