"""Whether the ranks of a tensor-parallel group were given the same data."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from bmt_comm import Communicator, check_agreement

from .regions import tensor_comm


def check_same_batch(*tensors: Tensor, comm: Communicator | None = None) -> None:
    """Raise unless all tensor-parallel ranks have the same tensors: together they compute one replica.

    Costs one pass over the tensors and a few bytes of communication; on CUDA it waits for the device, so call it on
    the first batch only, as :class:`bmt_tp.VPEmbedding` and :func:`bmt_tp.parallelize` do.

    Args:
        tensors: of any shapes and dtypes.
        comm: the tensor-parallel ranks; by default the context's.

    Raises:
        RuntimeError: on every rank, if they differ.
    """
    comm = tensor_comm(comm)
    if comm.size == 1:
        return
    facts = [f"{tuple(t.shape)} {t.dtype} with the digest {_digest(t)}" for t in tensors]
    try:
        check_agreement(comm, "the batch of a tensor-parallel group", facts)
    except RuntimeError as error:
        raise RuntimeError(
            f"the ranks of a tensor-parallel group must be given the same batch, of which each computes a part: "
            f"{error}; choose the data by the context's data_rank, not by rank"
        ) from error


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().tobytes()).hexdigest()[:16]
