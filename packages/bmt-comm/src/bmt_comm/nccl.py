"""The function names of ``bmtrain.nccl`` over :class:`~bmt_comm.Communicator`; nothing is differentiable.

Buffers are tensors, or what ``tensor.storage()`` returns. ``groupStart`` and ``groupEnd`` enclose sends and receives
that depend on each other. ``groupEnd`` starts them together, and waits for them.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from .communicator import Communicator

NCCLCommunicator = Communicator

Buffer: TypeAlias = Tensor | torch.TypedStorage | torch.UntypedStorage

_Messages = list[tuple[Tensor, int]]
_group: dict[Communicator, tuple[_Messages, _Messages]] | None = None  # what to send, what to receive

_REPLACED = {
    "getUniqueId": "ranks meet in init_distributed, and in torch.distributed.new_group(ranks)",
    "commInitRank": "use bmtrain.config['comm'], config['tp_comm'] …, or for other ranks "
    "bmtrain.Communicator(torch.distributed.new_group(ranks))",
    "dtype2nccl": "torch.distributed chooses NCCL's dtypes by itself",
    "op2nccl": "operations are named 'sum', 'avg', 'max', 'min' and 'prod'",
}


def __getattr__(name: str) -> object:
    if name in _REPLACED:
        raise AttributeError(f"bmtrain has no nccl.{name}: {_REPLACED[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def commCount(comm: Communicator) -> int:
    """The number of ranks."""
    return comm.size


def commRank(comm: Communicator) -> int:
    """This process's rank in ``comm``."""
    return comm.rank


def commDestroy(comm: Communicator) -> None:
    """Does nothing: a process group ends with ``shutdown``, since other communicators may use it."""


def allReduce(src: Buffer, dst: Buffer, op: str, comm: Communicator) -> None:
    """``dst`` on every rank = the reduction of every rank's ``src``."""
    result = _tensor(dst, reduces=True)
    _copy(_tensor(src, reduces=True), result)
    comm.all_reduce(result, op)


def reduce(src: Buffer, dst: Buffer, op: str, root: int, comm: Communicator) -> None:
    """``dst`` on rank ``root`` = the reduction of every rank's ``src``; elsewhere ``dst`` is left alone."""
    if not 0 <= root < comm.size:
        raise ValueError(f"root={root} is not a rank of this communicator (0 to {comm.size - 1})")
    result = _tensor(src, reduces=True).clone()
    comm.all_reduce(result, op)
    if comm.rank == root:
        _copy(result, _tensor(dst, reduces=True))


def broadcast(src: Buffer, dst: Buffer, root: int, comm: Communicator) -> None:
    """``dst`` on every rank = ``src`` of rank ``root``."""
    result = _tensor(dst)
    if comm.rank == root:
        _copy(_tensor(src), result)
    comm.broadcast(result, root)


def allGather(src: Buffer, dst: Buffer, comm: Communicator) -> None:
    """``dst`` (size × numel) on every rank = every rank's ``src``, in rank order."""
    comm.all_gather(_tensor(dst), _tensor(src))


def reduceScatter(src: Buffer, dst: Buffer, op: str, comm: Communicator) -> None:
    """``dst`` = this rank's part of the reduction of every rank's ``src`` (size × numel)."""
    comm.reduce_scatter(_tensor(dst, reduces=True), _tensor(src, reduces=True), op)


def send(src: Buffer, peer: int, comm: Communicator) -> None:
    """Send ``src`` to rank ``peer``."""
    if _group is None:
        comm.send(_tensor(src), peer)
    else:
        _group.setdefault(comm, ([], []))[0].append((_tensor(src), peer))


def recv(dst: Buffer, peer: int, comm: Communicator) -> None:
    """Receive into ``dst`` what rank ``peer`` sends."""
    if _group is None:
        comm.recv(_tensor(dst), peer)
    else:
        _group.setdefault(comm, ([], []))[1].append((_tensor(dst), peer))


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


def _tensor(buffer: Buffer, reduces: bool = False) -> Tensor:
    """A tensor on the memory of a buffer.

    Raises:
        TypeError: it is no buffer; or, if the elements are to be reduced, a storage that does not know their dtype.
    """
    if isinstance(buffer, Tensor):
        return buffer
    if isinstance(buffer, torch.TypedStorage):
        return torch.empty(0, dtype=buffer.dtype, device=buffer.device).set_(buffer)
    if not isinstance(buffer, torch.UntypedStorage):
        raise TypeError(f"a buffer must be a tensor or its storage(), not {type(buffer).__name__}")
    if reduces:
        raise TypeError("an untyped storage does not know the dtype of its elements; pass the tensor")
    return torch.empty(0, dtype=torch.uint8, device=buffer.device).set_(buffer)


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
