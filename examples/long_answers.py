"""Compare presets with random eviction in long answers, on a model that is trained here.

    OMP_NUM_THREADS=1 python examples/long_answers.py model.pt

A tiny Llama learns to write down, step by step, who holds what. The prompt lists the objects that
16 people hold, a hundred numbered steps in each of which one person's object goes to a new person,
and eight questions. The answer repeats each step and names its object. To find the object, the
model has to look up where its own text last named the giver. The prompt is pinned, so only keys of
the model's own text are evicted.

In texts of the first kind a giver gives the object away, and each fact is needed once. In texts of
the second kind both people have the object afterwards, and an object that was passed on often is
passed on even more often. The table shows the share of questions that are answered correctly, by
the number of keys for the model's own text.

Training saves its state to the file, and resumes from it when started again. On one thread of a
busy CPU training took 5 minutes, and each line of the table 10 to 50 seconds. Measured on
2026-11-26 with 40% of the keys, as shares of the questions of the two kinds: `robust` answers 0.32
and 0.69, `authors` 0.26 and 0.48, random eviction 0.59 and 0.74, a full cache all. The whole table
is in docs/reference/results.md.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import random
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import h2o
from h2o.hf.simulation.random_eviction import draw_ranks

OBJECTS, NAMES, NUMBERS = 32, 128, 120
BEGIN, ASK = 0, 1
FIRST_OBJECT = 2
FIRST_NAME = FIRST_OBJECT + OBJECTS
FIRST_NUMBER = FIRST_NAME + NAMES
KINDS = ("needed once", "needed often")
TOKENS, RATE, SAVED = 2000, 1e-3, 25
"""Training: tokens per batch, learning rate, updates between two saved states"""
WIDTH, HEADS, HEAD = 256, 8, 32
CLEAR = 0.12
"""Least difference of two shares that counts: at least two standard errors of 128 answers each"""


@dataclasses.dataclass(frozen=True)
class Size:
    """Size of a text: its number of steps, and what follows from it."""

    steps: int

    @property
    def holders(self) -> int:
        return min(16, self.steps)

    @property
    def questions(self) -> int:
        return min(8, self.steps)


def text(size: Size, often: bool, rng: random.Random) -> tuple[list[int], list[int]]:
    """Make up a prompt and its answer, as token ids. Questions are steps whose receiver is ASK."""
    names = rng.sample(range(FIRST_NAME, FIRST_NUMBER), size.holders + size.steps)
    objects = rng.sample(range(FIRST_OBJECT, FIRST_NAME), size.holders)
    holds = dict(zip(names, objects, strict=False))
    prompt = [BEGIN, *itertools.chain(*holds.items())]
    givers, steps = list(holds), []
    for receiver in names[size.holders :]:
        at = rng.randrange(len(givers))
        giver = givers[at] if often else givers.pop(at)
        givers += [giver, receiver] if often else [receiver]
        holds[receiver] = holds[giver]
        steps.append((giver, receiver))
    steps += [(name, ASK) for name in rng.sample(sorted(set(givers)), size.questions)]
    first = FIRST_NUMBER + rng.randint(0, NUMBERS - len(steps))
    answer = []
    for number, (giver, receiver) in enumerate(steps, first):
        prompt += [number, giver, receiver]
        answer += [number, giver, holds[giver], receiver, holds[giver]]
    return [*prompt, answer[0]], answer[1:]


def batch(size: Size, rows: int, rng: random.Random) -> tuple[Tensor, int]:
    """Make up texts of alternating kinds, int64 [rows, tokens]. Also returns the tokens of a
    prompt."""
    texts = [text(size, bool(row % 2), rng) for row in range(rows)]
    return torch.tensor([prompt + answer for prompt, answer in texts]), len(texts[0][0])


def new_model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=FIRST_NUMBER + NUMBERS,
        hidden_size=WIDTH,
        intermediate_size=WIDTH // 2,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=HEAD,
        attention_bias=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        initializer_range=0.04,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        begin_with_induction(model)
    return model


def begin_with_induction(model: LlamaForCausalLM) -> None:
    """Initialize the heads that training would otherwise have to find first, after a long plateau.
    Those of the first layer copy the token one, two or four positions before. Those of the second
    layer look for a key whose previous token is the current one (induction heads; Olsson et al.,
    2022)."""
    half, std = WIDTH // 2, model.config.initializer_range
    first, second = (layer.self_attn for layer in model.model.layers)
    for name, weight in model.named_parameters():
        if "proj" in name:  # MLPs begin at zero, attention close to zero
            weight *= 0 if "down" in name else 0.05
    model.model.embed_tokens.weight[:, half:] = 0  # room for copies of previous tokens

    def rotation() -> Tensor:
        return torch.linalg.qr(torch.randn(half, half))[0]

    pairs = HEAD // 2
    angle = model.config.rope_parameters["rope_theta"] ** -(torch.arange(pairs) / pairs)
    for head, (places, part) in enumerate(
        [(1, 0), (1, 1), (1, 2), (1, 3), (2, 0), (2, 1), (4, 0), (4, 1)]
    ):
        own = slice(HEAD * head, HEAD * (head + 1))
        copied = torch.eye(half)[HEAD * part : HEAD * (part + 1)]
        first.k_proj.bias[own] = 6 * torch.cat([torch.ones(pairs), torch.zeros(pairs)])
        first.q_proj.bias[own] = 6 * torch.cat([(places * angle).cos(), -(places * angle).sin()])
        first.v_proj.weight[own, :half] += copied
        if places == 1:
            first.o_proj.weight[half:, own] += std * copied.T
        else:
            first.o_proj.weight[:half, own] += std / 2 * rotation() @ copied.T
    slow = torch.tensor([i for i in range(HEAD) if i % pairs >= pairs // 2])
    for head in range(HEADS):
        own, looked_for, copied = slice(HEAD * head, HEAD * (head + 1)), rotation(), rotation()
        second.q_proj.weight[HEAD * head + slow, :half] += 1.8 * looked_for[:pairs]
        second.k_proj.weight[HEAD * head + slow, half:] += 1.8 * looked_for[:pairs]
        second.v_proj.weight[own, :half] += copied[:HEAD]
        second.o_proj.weight[:half, own] += std * copied[:HEAD].T


def train(model: LlamaForCausalLM, path: Path, longest: int, updates: int, least: float) -> None:
    """Train on longer and longer texts until the loss of the longest is below `least`."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98))
    stages = [*(steps for steps in (8, 16, 32, 64) if steps < longest), longest]
    state: dict[str, Any] = {"update": 0, "stage": 0, "loss": 1.0}
    if path.exists():
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        state = saved["state"]
    start = time.perf_counter()
    is_last = state["stage"] == len(stages) - 1
    is_done = is_last and state["loss"] < least
    while not is_done and state["update"] < updates:
        optimizer.param_groups[0]["lr"] = RATE / 4 if is_last else RATE
        size = Size(stages[state["stage"]])
        tokens = 2 * size.holders + 8 * (size.steps + size.questions)
        ids, n = batch(size, max(2, TOKENS // tokens), random.Random(state["update"]))
        logits = model.lm_head(model.model(ids).last_hidden_state[:, n - 1 : -1])
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, n:])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        state["update"] += 1
        state["loss"] = 0.9 * state["loss"] + 0.1 * loss.item()
        if is_last:
            is_done = state["loss"] < least
        elif state["loss"] < 0.06:
            state |= {"stage": state["stage"] + 1, "loss": 1.0}
            is_last = state["stage"] == len(stages) - 1
        if is_done or state["update"] == updates or state["update"] % SAVED == 0:
            seconds = time.perf_counter() - start
            print(
                f"{seconds:5.0f} s, update {state['update']}, {size.steps} steps, "
                f"loss {loss:.4f}", flush=True,
            )  # fmt: skip
            weights, moments = model.state_dict(), optimizer.state_dict()
            torch.save({"model": weights, "optimizer": moments, "state": state}, path)


