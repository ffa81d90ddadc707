"""Memory that the ranks of a communicator share, if they are on one host and ``bmt_kernels`` is there."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .communicator import Communicator


class SharedMemory(Protocol):
    """What ``bmt_kernels.SharedMemoryExchange`` does, message by message, in one order on all ranks."""

    def send(self, data: Tensor) -> None: ...

    def receive(self, like: Tensor) -> list[Tensor]: ...

    def release(self) -> None: ...


class _Connectable(SharedMemory, Protocol):
    @property
    def handle(self) -> tuple[int, int, int]: ...

    def connect(self, handles: Sequence[tuple[int, int, int]]) -> bool: ...


def connect_shared_memory(comm: Communicator, timeout: datetime.timedelta) -> SharedMemory | None:
    """Find the other ranks' memory. A collective; None, on all ranks, where one of them cannot."""
    exchange = _create(comm, timeout)
    mine = torch.tensor((0, 0, 0) if exchange is None else exchange.handle)
    handles = mine.new_empty(comm.size, 3)
    comm.all_gather(handles, mine)
    connected = exchange is not None and exchange.connect([(a, b, c) for a, b, c in handles.tolist()])
    agreed = torch.tensor(int(connected))
    comm.all_reduce(agreed, "min")
    return exchange if agreed.item() else None


def _create(comm: Communicator, timeout: datetime.timedelta) -> _Connectable | None:
    try:
        from bmt_kernels import SharedMemoryExchange
    except ImportError:
        return None
    if not SharedMemoryExchange.available():
        return None
    try:
        return SharedMemoryExchange(comm.rank, comm.size, timeout.total_seconds())
    except OSError:  # the system gives no such memory
        return None
