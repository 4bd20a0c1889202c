"""What a text loses when its prompt is compressed by kvpress or by transformers' QuantizedCache.

Run by peers.Peer with the model's folder and the number of threads. A request is
{"ids": [...], "prompt": tokens that are compressed, "method": one of METHODS or "QuantizedCache",
"kept": keys that a press keeps of them, all by default, and "bits" of a quantised cache, which
kvpress' presses may fill too}; the answer
{"loss": [-log p of each token from ids[prompt + 1] on], "bytes": {"cut": after the prompt,
"end": after the text}}.

The forward passes are those of kvpress' own pipeline: the prompt without the model's head under the
press, then the rest without it, at positions that count on. A press does nothing after the prompt,
and a quantised cache with room left in its residual part takes new tokens as they are, so that the
rest may go in at once.
"""

import contextlib
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
from transformers import AutoModelForCausalLM, Cache, DynamicCache, QuantizedCache

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


def bytes_held(cache: Cache, tokens: int) -> int:
    """Bytes of keys and values; without quantisation of so many tokens, as AdaKV only masks what
    it drops."""
    total = 0
    for layer in cache.layers:
        if isinstance(cache, QuantizedCache):
            parts = layer._quantized_keys, layer._quantized_values, layer.keys, layer.values
            total += sum(x.nbytes for part in parts for x in plain(part))
        else:
            total += 2 * layer.keys[:, :, 0].nbytes * tokens
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
    method, prompt = request["method"], request["prompt"]
    kept, bits = request.get("kept", prompt), request.get("bits")
    ids = torch.tensor([request["ids"]])
    model = models["eager" if method == "ObservedAttention" else "sdpa"]
    with torch.inference_mode():
        cache = QuantizedCache("quanto", model.config, nbits=bits) if bits else DynamicCache()
        press = contextlib.nullcontext()
        if kept < prompt:  # a press rounds down; half a key more keeps what is asked for
            press = METHODS[method](1 - (kept + 0.5) / prompt)(model)
        with press:
            model.model(input_ids=ids[:, :prompt], past_key_values=cache)
        answer = {"bytes": {"cut": bytes_held(cache, kept)}}
        rest = ids[:, prompt:]
        positions = torch.arange(prompt, ids.shape[1])[None]
        logits = model(rest, past_key_values=cache, position_ids=positions).logits[0, :-1].float()
        loss = torch.nn.functional.cross_entropy(logits, rest[0, 1:], reduction="none")
        answer["bytes"]["end"] = bytes_held(cache, kept + rest.shape[1])
        answer["loss"] = loss.tolist()
    if method != "AdaKV":
        assert cache.get_seq_length() == kept + rest.shape[1]
    print(json.dumps(answer), flush=True)
