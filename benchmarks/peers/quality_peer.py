"""Loss of a text whose prompt is compressed by kvpress or by transformers' QuantizedCache.

Started by peers.Peer with the model's folder, the number of threads and the dtype (default:
bfloat16). A request is {"ids": [...], "prompt": tokens that are compressed, "method": one of
METHODS, "full" or "QuantizedCache", "kept": keys that a press keeps of the prompt (default: all),
"bits": bits of a quantized cache, which presses may also fill}. The answer is
{"loss": [-log p of each token from ids[prompt + 1] on], "bytes": {"cut": after the prompt,
"end": after the text}}. With "answer", a number of tokens at the end of the ids, it also has
"found": whether greedy decoding gives these tokens. The tokens before them are then processed at
once, and these one by one.

The forward passes are those of kvpress' own pipeline: the prompt under the press and without the
model's head, then the rest without the press, at the following positions. A press does nothing
after the prompt, and a quantized cache with room in its residual part stores new tokens unchanged,
so the rest can be processed at once. KVzip gets a tokenizer without a chat template, since these
prompts have none. Otherwise it would take their first tokens for the template.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Iterator

import torch
from kvpress import (
    AdaKVPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    KVzipPress,
    ObservedAttentionPress,
    SnapKVPress,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, Cache, DynamicCache, QuantizedCache

METHODS = {
    "ObservedAttention": ObservedAttentionPress,
    "SnapKV": SnapKVPress,
    "KeyDiff": KeyDiffPress,
    "ExpectedAttention": ExpectedAttentionPress,
    "AdaKV": lambda ratio: AdaKVPress(ExpectedAttentionPress(ratio, epsilon=1e-2)),
    "KVzip": KVzipPress,
}
"""The settings of kvpress' own evaluation: AdaKV over ExpectedAttention, the others by default"""
MASKING = ("AdaKV", "KVzip")
"""Methods that only mask the keys that they drop, which differ between heads. Only visible keys are
counted."""


def plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors that make up a quantized one."""
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain(getattr(tensor, name))


def bytes_held(cache: Cache, tokens: int) -> int:
    """Bytes of keys and values. Without quantization those of `tokens` tokens, since the cache
    still holds the keys that a method in `MASKING` drops."""
    total = 0
    for layer in cache.layers:
        if isinstance(cache, QuantizedCache):
            parts = layer._quantized_keys, layer._quantized_values, layer.keys, layer.values
            total += sum(x.nbytes for part in parts for x in plain(part))
        else:
            total += 2 * layer.keys[:, :, 0].nbytes * tokens
    return total


folder, threads = sys.argv[1], int(sys.argv[2])
dtype = getattr(torch, sys.argv[3] if len(sys.argv) > 3 else "bfloat16")
torch.set_num_threads(threads)
models = {
    attention: AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation=attention
    ).eval()
    for attention in ("sdpa", "eager")
}
without_template = tempfile.TemporaryDirectory()
tokenizer = AutoTokenizer.from_pretrained(folder)
tokenizer.chat_template = None
tokenizer.save_pretrained(without_template.name)
for model in models.values():
    model.config.name_or_path = without_template.name  # KVzip loads the tokenizer from here
for line in sys.stdin:
    request = json.loads(line)
    method, prompt = request["method"], request["prompt"]
    kept, bits = request.get("kept", prompt), request.get("bits")
    ids, alone = torch.tensor([request["ids"]]), request.get("answer", 1) - 1
    model = models["eager" if method == "ObservedAttention" else "sdpa"]
    with torch.inference_mode():
        cache = QuantizedCache("quanto", model.config, nbits=bits) if bits else DynamicCache()
        press = contextlib.nullcontext()
        if kept < prompt:  # most presses round down; half a key more gives the requested number
            half = 0.0 if method == "KVzip" else 0.5
            press = METHODS[method](1 - (kept + half) / prompt)(model)
        with press:
            model.model(input_ids=ids[:, :prompt], past_key_values=cache)
        answer = {"bytes": {"cut": bytes_held(cache, kept)}}
        end = ids.shape[1]
        # The last token is only predicted. With an answer it is not processed.
        first = end - 1 - alone if "answer" in request else end
        pieces = [(prompt, first), *((i, i + 1) for i in range(first, end - 1))]
        logits = torch.cat([
            model(
                ids[:, a:b], past_key_values=cache, position_ids=torch.arange(a, b)[None]
            ).logits[0]
            for a, b in pieces
        ])[: end - prompt - 1].float()  # fmt: skip
        targets = ids[0, prompt + 1 :]
        loss = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        read = pieces[-1][1] - prompt
        answer["bytes"]["end"] = bytes_held(cache, kept + read)
        answer["loss"] = loss.tolist()
        if "answer" in request:
            right = logits.argmax(-1) == targets
            answer["found"] = bool(right[-request["answer"] :].all())
    if method not in MASKING:
        assert cache.get_seq_length() == kept + read
    print(json.dumps(answer), flush=True)
