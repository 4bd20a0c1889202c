"""Several processes that measure together, as torchrun and `accelerate launch` start them.

Every process has the whole model and goes through the same steps. Only what takes long is divided:
of so many pieces of work each process does one, then all of them know all results. So a piece
is computed from the same tensors as by a single process, and numbers are the same; which machine a
process runs on does not matter, nor whether machines share a disk. The first process alone writes
and prints.
"""

from __future__ import annotations

import datetime
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from h2o.errors import UserError

__all__ = ["ALONE", "Processes", "finish", "launched", "refuse_several"]

Piece, Result = TypeVar("Piece"), TypeVar("Result")

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""What launchers tell a process by its environment."""


class Processes:
    """This process, number `rank` of `world`. All processes must call the collective methods.

    Values travel pickled through `group`, a process group of torch.distributed on the CPU.
    """

    def __init__(self, rank: int = 0, world: int = 1, group: Any = None) -> None:
        self.rank, self.world, self.group = rank, world, group

    @property
    def first(self) -> bool:
        """Whether this is the one that writes and prints."""
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

    def shared(
        self, pieces: Sequence[Piece], work: Callable[[Piece], Result]
    ) -> Iterator[tuple[Piece, Result]]:
        """(piece, its result) in order, on every process; each works on every world-th piece."""
        return self.streamed(pieces, lambda mine: enumerate(map(work, mine)))

    def streamed(
        self,
        pieces: Sequence[Piece],
        work: Callable[[Sequence[Piece]], Iterator[tuple[int, Result]]],
    ) -> Iterator[tuple[Piece, Result]]:
        """As `shared`, for work on many pieces at a time: it takes every world-th of them, and
        yields (index among these, result) in any order."""
        mine = work(pieces[self.rank :: self.world])
        for _ in range(0, len(pieces), self.world):
            for rank, done in enumerate(self.everyone(next(mine, None))):
                if done is not None:
                    index, result = done
                    yield pieces[rank + index * self.world], result

    def agree(self, facts: Sequence[dict[str, Any]]) -> None:
        """Raises: UserError that names what a process has found otherwise than the first one."""
        firsts, *rest = self.everyone(facts)
        for rank, others in enumerate(rest, 1):
            if len(others) != len(firsts):
                raise UserError(
                    f"process {rank} found {len(others)} results to make and process 0 "
                    f"{len(firsts)}: give all processes the same files"
                )
            for one, other in zip(firsts, others, strict=True):
                for name in sorted(one):
                    if one[name] != other.get(name):
                        raise UserError(
                            f"process {rank} has {name} {other.get(name)!r} and process 0 "
                            f"{one[name]!r}: give all processes the same files and versions"
                        )


ALONE = Processes()


@functools.cache
def launched() -> Processes:
    """All that were launched together, which meet at the first call; `ALONE` without a launcher."""
    if _several() == 1:
        return ALONE
    from torch import distributed

    patience = datetime.timedelta(weeks=52)  # a launcher ends all of them where one fails
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", timeout=patience)
    group = distributed.new_group(backend="gloo", timeout=patience)
    return Processes(distributed.get_rank(), distributed.get_world_size(), group)


def refuse_several(command: str) -> None:
    """Raises: UserError where a launcher has started a command several times that is for one."""
    if (world := _several()) > 1:
        raise UserError(
            f"{command} is for one process, and {world} were launched, which would all do the same "
            "work and write the same files: start it without torchrun or accelerate launch"
        )


def _several() -> int:
    """How many processes a launcher has started."""
    if not all(os.environ.get(name) for name in LAUNCHED):
        return 1
    return int(os.environ["WORLD_SIZE"])


def finish() -> None:
    """Ends the process group after a barrier, so that no connection closes while in use."""
    if launched.cache_info().currsize and launched().world > 1:
        from torch import distributed

        distributed.barrier(launched().group)
        distributed.destroy_process_group()
        launched.cache_clear()
