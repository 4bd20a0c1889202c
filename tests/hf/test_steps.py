"""A decode step allocates its output and nothing else."""

from __future__ import annotations

import ctypes
import ctypes.util
import gc
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from h2o import H2OCache, backends
from h2o.hf.attention.attention import h2o_attention_forward
from h2o.hf.layers import layer
from tests.hf.drive import Attention, forward, new_cache, tensors
from tests.inputs import drifting
from tests.torch.calls import TABLE

if backends.forced:
    pytest.skip("what the core's steps cost", allow_module_level=True)

TEXT = drifting(3, B=2, N=700, D=32)
ATTENTION = Attention()


def steps(cache, start, count):
    """Run decode steps the way a model does."""
    query, key, value = tensors(TEXT)
    for i in range(start, start + count):
        q, k, v = (x[:, :, i : i + 1] for x in (query, key, value))
        k, v = cache.update(k, v, 0)
        h2o_attention_forward(ATTENTION, q, k, v, None, scaling=0.2)


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch):
    """Count what a step does without the check of its slots."""
    monkeypatch.setattr(layer, "CHECKS_SLOTS", False)


@pytest.fixture
def running():
    """A cache with a full budget, after the one-time work of the first steps."""
    cache = new_cache(heavy=20, recent=20, sinks=2, value_weighted=True)
    forward(cache, TEXT.cut(0, 100))
    steps(cache, 100, 10)
    return cache


def test_nothing_moves(running):
    """A step must not move the slots, and must write only one key and one value of each head."""
    addresses = [x.data_ptr() for x in running.layers[0].slots if x is not None]
    for i in range(110, 160):
        keys, values = running.layers[0].slots.keys.clone(), running.layers[0].slots.values.clone()
        steps(running, i, 1)
        for before, after in (
            (keys, running.layers[0].slots.keys),
            (values, running.layers[0].slots.values),
        ):
            written = (before != after).any(-1).sum(-1)
            assert written.tolist() == [[1, 1], [1, 1]]
    assert [x.data_ptr() for x in running.layers[0].slots if x is not None] == addresses


def test_torch_allocates_the_output_only(running):
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        steps(running, 110, 20)
    allocated = [
        event.self_cpu_memory_usage
        for event in profiler.events()
        if event.self_cpu_memory_usage > 0
    ]
    output = 2 * 4 * 32 * 4  # B, H, D, fp32
    assert len(allocated) == 20
    assert max(allocated) <= output + 64


def test_python_keeps_nothing(running):
    """A step must not leave Python objects behind. A full collection first drops the free memory
    that Python holds back."""
    steps(running, 110, 10)
    tracemalloc.start()
    held = []
    for start, count in [(120, 100), (220, 400)]:
        steps(running, start, count)
        gc.collect()
        if not TABLE:  # Python's attribute cache holds the names that the core looked up
            sys._clear_type_cache()
        held.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert held[1] - held[0] < 1000  # bytes over 400 steps; a counter may need another digit


def test_the_core_keeps_nothing(running):
    """The core must not leak memory: the C library has handed out about as many bytes after 400
    steps as before."""
    libc = ctypes.CDLL(ctypes.util.find_library("c"))
    if not hasattr(libc, "mallinfo2"):
        pytest.skip("needs glibc's mallinfo2")

    class Info(ctypes.Structure):
        _fields_ = [
            (name, ctypes.c_size_t)
            for name in (
                "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
                "uordblks", "fordblks", "keepcost",
            )
        ]  # fmt: skip

    libc.mallinfo2.restype = Info

    def in_use():
        info = libc.mallinfo2()
        return info.uordblks + info.hblkhd

    steps(running, 110, 50)
    before = in_use()
    steps(running, 160, 400)
    assert in_use() - before < 4096


def test_a_prompt_takes_memory_in_proportion_to_its_length():
    """The memory of a prompt must grow with its length, not with the square. The attention weights
    of 4096 tokens in 8 heads would take 512 MB."""
    for n in (2048, 4096):
        bytes_in_and_out = n * 64 * 4 * (8 + 2 + 2 + 8)  # query, keys, values, out
        assert peak_of_prompt(n) < 2 * bytes_in_and_out


@pytest.mark.parametrize("shares", [None, "echo"])
def test_echo_takes_memory_in_proportion_to_the_length(shares):
    """Echo must not hold all of its attention weights at once, which would take 134 MB."""
    by_echo = {"score_by": "mean-echo", "head_shares": shares}
    peak_of_prompt(256, **by_echo)  # the first prompt allocates memory that stays
    bytes_in_and_out = 2048 * 64 * 4 * (8 + 2 + 2 + 8)
    assert peak_of_prompt(2048, **by_echo) < 4 * bytes_in_and_out


def peak_of_prompt(n, **policy):
    """Bytes by which the process grew at most during attention and eviction of a prompt."""
    clear = Path("/proc/self/clear_refs")
    if not clear.exists():
        pytest.skip("needs Linux's /proc")
    torch.manual_seed(0)
    query = torch.randn(1, 8, n, 64)
    key, value = torch.randn(2, 1, 2, n, 64)
    config = LlamaConfig(num_hidden_layers=1, head_dim=64, num_key_value_heads=2)
    cache = H2OCache(config, heavy=100, recent=100, **policy)
    key, held = cache.update(key, value, 0)
    gc.collect()
    clear.write_text("5")  # forget the largest size so far
    before = status("VmRSS")
    h2o_attention_forward(ATTENTION, query, key, held, None, scaling=0.1)
    assert sum(cache.layers[0].report().kept_by_head[0]) == 2 * 200
    return status("VmHWM") - before


def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) * 1024


def test_attention_reads_the_new_key_in_place(running):
    """`update` must return the model's own tensors instead of copies."""
    _, key, value = tensors(TEXT.cut(110, 150))
    same_key, same_value = running.update(key, value, 0)
    assert same_key.data_ptr() == key.data_ptr()
    assert same_value is value
    assert not hasattr(key, "h2o_layer")  # the view links to the layer, the caller's tensor doesn't
    running.guard.layer_rejected()
