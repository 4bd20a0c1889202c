"""The OpenAI server with h2o's pages and the `openai` client: streams, concurrency, metrics."""

from __future__ import annotations

import time

import pytest

from h2o import H2OConfig
from h2o.vllm.metrics import SECONDS
from tests.vllm.engines import after_prefix, alone, prompts
from tests.vllm.servers import NEW, SMALL, metric, openai, serving, together, with_tokenizer

CLIENTS = 64


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A tiny model with the default model's tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    return folder, with_tokenizer(folder)


@pytest.fixture(scope="module")
def running(llama, tmp_path_factory):
    with serving(llama[0], tmp_path_factory.mktemp("server") / "log") as server:
        yield server
        assert server.process.poll() is None, server.log.read_text()[-4000:]


@pytest.fixture
def server(running):
    """Address of the server."""
    return running.address


def texts(number: int, seed: int) -> list[list[int]]:
    lengths = tuple(3 + 37 * i % 200 for i in range(number))
    return prompts(lengths, seed)


def test_clients_are_answered_as_an_h2o_cache_answers(server, llama):
    requests = texts(CLIENTS, 1)
    wanted = alone(llama[1], requests, H2OConfig(**SMALL), NEW)
    answers = together(server, requests)
    assert [x == y for x, y in zip(answers, wanted, strict=True)] == [True] * CLIENTS
    assert metric(server, "vllm:num_preemptions_total") == 0


def test_metrics_have_the_numbers_of_h2o(running):
    """The metrics count every eviction of these requests, in two layers of two heads."""
    server, requests = running.address, texts(12, 5)
    together(server, requests[:1])
    time.sleep(SECONDS + 3)
    before = metric(server, "h2o:evicted_keys_total")
    together(server, requests)
    evicted = 4 * sum(max(0, len(request) + NEW - 1 - 16) for request in requests)
    for _ in range(30):
        if metric(server, "h2o:evicted_keys_total") == before + evicted:
            break
        time.sleep(1)
    assert metric(server, "h2o:evicted_keys_total") == before + evicted
    assert 0.1 < metric(server, "h2o:share_held") < 0.9
    size, fit = (int(metric(server, f"h2o:{x}")) for x in ("request_bytes", "requests_that_fit"))
    assert fit == 2_000_000 // size - 1
    said = f"h2o: {fit} requests fit, and 7 of the longest would with a full cache: each takes"
    assert said in running.log.read_text()


def test_requests_have_budgets_of_their_own_within_a_page(server, llama):
    requests = texts(6, 4)
    for asked, config in (
        ((4, 3), H2OConfig(heavy=4, recent=3)),
        ((90, 5), H2OConfig(heavy=11, recent=5)),
    ):
        arguments = dict(zip(("h2o_heavy", "h2o_recent"), asked, strict=True))
        answers = together(server, requests, vllm_xargs=arguments | {"h2o_pinned": []})
        assert answers == alone(llama[1], requests, config, NEW)


def test_requests_forget_parts_of_a_shared_prefix(server, llama):
    (beginning,), spans = prompts((60,), 5), [(5, 30), (40, 44)]
    requests = [beginning + rest for rest in prompts((5, 40, 24), 6)]
    prefix, of_model = {"h2o_prefix": 60}, (llama[1], requests, 60, H2OConfig(**SMALL))
    whole, left = after_prefix(*of_model), after_prefix(*of_model, forgets=spans)
    assert whole != left
    asked = prefix | {"h2o_evict": "5:30,40:44"}
    for _ in range(2):
        assert together(server, requests, vllm_xargs=asked) == left
        assert together(server, requests, vllm_xargs=prefix) == whole


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"h2o_heavy": -3}, "h2o_heavy is -3; expected an integer from 0"),
        ({"h2o_prefix": 0}, "h2o_prefix is 0; expected an integer of at least 1"),
        ({"h2o_pinned": [0, 40]}, r"h2o_pinned is \[0, 40\]; expected spans"),
        ({"h2o_evict": "3:9"}, "h2o_evict names tokens of a prefix: pass h2o_prefix too"),
    ],
)
def test_wrong_budgets_and_pins_are_errors_of_the_client(server, arguments, reason):
    """The client gets the reasons that tests/torch/test_paged_rows.py tests in full."""
    client = openai.OpenAI(base_url=f"{server}/v1", api_key="none", timeout=60, max_retries=0)
    with pytest.raises(openai.BadRequestError, match=reason):
        client.completions.create(
            model="tiny", prompt=[5, 6], max_tokens=4, extra_body={"vllm_xargs": arguments}
        )
