"""The collectives of a process group "bmt" of one rank."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from .memory_ranges import copy_between
from .operation import Operation
from .work import DONE, Pending, Work


class CollectivesOfOneRank:
    """The collectives of a group of one rank, with the same arguments as those of larger groups.

    ``group_calls.GroupCall`` does the copies of a rank to itself in a gather, a scatter, an all-gather and an
    all-to-all.
    """

    def all_reduce(self, flat: Tensor, op: str, operation: Operation) -> Work:
        return DONE

    def reduce(self, flat: Tensor, root: int, op: str, operation: Operation) -> Work:
        return DONE

    def broadcast(self, flat: Tensor, root: int, operation: Operation) -> Work:
        return DONE

    def all_gather(self, chunks: Sequence[Tensor], mine: Tensor, operation: Operation) -> Work:
        return DONE

    def gather(self, chunks: Sequence[Tensor], mine: Tensor, root: int, operation: Operation) -> Work:
        return DONE

    def scatter(self, mine: Tensor, chunks: Sequence[Tensor], root: int, operation: Operation) -> Work:
        return DONE

    def reduce_scatter(self, out: Tensor, chunks: Sequence[Tensor], op: str, operation: Operation) -> Work:
        return Pending([], partial(copy_between, out, chunks[0]), None)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], operation: Operation) -> Work:
        return DONE

    def stop(self, why: str) -> None:
        """Nothing waits."""

    def fail(self, error: BaseException) -> None:
        """No other rank waits for this one."""
