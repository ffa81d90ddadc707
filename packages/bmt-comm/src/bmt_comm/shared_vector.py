"""A vector in memory that all ranks of a communicator on one host share: each sees what the others write."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
from torch import Tensor

_LABEL = "a vector in shared memory"


class Ranks(Protocol):
    """The part of a communicator that is used here."""

    rank: int
    size: int

    def broadcast(self, tensor: Tensor, root: int, *, label: str) -> Any: ...

    def all_gather(self, out: Tensor, src: Tensor, *, label: str) -> Any: ...


def make_shared_vector(comm: Ranks, numel: int, dtype: torch.dtype) -> Tensor | None:
    """A vector of zeros in anonymous memory of the first rank, which the others map; a collective.

    The memory has no name, and is released when the tensors of all ranks are gone, so nothing is left behind even if
    processes are killed. None, on every rank, if one rank cannot create or map it.
    """
    fd = -1
    try:
        if comm.rank == 0:
            fd = _create(numel * dtype.itemsize)
        handle = torch.tensor([os.getpid(), fd], device="cpu")
        comm.broadcast(handle, 0, label=_LABEL)
        process, number = handle.tolist()
        vector = _map(f"/proc/{process}/fd/{number}", numel, dtype) if number >= 0 else None
        mapped = torch.empty(comm.size, dtype=torch.uint8, device="cpu")
        mapped[comm.rank] = vector is not None
        comm.all_gather(mapped, mapped[comm.rank], label=_LABEL)  # after which all have opened it
        return vector if mapped.all() else None
    finally:
        if fd >= 0:
            os.close(fd)


def _create(size: int) -> int:
    """Anonymous memory of ``size`` bytes; -1 if there is none."""
    try:
        fd = os.memfd_create("bmt_comm")
    except OSError:
        return -1
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        return -1
    return fd


def _map(path: str, numel: int, dtype: torch.dtype) -> Tensor | None:
    try:
        return torch.from_file(path, shared=True, size=numel, dtype=dtype, device="cpu")
    except RuntimeError:
        return None
