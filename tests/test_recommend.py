"""`h2o recommend` measures what eviction costs, budget by budget. No time is asserted."""

from __future__ import annotations

import dataclasses
import json
import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from h2o import cli, load_model  # noqa: E402
from h2o.evaluation import generation, recommendation, setting  # noqa: E402
from h2o.evaluation.kept_rule import is_followed, make_chat  # noqa: E402
from h2o.evaluation.recommendation import Cost, Reader, verdict  # noqa: E402
from tests.test_cli import tiny  # noqa: E402, F401

SHORT = ("--length", "300", "--texts", "2")


@pytest.fixture
def measure(tiny, capsys, tmp_path):  # noqa: F811
    """Runs the command, and returns the object that --json prints."""

    def measure(*arguments):
        command = ["recommend", "--model", tiny, *SHORT, "-o", str(tmp_path / "out"), *arguments]
        assert cli.main([*command, "--json"]) == 0
        captured = capsys.readouterr()
        assert captured.err == ""
        return json.loads(captured.out)

    return measure


def test_every_setting_is_compared_with_the_full_cache(measure, tiny, tmp_path):  # noqa: F811
    result = measure("--budgets", "0.5", "8", "--compare", "budget,local,random-bytes:0.5")
    assert (result["model"], result["dtype"], result["texts"]) == (tiny, "float32", 2)
    full, in_bits, *others = result["costs"]
    assert [x["setting"] for x in (full, in_bits)] == ["full", "budget:1.0"]
    assert [x["setting"] for x in others] == [
        "budget:0.5", "budget:8", "local:0.5", "local:8", "random-bytes:0.5"
    ]  # fmt: skip
    assert (full["divergence"], full["same"], full["lost"]) == (0, 1, 0)
    assert full["found"] == full["known"]
    assert full["bytes_ratio"] == full["token_speedup"] == 1
    assert 0 < in_bits["divergence"] < others[1]["divergence"]
    assert others[0]["bytes_ratio"] < in_bits["bytes_ratio"] < 1
    assert others[-1]["bytes_ratio"] is None  # no cache evicts at random
    assert others[-1]["divergence"] > 0
    assert result["verdict"] in (tmp_path / "out" / "report.md").read_text("utf-8")


def test_no_verdict_without_a_budget(measure):
    """Other settings say nothing about whether to evict."""
    result = measure("--compare", "authors:8", "--texts", "1")
    assert [x["setting"] for x in result["costs"]] == ["full", "budget:1.0", "authors:8"]
    assert result["verdict"].startswith("No budget was measured")


def test_the_prediction_is_the_models(tiny):  # noqa: F811
    """The full cache's logits are those of one plain pass, and those of a budget are what a loop
    with the cache gives."""
    from h2o import H2OCache
    from h2o.compat import with_cache

    model, tokenizer = load_model(tiny)
    ids = tokenizer("The lamp was lit at dusk, and the keeper slept until the tide had turned.")
    piece, after = ids["input_ids"][:60], ids["input_ids"][60:70]
    full = Reader(model, tokenizer, setting.parse("full")).predict(piece, after)
    with torch.no_grad():
        plain = model(torch.tensor([piece + after]), use_cache=False).logits[0, 59:69]
        torch.testing.assert_close(full, plain, rtol=1e-4, atol=1e-4)
        for name in ("budget:0.3", "h2o:8+8"):
            chosen = setting.parse(name)
            found = Reader(model, tokenizer, chosen).predict(piece, after)
            cache = H2OCache(model.config, chosen.config)
            each = [model(torch.tensor([piece]), **with_cache(cache)).logits[0, -1]]
            each += [
                model(torch.tensor([[x]]), **with_cache(cache)).logits[0, -1] for x in after[:-1]
            ]
            torch.testing.assert_close(found, torch.stack(each), rtol=1e-5, atol=1e-5)
            assert not torch.allclose(found, plain, rtol=1e-3, atol=1e-3)


