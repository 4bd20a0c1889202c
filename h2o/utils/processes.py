"""Commands that torchrun or `accelerate launch` has started in several processes."""

from __future__ import annotations

import os
import sys

from h2o.errors import UserError

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Environment variables that launchers set for each process."""


def check_single_process(command: str) -> None:
    """Raise UserError if a launcher has started several processes of a single-process command."""
    if (world := world_size()) > 1:
        raise UserError(
            f"{command} is for one process, and {world} were launched, which would all do the same "
            "work and write the same files. Start it without torchrun or accelerate launch"
        )


def world_size() -> int:
    """Number of processes that a launcher has started, 1 without a launcher."""
    if not all(os.environ.get(name) for name in LAUNCHED):
        return 1
    return int(os.environ["WORLD_SIZE"])


def is_first() -> bool:
    """Whether this is the first of the launched processes, the one that prints."""
    return world_size() == 1 or os.environ["RANK"] == "0"


def leave_group() -> None:
    """Leave torch's process group, if this process is in one. Otherwise its threads may still run
    when Python exits, which then aborts the process (SIGABRT)."""
    distributed = sys.modules.get("torch.distributed")
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
