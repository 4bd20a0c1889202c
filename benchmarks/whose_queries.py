"""Compare whose queries should rank keys that several layers attend to (Gemma 3n, Gemma 4).

    python -m benchmarks.whose_queries

A small model of each family processes held-out pieces of the article that h2o includes: a prompt,
then the rest letter by letter. It has random weights, or some training on the other letters of the
article. One layer's keys are reused by later layers. This layer keeps a few of them, ranked by the
attention of its own queries; of the queries of all layers that attend to the keys; or of all
layers, but in the prompt with only the last query of later layers, which is what generate() gives
for Gemma 4. The table has the loss of each in nats per token against the model with all keys (the
mean divergence of its distributions).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, DynamicCache
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from h2o.evaluation.text_table import table
from h2o.hf.families.shared_keys import shared_key_layers

NAME = "benchmarks_whose_queries"
QUERIES = {
    "its own": lambda own, later, prompt: own,
    "all layers'": lambda own, later, prompt: own + later.sum(2),
    "all layers', of prompts the last": lambda own, later, prompt: (
        own + (later[:, :, -1] if prompt else later.sum(2))
    ),
}
"""The attention that is added to the scores, given that of the layer's own queries, [B, G, N], and
that of later layers' queries, [B, G, Q, N]"""
PROMPT, TEXT = 64, 128


class Trial:
    """Attention over the keys that are kept of one layer."""

    def __init__(self, layer: int, later: tuple[int, ...], heavy: int, recent: int) -> None:
        self.layer, self.later, self.budget = layer, later, (heavy, recent)

    def begin(self, queries: Any) -> None:
        self.queries, self.own, self.others = queries, None, []
        self.scores = self.visible = None

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any,
        scaling: float | None = None, **_: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        B, H, Q, D = query.shape
        G, N = key.shape[1:3]
        logits = query.view(B, G, H // G, Q, D) @ key[:, :, None].mT
        logits = logits * (D**-0.5 if scaling is None else scaling)
        if mask is not None:
            logits = logits + mask[:, :, None, :, :N]
        ours = module.layer_idx == self.layer
        if (ours or module.layer_idx in self.later) and self.visible is not None:
            new = torch.ones(B, G, Q, dtype=torch.bool)
            seen = torch.cat([self.visible, new], -1)
            logits = logits.masked_fill(~seen[:, :, None, None], -torch.inf)
        weights = logits.softmax(-1)
        if ours:
            self.own = weights.sum((2, 3))
        elif module.layer_idx in self.later:
            self.others.append(weights.sum(2))
        out = weights @ value[:, :, None]
        return out.view(B, H, Q, -1).transpose(1, 2), None

    def evict(self) -> None:
        """Update scores and evict keys after a forward pass."""
        heavy, recent = self.budget
        prompt = self.scores is None
        received = self.queries(self.own, torch.stack(self.others).sum(0), prompt)
        if prompt:
            self.scores, self.visible = received, torch.ones_like(received).bool()
        else:
            more = received.shape[-1] - self.scores.shape[-1]
            self.scores = nn.functional.pad(self.scores, (0, more)) + received
            self.visible = nn.functional.pad(self.visible, (0, more), value=True)
        old = self.scores[..., :-recent].masked_fill(~self.visible[..., :-recent], -1.0)
        kept = torch.zeros_like(old).bool().scatter(-1, old.topk(heavy).indices, True)
        self.visible[..., :-recent] &= kept
        self.others = []


@contextmanager
def attending(model: Any, trial: Trial) -> Iterator[None]:
    AttentionInterface.register(NAME, trial.attend)
    AttentionMaskInterface.register(NAME, eager_mask)
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation("eager")


def small(model_type: str) -> Any:
    kinds = [f"{kind}_attention" for kind in ("full", "sliding", "full", "sliding", "full", "full")]
    more: dict[str, Any] = {"global_head_dim": 16}
    if model_type == "gemma3n_text":
        more = {
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128, "laurel_rank": 8,
            "altup_num_inputs": 2, "activation_sparsity_pattern": [0.0] * 6,
        }  # fmt: skip
    else:
        more |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 128}
    config = AutoConfig.for_model(
        model_type, vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=6,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, sliding_window=24,
        num_kv_shared_layers=3, layer_types=kinds, max_position_embeddings=512,
        initializer_range=0.1, attn_implementation="eager", pad_token_id=0, **more,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def trained(model: Any, text: Tensor, steps: int) -> float:
    """Train for `steps` steps on pieces of a text. Returns the mean loss of the last hundred."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - TEXT, (8,))
        batch = torch.stack([text[i : i + TEXT] for i in starts])
        loss = model(batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return sum(losses[-100:]) / max(1, len(losses[-100:]))


@torch.no_grad()
def lost(model: Any, trial: Trial, pieces: Tensor) -> dict[str, float]:
    """Loss in nats per token for each entry of QUERIES."""
    full = model(pieces, use_cache=False).logits[:, PROMPT:-1].log_softmax(-1)
    results = {}
    for name, queries in QUERIES.items():
        trial.begin(queries)
        cache, logits = DynamicCache(config=model.config), []
        with attending(model, trial):
            for piece in pieces.split([PROMPT, *[1] * (TEXT - PROMPT)], 1):
                logits.append(model(piece, cache=cache).logits[:, -1:])
                trial.evict()
        cut = torch.cat(logits[1:-1], 1).log_softmax(-1)
        divergence = (full.exp() * (full - cut)).sum(-1)
        results[name] = divergence.mean().item()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="training steps")
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    letters = files("h2o").joinpath("data/lighthouse.txt").read_bytes()
    text = torch.tensor([min(x, 127) for x in letters])
    held_out = text[-16 * TEXT :].view(16, TEXT)
    rows = []
    for model_type in ("gemma3n_text", "gemma4_text"):
        for steps in (0, options.steps):
            for heavy, recent in ((4, 4), (8, 8), (16, 16)):
                rows.append([model_type, str(steps), f"{heavy}+{recent}"])
            results: list[list[dict[str, float]]] = [[], [], []]
            for seed in range(options.seeds):
                torch.manual_seed(seed)
                model = small(model_type)
                trained(model.train(), text[: -16 * TEXT], steps)
                model.eval()
                ((layer, later),) = shared_key_layers(model.config).items()
                for budget, result in zip(((4, 4), (8, 8), (16, 16)), results, strict=True):
                    result.append(lost(model, Trial(layer, later, *budget), held_out))
            for row, result in zip(rows[-3:], results, strict=True):
                row += [f"{sum(x[name] for x in result) / len(result):.4f}" for name in QUERIES]
            print(*rows[-3:], sep="\n", flush=True)
    print(table(["family", "steps", "keys", *QUERIES], rows))


if __name__ == "__main__":
    main()
