"""Matrix products fused with the gather or the reduction, through PyTorch's symmetric memory (CUDA).

GPUs that access each other's memory directly, over NVLink, need no collective around a product: while one part of the
operand is multiplied, the next is copied from the rank that has it. PyTorch's operations for this (``symm_mem``) split
the products by ranks. A communicator opts in by :func:`enable_symmetric_memory`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_comm import Communicator

from . import _compat
from .regions import tensor_comm


def enable_symmetric_memory(comm: Communicator | None = None) -> None:
    """Fuse the products of layers that gather or scatter a sequence over ``comm`` with that communication.

    Every rank of ``comm`` must call it, before the first product. Results are the same up to the order of sums. The
    layers' chunk counts have no effect any more.

    Args:
        comm: the tensor-parallel ranks; by default the context's.

    Raises:
        RuntimeError: on every rank, if one of them is not on a CUDA device that can access the others' memory, or its
            PyTorch lacks the operations. The layers then work as before.
    """
    comm = tensor_comm(comm)
    if comm.size == 1:
        return
    problems = [problem for problem in comm.all_gather_object(_problem(comm)) if problem]
    if problems:
        raise RuntimeError(f"symmetric memory cannot be used: {problems[0]}")
    assert comm.group is not None
    _compat.enable_symmetric_memory(comm.group.group_name)
    comm.symmetric_memory = True


def _problem(comm: Communicator) -> str:
    """Why this rank cannot use symmetric memory; empty if it can."""
    if comm.device.type != "cuda":
        return f"rank {comm.ranks[comm.rank]} is on {comm.device}, and CUDA devices are needed"
    if not _compat.HAS_SYMMETRIC_MEMORY:
        return f"torch {torch.__version__} has no symmetric memory"
    if comm.size > torch.cuda.device_count():
        return f"the {comm.size} ranks are not on one machine, which has {torch.cuda.device_count()} GPUs"
    mine = torch.cuda.current_device()
    apart = [
        i for i in range(torch.cuda.device_count()) if i != mine and not torch.cuda.can_device_access_peer(mine, i)
    ]
    return f"GPU {mine} does not reach the memory of GPU {apart[0]}" if apart else ""


def gathered_products(
    x: Tensor, weights: Sequence[Tensor], dim: int, comm: Communicator, return_gathered: bool = False
) -> tuple[Tensor | None, list[Tensor]]:
    """The product of the ranks' ``x`` (\\*, n), gathered along ``dim``, with each weight (n, m).

    Returns:
        The gathered x, or None without ``return_gathered``; the products.
    """
    assert comm.group is not None
    gathered, products = _compat.fused_all_gather_matmul(
        x, [weight.to(x.dtype) for weight in weights], dim, comm.group.group_name, return_A=return_gathered
    )
    return (gathered if return_gathered else None), [product.contiguous() for product in products]


def scattered_product(x: Tensor, weight: Tensor, dim: int, comm: Communicator) -> Tensor:
    """This rank's part, along ``dim``, of the sum over ranks of ``x`` (\\*, n) times ``weight`` (n, m)."""
    assert comm.group is not None
    y = _compat.fused_matmul_reduce_scatter(x, weight.to(x.dtype), "sum", dim, comm.group.group_name)
    return y.contiguous()
