"""The requests of a batch, which vLLM's two model runners describe each in its own way.

What depends on the runner stands here. Both tell a logits processor of each request before the
first forward pass with it, and ask it whether the request's parameters are valid before the server
accepts the request. vLLM finds the processor by the entry point `h2o` of `vllm.logits_processors`;
logits stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import LogitsProcessor as ProcessorOfV1
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as ProcessorOfV2

from h2o.config import H2OConfig
from h2o.packages import install_command
from h2o.vllm.page_budget import one_key
from h2o.vllm.paged_request import Request, prefix_tokens, with_budget, with_pins
from h2o.vllm.refusing_backends import Unchanged
from h2o.vllm.validation import entry_of, logger, page_budget


class Requests(Unchanged, ProcessorOfV1, ProcessorOfV2):
    """The requests of an engine: by row of the batch in the V1 runner, by slot in the V2 runner,
    where a request keeps its slot while its row may change from step to step."""

    of_config: ClassVar[WeakValueDictionary[str, Requests]] = WeakValueDictionary()
    """The requests of each engine of this process, by `VllmConfig.instance_id`."""

    def __init__(self, vllm_config: VllmConfig, *of_runner: Any) -> None:
        """
        Args:
            of_runner: a device and whether memory is pinned, of V1; the state of requests, of V2.
        """
        self.known: dict[int, Request] = {}
        self.prompt_lengths: Any = None
        """Prompt length by slot; None: the V1 runner"""
        if vllm_config.use_v2_model_runner:
            self.prompt_lengths = of_runner[0].prompt_len.np
        self.config: H2OConfig | None = None
        if entry_of(vllm_config) is not None:
            self.budget = page_budget(vllm_config)  # which refuses, also for models whose layers
            self.config = self.budget.config  # never ask for h2o's backend
            model, parallel = vllm_config.model_config, vllm_config.parallel_config
            heads = model.get_num_kv_heads(parallel)
            self.keys = one_key(heads, model.get_head_size(), model.dtype)
            self.of_config[vllm_config.instance_id] = self

    @classmethod
    def of_engine(cls, vllm_config: VllmConfig) -> Requests:
        """Raises RuntimeError where vLLM has made none, so that budgets would be passed over."""
        if vllm_config.instance_id not in cls.of_config:
            raise RuntimeError(
                "vLLM does not tell h2o of its requests: the installed h2o lacks the entry point "
                f"h2o of vllm.logits_processors. Install it again: {install_command()}"
            )
        return cls.of_config[vllm_config.instance_id]

    def of_batch(self, rows: Any) -> Callable[[int], Request | None]:
        """The request of each row, by vLLM's metadata of all attention; None where a prompt's
        length is not known."""
        if self.prompt_lengths is None:
            return self.known.get
        slots = rows.req_idx.tolist()
        return lambda row: self.known.get(slots[row])

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

    def request(self, params: Any, prompt: int) -> Request:
        """A new request with a prompt of so many tokens.

        Its own budget, `h2o_heavy` and `h2o_recent` of `vllm_xargs`, is as `H2OConfig` has them;
        what is more than a page holds is cut off. What does not go together with the server's
        config is a line of the log, since an error here would end the server.
        """
        assert self.config is not None
        arguments, config, pinned = params.extra_args or {}, None, []
        prefix = prefix_tokens(arguments, prompt)
        try:
            config = with_budget(self.config, arguments)
        except (TypeError, ValueError) as error:
            logger.warning("h2o: a request gets the server's budget: %s", error)
        try:
            asked = with_pins(self.config, arguments, prefix or prompt)
            self.budget.check_room(self.keys, asked)
            pinned = asked
        except (TypeError, ValueError) as error:
            logger.warning("h2o: a request is served without the pins that it asks for: %s", error)
        return Request(prompt, config, pinned, prefix)

    # ---- As the V1 runner asks -------------------------------------------------------------------

    def update_state(self, batch_update: Any) -> None:
        if self.config is not None:
            process_dict_updates(self.known, batch_update, self._request_of_v1)

    def _request_of_v1(
        self, params: Any, prompt: list[int] | None, answer: list[int]
    ) -> Request | None:
        return None if prompt is None else self.request(params, len(prompt))

    # ---- As the V2 runner asks -------------------------------------------------------------------

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """False: the logits of no request are changed."""
        if self.config is not None:
            prompt = int(self.prompt_lengths[req_idx])
            self.known[req_idx] = self.request(sampling_params, prompt)
        return False
