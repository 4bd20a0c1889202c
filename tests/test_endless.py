"""The examples of endless texts and chats, with a tiny model and (slow) with a real one."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from h2o import H2OConfig, load_model  # noqa: E402
from tests.evaluation.conftest import tokenizer  # noqa: E402, F401
from tests.examples import EXAMPLES, run  # noqa: E402
from tests.hf.tiny import model  # noqa: E402
from tests.test_cli import tiny  # noqa: E402, F401


def example(name: str, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return __import__(name)


def test_a_text_is_read_to_its_end(tiny, tmp_path):  # noqa: F811
    """Each stretch prints a line, and the run passes the model's last position without an error."""
    text = tmp_path / "text.txt"
    text.write_text("Some words of a text that goes on and on.\n" * 60)
    out = run(
        "endless_text.py", text, "--model", tiny, "--keys", "16", "--every", "500", "--chunk", "20"
    )  # fmt: skip
    header, *lines = out.splitlines()
    assert header.split() == ["tokens", "heavy", "hitters", "sinks", "window"]
    assert [int(line.split()[0]) for line in lines[:-3]] == [500, 1000, 1500, 2000, 2500, 2520]
    assert [line.split(":")[0] for line in lines[-3:]] == ["heavy hitters", "sinks", "window"]


def test_perplexity_is_that_of_each_stretch(monkeypatch):
    """Perplexity over stretches must equal that of one cache fed with the same chunks."""
    endless = example("endless_text", monkeypatch)
    ours = model("llama")
    config = H2OConfig(heavy=6, recent=6, positions="cache_relative")
    ids = torch.randint(2, 90, (80,), generator=torch.Generator().manual_seed(1)).tolist()
    one, other = endless.Reader(ours, config), endless.Reader(ours, config)
    for begin in range(0, 80, 5):
        one.feed(ids[begin : begin + 5])
        other.feed(ids[begin : begin + 5])
        if begin == 55:
            first = math.log(one.close_stretch())
    second = math.log(one.close_stretch())
    whole = math.log(other.close_stretch())
    assert whole == pytest.approx((59 * first + 20 * second) / 79)
    assert math.log(one.perplexity) == pytest.approx(whole), "stretches count by their tokens"
    assert endless.Reader(ours, config).perplexity == 1, "of no text"


def test_a_chat_needs_a_template(monkeypatch, tokenizer):  # noqa: F811
    """A tokenizer without a chat template raises an error."""
    endless = example("endless_chat", monkeypatch)
    config = H2OConfig(heavy=6, recent=6, positions="cache_relative")
    with pytest.raises(ValueError, match="no chat template"):
        endless.Chat(model("llama"), tokenizer, config)


@pytest.mark.slow
def test_a_chat_goes_on_beyond_its_budget(monkeypatch):
    endless = example("endless_chat", monkeypatch)
    ours, tokens = load_model()
    talk = endless.Chat(
        ours,
        tokens,
        H2OConfig(heavy=24, recent=40, sinks=4, positions="cache_relative", min_tokens=0),
    )
    first = "".join(talk.reply("What is the capital of France?", 30))
    assert "Paris" in first
    new = talk.turn("And?")[0, talk.ids.shape[1] :]
    assert tokens.decode(new) == "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    for said in ("Tell me about rivers.", "And about mountains?", "Thanks."):
        assert "".join(talk.reply(said, 30)).strip()
    assert talk.cache.get_seq_length() > 100
    assert talk.cache.report().total.kept[0] / len(talk.cache.layers) == 68