def test_an_interrupted_run_goes_on(measure, monkeypatch, tmp_path):
    """Without time left, the first piece is measured. Later runs measure only what is missing, and
    a result that was cut off while it was written is measured again."""
    log = []
    original = recommendation.find_facts

    def find_facts(reader, *which):
        log.append(reader.setting.name)
        return original(reader, *which)

    monkeypatch.setattr(recommendation, "find_facts", find_facts)
    few = "--budgets", "0.5", "--compare", "budget"
    assert measure(*few, "--minutes", "0")["texts"] == 1
    assert log == ["full", "budget:1.0", "budget:0.5"]
    first = measure(*few)
    assert first["texts"] == 2
    assert log == ["full", "budget:1.0", "budget:0.5"] * 2
    assert measure(*few)["costs"] == first["costs"]
    assert len(log) == 6
    path = tmp_path / "out" / "results.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    again = measure(*few)
    assert again["texts"] == 2
    assert len(log) == 6  # the last result was an agreement
    assert [x["divergence"] for x in again["costs"]] == [x["divergence"] for x in first["costs"]]


def test_times_of_another_machine_are_not_reused(measure, monkeypatch):
    """The report names the machine and its threads, so times must be of these."""
    rounds, original = [], recommendation.speed.run

    def run(chosen, *given):
        rounds.append(chosen.name)
        return original(chosen, *given)

    monkeypatch.setattr(recommendation.speed, "run", run)
    few = "--budgets", "0.5", "--compare", "budget", "--minutes", "0"
    measure(*few)
    timed = len(rounds)
    measure(*few)
    assert len(rounds) == timed
    described = recommendation.speed.describe_machine
    monkeypatch.setattr(
        recommendation.speed, "describe_machine", lambda device: described(device) | {"threads": 77}
    )
    assert measure(*few)["machine"]["threads"] == 77
    assert len(rounds) == 2 * timed


def test_the_table_for_readers(tiny, capsys, tmp_path):  # noqa: F811
    out = "-o", str(tmp_path), "--budgets", "0.5", "--compare", "budget,random-bytes"
    assert cli.main(["recommend", "--model", tiny, *SHORT, *out]) == 0
    captured = capsys.readouterr()
    assert "agreement: budget:0.5, text 2 of 2" in captured.err
    head, texts, _, names, _, *lines = captured.out.splitlines()
    assert f"{torch.get_num_threads()} thread" in head
    assert texts == "2 texts of 300 tokens"
    assert names.split()[:2] == ["cache", "facts"]
    rows = {line.split()[0]: line.split() for line in lines if ":" in line or "full" in line}
    assert rows["budget:0.5"][-1].endswith("x")
    assert len(rows["random-bytes:0.5"]) < len(rows["budget:0.5"])


# ---- The verdict ---------------------------------------------------------------------------------

BITS = Cost("budget:1.0", 1.0, 0.01, 0.98, 0.0, 0.0, 24, 24, 8, 8, 0.41, 1.0, 0.01, 1.1)


def cost(budget, lost=0.0, found=24, known=24, **changes):
    ratio = budget if isinstance(budget, float) else budget / 1000
    changes = {"bytes_ratio": ratio, "token_speedup": 2.0} | changes
    return dataclasses.replace(
        BITS, setting=f"budget:{budget}", budget=budget, lost=lost, found=found, known=known,
        **changes,
    )  # fmt: skip


def test_the_smallest_budget_that_holds():
    costs = [BITS, cost(0.05, 0.3, 9), cost(0.1, 0.04, 22), cost(0.2, 0.01), cost(0.4)]
    text = verdict(costs)
    assert text.startswith("Use budget=0.2: it takes 20% of the bytes")
    assert "finds 24 of 24 facts. budget=0.1 loses 0.040 nats per token and finds 22 of 24" in text


def test_a_budget_below_one_that_fails_is_not_recommended():
    """That a smaller budget holds by chance says nothing."""
    costs = [BITS, cost(0.1), cost(0.2, 0.05), cost(0.4)]
    assert verdict(costs).startswith("Use budget=0.4")


