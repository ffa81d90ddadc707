"""The function names of ``bmtrain.nccl`` over :class:`~bmt_comm.Communicator`; tensors in, nothing differentiable.

``groupStart`` and ``groupEnd`` bracket sends and receives that depend on each other: those between them start
together at the end, and are waited for.
"""

from __future__ import annotations

from torch import Tensor

from .communicator import Communicator

_Messages = list[tuple[Tensor, int]]
_group: dict[Communicator, tuple[_Messages, _Messages]] | None = None  # what to send, what to receive


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
    if not 0 <= root < comm.size:
        raise ValueError(f"root={root} is not a rank of this communicator (0 to {comm.size - 1})")
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
    if _group is None:
        comm.send(src, peer)
    else:
        _group.setdefault(comm, ([], []))[0].append((src, peer))


def recv(dst: Tensor, peer: int, comm: Communicator) -> None:
    """Receive into ``dst`` what rank ``peer`` sends."""
    if _group is None:
        comm.recv(dst, peer)
    else:
        _group.setdefault(comm, ([], []))[1].append((dst, peer))


def groupStart() -> None:
    """Begin a group of sends and receives."""
    global _group
    if _group is not None:
        raise RuntimeError("groupStart() was called twice without groupEnd()")
    _group = {}


def groupEnd() -> None:
    """Do the sends and receives since :func:`groupStart`, all at once."""
    global _group
    if _group is None:
        raise RuntimeError("groupEnd() without groupStart()")
    group, _group = _group, None
    works = [comm.send_recv(sends, recvs, async_op=True) for comm, (sends, recvs) in group.items()]
    for work in works:
        work.wait()


def _copy(src: Tensor, dst: Tensor) -> None:
    if src.numel() != dst.numel() or src.dtype != dst.dtype:
        raise ValueError(
            f"src ({tuple(src.shape)}, {src.dtype}) and dst ({tuple(dst.shape)}, {dst.dtype}) must have the same "
            "number of elements and dtype"
        )
    if not dst.is_contiguous():
        raise ValueError(f"dst of shape {tuple(dst.shape)} and strides {dst.stride()} is not contiguous")
    if src.data_ptr() != dst.data_ptr():
        dst.view(-1).copy_(src.reshape(-1))
