"""The policy: the choice of the keys that are kept, one record from the caller to the kernels.

A field is written here and in `csrc/tables.c` (`h2o_policy_fields`), in the same order, and nowhere
else: options and texts of the policy come from `FIELDS`. (CONTRIBUTING.md says what a new choice of
`score_by` takes.) Imports neither torch nor NumPy.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from h2o.budgets import check_tokens

OperationScore = Literal["sum", "mean", "max"]
"""Scores that the operations rank by."""
ScoreBy = Literal["sum", "mean", "max", "mean-echo", "random"]
"""Scores that a cache can rank by. Its layers make those of a prompt ("mean-echo") or all
("random")."""
OPERATIONS_SCORE_BY: dict[str, OperationScore] = {"mean-echo": "mean", "random": "sum"}
"""Score of the operations for a score of a cache that they do not know."""
BEFORE = 4
"""Tokens before a key that echo looks at, besides the key's own."""


class Policy(NamedTuple):
    """Choice of the keys that a budget has room for."""

    sinks: int = 0
    """First tokens of the row that are never evicted (Xiao et al., "Efficient Streaming
    Language Models with Attention Sinks", ICLR 2024)."""
    score_by: OperationScore = "sum"
    """"sum": accumulated attention. "mean": the same per query that has seen the key, so that
    age is no advantage. "max": the largest attention that any one query and head has given it."""
    decay: float = 1.0
    """In [0, 1]: what remains of a score after one more token. 1 is H2O; 0 ranks by the last
    query alone."""
    value_weighted: bool = False
    """Multiply the rank by the L2 norm of the key's value."""

    @property
    def scores_largest(self) -> bool:
        """Whether a score is the largest attention that any one query gave, rather than the sum.
        Both fade alike: attention counts decay^age."""
        return self.score_by == "max"

    def queries_of(self, positions: Any, lengths: Any) -> Any:
        """Number of queries that have seen each key, float32: decay^0 + ... + decay^(age - 1).

        Args:
            positions, lengths: integer tensors of torch, positions of keys and tokens that their
                rows have seen.
        """
        age = (lengths - positions).clamp(min=1).float()
        if self.decay == 0.0:
            return age.new_ones(age.shape)
        if self.decay == 1.0:
            return age
        return (age * math.log(self.decay)).expm1() / (self.decay - 1.0)


class PolicyFields(TypedDict, total=False):
    """The fields of a `Policy` as keyword arguments of a function."""

    sinks: int
    score_by: ScoreBy
    decay: float
    value_weighted: bool


class Field(NamedTuple):
    """A field of the policy as an option of a command, or in a text as name=value."""

    parse: Callable[[str], Any]
    """Function of a text to the value. Raises: ValueError for a text that is none."""
    choices: tuple[str, ...] | None
    metavar: str | None
    help: str
    """a line, in which %(default)s is the default"""
    flag: bool = False
    """Whether the option stands for True by itself."""


def _truth(text: str) -> bool:
    if text.lower() not in ("", "true", "false"):
        raise ValueError(f"is true or false, not {text!r}")
    return text.lower() != "false"


FIELDS: dict[str, Field] = {
    "sinks": Field(int, None, "N", "number of first tokens that are never evicted (%(default)s)"),
    "score_by": Field(
        str, get_args(ScoreBy), None,
        "sum: all attention that a key has received; mean: attention per query that has seen the "
        "key; max: the largest of any query; mean-echo: mostly echo in the prompt, then the mean; "
        "random: a baseline for evaluation (%(default)s)",
    ),
    "decay": Field(
        float, None, "D",
        "factor by which a score shrinks with each further token, 0 to 1 (%(default)s)",
    ),
    "value_weighted": Field(
        _truth, None, None, "multiply the rank by the norm of the value", flag=True
    ),
}  # fmt: skip
"""Options for the fields of `Policy`, in their order."""


def check_policy(policy: Policy, choices: Sequence[str] = get_args(OperationScore)) -> Policy:
    """Convert a policy to plain Python numbers. `choices` are the allowed scores.

    Raises: TypeError for a thing that is no number (a bool is none), ValueError for a number out
    of range.
    """
    _, score_by, decay, value_weighted = policy
    sinks = check_tokens("sinks", policy.sinks)
    if score_by not in choices:
        *others, last = (f'"{name}"' for name in choices)
        raise ValueError(f"score_by must be {', '.join(others)} or {last}, not {score_by!r}")
    if isinstance(decay, bool) or not isinstance(decay, numbers.Real):
        raise TypeError(f"decay must be a number in [0, 1], not {decay!r}")
    if not 0 <= decay <= 1:  # refuses NaN as well
        raise ValueError(f"decay must be in [0, 1], not {decay!r}")
    if not isinstance(value_weighted, bool):
        raise TypeError(f"value_weighted must be True or False, not {value_weighted!r}")
    return Policy(sinks, score_by, float(decay), value_weighted)


PAPER = Policy()
"""The policy of Zhang et al.: accumulated attention alone."""


def one_policy(policy: Policy, fields: PolicyFields) -> Policy:
    """The policy that a caller gave by its fields.

    Raises: TypeError where it was given whole too, and for a keyword that is no field.
    """
    if policy is not PAPER:
        raise TypeError(f"give a policy or its fields, not both: {', '.join(fields)}")
    return Policy(**fields)
