"""The function names of ``bmtrain.nccl`` over :class:`~bmt_comm.Communicator`; tensors in, nothing differentiable.

``groupStart`` and ``groupEnd`` bracket sends and receives that depend on each other: between them nothing
is waited for, at the end everything is.
"""

from __future__ import annotations

from torch import Tensor

from .communicator import Communicator, Work

_group: list[Work] | None = None


def commCount(comm: Communicator) -> int:
    """The number of ranks."""
    return comm.size


def commRank(comm: Communicator) -> int:
    """This process's rank in ``comm``."""
    return comm.rank


def commDestroy(comm: Communicator) -> None:
    """Nothing to do: a process group ends with ``shutdown``, since other communicators may stand on it."""


def allReduce(src: Tensor, dst: Tensor, op: str, comm: Communicator) -> None:
    """``dst`` on every rank = the reduction of every rank's ``src``."""
    _copy(src, dst)
    comm.all_reduce(dst, op)


def reduce(src: Tensor, dst: Tensor, op: str, root: int, comm: Communicator) -> None:
    """``dst`` on rank ``root`` = the reduction of every rank's ``src``; elsewhere ``dst`` is left alone."""
    result = src.clone()
    comm.all_reduce(result, op)
    if comm.rank == root:
        _copy(result, dst)


def broadcast(src: Tensor, dst: Tensor, root: int, comm: Communicator) -> None:
    """``dst`` on every rank = ``src`` of rank ``root``."""
    if comm.rank == root:
        _copy(src, dst)
    comm.broadcast(dst, root)


def allGather(src: Tensor, dst: Tensor, comm: Communicator) -> None:
    """``dst`` (size × numel) on every rank = every rank's ``src``, in rank order."""
    comm.all_gather(dst, src)


def reduceScatter(src: Tensor, dst: Tensor, op: str, comm: Communicator) -> None:
    """``dst`` = this rank's part of the reduction of every rank's ``src`` (size × numel)."""
    comm.reduce_scatter(dst, src, op)


def send(src: Tensor, peer: int, comm: Communicator) -> None:
    """Send ``src`` to rank ``peer``."""
    _run(comm.send(src, peer, async_op=True))


def recv(dst: Tensor, peer: int, comm: Communicator) -> None:
    """Receive into ``dst`` what rank ``peer`` sends."""
    _run(comm.recv(dst, peer, async_op=True))


def groupStart() -> None:
    """Begin a group of sends and receives."""
    global _group
    if _group is not None:
        raise RuntimeError("groupStart() was called twice without groupEnd()")
    _group = []


def groupEnd() -> None:
    """Wait for the sends and receives since :func:`groupStart`."""
    global _group
    if _group is None:
        raise RuntimeError("groupEnd() without groupStart()")
    works, _group = _group, None
    for work in works:
        work.wait()


def _run(work: Work) -> None:
    if _group is None:
        work.wait()
    else:
        _group.append(work)


def _copy(src: Tensor, dst: Tensor) -> None:
    if src.numel() != dst.numel() or src.dtype != dst.dtype:
        raise ValueError(
            f"src ({tuple(src.shape)}, {src.dtype}) and dst ({tuple(dst.shape)}, {dst.dtype}) must have the same "
            "number of elements and dtype"
        )
    if src.data_ptr() != dst.data_ptr():
        dst.view(-1).copy_(src.reshape(-1))
