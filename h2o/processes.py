"""Several processes of one command, as torchrun and `accelerate launch` start them, or of one
model that is cut over them.
"""

from __future__ import annotations

import os
from typing import Any, TypeVar

from h2o.errors import UserError

__all__ = ["ALONE", "Processes", "is_first", "refuse_several", "world_size"]

Result = TypeVar("Result")

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What launchers tell a process by its environment."""


class Processes:
    """This process, number `rank` of `world`. All processes must call the collective methods.

    Values travel pickled through `group`, a process group of torch.distributed.
    """

    def __init__(self, rank: int = 0, world: int = 1, group: Any = None) -> None:
        self.rank, self.world, self.group = rank, world, group

    @property
    def first(self) -> bool:
        """Whether this is the one that writes."""
        return self.rank == 0

    def everyone(self, value: Result) -> list[Result]:
        """The value of each process, by rank."""
        if self.world == 1:
            return [value]
        from torch import distributed

        values: list[Any] = [None] * self.world
        distributed.all_gather_object(values, value, group=self.group)
        return values

    def of_first(self, value: Result) -> Result:
        """The value of the first process."""
        return self.everyone(value if self.first else None)[0]  # type: ignore[return-value]


ALONE = Processes()


def refuse_several(command: str) -> None:
    """Raises: UserError where a launcher has started a command several times that is for one."""
    if (world := world_size()) > 1:
        raise UserError(
            f"{command} is for one process, and {world} were launched, which would all do the same "
            "work and write the same files: start it without torchrun or accelerate launch"
        )


def world_size() -> int:
    """How many processes a launcher has started, 1 without one."""
    if not all(os.environ.get(name) for name in LAUNCHED):
        return 1
    return int(os.environ["WORLD_SIZE"])


def is_first() -> bool:
    """Whether this is the process that prints, of those that a launcher has started."""
    return world_size() == 1 or os.environ["RANK"] == "0"