def test_numbers_of_tokens_are_ordered_by_their_bytes():
    assert verdict([BITS, cost(50, 0.2), cost(0.2), cost(100)]).startswith("Use budget=100")


def test_hopeless_budgets():
    text = verdict([BITS, cost(0.1, 1.0, 2), cost(0.2, 0.5, 10)])
    assert text.startswith("Do not evict keys of this model on texts like this one: budget=0.2")
    assert "write budget=1.0: takes 41% of the bytes" in text
    assert verdict([BITS]).startswith("Do not evict keys of this model on texts like this one. To")


def test_facts_that_the_model_does_not_find_say_nothing():
    text = verdict([BITS, cost(0.2, found=1, known=5)])
    assert text.startswith("Use budget=0.2")
    assert "the model itself finds only 5 facts, too few to tell" in text


def test_a_rule_that_is_forgotten():
    text = verdict([BITS, cost(0.2, followed=5)])
    assert "is followed in 5 of 8 chats, so pin such messages (pinned=)" in text


def test_the_rule_of_a_chat():
    """The turns are the template's own, and a cache reads them one by one. A model without training
    does not follow the rule, but one that always says the code word does."""
    model, tokenizer = load_model()
    chat = make_chat(tokenizer, ["The lamp was lit.", "The tide turned."], random.Random(0))
    read = tokenizer.decode(chat.ids[0])
    assert [read.count(x) for x in ("Follow one rule", "The lamp was lit.", "I have read it.")] == [
        1, 1, 2
    ]  # fmt: skip
    assert [tokenizer.decode(chat.ids[0, :n])[-10:] for n in chat.ends] == ["assistant\n"] * 4
    word = tokenizer.decode(chat.answer)
    assert f"the single word {word} and" in read
    reader = Reader(model, tokenizer, setting.parse("full"))
    text = reader.predict(chat.ids[0].tolist(), chat.answer)
    follows = text.argmax(-1).tolist() == chat.answer
    assert is_followed(reader, chat) == follows
    says = text.argmax(-1).tolist()[:1]
    assert is_followed(reader, chat._replace(answer=says))
    tokenizer.chat_template = None
    assert make_chat(tokenizer, ["The lamp was lit."], random.Random(0)) is None


# ---- What is wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--length", "1990"], 1, "exceeds the model's 2000 positions: pass --length 1488 or less"),
        (["--length", "20000"], 1, "too few for a piece of 20000 and the 64 tokens after it"),
        (["--compare", "nonsense"], 2, "setting 'nonsense': unknown"),
        (["--compare", "mask-local:0.1+0.1"], 2, "mask-local:0.1+0.1: a mask, not a cache"),
        (["--minutes", "nan"], 2, "argument --minutes: nan is no time"),
    ],
)
def test_one_line_says_what_is_wrong(tiny, capsys, tmp_path, arguments, code, words):  # noqa: F811
    command = ["recommend", "--model", tiny, "-o", str(tmp_path), *arguments]
    if code == 2:
        with pytest.raises(SystemExit) as exit_:
            cli.main(command)
        assert exit_.value.code == 2
    else:
        assert cli.main(command) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("h2o recommend: error: ")
    assert words in last


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ValueError("it cannot"), "budget:1.0: it cannot"),
        (torch.OutOfMemoryError(), "not enough memory for a prompt of 64 tokens"),
    ],
)
def test_a_model_that_h2o_cannot_serve(tiny, capsys, tmp_path, monkeypatch, error, words):  # noqa: F811
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("h2o.evaluation.generation.H2OCache", refuse)
    assert cli.main(["recommend", "--model", tiny, *SHORT, "-o", str(tmp_path)]) == 1
    assert words in capsys.readouterr().err.splitlines()[-1]


def test_the_full_cache_does_not_wait_for_plans():
    """cuDNN builds a new plan for each token, so it is disabled while the full cache is timed. The
    user's setting must be restored afterwards."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with generation.without_cudnn(torch.device("cuda")):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
    with generation.without_cudnn(torch.device("cpu")):
        assert torch.backends.cuda.cudnn_sdp_enabled() == before
