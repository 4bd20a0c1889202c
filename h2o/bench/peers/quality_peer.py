"""What a text loses when its prompt is compressed by kvpress or by transformers' QuantizedCache.

Run by peers.Peer with the model's folder and the number of threads. A request is
{"ids": [...], "prompt": tokens that are compressed, "method": one of METHODS or "QuantizedCache",
"kept": keys that a press keeps of them, or "bits" of a quantised cache}; the answer
{"loss": [-log p of each token from ids[prompt + 1] on], "bytes": {"cut": after the prompt,
"end": after the text}}.

The forward passes are those of kvpress' own pipeline: the prompt without the model's head under the
press, then the rest without it, at positions that count on. A press does nothing after the prompt,
and a quantised cache with room left in its residual part takes new tokens as they are, so that the
rest may go in at once.
"""

import json
import sys
from collections.abc import Iterator

import torch
from kvpress import (
    AdaKVPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    ObservedAttentionPress,
    SnapKVPress,
)
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache

METHODS = {
    "ObservedAttention": ObservedAttentionPress,
    "SnapKV": SnapKVPress,
    "KeyDiff": KeyDiffPress,
    "ExpectedAttention": ExpectedAttentionPress,
    "AdaKV": lambda ratio: AdaKVPress(ExpectedAttentionPress(ratio, epsilon=1e-2)),
}
"""As kvpress' own evaluation has them: AdaKV over ExpectedAttention, the others by default."""


def plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory of which a quantised one consists."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain(getattr(tensor, name))


def held(cache: DynamicCache, kept: int | None, grown: int) -> int:
    """Bytes of keys and values. AdaKV only masks what it drops: as if it were dropped."""
    total = 0
    for layer in cache.layers:
        if kept is not None:
            key = layer.keys[:, :, 0]
            total += 2 * key.nbytes * (kept + grown)
            continue
        parts = layer._quantized_keys, layer._quantized_values, layer.keys, layer.values
        total += sum(x.nbytes for part in parts for x in plain(part))
    return total


folder, threads = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(threads)
models = {
    attention: AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, attn_implementation=attention
    ).eval()
    for attention in ("sdpa", "eager")
}
for line in sys.stdin:
    request = json.loads(line)
    method, prompt, kept = request["method"], request["prompt"], request.get("kept")
    ids = torch.tensor([request["ids"]])
    model = models["eager" if method == "ObservedAttention" else "sdpa"]
    with torch.inference_mode():
        if kept is None:
            cache = QuantizedCache("quanto", model.config, nbits=request["bits"])
            model.model(input_ids=ids[:, :prompt], past_key_values=cache)
        else:
            cache = DynamicCache()
            # A press rounds down; half a key more keeps what is asked for.
            with METHODS[method](1 - (kept + 0.5) / prompt)(model):
                model.model(input_ids=ids[:, :prompt], past_key_values=cache)
        answer = {"bytes": {"cut": held(cache, kept, 0)}}
        rest = ids[:, prompt:]
        positions = torch.arange(prompt, ids.shape[1])[None]
        logits = model(rest, past_key_values=cache, position_ids=positions).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, rest[0, 1:], reduction="none")
        answer["bytes"]["end"] = held(cache, kept, rest.shape[1])
        answer["loss"] = loss.tolist()
    if kept is not None and method != "AdaKV":
        assert cache.layers[0].keys.shape[2] == kept + rest.shape[1]
    print(json.dumps(answer), flush=True)
