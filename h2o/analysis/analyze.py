"""`h2o.analyze`: measures what a model attends to in a text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from h2o.analysis.given_config import warn_of_floor
from h2o.analysis.result import Analysis
from h2o.arguments.plain_values import is_list
from h2o.arguments.torch_values import check_ids, check_mask
from h2o.budgets import check_prompt_length
from h2o.config import H2OConfig, resolve_config
from h2o.hf.model_traits import tensor_parallel
from h2o.hf.model_traits.wrappers import input_device
from h2o.model_identity import vocabulary_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from h2o.config.fields import ConfigFields


def analyze(
    model: Any,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    h2o_config: H2OConfig | None = None,
    prompt_length: int = 1,
    **parameters: Unpack[ConfigFields],
) -> Analysis:
    """Measure what a model attends to in one text, and what an H2O cache would keep of it.

    ```python
    inputs = tokenizer(text, return_tensors="pt")
    a = h2o.analyze(model, **inputs, heavy=0.1, recent=0.1)
    for token in a.tokens(tokenizer, layer=5)[:10]:
        print(token.position, repr(token.text), token.score)
    ```

    Runs two forward passes: one of the model as it is, one with an `H2OCache` of this config.
    Memory is linear in the text's length. Methods of the result that need another pass (`sparsity`
    with another threshold, `retained_mass` of another config, `tokens` at a step, `removal`) run
    the model again, so do not change the model in between.

    Args:
        model: a causal language model that `H2OCache` supports. Layers with a sliding window are
            left out.
        input_ids: int64 [1, n] or [n], n >= 3, one text.
        attention_mask: the same shape. Padding is removed before anything else.
        h2o_config: an `H2OConfig`. Its fields can be passed as keywords instead: `heavy`,
            `recent`, ... Fractions are of the text. `heavy` is also the number of heavy hitters,
            which `min_tokens` raises in short texts: with `min_tokens=0` it is the fraction itself.
            If keywords without `min_tokens` are raised, a UserWarning says so.
        prompt_length: number of tokens before the first eviction. 1 evicts from the very beginning.

    Raises:
        UnsupportedError: h2o does not support the model.
        TypeError, ValueError: an argument is wrong.
        ValueError: attention is not finite, as with weights that overflow float16.
    """
    parameters.pop("token_type_ids", None)  # some tokenizers return them, decoders ignore them
    config = resolve_config(h2o_config, parameters, analyze).for_model(model)
    input_device(model)  # raises for a model without weights
    ids = _one_text(input_ids, attention_mask, vocabulary_of(model))
    if (part := tensor_parallel.part_of_heads(model)) != tensor_parallel.WHOLE:
        raise ValueError(
            "analyze() shows all heads of a model, but this is "
            f"{tensor_parallel.describe_part(part)}: load the "
            "model whole, in one process without tp_plan or distributed_config"
        )
    lengths = check_prompt_length(prompt_length)
    longest = lengths if isinstance(lengths, int) else max(lengths)
    if longest >= len(ids):
        raise ValueError(
            f"prompt_length is {longest}, but the text has {len(ids)} tokens, so nothing "
            f"would be evicted: use a number from 1 to {len(ids) - 1}, or a longer text"
        )
    analysis = Analysis(model, ids, config, lengths)
    if h2o_config is None:
        warn_of_floor(model, config, parameters, len(ids))
    return analysis


def _one_text(input_ids: Any, mask: Any, vocabulary: float) -> Tensor:
    """The text as int64 [n], without padding."""
    hint = 'call h2o.analyze(model, **tokenizer(text, return_tensors="pt")), one text at a time'
    name = "input_ids"
    ids = check_ids(name, input_ids, one_row=True, vocabulary=vocabulary, least=3, hint=hint)[0]
    if mask is not None:
        given = getattr(input_ids, "ndim", 2 if is_list(input_ids[0]) else 1)
        shape = (1, len(ids)) if given == 2 else (len(ids),)
        real = check_mask("attention_mask", mask, shape, "as input_ids", ids.device).reshape(-1)
        ids = ids[real]
    if len(ids) < 3:
        raise ValueError(f"input_ids has {len(ids)} tokens without padding; expected at least 3")
    return ids
