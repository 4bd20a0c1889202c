"""`Policy`: which keys are kept, as one record that is passed from the caller to the kernels.

The fields are listed here and in `csrc/tables.c` (`h2o_policy_fields`), in the same order, and
nowhere else. Command-line options and descriptions come from `FIELDS`. CONTRIBUTING.md says how to
add a choice of `score_by`. This module imports neither torch nor NumPy.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence, Set
from typing import Any, Literal, NamedTuple, TypedDict, get_args

from h2o.arguments.plain_values import check_choice, check_flag, check_fraction
from h2o.budgets import check_tokens

OperationScore = Literal["sum", "mean", "max"]
"""Scores that the operations can rank by."""
ScoreBy = Literal["sum", "mean", "max", "mean-echo", "random"]
"""Scores that a cache can rank by. For "mean-echo" the cache's layers compute the scores of the
prompt, for "random" all scores."""
OPERATIONS_SCORE_BY: dict[str, OperationScore] = {"mean-echo": "mean", "random": "sum"}
"""The score that the operations use in place of one that only a cache knows."""
BEFORE = 4
"""Number of tokens before a key whose queries count for its echo, besides the key's own token."""


class Policy(NamedTuple):
    """How to choose the keys that a budget keeps."""

    sinks: int = 0
    """Number of initial tokens of each row that are never evicted (Xiao et al., "Efficient
    Streaming Language Models with Attention Sinks", ICLR 2024)."""
    score_by: OperationScore = "sum"
    """"sum": accumulated attention. "mean": accumulated attention divided by the number of queries
    that have seen the key, so that older keys have no advantage. "max": the largest attention from
    any one query and head."""
    decay: float = 1.0
    """Factor in [0, 1] by which a score shrinks with each further token. 1 is H2O; 0 ranks by the
    last query alone."""
    value_weighted: bool = False
    """Multiply the rank by the L2 norm of the key's value."""

    @property
    def scores_largest(self) -> bool:
        """Whether a score is the largest attention from any one query, instead of the sum. In both
        cases attention counts decay^age."""
        return self.score_by == "max"

    def queries_of(self, positions: Any, lengths: Any) -> Any:
        """Decayed number of queries that have seen each key: decay^0 + ... + decay^(age - 1).

        Args:
            positions: torch integer tensor, the positions of the keys.
            lengths: torch integer tensor, the number of tokens that each key's row has seen.

        Returns:
            float32 tensor.
        """
        age = (lengths - positions).clamp(min=1).float()
        if self.decay == 0.0:
            return age.new_ones(age.shape)
        if self.decay == 1.0:
            return age
        return (age * math.log(self.decay)).expm1() / (self.decay - 1.0)


class PolicyFields(TypedDict, total=False):
    """The fields of a `Policy` as keyword arguments."""

    sinks: int
    score_by: ScoreBy
    decay: float
    value_weighted: bool


class Field(NamedTuple):
    """How a field of the policy is parsed, from a command-line option or from name=value."""

    parse: Callable[[str], Any]
    """Convert a text to the value. Raises: ValueError for an invalid text."""
    choices: tuple[str, ...] | None
    metavar: str | None
    help: str
    """One line. %(default)s stands for the default."""
    flag: bool = False
    """Whether the option takes no argument and means True."""


def _truth(text: str) -> bool:
    if text.lower() not in ("", "true", "false"):
        raise ValueError(f"must be true or false, not {text!r}")
    return text.lower() != "false"


FIELDS: dict[str, Field] = {
    "sinks": Field(int, None, "N", "number of initial tokens that are never evicted (%(default)s)"),
    "score_by": Field(
        str, get_args(ScoreBy), None,
        "sum: all attention that a key has received; mean: attention per query that has seen the "
        "key; max: the largest from any query; mean-echo: mostly echo for keys of the prompt, then "
        "the mean; random: a baseline that is only simulated (%(default)s)",
    ),
    "decay": Field(
        float, None, "D",
        "factor by which a score shrinks with each further token, 0 to 1 (%(default)s)",
    ),
    "value_weighted": Field(
        _truth, None, None, "multiply the rank by the norm of the value", flag=True
    ),
}  # fmt: skip
"""The fields of `Policy` as options, in the same order."""


def check_policy(policy: Policy, choices: Sequence[str] = get_args(OperationScore)) -> Policy:
    """Check a policy and convert it to plain Python numbers. `choices` are the allowed scores.

    Raises: TypeError for a value of the wrong type (a bool is not a number), ValueError for one out
    of range.
    """
    sinks, score_by, decay, value_weighted = policy
    return Policy(
        check_tokens("sinks", sinks),
        check_choice("score_by", score_by, choices),
        check_fraction("decay", decay),
        check_flag("value_weighted", value_weighted),
    )


PAPER = Policy()
"""The policy of Zhang et al.: accumulated attention alone."""


def check_names(unknown: Set[str], names: Sequence[str]) -> None:
    """Raise TypeError if there are unknown keywords. `names` are the known ones."""
    if unknown:
        name = min(unknown)
        close = difflib.get_close_matches(name, names, 1)
        hint = f". Did you mean {close[0]}?" if close else ""
        raise TypeError(f"unknown parameter {name!r}: expected one of {', '.join(names)}{hint}")


def resolve_policy(policy: Policy, fields: PolicyFields, function: Callable[..., Any]) -> Policy:
    """Make a policy from the fields that a caller of `function` gave.

    Raises: TypeError if the caller gave a policy too, and for a keyword that is not a field.
    """
    check_names(fields.keys() - {*Policy._fields}, [*Policy._fields, *function.__kwdefaults__])
    if policy is not PAPER:
        raise TypeError(f"give a policy or its fields, not both: {', '.join(fields)}")
    return Policy(**fields)
