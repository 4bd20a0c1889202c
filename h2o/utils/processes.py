"""Several processes of one command, as torchrun and `accelerate launch` start them."""

from __future__ import annotations

import os

from h2o.errors import UserError

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables by which launchers describe a process."""


def refuse_several(command: str) -> None:
    """Raise UserError where a launcher has started several processes of a command for one."""
    if (world := world_size()) > 1:
        raise UserError(
            f"{command} is for one process, and {world} were launched, which would all do the same "
            "work and write the same files: start it without torchrun or accelerate launch"
        )


def world_size() -> int:
    """Number of processes that a launcher has started, 1 without one."""
    if not all(os.environ.get(name) for name in LAUNCHED):
        return 1
    return int(os.environ["WORLD_SIZE"])


def is_first() -> bool:
    """Whether this is the process that prints, of those that a launcher has started."""
    return world_size() == 1 or os.environ["RANK"] == "0"
