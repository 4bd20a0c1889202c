"""Several Python threads, pool sizes and a fork give the answers of one thread alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from h2o import ops
from tests import inputs

ANSWER = """
import hashlib
import os
import sys
import numpy as np
from tests.core.test_threads import conversation, text
texts = [text(5), text(6, heads=71), text(7, heads=3)]
told = lambda: b"".join(answer for words in texts for answer in conversation(words))
digest = lambda: hashlib.sha256(told()).hexdigest()
print(digest())
if "fork" in sys.argv:
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        print(digest(), flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    print(digest())
"""


def text(seed: int, heads: int = 0) -> inputs.Text:
    """A random text. `heads` query heads share one KV head, if given."""
    return inputs.drifting(seed, B=2, H=heads or 8, G=1 if heads else 4, N=700, D=64)


def conversation(words: inputs.Text) -> list[bytes]:
    """All answers of a prompt, of steps and of a simulation of the whole text."""
    answers = []
    slots = ops.new_slots(words.keys, 311, heavy=180, recent=130)
    prompt = words.cut(0, 650)
    out, scores = ops.attend(*prompt)
    ops.evict(prompt.keys, prompt.values, scores, slots)
    answers += [out, scores]
    for i in range(650, 700):
        answers.append(ops.step(*words.cut(i, i + 1), slots))
    answers += [part for part in slots if part is not None]
    prompts, budget = np.full(2, 20, np.int32), np.full((2, 2), 50, np.int32)
    answers += ops.simulate(*words, prompts, budget)
    return [answer.tobytes() for answer in answers]


def test_threads_of_python_do_not_meet():
    texts = [text(seed) for seed in range(4)]
    alone = [conversation(words) for words in texts]
    together: dict[int, list[bytes]] = {}
    start = threading.Barrier(len(texts))

    def run(i: int) -> None:
        start.wait()
        together[i] = conversation(texts[i])

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[i] for i in range(len(texts))] == alone


def test_calls_on_the_same_slots_at_once_do_no_harm():
    """Concurrent calls on the same slots may give wrong answers, which is the caller's fault. But
    no call may crash or write outside the slots: the rows before and after the store must not
    change."""
    rng = np.random.default_rng(0)
    B, G, S, D = 2, 4, 65, 64
    room = np.full((B + 2, G, S, D), 7, np.float32)
    twin = np.full((B + 2, G, S, D), 7, np.float32)
    slots = ops.new_slots(room[1:-1], S, heavy=32, recent=32)
    slots = slots._replace(keys=room[1:-1], values=twin[1:-1])
    token = [rng.standard_normal((B, heads, 1, D)).astype(np.float32) for heads in (8, G, G)]
    prompt = [rng.standard_normal((B, heads, 50, D)).astype(np.float32) for heads in (8, G, G)]
    refused: list[str] = []
    start = threading.Barrier(4)

    def step() -> None:
        start.wait()
        for _ in range(300):
            try:
                ops.step(*token, slots)
            except ValueError as error:  # another thread has left the slots half written
                refused.append(str(error))

    def cut() -> None:
        start.wait()
        for _ in range(60):
            try:
                _, scores = ops.attend(*prompt, slots=slots)
                ops.evict(*prompt[1:], scores, slots)
            except ValueError as error:
                refused.append(str(error))

    def spoil() -> None:
        start.wait()
        for i in range(3000):
            slots.seen_tokens[...] = i % 80
            slots.next_slot[...] = (i * 7) % 90 - 10
            slots.budget[...] = (i % 50, i % 33)

    threads = [threading.Thread(target=run) for run in (step, step, cut, spoil)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for memory in (room, twin):
        assert (memory[[0, -1]] == 7).all()
    assert all(text.startswith("slots.") for text in refused)


def test_python_runs_during_a_call():
    """With a huge switch interval threads switch only where the GIL is released, so the flag shows
    whether the call released it."""
    words = text(1)
    interval = sys.getswitchinterval()
    seen: list[bool] = []

    def run(started: threading.Event, state: dict) -> None:
        started.set()
        ops.attend(*words)
        state["done"] = True

    sys.setswitchinterval(1000.0)
    try:
        for _ in range(200):  # sometimes the call ends before the other thread wakes
            started, state = threading.Event(), {"done": False}
            thread = threading.Thread(target=run, args=(started, state))
            thread.start()
            started.wait()
            seen.append(state["done"])
            thread.join()
            if not seen[-1]:
                break
    finally:
        sys.setswitchinterval(interval)
    assert False in seen


def answers_of(*arguments: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ANSWER, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_the_number_of_threads_does_not_matter_nor_does_a_fork():
    answers = [answers_of("fork", H2O_THREADS="3")]
    answers += [answers_of(H2O_THREADS=threads) for threads in ("1", "8")]
    assert [*map(len, answers)] == [3, 1, 1]
    assert len({digest for run in answers for digest in run}) == 1


@pytest.mark.parametrize("threads", ["many", "0", "-2", "3 threads"])
def test_a_number_of_threads_that_is_none_is_an_error(threads):
    run = subprocess.run(
        [sys.executable, "-c", "import h2o.ops"], capture_output=True, text=True, timeout=60,
        env={**os.environ, "H2O_THREADS": threads},
    )  # fmt: skip
    assert run.returncode != 0
    assert f"ValueError: H2O_THREADS={threads}: not a number of threads" in run.stderr
