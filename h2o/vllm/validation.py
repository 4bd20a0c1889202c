"""Validation of the entry "h2o" in vLLM's config, of the model and vLLM's settings, and of
requests."""

from __future__ import annotations

from typing import Any, ClassVar
from weakref import WeakValueDictionary

from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.sample.logits_processor import LogitsProcessor as ProcessorOfV1
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorOfV2

from h2o.config import H2OConfig
from h2o.hf.modes import Mode, check_modes
from h2o.packages import install_command
from h2o.spans import Row
from h2o.vllm.config_entry import config_of_entry, whole_prompts_of
from h2o.vllm.page_budget import PageBudget
from h2o.vllm.paged_request import (
    PagedRequest,
    evicted_spans,
    prefix_tokens,
    with_budget,
    with_pins,
)
from h2o.vllm.unsupported_backends import Unchanged

logger = init_logger("vllm.h2o")

ENTRY = "h2o"
"""h2o's entry in `--additional-config`"""

CONNECTOR = "StoredPromptsConnector"
"""h2o's own KV connector"""


def entry_of(vllm_config: VllmConfig) -> Any:
    """The entry "h2o" of the config, or None if there is none."""
    additional = vllm_config.additional_config
    return additional.get(ENTRY) if isinstance(additional, dict) else None


