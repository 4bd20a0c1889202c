"""Prompt lookup decoding with an H2OCache: number of forward passes and time for the same text.

    python examples/prompt_lookup.py [--draft 8] [--tokens 160]

The model is asked to repeat a list, so most of its answer is in the prompt. It generates greedily
without and with prompt lookup, first with a budget for all tokens and then with a fifth of them.
"""

from __future__ import annotations

import argparse
import time

import torch

import h2o

LIST = "\n".join(
    f"{number}. The {colour} boat of {name} leaves the harbour at {number + 4} in the morning."
    for number, (colour, name) in enumerate(
        [("red", "Anna"), ("blue", "Boris"), ("green", "Clara"), ("white", "David"),
         ("black", "Elena"), ("yellow", "Frank"), ("brown", "Greta"), ("grey", "Henry")], start=1
    )
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draft", type=int, default=8, help="tokens of a draft (%(default)s)")
    parser.add_argument("--tokens", type=int, default=160)
    options = parser.parse_args()
    model, tokenizer = h2o.load_model()
    model.set_attn_implementation("h2o")
    turn = {"role": "user", "content": f"Repeat this list word by word, twice.\n\n{LIST}"}
    inputs = tokenizer.apply_chat_template(
        [turn], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    n = inputs.input_ids.shape[1]
    passes: list[int] = []
    model.register_forward_pre_hook(lambda *_: passes.append(1))
    for name, config in {"all": h2o.H2OConfig.full(), "a fifth": h2o.H2OConfig.robust(0.2)}.items():
        texts = []
        for lookup in (0, options.draft):
            passes.clear()
            cache = h2o.H2OCache(model.config, config, prompt_length=n)
            more = {"prompt_lookup_num_tokens": lookup} if lookup else {}
            start = time.perf_counter()
            out = model.generate(
                **inputs,
                cache=cache,
                max_new_tokens=options.tokens,
                do_sample=False,
                **more,
            )
            seconds = time.perf_counter() - start
            texts.append(out[0, n:])
            how = f"lookup of {lookup}" if lookup else "greedy"
            print(
                f"keys kept: {name:8s} {how:12s} {len(out[0]) - n:4d} tokens {len(passes):4d} "
                f"passes {seconds:6.1f} s"
            )
        shorter = min(map(len, texts))
        same = (texts[0][:shorter] == texts[1][:shorter]).cumprod(0).sum()
        print(f"    the same text for {same} of {shorter} tokens")
        print("   ", " ".join(tokenizer.decode(texts[1]).split())[:120])


if __name__ == "__main__":
    with torch.no_grad():
        main()
