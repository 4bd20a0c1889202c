"""What is refused and said: of the entry "h2o" of vLLM's config, of settings of vLLM that it does
not go with, and of requests."""

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
from h2o.packages import install_command
from h2o.vllm.entry import entry_places, served_budget_config
from h2o.vllm.page_budget import PageBudget
from h2o.vllm.paged_request import Request, prefix_tokens, with_budget, with_pins
from h2o.vllm.refusing_backends import Unchanged

logger = init_logger("vllm.h2o")

ENTRY = "h2o"
"""The entry of `--additional-config`."""

CONNECTOR = "StoredPromptsConnector"
"""h2o's own KV connector"""


def entry_of(vllm_config: VllmConfig) -> Any:
    """The entry "h2o" of the config; None where there is none."""
    additional = vllm_config.additional_config
    return additional.get(ENTRY) if isinstance(additional, dict) else None


def page_budget(vllm_config: VllmConfig) -> PageBudget:
    """The budgets of this model's layers, or of this rank's part of them.

    Raises: TypeError, ValueError for a wrong entry, and for a model or setting that is not served.
    """
    refuse(vllm_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    entry, ranks = entry_of(vllm_config), parallel.tensor_parallel_size
    part = parallel.rank % ranks, ranks
    config = served_budget_config(
        entry, model.hf_text_config, can_deal=lambda: can_deal(vllm_config)
    )
    layers = model.get_num_layers(parallel)
    return PageBudget(config, layers, model.max_model_len, entry_places(entry), part)


def can_deal(vllm_config: VllmConfig) -> bool:
    """Whether places can be dealt over all layers of the model: they are h2o's, with all of their
    heads, and on the CPU, since on GPUs nothing of this has run."""
    is_whole = vllm_config.parallel_config.tensor_parallel_size == 1
    if not (current_platform.is_cpu() and is_whole) or has_windows(vllm_config):
        return False
    from h2o.vllm.echo_of_prompts import not_dealt  # and all that serves transformers

    return not not_dealt(vllm_config.model_config.hf_config)


def has_windows(vllm_config: VllmConfig) -> bool:
    """Whether some layers of the model have a sliding window, and others full attention."""
    kinds = getattr(vllm_config.model_config.hf_text_config, "layer_types", None) or ()
    return {"full_attention", "sliding_attention"} <= {*kinds}


def _has_other_scheduler(vllm_config: VllmConfig) -> bool:
    scheduler = vllm_config.scheduler_config.scheduler_cls
    return scheduler is not None and getattr(scheduler, "__module__", "") != "h2o.vllm.scheduler"


def refuse(vllm_config: VllmConfig) -> None:
    """Raises ValueError for a setting that is not served, with the reason."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache, attention = vllm_config.cache_config, vllm_config.attention_config
    transfer = vllm_config.kv_transfer_config
    on_cpu, on_gpu = current_platform.is_cpu(), current_platform.is_cuda()
    reasons = {
        "other platforms than the CPU and NVIDIA's GPUs": (
            not (on_cpu or on_gpu),
            "none was tested so far",
        ),
        "a GPU by vLLM's own attention": (
            on_gpu and attention.backend is not AttentionBackendEnum.CUSTOM,
            "give --attention-backend CUSTOM",
        ),
        "layers with a sliding window beside others on a GPU": (
            on_gpu and has_windows(vllm_config),
            "they would be vLLM's own, which h2o knows on the CPU only",
        ),
        "layers with states": (model.is_hybrid, "their pages and h2o's were not tried together"),
        "speculative decoding": (
            vllm_config.speculative_config,
            "drafts that are not accepted would have evicted keys already",
        ),
        "pipeline parallelism": (
            parallel.pipeline_parallel_size > 1,
            "pages have the size of the model's widest layer; use --tensor-parallel-size",
        ),
        "context parallelism": (
            parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
            "a request's keys are ranked together, on one rank",
        ),
        "multi-head latent attention": (model.use_mla, "its keys are no heads of their own"),
        f"--kv-cache-dtype {cache.cache_dtype}": (
            cache.cache_dtype not in ("auto", "float32", "float16", "bfloat16"),
            "give kv_dtype in the entry h2o",
        ),
        "a KV connector": (
            transfer is not None and transfer.kv_connector != CONNECTOR,
            "pages cannot be moved",
        ),
        "a scheduler of your own": (
            _has_other_scheduler(vllm_config),
            "h2o's reads prefixes by themselves; leave out --scheduler-cls",
        ),
        "models that pool": (
            model.runner_type == "pooling",
            "no step follows a prompt, so no key is worth evicting",
        ),
        "micro-batches": (
            parallel.use_ubatching,
            "the chunks of a prompt are followed from batch to batch; leave out --enable-dbo",
        ),
        f"{model.get_total_num_kv_heads()} key/value heads on {parallel.tensor_parallel_size} "
        "tensor parallel ranks": (
            model.get_total_num_kv_heads() % parallel.tensor_parallel_size,
            "a head that is copied to several ranks would be scored by a part of its queries",
        ),
    }
    for what, (present, reason) in reasons.items():
        if present:
            raise ValueError(f"h2o does not serve {what}: {reason}")


# ---- Requests --------------------------------------------------------------------------------


class Requests(Unchanged, ProcessorOfV1, ProcessorOfV2):
    """What vLLM's front end asks whether a request's `vllm_xargs` are valid, before it accepts the
    request. vLLM finds it by the entry point `h2o` of `vllm.logits_processors`."""

    of_config: ClassVar[WeakValueDictionary[str, Requests]] = WeakValueDictionary()
    """The processor of each engine of this process, by `VllmConfig.instance_id`."""

    def __init__(self, vllm_config: VllmConfig, *of_runner: Any) -> None:
        if entry_of(vllm_config) is not None:
            page_budget(vllm_config)  # refuses, also where no layer asks for h2o's backend
            self.of_config[vllm_config.instance_id] = self

    @classmethod
    def check_asked(cls, vllm_config: VllmConfig) -> None:
        """Raises RuntimeError where vLLM has made none, so that wrong requests would be accepted,
        which end the scheduler."""
        if vllm_config.instance_id not in cls.of_config:
            raise RuntimeError(
                "vLLM does not ask h2o about its requests: the installed h2o lacks the entry point "
                f"h2o of vllm.logits_processors. Install it again: {install_command()}"
            )

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError for a wrong budget or pin, which becomes the answer 400."""
        try:
            arguments = sampling_params.extra_args or {}
            with_budget(H2OConfig(), arguments)
            with_pins(H2OConfig(), arguments)
            prefix_tokens(arguments, 0)
        except TypeError as error:
            raise ValueError(str(error)) from error


def read_request(
    arguments: dict[str, Any], prompt: int, server: PageBudget, keys: Tensor
) -> Request:
    """A new request with a prompt of so many tokens, by its `vllm_xargs`.

    Its own budget, `h2o_heavy` and `h2o_recent`, is as `H2OConfig` has them; what is more than a
    page holds is cut off. What does not go together with the server's config is a line of the log,
    since an error here would end the server.

    Args:
        keys: like [1, G, any, D], of a layer.
    """
    config, pinned = None, []
    prefix = prefix_tokens(arguments, prompt)
    try:
        config = with_budget(server.config, arguments)
    except (TypeError, ValueError) as error:
        logger.warning("h2o: a request gets the server's budget: %s", error)
    try:
        asked = with_pins(server.config, arguments, prefix or prompt)
        server.check_room(keys, asked)
        pinned = asked
    except (TypeError, ValueError) as error:
        logger.warning("h2o: a request is served without the pins that it asks for: %s", error)
    return Request(prompt, config, pinned, prefix)
