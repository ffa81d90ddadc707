"""Collectives on the CPU over several hosts: shared memory within a host, messages between hosts.

[Note: columns]
    All hosts have the same number of ranks. The ranks with the same place on their hosts are a *column*. A collective
    has a part within hosts and a part within columns, so that each byte crosses to another host once, not once for each
    rank of that host:

    ============== ==================================== =========================================
    collective     first                                then
    ============== ==================================== =========================================
    all-gather     columns: every host's chunk          hosts: the chunks of the other columns
    reduce-scatter hosts: one sum for each host         columns: the sum of these, which may travel packed
    all-reduce     hosts: reduce-scatter                columns: all-reduce; hosts: all-gather
    broadcast      the root's column, and its host      the other hosts
    ============== ==================================== =========================================

    The first part begins at the call. The second part begins when ranks wait, in the order of the calls: a wait for a
    collective also waits for all that began before it, because other ranks may be waiting for them. The two parts have
    separate exchanges, because the order in an exchange must be the same on all ranks.
"""

from __future__ import annotations

import datetime
import os
import platform
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from .direct_exchange import DirectExchange, split_evenly
from .fixed_order import TREE_SUM
from .operation import Operation
from .packing import Packing
from .refusals import Refusals
from .shared_memory import SharedMemoryCollectives, connect_shared_memory
from .shared_memory_channel import Order
from .work import DONE, Pending, Work

_ONE_SHOT_BYTES = 1 << 16  # of all ranks together, up to which an all-reduce is one-shot
_UNEQUAL = "ranks are on several hosts, in containers or of users, that do not have as many each, or have one each"
_MEETING = Operation(0, b"hosts", 0)