def page_budget(vllm_config: VllmConfig) -> PageBudget:
    """The budgets of this model's layers, or of this rank's part of them.

    Raises: TypeError, ValueError for a wrong entry, and for a model or setting that is not
    supported.
    """
    check_supported(vllm_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    entry, ranks = entry_of(vllm_config), parallel.tensor_parallel_size
    part = parallel.rank % ranks, ranks
    config = config_of_entry(
        entry, model.hf_text_config, can_divide_budget=lambda: can_divide_budget(vllm_config)
    )
    layers = model.get_num_layers(parallel)
    return PageBudget(config, layers, model.max_model_len, whole_prompts_of(entry), part)


def can_divide_budget(vllm_config: VllmConfig) -> bool:
    """Whether the budget of a request can be divided across all layers of the model. All layers
    must use h2o's attention, with all of their heads on one rank. Only the CPU is supported, since
    this has never run on a GPU."""
    is_whole = vllm_config.parallel_config.tensor_parallel_size == 1
    if not (current_platform.is_cpu() and is_whole) or has_windows(vllm_config):
        return False
    from h2o.vllm.prompt_scoring import echo_replacement  # imports transformers

    return not echo_replacement(vllm_config.model_config.hf_config)


def has_windows(vllm_config: VllmConfig) -> bool:
    """Whether some layers of the model have a sliding window and others full attention."""
    kinds = getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or ()
    return {"full_attention", "sliding_attention"} <= {*kinds}


def check_supported(vllm_config: VllmConfig) -> None:
    """Raise ValueError with the reason if the model or a setting is not supported."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache, attention = vllm_config.cache_config, vllm_config.attention_config
    transfer, scheduler = vllm_config.kv_transfer_config, vllm_config.scheduler_config.scheduler_cls
    on_cpu, on_gpu = current_platform.is_cpu(), current_platform.is_cuda()
    kinds = {Mode.HYBRID: model.is_hybrid, Mode.LATENT: model.use_mla}
    check_modes({Mode.VLLM, *(mode for mode, holds in kinds.items() if holds)})
    reasons = {
        "platforms other than the CPU and NVIDIA GPUs": (
            not (on_cpu or on_gpu),
            "none has been tested",
        ),
        "vLLM's own attention on a GPU": (
            on_gpu and attention.backend is not AttentionBackendEnum.CUSTOM,
            "pass --attention-backend CUSTOM",
        ),
        "models with a sliding window in some layers on a GPU": (
            on_gpu and has_windows(vllm_config),
            "these layers would use vLLM's own attention, which h2o supports on the CPU only",
        ),
        "speculative decoding": (
            vllm_config.speculative_config,
            "rejected drafts would already have evicted keys",
        ),
        "pipeline parallelism": (
            parallel.pipeline_parallel_size > 1,
            "pages have the size that the model's largest layer needs; use --tensor-parallel-size",
        ),
        "context parallelism": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "all keys of a request are ranked together, on one rank",
        ),
        f"--kv-cache-dtype {cache.cache_dtype}": (
            cache.cache_dtype not in ("auto", "float32", "float16", "bfloat16"),
            "set kv_dtype in the entry h2o",
        ),
        "a KV connector": (
            transfer is not None and transfer.kv_connector != CONNECTOR,
            "pages cannot be moved",
        ),
        "a custom scheduler": (
            scheduler is not None and getattr(scheduler, "__module__", "") != "h2o.vllm.scheduler",
            "h2o needs its own to prefill prefixes separately; leave out --scheduler-cls",
        ),
        "pooling models": (
            model.runner_type == "pooling",
            "no decode step follows a prompt, so eviction would save nothing",
        ),
        "micro-batches": (
            parallel.use_ubatching,
            "the chunks of a prompt are tracked from batch to batch; leave out --enable-dbo",
        ),
        f"{model.get_total_num_kv_heads()} key/value heads on {parallel.tensor_parallel_size} "
        "tensor parallel ranks": (
            model.get_total_num_kv_heads() % parallel.tensor_parallel_size,
            "a head that is copied to several ranks would be scored by only some of its queries",
        ),
    }
    for what, (present, reason) in reasons.items():
        if present:
            raise ValueError(f"h2o does not support {what}: {reason}")


# ---- Requests --------------------------------------------------------------------------------


class Requests(Unchanged, ProcessorOfV1, ProcessorOfV2):
    """Validates the `vllm_xargs` of a request before vLLM's front end accepts the request. vLLM
    finds this class by the entry point `h2o` of `vllm.logits_processors`."""

    of_config: ClassVar[WeakValueDictionary[str, Requests]] = WeakValueDictionary()
    """The processor of each engine in this process, by `VllmConfig.instance_id`"""

    def __init__(self, vllm_config: VllmConfig, *of_runner: Any) -> None:
        if entry_of(vllm_config) is not None:
            page_budget(vllm_config)  # raises errors even if no layer uses h2o's backend
            self.of_config[vllm_config.instance_id] = self

    @classmethod
    def check_created(cls, vllm_config: VllmConfig) -> None:
        """Raise RuntimeError if vLLM has created no processor. It would then accept wrong requests,
        and these end the scheduler."""
        if vllm_config.instance_id not in cls.of_config:
            raise RuntimeError(
                "vLLM does not let h2o validate requests: the installed h2o lacks the entry point "
                f"h2o of vllm.logits_processors. Reinstall it: {install_command()}"
            )

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError for a wrong budget, pin or prefix. vLLM answers with status 400."""
        try:
            arguments = sampling_params.extra_args or {}
            any_config = H2OConfig(heavy=0.1, recent=0.1)  # the server's is not known here
            with_budget(any_config, arguments)
            with_pins(any_config, arguments)
            prefix_tokens(arguments, 0)
            evicted_spans(arguments)
        except TypeError as error:
            raise ValueError(str(error)) from error


def read_request(
    arguments: dict[str, Any], prompt: int, server: PageBudget, keys: Tensor
) -> PagedRequest:
    """Create a request with a prompt of `prompt` tokens from its `vllm_xargs`.

    `h2o_heavy` and `h2o_recent` are its own budget, with the meaning that they have in `H2OConfig`.
    A budget larger than a page is reduced later, which is logged if no room is left for heavy
    hitters. Arguments that conflict with the server's config are logged and ignored, since an error
    here would end the server.

    Args:
        keys: tensor [1, G, any, D] like the keys of a layer.
    """
    config = None
    prefix = prefix_tokens(arguments, prompt)
    try:
        config = with_budget(server.config, arguments)
    except (TypeError, ValueError) as error:
        logger.warning("h2o: a request gets the server's budget instead of its own: %s", error)
    if config is not None and (reason := server.why_no_heavy(keys, prefix or prompt, config)):
        logger.warning("h2o: a request keeps no heavy hitters: %s", reason)
    try:
        pinned = with_pins(server.config, arguments, prefix or prompt)
        server.check_room(keys, pinned)
    except (TypeError, ValueError) as error:
        pinned = []
        logger.warning("h2o: a request is answered without the pins that it asks for: %s", error)
    evicted: Row = []
    try:
        evicted = evicted_spans(arguments, prefix or prompt)
    except (TypeError, ValueError) as error:
        logger.warning("h2o: a request keeps the tokens that it asks to forget: %s", error)
    return PagedRequest(prompt, config, pinned, prefix, evicted)
