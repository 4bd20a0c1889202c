"""`h2o stream`: the text is read piece by piece, and every cache stays as small as it was."""

from __future__ import annotations

import argparse
import io
import json
import math
import signal
import subprocess
import sys
import time

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from h2o import H2OCache, H2OConfig, cli  # noqa: E402
from h2o.borrowed import with_cache  # noqa: E402
from h2o.errors import UserError  # noqa: E402
from h2o.evaluate.perplexity import by_cache  # noqa: E402
from h2o.evaluate.setting import parse  # noqa: E402
from h2o.stream import token_stream  # noqa: E402
from h2o.stream.chat import Chat  # noqa: E402
from h2o.stream.reader import Reader, read  # noqa: E402
from tests.hf.tiny import VOCABULARY, model  # noqa: E402
from tests.test_cli import tiny  # noqa: E402, F401


def ids(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (count,), generator=generator).tolist()


def test_pieces_are_the_text():
    words = " ".join(f"word{i}" for i in range(400)) + "\nthe end"
    for block in (1, 7, 50, 10**6):
        parts = list(token_stream.pieces(io.StringIO(words), block=block))
        assert "".join(parts) == words
        assert max(map(len, parts)) < 2 * block + 20
    twice = token_stream.pieces(io.StringIO("abc "), repeat=True)
    assert [next(twice) for _ in range(3)] == ["abc "] * 3
    with pytest.raises(ValueError, match="empty"):
        list(token_stream.pieces(io.StringIO("\n \n"), repeat=False))
    with pytest.raises(ValueError, match="empty"):
        list(token_stream.pieces(io.StringIO(""), repeat=True))


def waiting(text, then=""):
    """A pipe that has the text, and then an end or, with None, Ctrl-C."""

    class Pipe(io.StringIO):
        def seekable(self):
            return False

        def readline(self, size=-1):
            line = super().readline(size)
            if not line and then is None:
                raise KeyboardInterrupt
            return line

    return Pipe(text)


def test_lines_of_a_pipe_are_read_as_they_come():
    """White space comes with the next line, so that it is encoded as in a file."""
    log = "one two \n\nthree\n  four\nfi"
    for then in ("", None):
        parts = list(token_stream.pieces(waiting(log, then)))
        assert parts == ["one two", " \n\nthree", "\n  four", "\nfi"]
    with pytest.raises(ValueError, match="empty"):
        list(token_stream.pieces(waiting("", None)))


def test_what_was_read_before_ctrl_c_counts():
    ours = model("llama")
    for then, stretches in ((1, [40, 80, 103]), (0, [40, 80])):
        readers = [Reader(ours, parse(name)) for name in ("h2o:6+6", "full")]

        def text(until=80 + 23 * then):
            yield from token_stream.chunks(ids(until), 1)
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            for _ in read(text(), readers, every=40):
                pass
        for reader in readers:
            assert [point.tokens for point in reader.points] == stretches


