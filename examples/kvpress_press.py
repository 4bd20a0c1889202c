"""A press that ranks keys as H2O does, for kvpress's pipeline, wrappers and evaluation.

    pip install kvpress                 # installs the transformers version that it needs
    pip install .                       # in the folder of h2o's sources: only the core
    python examples/kvpress_press.py --model NAME --context article.txt --question "Who built it?"

`H2OPress(compression_ratio=0.8)` keeps a fifth of a prompt's keys: sinks, the newest keys, and the
keys with the most attention. kvpress compresses only the prompt, and keeps everything that is
generated afterwards. An `H2OCache` keeps to its budget during generation too. Its `budget=` ranks
keys by what the prompt would look up again, which this press cannot do.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from kvpress import KVPressTextGenerationPipeline, ScorerPress
from kvpress.utils import compute_n_kept, get_prerope_query_states
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from h2o import ops


@dataclass
class H2OPress(ScorerPress):
    """Keeps sinks, recent keys, and the keys that receive the most attention from the prompt.

    h2o's kernels compute the attention, so any `attn_implementation` works and the matrix of
    queries by keys is never stored.

    Args:
        recent: share of the kept keys that are reserved for the newest.
        sinks: number of first tokens that are always kept.
        score_by: "sum" (as in the paper), "mean" (per query that sees the key) or "max".

    Raises:
        ValueError: the prompt has padding, or there are more sinks and recent keys than are kept.
    """

    recent: float = 0.5
    sinks: int = 0
    score_by: str = "sum"

    @torch.no_grad()
    def score(
        self,
        module: Any,
        hidden_states: Tensor,
        keys: Tensor,
        values: Tensor,
        attentions: Tensor | None,
        kwargs: dict[str, Any],
    ) -> Tensor:
        """Ranks [B, G, N] of the keys. Keys that are always kept have rank infinity."""
        n = keys.shape[2]
        check_no_padding(kwargs.get("attention_mask"))
        kept = compute_n_kept(n, self.compression_ratio)
        recent = int(self.recent * kept)
        if self.sinks + recent > kept:
            raise ValueError(
                f"{self.sinks} sinks and {recent} recent keys are more than the {kept} keys that "
                f"compression_ratio={self.compression_ratio} keeps of {n}: lower one of the three"
            )
        query = get_prerope_query_states(module, hidden_states)
        query, _ = apply_rotary_pos_emb(query, query, *kwargs["position_embeddings"])
        _, ranks = ops.attend(query, keys, values, scale=module.scaling, score_by=self.score_by)
        if self.score_by == "mean":
            ranks = ranks / torch.arange(n, 0, -1, device=ranks.device)
        ranks[..., : self.sinks] = ranks[..., n - recent :] = torch.inf
        return ranks


def check_no_padding(mask: Tensor | None) -> None:
    """Raise a ValueError unless the last token sees all tokens of the prompt."""
    if mask is None:
        return
    last = mask if mask.ndim == 2 else mask[:, 0, -1]  # [B, N]: bool, or 1 and 0, or 0 and -inf
    seen = last == 0 if last.is_floating_point() else last != 0
    if not seen.all():
        raise ValueError("H2OPress does not support padding: compress one prompt at a time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a name on the Hub, or a folder")
    parser.add_argument("--context", type=Path, required=True, help="a text file")
    parser.add_argument("--question", required=True)
    parser.add_argument(
        "--ratio", type=float, default=0.8, help="share of keys to evict (default: %(default)s)"
    )
    parser.add_argument("--max-new-tokens", type=int, default=40)
    options = parser.parse_args()
    pipeline = KVPressTextGenerationPipeline(
        model=AutoModelForCausalLM.from_pretrained(options.model),
        tokenizer=AutoTokenizer.from_pretrained(options.model),
    )
    for ratio in (0.0, options.ratio):
        answer = pipeline(
            options.context.read_text("utf-8"),
            question=options.question,
            press=H2OPress(compression_ratio=ratio, sinks=4),
            max_new_tokens=options.max_new_tokens,
        )["answer"]
        print(f"{1 - ratio:4.0%} of the keys: {' '.join(answer.split())}")


if __name__ == "__main__":
    main()
