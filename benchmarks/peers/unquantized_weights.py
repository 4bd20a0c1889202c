"""The default model's weights in 16 bits for peers, since its own GGUF file has four."""

from __future__ import annotations

from pathlib import Path

from h2o import models

from ..machine import cache_dir

__all__ = ["unquantized_weights"]

KINDS = {"float16": "F16", "bfloat16": "BF16"}
"""gguf's names of the dtypes"""


def unquantized_weights(dtype: str) -> Path:
    """A GGUF file with the same metadata in a separate folder, written if it does not exist."""
    import gguf  # only tables of other engines need it, none for a GPU

    target = cache_dir() / dtype / "model.gguf"
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_suffix(".part")
    stored = gguf.GGMLQuantizationType[KINDS[dtype]]
    file_type = gguf.LlamaFileType[f"MOSTLY_{KINDS[dtype]}"]
    reader = gguf.GGUFReader(models.find_weights())
    writer = gguf.GGUFWriter(unfinished, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer has them already
        kind, *element = field.types
        value = field.contents()
        if name == "general.file_type":
            value = int(file_type)
        writer.add_key_value(name, value, kind, element[0] if element else None)
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if weights.ndim == 1:
            writer.add_tensor(tensor.name, weights.astype("f4"))
        else:
            writer.add_tensor(tensor.name, gguf.quants.quantize(weights, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)
    return target