class HostsCollectives:
    """Collectives of a process group over several hosts, in the same order on all ranks.

    Args:
        direct: messages between all ranks.
        hosts: the ranks of every host.
        within: the collectives of this rank's host, for the first and for the second part of a collective.
    """

    def __init__(
        self,
        direct: DirectExchange,
        hosts: Sequence[Sequence[int]],
        within: tuple[SharedMemoryCollectives, SharedMemoryCollectives],
    ) -> None:
        self.rank, self.size, self.direct = direct.rank, direct.size, direct
        self.host_count = len(hosts)
        self._hosts = hosts
        self._host, self._place = _place_of(direct.rank, hosts)
        self._column = [host[self._place] for host in hosts]
        self._within, self._within_later = within
        self._across, self._across_later = direct.among(self._column, 3), direct.among(self._column, 4)
        self._unfinished: deque[_Finish] = deque()
        self._order = Order()
        self._refusals: Refusals | None = None
        self._why = ""  # waits were ended
        self._has_failed = False  # and the other ranks were told
        self.waits_for = 0

    def tell_refusals(self, store: dist.Store) -> None:
        """Let ranks know by ``store`` what another one was refused: see :meth:`send_nothing`. All ranks call this."""
        self._refusals = Refusals(store, self.rank, self)

    def all_gather(
        self, chunks: Sequence[Tensor], mine: Tensor, operation: Operation, waits_at_once: bool = False
    ) -> Work:
        works = [
            self._across.all_gather([chunks[rank] for rank in self._column], mine, operation),
            self._within.all_gather([chunks[rank] for rank in self._hosts[self._host]], mine, operation),
        ]

        def finish() -> None:
            _wait_for(works)
            others = [host for n, host in enumerate(self._hosts) if n != self._host]
            works[:] = [
                self._within_later.all_gather([chunks[rank] for rank in host], chunks[host[self._place]], operation)
                for host in others
            ]
            _wait_for(works)

        return self._later(operation, finish, (chunks, mine))

    def reduce_scatter(
        self, out: Tensor, chunks: Sequence[Tensor], op: str, operation: Operation, waits_at_once: bool = False
    ) -> Work:
        if not _splits(op, out) or len({chunk.numel() for chunk in chunks}) > 1:
            return self._later(operation, self.direct.reduce_scatter(out, chunks, op, operation).wait, chunks)
        sums, works = self._reduce_within(chunks, op, chunks[0].dtype, operation)

        def finish() -> None:
            _wait_for(works)
            self._across_later.reduce_scatter(out, sums.unbind(), op, operation).wait()
            self.direct.memory.give_back(sums)

        return self._later(operation, finish, chunks)

    def packed_reduce_scatter(
        self, out: Tensor, chunks: Sequence[Tensor], packing: Packing, operation: Operation
    ) -> Work:
        """Sum in the dtype of ``out``. The sums for other hosts are packed; the sum for this host is not.

        Sums within a host have the order of a tree. Sums between hosts have the order of the hosts.
        """
        sums, works = self._reduce_within(chunks, TREE_SUM, out.dtype, operation)

        def finish() -> None:
            _wait_for(works)
            packed = out.new_empty((2, self.host_count, packing.bytes(out.numel())), dtype=torch.uint8)
            sent, received = packed[0].unbind(), packed[1].unbind()
            for host, total in enumerate(sums.unbind()):
                if host != self._host:
                    packing.pack(sent[host], total)
            across = self._across_later
            _wait_for(across.exchange(sent, received, across.next_tag(operation)))
            packing.add_up(out, received, self._host, sums[self._host])
            self.direct.memory.give_back(sums)

        return self._later(operation, finish, chunks)

    def _reduce_within(
        self, chunks: Sequence[Tensor], op: str, dtype: torch.dtype, operation: Operation
    ) -> tuple[Tensor, list[Work]]:
        """The host's sums for this rank's place on every host, (hosts, numel), and the works that compute them."""
        sums = self.direct.memory.take(self.host_count, chunks[0].numel(), dtype)
        works = [
            self._within.reduce_scatter(total, [chunks[rank] for rank in host], op, operation)
            for total, host in zip(sums.unbind(), self._hosts)
        ]
        return sums, works

    def all_reduce(self, flat: Tensor, op: str, operation: Operation) -> Work:
        if not _splits(op, flat) or flat.nbytes * self.size <= _ONE_SHOT_BYTES:
            return self._later(operation, self.direct.all_reduce(flat, op, operation).wait, flat)
        parts = split_evenly(flat, len(self._hosts[0]))
        mine = parts[self._place]
        works = [self._within.reduce_scatter(mine, parts, op, operation)]

        def finish() -> None:
            _wait_for(works)
            if mine.numel():
                self._across_later.all_reduce(mine, op, operation).wait()
            self._within_later.all_gather(parts, mine, operation).wait()

        return self._later(operation, finish, flat)

    def broadcast(self, flat: Tensor, root: int, operation: Operation) -> Work:
        host, place = _place_of(root, self._hosts)
        works = [self._across.broadcast(flat, host, operation)] if place == self._place else []
        if host == self._host:
            works.append(self._within.broadcast(flat, place, operation))

        def finish() -> None:
            _wait_for(works)
            if host != self._host:
                self._within_later.broadcast(flat, place, operation).wait()

        return self._later(operation, finish, flat)

    # The other collectives of torch.distributed are messages between each two ranks.

    def reduce(self, flat: Tensor, root: int, op: str, operation: Operation) -> Work:
        """Reduce into ``flat`` of rank ``root``; ``flat`` of the others is not written."""
        with torch.inference_mode(False):  # it may be written outside of inference mode later
            total = flat if self.rank == root else flat.clone()
        return self.all_reduce(total, op, operation)

    def gather(self, chunks: Sequence[Tensor], mine: Tensor, root: int, operation: Operation) -> Work:
        """Copy every rank's ``mine`` into ``chunks`` of rank ``root``, except its own chunk."""
        nothing = mine[:0]
        sends = [mine if rank == root else nothing for rank in range(self.size)]
        return self._exchange(sends, chunks if self.rank == root else [nothing] * self.size, operation)

    def scatter(self, mine: Tensor, chunks: Sequence[Tensor], root: int, operation: Operation) -> Work:
        """Copy chunk r of rank ``root`` into ``mine`` of rank r, except that of the root."""
        nothing = mine[:0]
        receives = [mine if rank == root else nothing for rank in range(self.size)]
        return self._exchange(chunks if self.rank == root else [nothing] * self.size, receives, operation)

    def all_to_all(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], operation: Operation) -> Work:
        """Copy ``inputs[r]`` into ``outputs[this rank]`` of every other rank r.

        The numbers of bytes go first, because gloo ends the process that receives more than it has room for.
        """
        ours = torch.tensor([[mine.nbytes, out.nbytes] for mine, out in zip(inputs, outputs)], device="cpu")
        theirs = ours.clone()  # a rank's own part fits
        works = self.direct.exchange(ours.unbind(), theirs.unbind(), self.direct.next_tag(operation))
        tag = self.direct.next_tag(operation)

        def finish() -> None:
            _wait_for(works)
            sends, receives, wrong = list(inputs), list(outputs), []
            for rank, (sent, expected) in enumerate(theirs.tolist()):
                if sent != outputs[rank].nbytes:
                    wrong.append((rank, sent, self.rank, outputs[rank].nbytes))
                    receives[rank] = outputs[rank][:0]
                if expected != inputs[rank].nbytes:
                    wrong.append((self.rank, inputs[rank].nbytes, rank, expected))
                    sends[rank] = inputs[rank][:0]
            _wait_for(self.direct.exchange(sends, receives, tag))
            if wrong:
                source, sent, target, expected = wrong[0]
                raise ValueError(
                    f"all_to_all: rank {source} sends {sent} bytes to rank {target}, whose output takes {expected}"
                )

        return self._later(operation, finish, (inputs, outputs))

    def _exchange(self, sends: Sequence[Tensor], receives: Sequence[Tensor], operation: Operation) -> Work:
        works = self.direct.exchange(sends, receives, self.direct.next_tag(operation))
        return self._later(operation, lambda: _wait_for(works), (sends, receives))

    def send_nothing(self, operation: Operation) -> Work:
        """Ranks that do take part in ``operation`` fail soon. Needs no waiting."""
        if self._refusals is not None:
            self._refusals.tell(operation)
        return DONE

    def stop(self, why: str) -> None:
        """End all waits, in other threads too, with an error."""
        self._why = why
        if self._refusals is not None:
            self._refusals.leave()
        for within in (self._within, self._within_later):
            within.stop(why)
        if self._unfinished:  # otherwise other ranks may still be reading messages of this one
            self.direct.stop()

    def fail(self, error: BaseException) -> None:
        """After ``error``, collectives that are not done fail, on every rank that needs a message of this one."""
        self._order.fail(error)
        for within in (self._within, self._within_later):
            within.fail(error)
        if self._refusals is not None and not self._why and not self._has_failed:
            self._has_failed = True
            self._refusals.tell_failure(error)

    def _told(self) -> str:
        """What a rank was refused, if that may be why the collective of ``waits_for`` has failed."""
        return "" if self._refusals is None else self._refusals.told(self.waits_for)

    def _later(self, operation: Operation, finish: Callable[[], None], keep: object) -> Work:
        """A collective that has begun; ``finish`` is its second part."""
        self._order.check()
        entry = _Finish(operation.number, finish)
        self._unfinished.append(entry)

        def wait() -> None:
            try:
                while not entry.done:
                    self._order.check()
                    if self._why:
                        raise RuntimeError(self._why)
                    self.waits_for = self._unfinished[0].number
                    self._unfinished[0].run()
                    self._unfinished.popleft()
            except BaseException as error:
                self.fail(error)  # an interrupted second part cannot be begun again
                why = self._why or self._told() if isinstance(error, RuntimeError) else ""
                if why:
                    raise RuntimeError(why) from error
                raise
            finally:
                self.waits_for = 0

        return Pending([], wait, keep)


