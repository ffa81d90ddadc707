"""Packed communication: many small messages between the same ranks travel as one.

A *reduction* is a value whose sum or maximum over the ranks of a communicator is wanted. A *transfer* is a tensor that
goes from one rank of a communicator to another. The functions here take those of one phase of a round, and make one
collective of those that share a communicator, an operation and a dtype.

Collectives run in one order on all ranks (operation, then numbers of the ranks), so that ranks with several
communicators, and others with only some of them, cannot deadlock. Communicators with the same ranks are used as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from bmt_comm import Communicator, Work

_Item = TypeVar("_Item")


@dataclass
class Communication:
    """What a step communicated, on this rank.

    Attributes:
        rounds: in which a rule asked for something of parameters that several ranks share.
        collectives: calls of collectives. An exchange of packed messages is one.
        bytes: sent. An all-reduce over n ranks counts as 2 (n - 1) / n of the buffer.
    """

    rounds: int = 0
    collectives: int = 0
    bytes: int = 0


@dataclass(eq=False)
class Reduction:
    """``value`` (fp32) becomes the sum or maximum over ``comm``."""

    comm: Communicator
    op: str
    value: Tensor


@dataclass(eq=False)
class Transfer:
    """A tensor that goes from rank ``source`` of ``comm`` to ``target``, into a tensor of its shape and dtype.

    Other ranks take no part in it and need not make one.
    """

    comm: Communicator
    op: str
    source: int
    target: int
    tensor: Tensor | None
    into: Tensor | None
    like: Tensor = field(init=False)

    def __post_init__(self) -> None:
        like = self.tensor if self.tensor is not None else self.into
        assert like is not None
        self.like = like


def reduce_packed(
    reductions: Sequence[Reduction], record: Communication, overlap: Callable[[], bool] = lambda: False
) -> None:
    """Replace each reduction's value by its result. One all-reduce per communicator and operation.

    ``overlap`` is called while they run, until it returns that nothing is left to do.
    """
    in_flight = []
    for group in _in_order(reductions, lambda r: (r.op, r.comm.ranks, str(r.value.device))):
        comm = group[0].comm
        buffer = torch.cat([r.value.reshape(-1) for r in group]).to(comm.device)
        if not buffer.numel():
            continue
        in_flight.append((group, buffer, comm.all_reduce(buffer, group[0].op, async_op=True)))
        record.collectives += 1
        record.bytes += 2 * (comm.size - 1) * buffer.nbytes // comm.size
    for group, buffer, reducing in in_flight:
        _wait(reducing, overlap)
        parts = buffer.to(group[0].value.device).split([r.value.numel() for r in group])
        for reduction, part in zip(group, parts):
            # A matrix is copied: products of it would have other bits at odd addresses.
            reduction.value = (part.clone() if reduction.value.dim() > 1 else part).view(reduction.value.shape)


def move_packed(
    transfers: Sequence[Transfer], record: Communication, overlap: Callable[[], bool] = lambda: False
) -> None:
    """Carry out all transfers. One exchange per communicator, operation and dtype.

    ``overlap`` is called while they run, until it returns that nothing is left to do.
    """
    in_flight = []
    for group in _in_order(transfers, lambda t: (t.op, t.comm.ranks, str(t.like.dtype))):
        comm = group[0].comm
        sends: dict[int, list[Tensor]] = {}
        receives: dict[int, list[Tensor]] = {}
        for transfer in group:
            if transfer.like.numel() == 0:  # on both sides
                continue
            if transfer.source == transfer.target:
                assert transfer.into is not None
                assert transfer.tensor is not None
                transfer.into.copy_(transfer.tensor)
            elif transfer.source == comm.rank:
                assert transfer.tensor is not None
                sends.setdefault(transfer.target, []).append(transfer.tensor.reshape(-1))
            else:
                assert transfer.into is not None
                receives.setdefault(transfer.source, []).append(transfer.into)
        outgoing = [(torch.cat(parts).to(comm.device), peer) for peer, parts in sorted(sends.items())]
        incoming = [
            (torch.empty(sum(t.numel() for t in parts), dtype=parts[0].dtype, device=comm.device), peer)
            for peer, parts in sorted(receives.items())
        ]
        if not outgoing and not incoming:
            continue
        in_flight.append((comm.send_recv(outgoing, incoming, async_op=True), incoming, receives))
        record.collectives += 1
        record.bytes += sum(message.nbytes for message, _ in outgoing)
    for moving, incoming, receives in in_flight:
        _wait(moving, overlap)
        for message, peer in incoming:
            for into, part in zip(receives[peer], message.split([t.numel() for t in receives[peer]])):
                into.copy_(part.view(into.shape))


def _wait(work: Work, overlap: Callable[[], bool]) -> None:
    while not work.is_completed() and overlap():
        pass
    work.wait()


def _in_order(items: Sequence[_Item], key: Callable[[_Item], tuple[Any, ...]]) -> list[list[_Item]]:
    """The items that share a key, by ascending key."""
    groups: dict[tuple[Any, ...], list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return [groups[k] for k in sorted(groups)]
