"""The process groups and communicators of a layout: made on all ranks in one order, and connected."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from . import _compat
from .communicator import Communicator


class LayoutGroups:
    """Makes process groups and communicators. All ranks call it for the same ones, in the same order.

    All ranks make each process group, whether they are in it or not. If only the ranks of the group did
    (``use_local_synchronization``), torch would name it by the number of groups that a rank is in, and ranks in
    different numbers of groups would wait for each other under different names. If the default process group is bound
    to a device ("eager"), NCCL splits new groups off it, which takes all of its ranks. Groups that have no ranks in
    common are made by one split.

    If it is not bound to a device, NCCL connects the ranks of a group at their first exchange. In any group it connects
    two ranks at their first message, which blocks both. These exchanges happen here, in the same order on all ranks.

    Attributes:
        made: the process groups that were made.
        alone: the communicator of this rank.
        world: that of all ranks.
    """

    def __init__(self, everyone: dist.ProcessGroup, device: torch.device, timeout: datetime.timedelta) -> None:
        self.made: list[dist.ProcessGroup] = []
        self._device, self._timeout = device, timeout
        self._rank = dist.get_rank()
        self._known = {tuple(range(dist.get_world_size())): everyone}
        self._communicators: dict[dist.ProcessGroup, Communicator] = {}
        self.alone = Communicator(None, device)
        self.world = self.communicator([list(range(dist.get_world_size()))])

    def of(self, parts: Sequence[Sequence[int]]) -> dist.ProcessGroup:
        """The process group of this rank's part; the same object for the same ranks."""
        mine = next(tuple(part) for part in parts if self._rank in part)
        if mine not in self._known:
            made = self._make(parts)
            assert made is not None
            self._known[mine] = made
        return self._known[mine]

    def communicator(self, parts: Sequence[Sequence[int]]) -> Communicator:
        """The communicator of this rank's part; ``alone`` if the part has no other rank."""
        group = self.of(parts)
        if group not in self._communicators:
            alone = dist.get_world_size(group) == 1 and group is not dist.group.WORLD
            self._communicators[group] = self.alone if alone else self._connected(group, self._device)
        return self._communicators[group]

    def on_host(self, comm: Communicator, parts: Sequence[Sequence[int]]) -> Communicator:
        """A communicator of the same ranks for host memory; ``comm`` itself if it supports that."""
        if comm.size == 1 or not comm.in_order:
            return comm
        # In an eager group, torch makes ranks outside of the new group split NCCL's communicator even for gloo, where
        # the ranks of the group do not. So only these make it.
        group = self._make(parts, "gloo", alone=comm.eager)
        assert group is not None
        return self._connected(group, torch.device("cpu"))

    def channels(self, comm: Communicator, parts: Sequence[Sequence[int]]) -> dict[tuple[int, int], Communicator]:
        """The point-to-point channels of this rank: a communicator for each pair (source, target) of ranks of ``comm``.

        ``parts`` are the ranks of ``comm``, and of the other communicators of its kind.
        """
        pairs = [each for pair in _pairs(comm.size) for each in (pair, pair[::-1])]
        if not comm.in_order:
            return {pair: comm for pair in pairs if comm.rank in pair}
        # Each channel is a separate process group, so torch need not warn that messages wait for each other.
        os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        channels = {}
        for source, target in pairs:
            group = self._make([sorted((part[source], part[target])) for part in parts])
            if group is None:
                continue
            channel = channels[source, target] = Communicator(group, self._device)
            token = torch.zeros(1, device=self._device)
            (channel.send if comm.rank == source else channel.recv)(token, 1 - channel.rank)
        return channels

    def _make(
        self, parts: Sequence[Sequence[int]], backend: str | None = None, alone: bool = False
    ) -> dist.ProcessGroup | None:
        """Make a process group for each part; returns this rank's. ``alone``: only the ranks of a part make it."""
        mine = None
        if self.world.eager and backend is None and len(set(_compat.backends().values())) == 1:
            mine = dist.split_group(split_ranks=[list(part) for part in parts], timeout=self._timeout)
            self.made += [mine] if mine is not None else []
            return mine
        for part in parts:
            group = dist.new_group(list(part), self._timeout, backend, use_local_synchronization=alone)
            if self._rank in part:
                mine = group
                self.made.append(group)
        return mine

    def _connected(self, group: dist.ProcessGroup, device: torch.device) -> Communicator:
        comm = Communicator(group, device)
        comm.share_memory(self._timeout)
        if comm.in_order and not comm.eager and comm.size > 1:
            comm.barrier()
        return comm


def _pairs(size: int) -> Iterator[tuple[int, int]]:
    """All pairs of ranks, in rounds. In a round each rank has at most one partner, so its pairs run in parallel."""
    even = size + size % 2
    for turn in range(even - 1):
        for k in range(even // 2):
            a, b = (turn, even - 1) if k == 0 else ((turn + k) % (even - 1), (turn - k) % (even - 1))
            if max(a, b) < size:
                yield min(a, b), max(a, b)
