"""Count the facts that kvpress' methods find, with the trials and bytes of `h2o eval --needle`.

    python -m benchmarks.needle_peers wikitext2_test.txt --facts all --lengths 512

Each text is processed and compressed before its question comes. Budgets are shares of the bytes of
a full cache of the text. A cache that a press has compressed then grows with the question and the
answer, while h2o keeps to its budget. With "cut" it has the budget when the text is compressed, and
more at the end. With "end" it is compressed further, so that it has the budget at the end, if that
leaves any keys. KVzip and AdaKV mask keys instead of dropping them, but are counted as if they
dropped them. The peers run in a separate environment under h2o's cache folder.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from h2o import models
from h2o.evaluation import needles
from h2o.evaluation.text_table import table
from h2o.result_file import ResultFile, fingerprint, provenance
from h2o.utils.progress import print_line

from .equal_bytes import BUDGETS
from .peers.environments import Peer

COUNTS = ("cut", "end")
PRESSES = ("KVzip", "SnapKV", "ExpectedAttention", "KeyDiff", "AdaKV")


def rows(
    counts: Sequence[str], presses: Sequence[str] = PRESSES
) -> list[tuple[str, str, str, float]]:
    """List (name, method, "cut" or "end", budget)."""
    listed = [("full", "full", "cut", 1.0)]
    for method in presses:
        for count in counts:
            listed += [(f"{method}:{part} {count}", method, count, part) for part in BUDGETS]
    return listed


def asked_of(method: str, count: str, part: float, document: list[int], rest: list[int],
             answer: int) -> dict[str, Any] | None:  # fmt: skip
    """The peer's request, or None if the budget leaves no keys. `answer` is the number of tokens in
    `rest` that belong to the answer."""
    kept = int(part * len(document)) - (len(rest) - 1 if count == "end" else 0)
    if kept <= 0:
        return None
    return {
        "ids": document + rest, "prompt": len(document), "answer": answer, "method": method,
        "kept": kept,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a long plain text")
    parser.add_argument("--lengths", default="512", help="tokens of the texts (512)")
    parser.add_argument("--facts", default="all", help="kinds of h2o eval --needle (all)")
    parser.add_argument("--decoys", type=int, default=0, help="as of h2o eval --needle (0)")
    parser.add_argument("--count", nargs="+", default=COUNTS, choices=COUNTS,
                        help="when the budgets apply (both)")  # fmt: skip
    parser.add_argument(
        "--limit", type=int, default=2, help="trials of each length, depth and kind (2)"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--model", help="a folder; default: the embedded SmolLM2-135M")
    parser.add_argument("--presses", nargs="+", default=PRESSES, choices=PRESSES)
    parser.add_argument("--output-path", type=Path, default=Path("h2o-eval"))
    options = parser.parse_args()
    model, tokenizer = models.load_model(
        options.model, attn_implementation=None, dtype=options.dtype, log=print_line
    )
    origin = provenance(model, tokenizer, options.model or models.DEFAULT_MODEL)
    text = options.text.read_text("utf-8")
    trials = needles.Needles.make_rows(
        text, tokenizer, options.lengths, options.limit, options.facts, options.decoys
    )
    questions = sum(len(trial["asked"]["facts"]) for trial in trials)
    listed = rows(options.count, options.presses)
    cells = ResultFile(options.output_path / "needle_peers.jsonl")
    results: dict[str, list[dict[str, Any]]] = {name: [] for name, *_ in listed}
    folder = options.model or str(models.embedded_folder())
    arguments = folder, str(torch.get_num_threads()), options.dtype
    with (
        Peer("quality", *arguments) as peer,
        tqdm(total=questions * len(results)) as bar,
    ):
        for trial in trials:
            document, asked = needles.encode(tokenizer, trial["text"], trial["asked"]["facts"])
            for (question, answer), (name, *what) in itertools.product(asked, listed):
                parts = [document[0].tolist(), question[0].tolist() + answer[0].tolist()]
                bar.update()
                request = asked_of(*what, *parts, answer.shape[1])
                if request is None:
                    continue
                facts = origin | request | {"ids": fingerprint({"ids": request["ids"]})}
                facts |= {"trial": fingerprint(trial)}
                result = cells.find(facts)
                if result is None:
                    result = cells.put(facts, peer.ask(**request))
                results[name].append(result | {"tokens": len(parts[0])})
    print(f"{questions} facts")
    titles = ["setting", "bytes at the cut", "at the end", "found"]
    full = [result["found"] for result in results["full"]]
    lines = [line(name, found, full, results["full"]) for name, found in results.items() if found]
    print(table([*titles, f"of full's {sum(full)}"], lines))


def line(
    name: str, found: list[dict[str, Any]], full: list[bool], whole: list[dict[str, Any]]
) -> list[str]:
    """The row of a setting. Its cells are empty if some trials left no keys."""
    if len(found) != len(full):
        return [name, *[""] * 4]
    known = [result for result, is_found in zip(found, full, strict=True) if is_found]
    shares = [
        statistics.fmean(
            result["bytes"][when] / of["bytes"]["cut"]
            for result, of in zip(found, whole, strict=True)
        )
        for when in ("cut", "end")
    ]
    return [
        name,
        *(f"{share:.1%}" for share in shares),
        *(needles.format_share([y["found"] for y in x]) for x in (found, known) if x),
    ]


if __name__ == "__main__":
    main()
