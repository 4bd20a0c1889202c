"""Prefill, time per token and bytes of a model after prompts of some lengths, and its throughput.

    python -m benchmarks.prompt_lengths book.txt --model MODEL --lengths 4096 8192

The caches take turns, and each round starts with another one. "full" is transformers' DynamicCache
with sdpa. With `--bytes`, eight prompts of the first length are then answered by `h2o.generate_all`
and, with DynamicCache, by generate(), as many at a time as fit with their keys and values. A run
resumes from the results under `--output-path`, which have samples of every round and the load of
the machine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import GenerationConfig

import h2o
from h2o import models
from h2o.compat import with_cache
from h2o.evaluation import speed
from h2o.evaluation.generation import new_cache, warm_up
from h2o.evaluation.setting import Setting, parse_all
from h2o.evaluation.text_table import table
from h2o.result_file import ResultFile, provenance
from h2o.utils.progress import print_line

MANY = 8
"""Number of prompts that are answered with `--bytes`"""


class Bench:
    """Times a model. Prompts are cut from one text."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.model, tokenizer = models.load_model(
            options.model, dtype=options.dtype, attn_implementation=None, log=print_line
        )
        ids = tokenizer(options.text.read_text("utf-8"), verbose=False)["input_ids"]
        self.ids = torch.tensor(ids)
        self.settings = parse_all(options.compare)
        self.tokens = options.tokens
        self.facts = provenance(self.model, tokenizer, options.model or models.DEFAULT_MODEL)
        self.facts |= {"threads": torch.get_num_threads(), "tokens": options.tokens}
        self.file = ResultFile(options.output_path / "prompt_lengths.jsonl")
        warm_up(self.model, self.ids[None])

    def prompt(self, number: int, length: int) -> Tensor:
        """Ids [1, length] of a prompt. Each `number` begins at another place of the text."""
        start = 97 * number
        if len(self.ids) < start + length:
            raise SystemExit(f"the text has {len(self.ids)} tokens; {start + length} are needed")
        return self.ids[None, start : start + length]

    def samples(self, length: int, rounds: int) -> dict[str, list[speed.Sample]]:
        """Samples of each setting by name, one prompt at a time."""
        samples: dict[str, list[speed.Sample]] = {x.name: [] for x in self.settings}
        for number in tqdm(range(rounds), desc=f"{length} tokens"):
            first = number % len(self.settings)
            for setting in self.settings[first:] + self.settings[:first]:
                facts = self.facts | {"setting": setting.name, "length": length, "round": number}
                found = self.file.find(facts)
                if found is None:
                    ids = self.prompt(number, length)
                    sample = speed.run(setting, self.model, ids, self.tokens)
                    found = self.file.put(facts, sample._asdict() | {"load": os.getloadavg()[0]})
                fields = (found[name] for name in speed.Sample._fields)
                samples[setting.name].append(speed.Sample(*fields))
        return samples

    def single(self, lengths: Sequence[int], rounds: int) -> Iterator[list[str]]:
        """Rows of the table of one prompt at a time."""
        for length in lengths:
            samples = self.samples(length, rounds)
            for name, each in samples.items():
                x = speed.summarize(each, samples[self.settings[0].name])
                yield [
                    str(length),
                    name,
                    f"{x['prefill_seconds']:.2f}",
                    f"{x['prefill_speedup']:.2f}",
                    f"{1e3 * x['token_seconds']:.1f}",
                    f"{x['token_speedup']:.2f}",
                    f"{x['bytes_held'] / 1e6:.1f}",
                ]

    def many(self, length: int, limit: int) -> Iterator[list[str]]:
        """Rows of the table of `MANY` prompts whose caches together take at most `limit` bytes."""
        samples = self.samples(length, 1)
        for setting in tqdm(self.settings, desc=f"{MANY} prompts"):
            rows = max(1, min(MANY, limit // samples[setting.name][0].bytes_held))
            facts = self.facts | {"setting": setting.name, "length": length, "at a time": rows}
            found = self.file.find(facts) or self.file.put(
                facts, self._answer(setting, length, rows)
            )
            yield [
                setting.name,
                str(rows),
                f"{found['seconds']:.0f}",
                f"{MANY * self.tokens / found['seconds']:.2f}",
            ]

    def _answer(self, setting: Setting, length: int, rows: int) -> dict[str, float]:
        """Answer `MANY` prompts, `rows` at a time."""
        how = GenerationConfig(
            max_new_tokens=self.tokens, min_new_tokens=self.tokens, do_sample=False, pad_token_id=0
        )
        prompts = [self.prompt(number, length) for number in range(MANY)]
        begin = time.perf_counter()
        if setting.variant == "full":
            for first in range(0, MANY, rows):
                ids = torch.cat(prompts[first : first + rows])
                cache = with_cache(new_cache(self.model, None, length))
                mask = torch.ones_like(ids)
                self.model.generate(ids, attention_mask=mask, generation_config=how, **cache)
        else:
            requests = [h2o.Request(ids[0].tolist(), generation_config=how) for ids in prompts]
            self.model.set_attn_implementation("h2o")
            list(h2o.generate_all(self.model, requests, setting.config, rows=rows))
        return {"seconds": time.perf_counter() - begin, "load": os.getloadavg()[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", type=Path, help="a plain text longer than the longest prompt")
    parser.add_argument("--model", help="default: the embedded SmolLM2-135M")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096], help="tokens (4096)")
    parser.add_argument("--tokens", type=int, default=32, help="new tokens per prompt (32)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compare", default="full,echo-bytes:0.2,echo-bytes:0.1")
    parser.add_argument("--bytes", type=int, help="of keys and values, to answer many prompts")
    parser.add_argument("--output-path", type=Path, default=Path("h2o-eval"))
    options = parser.parse_args()
    bench = Bench(options)
    names = ["prompt", "cache", "prefill, s", "speedup", "ms per token", "speedup", "MB held"]
    print(table(names, list(bench.single(options.lengths, options.rounds))), flush=True)
    if options.bytes is not None:
        names = ["cache", "rows", "s", "tokens/s"]
        print(table(names, list(bench.many(options.lengths[0], options.bytes))))


if __name__ == "__main__":
    main()
