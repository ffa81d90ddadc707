"""Gathering and reducing within the matrix products, through PyTorch's symmetric memory (CUDA).

GPUs that reach each other's memory directly, over NVLink, need no collective around a product: while one part of the
operand is multiplied, the next is copied from the rank that has it. PyTorch's operations for this (``symm_mem``) cut
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
    """Let the layers that gather or scatter a sequence over ``comm`` do so within their products.

    Every rank of ``comm`` calls it, before the first product. Results are the same up to the order of sums; the layers'
    chunk counts no longer matter.

    Args:
        comm: the tensor-parallel ranks; by default the context's.

    Raises:
        RuntimeError: on every rank, where one of them is not on a CUDA device that reaches the others' memory, or its
            PyTorch lacks the operations. The layers go on as before.
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
    """Why this rank cannot take part; empty if it can."""
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
    x: Tensor, matrices: Sequence[Tensor], dim: int, comm: Communicator, keep: bool = False
) -> tuple[Tensor | None, list[Tensor]]:
    """The ranks' ``x`` (\\*, n), joined along ``dim``, times each matrix (n, m), and with ``keep`` joined."""
    assert comm.group is not None
    whole, products = _compat.fused_all_gather_matmul(
        x, [matrix.to(x.dtype) for matrix in matrices], dim, comm.group.group_name, return_A=keep
    )
    return (whole if keep else None), [product.contiguous() for product in products]


def scattered_product(x: Tensor, matrix: Tensor, dim: int, comm: Communicator) -> Tensor:
    """This rank's part, along ``dim``, of the sum over ranks of ``x`` (\\*, n) times ``matrix`` (n, m)."""
    assert comm.group is not None
    y = _compat.fused_matmul_reduce_scatter(x, matrix.to(x.dtype), "sum", dim, comm.group.group_name)
    return y.contiguous()
