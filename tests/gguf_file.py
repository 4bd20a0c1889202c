"""Write a tiny model as a .gguf file, without network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import torch
from tokenizers.pre_tokenizers import ByteLevel


def write_gguf(path: Path, merges: Sequence[str] = ("a b",)) -> Path:
    """Write a Llama with random weights and a tokenizer of single bytes and merged pairs."""
    D, F, H, G = 16, 32, 4, 2
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(D)
    writer.add_block_count(2)
    writer.add_feed_forward_length(F)
    writer.add_head_count(H)
    writer.add_head_count_kv(G)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(D // H)
    writer.add_rope_freq_base(10000.0)
    writer.add_tokenizer_model("gpt2")
    tokens = [*sorted(ByteLevel.alphabet()), "<|end|>", *(pair.replace(" ", "") for pair in merges)]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] + [1] * len(merges))
    writer.add_token_merges(list(merges))
    writer.add_eos_token_id(256)
    writer.add_vocab_size(len(tokens))
    generator = torch.Generator().manual_seed(0)
    shapes = {"token_embd": (len(tokens), D), "output_norm": (D,)}
    for i in range(2):
        shapes |= {f"blk.{i}.{name}": (D,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{i}.{name}": (D, D) for name in ("attn_q", "attn_output")}
        shapes |= {f"blk.{i}.{name}": (D * G // H, D) for name in ("attn_k", "attn_v")}
        shapes |= {f"blk.{i}.{name}": (F, D) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{i}.ffn_down"] = (D, F)
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", torch.randn(shape, generator=generator).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
