"""What h2o serves in vLLM, and whom: the entry "h2o" of the config, what is refused beside it, and
the requests with their budgets. Knows vLLM, as `plugin` does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessor
from vllm.v1.sample.logits_processor.builtin import process_dict_updates

from h2o.config import H2OConfig
from h2o.vllm.page_budget import PageBudget, config_of, places_of, with_budget, with_pins
from h2o.vllm.paged_rows import Request

__all__ = [
    "Budgets",
    "Requests",
    "budget_of",
    "entry_of",
    "has_windows",
    "logger",
    "refuse",
    "register_requests",
]

logger = init_logger("vllm.h2o")

ENTRY = "h2o"
"""The entry of `--additional-config`."""


# ---- What is served --------------------------------------------------------------------------


def entry_of(vllm_config: VllmConfig) -> Any:
    """The entry "h2o" of the config; None where there is none."""
    additional = vllm_config.additional_config
    return additional.get(ENTRY) if isinstance(additional, dict) else None


def served_config(vllm_config: VllmConfig) -> H2OConfig:
    """What the entry "h2o" says, for this model. Raises: TypeError, ValueError for a wrong one."""
    model = vllm_config.model_config.hf_text_config
    return config_of(entry_of(vllm_config), model, together=can_deal(vllm_config))


def budget_of(vllm_config: VllmConfig) -> PageBudget:
    """The budgets of this model's layers, or of this rank's part of them.

    Raises: TypeError, ValueError for a wrong entry, and for a model or setting that is not served.
    """
    refuse(vllm_config)
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    ranks = parallel.tensor_parallel_size
    part = parallel.rank % ranks, ranks
    layers, places = model.get_num_layers(parallel), places_of(entry_of(vllm_config))
    return PageBudget(served_config(vllm_config), layers, model.max_model_len, places, part)


def one_key(vllm_config: VllmConfig) -> Tensor:
    """[1, G, 1, D] that stands for the keys of a layer of this model."""
    model = vllm_config.model_config
    shape = (1, model.get_num_kv_heads(vllm_config.parallel_config), 1, model.get_head_size())
    return torch.empty(shape, dtype=model.dtype, device="cpu")


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


def refuse(vllm_config: VllmConfig) -> None:
    """Raises ValueError for a setting that is not served, with the reason."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    cache, attention = vllm_config.cache_config, vllm_config.attention_config
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
        "a KV connector": (vllm_config.kv_transfer_config, "pages cannot be shared or moved"),
        "vLLM's V2 model runner": (
            vllm_config.use_v2_model_runner,
            "set VLLM_USE_V2_MODEL_RUNNER=0",
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


# ---- Who the requests are --------------------------------------------------------------------


class Requests(LogitsProcessor):
    """The requests of a batch by row. vLLM tells logits processors of them before each forward
    pass; logits stay as they are."""

    of_config: dict[str, Requests] = {}  # noqa: RUF012 - by the instance of a config
    """Those of each engine of this process, by `VllmConfig.instance_id`."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self.rows: dict[int, Request] = {}
        self.config: H2OConfig | None = None
        if entry_of(vllm_config) is not None:
            self.budget = budget_of(vllm_config)  # which refuses, also for models whose layers
            self.config = self.budget.config  # never ask for this module's backend
            self.keys = one_key(vllm_config)
            self.of_config[vllm_config.instance_id] = self

    def update_state(self, batch_update: Any) -> None:
        if self.config is not None:
            process_dict_updates(self.rows, batch_update, self.request)

    def request(self, params: Any, prompt: list[int] | None, answer: list[int]) -> Request | None:
        """A new request; None where its prompt's length is not known.

        Its own budget, `h2o_heavy` and `h2o_recent` of `vllm_xargs`, is as `H2OConfig` has them;
        what is more than a page holds is cut off.
        """
        if prompt is None or self.config is None:
            return None
        arguments, config, pinned = params.extra_args or {}, None, []
        try:
            config = with_budget(self.config, arguments)
        except (TypeError, ValueError) as error:  # here it would end the server
            logger.warning("h2o: a request gets the server's budget: %s", error)
        try:
            asked = with_pins(self.config, arguments, len(prompt))
            self.budget.check_room(self.keys, asked)
            pinned = asked
        except (TypeError, ValueError) as error:
            logger.warning("h2o: a request is served without the pins that it asks for: %s", error)
        return Request(len(prompt), config, pinned)

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def is_argmax_invariant(self) -> bool:
        return True


class Budgets(Requests):
    """The same. Named by `--logits-processors h2o.vllm.plugin:Budgets`, which has vLLM ask it of
    each request before that is taken: a wrong budget becomes the answer 400, where else the request
    gets the server's budget, and a line of the log says why."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError for a wrong budget or pin."""
        try:
            arguments = sampling_params.extra_args or {}
            with_budget(H2OConfig(), arguments)
            with_pins(H2OConfig(), arguments)
        except TypeError as error:
            raise ValueError(str(error)) from error


def register_requests() -> None:
    """Has vLLM tell `Requests`. Among the processors that come with vLLM, since its V2 model runner
    refuses to start where a plugin's entry point names one of this kind."""
    if Requests not in BUILTIN_LOGITS_PROCESSORS:
        BUILTIN_LOGITS_PROCESSORS.append(Requests)