def configs(keys: int, prompt: int) -> dict[str, h2o.H2OConfig]:
    """The configs to compare, with `keys` keys per head for the tokens after the pinned prompt. The
    scores of "random" are replaced by `draw_scores`."""
    robust = h2o.H2OConfig.robust(keys)
    made = {
        "authors": h2o.H2OConfig.authors(keys),
        "robust": robust,
        "echo": h2o.H2OConfig.echo(keys),
        "random": dataclasses.replace(robust, score_by="sum", value_weighted=False),
    }
    return {name: dataclasses.replace(x, heavy=x.heavy + prompt) for name, x in made.items()}


def draw_scores(cache: h2o.H2OCache, n: int) -> None:
    """Replace the scores of all keys after a pinned prompt of n tokens by random ones. A key always
    gets the same score, far above the attention that the next token adds to it."""
    for number, layer in enumerate(cache.layers):
        positions, scores = layer.slots.positions, layer.slots.scores
        drawn = 1e6 * draw_ranks(positions, torch.arange(positions.shape[1])[:, None], number)
        scores.copy_(torch.where(positions < n, scores, drawn))


def right(
    model: Any, ids: Tensor, n: int, config: h2o.H2OConfig, is_random: bool = False
) -> list[float]:
    """Shares of the questions that are answered correctly, by kind."""
    cache = h2o.H2OCache(model, config, pinned="prompt")
    with contextlib.ExitStack() as stack, torch.no_grad():
        if is_random:
            hook = model.register_forward_hook(lambda *_: draw_scores(cache, n))
            stack.callback(hook.remove)
        out = model.generate(
            ids[:, :n],
            attention_mask=torch.ones(len(ids), n, dtype=torch.long),
            cache=cache,
            max_new_tokens=ids.shape[1] - n,
            do_sample=False,
        )
    wanted, given = (list(map(answered, rows[:, n:].tolist())) for rows in (ids, out))
    shares = []
    for kind in range(len(KINDS)):
        pairs = zip(wanted[kind :: len(KINDS)], given[kind :: len(KINDS)], strict=True)
        found = [
            answers.get(name) == thing for real, answers in pairs for name, thing in real.items()
        ]
        shares.append(sum(found) / len(found))
    return shares