class _Finish:
    """The second part of a collective."""

    def __init__(self, number: int, run: Callable[[], None]) -> None:
        self.number, self._run = number, run
        self.done = False

    def run(self) -> None:
        self._run()
        self.done = True


def _wait_for(works: list[Work]) -> None:
    for work in works:
        work.wait()


def _splits(op: str, tensor: Tensor) -> bool:
    """Whether the reduction of partial reductions is the reduction of all."""
    return op != TREE_SUM and (op != "avg" or tensor.is_floating_point() or tensor.is_complex())


def _place_of(rank: int, hosts: Sequence[Sequence[int]]) -> tuple[int, int]:
    """The host of a rank and its place there."""
    return next((n, host.index(rank)) for n, host in enumerate(hosts) if rank in host)


def connect(
    direct: DirectExchange, ranks: Sequence[int], timeout: datetime.timedelta | Callable[[], float], local_size: int = 0
) -> SharedMemoryCollectives | HostsCollectives | str:
    """The fastest collectives that all ranks of a group can use.

    A collective. Shared memory needs all ranks on one host, or several hosts with the same number of ranks, at least
    two.

    Args:
        direct: messages between the ranks.
        ranks: their global ranks.
        timeout: after which a collective fails if a rank has not joined it, or a function that returns its seconds.
        local_size: the ranks of the job on this host, if they are more: :func:`ranks_on_this_host`.

    Returns:
        The collectives; or, on all ranks, the reason why only messages are possible.
    """
    mine = torch.tensor([host_identity()], device="cpu")
    identities = mine.repeat(direct.size, 1)
    direct.all_gather(list(identities.unbind()), mine, _MEETING).wait()
    by_host: dict[int, list[int]] = {}
    for rank, identity in enumerate(identities.flatten().tolist()):
        by_host.setdefault(identity, []).append(rank)
    hosts = list(by_host.values())
    if len(hosts) == 1:
        return connect_shared_memory(direct, ranks, timeout, local_size)
    if len(hosts[0]) == 1 or len({len(host) for host in hosts}) > 1:
        return _UNEQUAL
    here = hosts[_place_of(direct.rank, hosts)[0]]
    within = [
        connect_shared_memory(direct.among(here, n), [ranks[r] for r in here], timeout, local_size) for n in (1, 2)
    ]
    connected = torch.tensor([int(not any(isinstance(each, str) for each in within))], device="cpu")
    direct.all_reduce(connected, "min", _MEETING).wait()
    first, second = within
    if connected.item() and isinstance(first, SharedMemoryCollectives) and isinstance(second, SharedMemoryCollectives):
        return HostsCollectives(direct, hosts, (first, second))
    return next((each for each in within if isinstance(each, str)), "the ranks of another host cannot share memory")


def ranks_on_this_host() -> int:
    """How many ranks of the job run on this host, from the launcher's environment variables; 0: unknown.

    They share the processors of the host, whichever group they communicate in.
    """
    size = os.environ.get("LOCAL_WORLD_SIZE", "") or os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "")
    return int(size) if size.isdecimal() else 0


def host_identity() -> int:
    """A number that is the same for processes that can share memory: one user, one booted system, one container."""
    facts: list[object] = [os.getuid() if hasattr(os, "getuid") else 0]
    boot = Path("/proc/sys/kernel/random/boot_id")
    facts.append(boot.read_text() if boot.exists() else platform.node())
    namespace = Path("/proc/self/ns/pid")
    facts.append(os.readlink(namespace) if namespace.exists() else "")
    text = repr(facts).encode()
    return zlib.crc32(text) << 31 | zlib.crc32(text[::-1]) >> 1
