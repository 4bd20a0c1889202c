"""The default model's weights as OpenVINO reads them, in float16: its own file has four bits."""

from __future__ import annotations

from pathlib import Path

import gguf

from h2o import models

from ..machine import cache_dir

__all__ = ["float16_weights"]


def float16_weights() -> Path:
    """A GGUF file with the same metadata, in a folder of its own, made when it is not there yet."""
    target = cache_dir() / "float16" / "model.gguf"
    if target.exists():
        return target
    target.parent.mkdir(exist_ok=True)
    unfinished = target.with_suffix(".part")
    reader = gguf.GGUFReader(models.find_weights())
    writer = gguf.GGUFWriter(unfinished, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue  # the writer has them already
        kind, *element = field.types
        value = field.contents()
        if name == "general.file_type":
            value = int(gguf.LlamaFileType.MOSTLY_F16)
        writer.add_key_value(name, value, kind, element[0] if element else None)
    for tensor in reader.tensors:
        weights = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, weights.astype("f4" if weights.ndim == 1 else "f2"))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    unfinished.rename(target)
    return target