def answered(tokens: list[int]) -> dict[int, int]:
    """The objects that an answer gives, by name. Name and object are two tokens before and one
    after each ASK."""
    return {tokens[i - 2]: tokens[i + 1] for i in range(2, len(tokens) - 1) if tokens[i] == ASK}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", type=Path, help="file of the trained model; training resumes it")
    parser.add_argument("--steps", type=int, default=100, help="steps of a text")
    parser.add_argument("--updates", type=int, default=2000, help="limit of training updates")
    parser.add_argument("--loss", type=float, default=0.002, help="loss that ends the training")
    parser.add_argument("--texts", type=int, default=32, help="number of texts to answer")
    parser.add_argument("--budgets", default="0.2,0.4,0.6,0.8", help="shares of the answer's keys")
    options = parser.parse_args()
    model = new_model()
    print(f"{sum(x.numel() for x in model.parameters()):,} parameters")
    train(model, options.path, options.steps, options.updates, options.loss)
    model.eval().set_attn_implementation("h2o")
    ids, n = batch(Size(options.steps), options.texts, random.Random("questions"))
    tokens = ids.shape[1] - n
    print(f"prompt: {n} tokens, pinned; answer: {tokens} tokens")
    print(f"{'policy':8s} {'keys':>5s}  " + "  ".join(KINDS))
    rows = [("full", tokens, h2o.H2OConfig.full())]
    for share in map(float, options.budgets.split(",")):
        keys = round(share * tokens)
        rows += [(name, keys, config) for name, config in configs(keys, n).items()]
    results: dict[tuple[str, int], list[float]] = {}
    for name, keys, config in rows:
        shares = results[name, keys] = right(model, ids, n, config, name == "random")
        cells = zip(shares, KINDS, strict=True)
        shown = "  ".join(f"{share:{len(kind)}.2f}" for share, kind in cells)
        print(f"{name:8s} {keys:5d}  {shown}", flush=True)
    print("\n".join(against_random(results)))


def against_random(results: dict[tuple[str, int], list[float]]) -> list[str]:
    """Summarize the table: for each kind, a line with the policies that clearly differ from random
    eviction."""
    lines = []
    for kind, title in enumerate(KINDS):
        gains = {
            f"{name} at {keys}": shares[kind] - results["random", keys][kind]
            for (name, keys), shares in results.items()
            if name not in ("full", "random")
        }
        better = [which for which, gain in gains.items() if gain >= CLEAR]
        worse = [which for which, gain in gains.items() if gain <= -CLEAR]
        lines.append(
            f"{title}: better than random by {CLEAR} or more: {', '.join(better) or 'none'}; "
            f"worse: {', '.join(worse) or 'none'}"
        )
    return lines


if __name__ == "__main__":
    main()
