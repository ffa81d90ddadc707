"""The transport of operations on CPU tensors, for each process group: messages of gloo, or shared memory."""

from __future__ import annotations

import datetime
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor

from . import _compat
from .direct_exchange import DirectExchange
from .hosts import HostsCollectives, connect, ranks_on_this_host
from .journal import waits
from .operation import Operation
from .shared_memory import SharedMemoryCollectives
from .work import Work

_log = logging.getLogger("bmt_comm")


class Transport(Protocol):
    """Operations on CPU tensors in place of those of the process group; tensors are contiguous and 1-D.

    ``waits_at_once`` says that the caller waits right after the call.

    Attributes:
        in_order: whether operations run one at a time, in the order in which they were posted, as NCCL's do.
        eager: whether making a process group takes all ranks of the job.
    """

    in_order: bool
    eager: bool

    def all_gather(
        self, chunks: Sequence[Tensor], mine: Tensor, operation: Operation, waits_at_once: bool = False
    ) -> Work: ...

    def reduce_scatter(
        self, out: Tensor, chunks: Sequence[Tensor], op: str, operation: Operation, waits_at_once: bool = False
    ) -> Work: ...

    def all_reduce(self, flat: Tensor, op: str, operation: Operation) -> Work: ...

    def broadcast(self, flat: Tensor, root: int, operation: Operation) -> Work: ...

    def all_gather_object(self, obj: Any) -> list[Any]: ...

    def broadcast_object(self, obj: Any, root: int) -> Any: ...

    def send(self, data: Tensor, peer: int, tag: int) -> Work: ...

    def recv(self, data: Tensor, peer: int, tag: int) -> Work: ...

    def send_recv(self, sends: Sequence[tuple[Tensor, int]], recvs: Sequence[tuple[Tensor, int]]) -> list[Work]: ...


transports: dict[str, Callable[[dist.ProcessGroup], Transport]] = {}
"""Factories of the transports of process groups, by the backend's name; for tests, see ``bmt_comm.testing``."""

HostCollectives = DirectExchange | SharedMemoryCollectives | HostsCollectives

host_collectives: WeakKeyDictionary[dist.ProcessGroup, HostCollectives] = WeakKeyDictionary()
"""By process group, for all communicators on it."""


def use_messages(group: dist.ProcessGroup) -> None:
    """Let collectives of a process group be messages over it, unless its ranks share memory already."""
    if group not in host_collectives:
        host_collectives[group] = DirectExchange(group)


def share_memory(group: dist.ProcessGroup, ranks: Sequence[int], timeout: datetime.timedelta) -> None:
    """Let the ranks of a process group, with global ranks ``ranks``, share memory if they can. A collective.

    ``timeout``: after which a collective fails if a rank has not joined it.
    """
    direct = host_collectives[group]
    if not isinstance(direct, DirectExchange):
        return
    connected = connect(direct, ranks, timeout, ranks_on_this_host())
    if isinstance(connected, str):
        _say_why_memory_is_not_shared(connected, ranks[0])
    else:
        host_collectives[group] = connected


@functools.cache
def _say_why_memory_is_not_shared(reason: str, first_rank: int) -> None:
    """Warn once, on one rank."""
    if dist.get_rank() == 0 and first_rank == 0:
        _log.warning("ranks send messages over gloo and do not share memory, which would be faster: %s", reason)


def stop_sharing_memory(groups: Iterable[dist.ProcessGroup]) -> None:
    """Release the memory that communicators on these groups share, even if they are still referenced."""
    for group in groups:
        on_host = host_collectives.get(group)
        if isinstance(on_host, (SharedMemoryCollectives, HostsCollectives)):
            host_collectives[group] = on_host.direct


def stop_waiting(message: str) -> None:
    """End all waits of this process, and NCCL's kernels, with an error."""
    groups = []
    for group, on_host in list(host_collectives.items()):
        if not isinstance(on_host, DirectExchange):
            on_host.stop(message)
        # A group that was destroyed has no backend any more, even if it is still referenced.
        if group in dist.distributed_c10d._world.pg_map and (waits or _compat.uses_nccl(group)):
            groups.append(group)
    # NCCL groups together, in one thread; each other group in its own thread, so that none waits for another.
    nccl = [group for group in groups if _compat.uses_nccl(group)]
    for together in (nccl, *([group] for group in groups if group not in nccl)):
        if together:
            threading.Thread(target=_compat.abort, args=(together,), daemon=True).start()