def test_chunks():
    assert list(token_stream.chunks(iter(range(7)), 3)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(token_stream.chunks([], 3)) == []


@pytest.mark.parametrize("chunk", [1, 5])
@pytest.mark.parametrize("positions", ["rolled", "original"])
def test_perplexity_is_the_cache_s(positions, chunk):
    ours, tokens = model("llama"), ids(120)
    setting = parse("h2o:6+6")
    reader = Reader(ours, setting, positions)
    for _ in read(token_stream.chunks(tokens, chunk), [reader], every=40):
        pass
    assert [point.tokens for point in reader.points] == [40, 80, 120]
    cache, losses, last = (
        H2OCache(ours.config, H2OConfig(heavy=6, recent=6, positions=positions)),
        [],
        None,
    )
    with torch.no_grad():
        for part in token_stream.chunks(tokens, chunk):
            logits = ours(torch.tensor([part]), **with_cache(cache)).logits[0]
            before = logits[:-1] if last is None else torch.cat([last, logits[:-1]])
            wanted = torch.tensor(part[len(part) - len(before) :], dtype=torch.long)
            losses += torch.nn.functional.cross_entropy(before, wanted, reduction="none").tolist()
            last = logits[-1:]
    for point, part in zip(reader.points, (losses[:39], losses[39:79], losses[79:]), strict=True):
        assert point.perplexity == pytest.approx(math.exp(sum(part) / len(part)), rel=1e-3)
    if positions == "original" and chunk == 1:
        expected = by_cache(ours, torch.tensor([tokens]), setting)[0]
        torch.testing.assert_close(torch.tensor(losses), expected, rtol=0, atol=1e-3)


def test_memory_and_positions_stay():
    """Beyond the positions that the model has, which the full cache runs out of."""
    ours = model("llama")
    readers = [Reader(ours, parse(name)) for name in ("h2o:6+6", "sink:2+10", "local:12", "full")]
    for _ in read(token_stream.chunks(ids(700), 4), readers, every=100):
        pass
    for reader in readers[:3]:
        assert len(reader.points) == 7
        assert len({point.kv_bytes for point in reader.points}) == 1
        assert {point.highest_position for point in reader.points} == {15}
        assert not reader.ended
    assert readers[3].ended
    assert readers[3].points[-1].tokens == 512
    assert len(readers[3].points) == 6


def test_what_is_no_stream():
    ours = model("llama")
    with pytest.raises(UserError, match="numbers of tokens"):
        Reader(ours, parse("h2o:0.1"))
    with pytest.raises(UserError, match="a mask, no cache"):
        Reader(ours, parse("mask-local:4+4"))


def test_command(tiny, tmp_path, capsys):  # noqa: F811
    file, output = tmp_path / "text.txt", tmp_path / "out" / "stream.json"
    file.write_text("Some words of a text that goes on and on.\n" * 3)
    arguments = ["stream", "--model", str(tiny), "--text", str(file), "--output", str(output)]
    numbers = ["--compare", "h2o:8+8,local:16", "--every", "100", "--chunk", "8"]
    assert cli.main([*arguments, *numbers, "--repeat", "--tokens", "400", "--json"]) == 0
    out = capsys.readouterr().out
    result = json.loads(output.read_text())
    assert json.loads(out.splitlines()[0]) == result
    assert "local:16" in out.splitlines()[-1]
    points = result["caches"]["h2o:8+8"]["points"]
    assert [point["tokens"] for point in points] == [104, 208, 312, 400]
    assert result["caches"]["h2o:8+8"]["config"]["positions"] == "rolled"
    assert output.with_suffix(".png").stat().st_size > 1000
    assert cli.main([*arguments, *numbers]) == 0  # once: what is left is too short for a point
    assert json.loads(output.read_text())["caches"]["local:16"]["points"][-1]["tokens"] == 104


def test_command_says_what_is_wrong(tiny, tmp_path, capsys):  # noqa: F811
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    (tmp_path / "folder.json").mkdir()
    start = ["stream", "--model", str(tiny), "--output", str(tmp_path / "x.json")]
    for arguments, error in {
        ("--text", str(tmp_path / "none.txt")): "No such file",
        ("--text", str(empty)): "text is empty",
        ("--chat",): "no chat template",
        ("--compare", "h2o:4+4/kv_dtype=int8-int4"): "multiple of 32",
        ("--output", str(tmp_path / "empty.txt" / "x.json")): "cannot write to",
        ("--output", str(tmp_path / "folder.json")): "is a folder",
        ("--output", str(tmp_path / "new" / "x.json"), "--text", str(empty)): "text is empty",
    }.items():
        assert cli.main([*start, *arguments]) == 1
        said = capsys.readouterr().err
        assert error in said
        assert (
            "loading" not in said
            or error in ("text is empty", "no chat template")
            or ("multiple of 32" in error)
        )
    assert not (tmp_path / "new").exists()
    for arguments, error in {
        ("--chunk", "0"): "--chunk: must be at least 1",
        ("--output", "x.png"): "wanted a name such as stream.json",
        ("--compare", "h2o:0.2"): "numbers of tokens",
        ("--compare", "nonsense"): "unknown",
        ("--chat", "--compare", "h2o:0.2"): "numbers of tokens",
        ("--chat", "--compare", "mask-local:4+4"): "a mask, no cache",
        ("--heavy", "0.1"): "numbers of tokens",
        ("--preset", "calibrated", "--profile", "nowhere.json"): "No such file",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            cli.main([*start, *arguments])
        assert error in capsys.readouterr().err


def test_an_earlier_result_stays_until_there_is_another(tiny, tmp_path, monkeypatch):  # noqa: F811
    output = tmp_path / "stream.json"
    output.write_text("earlier")
    arguments = ["stream", "--model", str(tiny), "--heavy", "8", "--output", str(output)]

    def interrupted(*_, **__):
        raise KeyboardInterrupt
        yield

    monkeypatch.setattr("h2o.stream.token_stream.tokens", interrupted)
    assert cli.main(arguments) == 130
    assert output.read_text() == "earlier"


def test_a_log_that_grows(tiny, tmp_path):  # noqa: F811
    """As `tail -f log | h2o stream --text -`, ended by Ctrl-C."""
    output = tmp_path / "stream.json"
    heed = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{heed}; from h2o.cli import main; raise SystemExit(main())",
         "stream", "--model", str(tiny), "--text", "-", "--caches", "h2o:8+8", "--every", "40",
         "--output", str(output)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        for _ in range(3):
            process.stdin.write("a line that the log gets, no more\n")
            process.stdin.flush()
        for line in process.stderr:  # a stretch has been read, though the pipe stays open
            if "h2o:8+8" in line:
                break
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(timeout=60) == 0
    finally:
        process.kill()
        process.communicate()
    points = json.loads(output.read_text())["caches"]["h2o:8+8"]["points"]
    assert [point["tokens"] for point in points] == [40, 80, 102]


@pytest.mark.slow
def test_a_chat_goes_on_beyond_its_budget():
    """The second turn is what the template says of it, and a short memory does not end the talk."""
    from h2o import load

    ours, tokenizer = load(attn_implementation="h2o")
    talk = Chat(ours, tokenizer, H2OConfig(heavy=24, recent=40, sinks=4, positions="rolled"))
    first = "".join(talk.reply("What is the capital of France?", 30))
    assert "Paris" in first
    assert talk.message("And?") == "\n<|im_start|>user\nAnd?<|im_end|>\n<|im_start|>assistant\n"
    for said in ("Tell me about rivers.", "And about mountains?", "Thanks."):
        assert "".join(talk.reply(said, 30)).strip()
    assert talk.cache.get_seq_length() > 100
    assert talk.cache.report().total.kept[0] / len(talk.cache.layers) == 68


def test_the_caches_are_what_options_say(capsys):
    """One, beside nothing else, or a list; a preset goes with a list too."""
    from h2o.cli import stream_command

    def caches(*arguments):
        parser = argparse.ArgumentParser()
        stream_command.add_arguments(parser)
        options = parser.parse_args(arguments)
        stream_command.check(parser, options)
        assert {setting.config.positions for setting in options.settings} == {"rolled"}
        return [setting.name for setting in options.settings]

    assert caches() == stream_command.COMPARE.split(",")
    assert caches("--rank-by", "mean") == stream_command.COMPARE.split(",")[:1]
    assert caches("--heavy", "8", "--decay", "0.9", "--sinks", "0", "--rank-by", "sum") == [
        "h2o:8+256/decay=0.9"
    ]
    assert caches("--preset", "robust") == ["robust:512"]
    assert caches("--budget", "64") == ["budget:64"]
    for name in ("--compare", "--caches"):
        both = caches("--preset", "robust", name, "full", "--budget", "64", "--kv-dtype", "int8")
        assert both == ["full", "robust:64/kv_dtype=int8"]
    for wrong, error in (
        (["--budget", "64", "--recent", "4"], "not both"),
        (["--budget", "0.1"], "numbers of tokens"),
        (["--of", "bytes"], "takes fractions"),
        (["--compare", "full", "--heavy", "8"], "--heavy is for one setting"),
    ):
        with pytest.raises(SystemExit):
            caches(*wrong)
        assert error in capsys.readouterr().err
