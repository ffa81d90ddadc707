"""Functions that change the layout of an activation over the tensor-parallel ranks.

[Note: layouts]
    replicated  every rank has the same tensor and, in backward, the same gradient of the one loss
    split       every rank has its part of one dimension: of the sequence, or of the features (the last one)
    partial     the tensor is the sum of the ranks' tensors

    Between the functions below a rank computes without communication. If ranks compute different things from a
    replicated tensor, its gradient is partial. So is the gradient of a parameter that is used on parts of the sequence
    (:mod:`bmt_tp.sequence`).

    ======================  =======================  ===================  ===================
    function                layouts                  forward              backward
    ======================  =======================  ===================  ===================
    copy_to_ranks           replicated → replicated  nothing              all-reduce
    reduce_from_ranks       partial → replicated     all-reduce           nothing
    split_along             replicated → split       take my part         all-gather
    gather_along            split → replicated       all-gather           take my part
    gather_along, partial   split → replicated       all-gather           reduce-scatter
    reduce_scatter_along    partial → split          reduce-scatter       all-gather
    ======================  =======================  ===================  ===================

    Backward computes the gradient of one loss, which all ranks have alike. ``bmt_comm.all_gather`` and its kin differ
    in this: they add up the losses of the ranks.

Shoeybi et al., "Megatron-LM", arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198 (sequence parallelism).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bmt_comm import Communicator, Work, current_context, not_compiled


def tensor_comm(comm: Communicator | None) -> Communicator:
    """``comm``, or the context's tensor-parallel one.

    Raises:
        RuntimeError: neither is there: ``init_distributed`` has not run.
    """
    return current_context().tp if comm is None else comm


@not_compiled
def copy_to_ranks(x: Tensor, comm: Communicator | None = None) -> Tensor:
    """``x`` (replicated, any shape). Ranks compute different things from the result; their gradients are summed."""
    comm = tensor_comm(comm)
    return x if comm.size == 1 else _Copy.apply(x, comm)


@not_compiled
def reduce_from_ranks(x: Tensor, comm: Communicator | None = None) -> Tensor:
    """The sum over ranks of ``x`` (partial, any shape), on every rank."""
    comm = tensor_comm(comm)
    return x if comm.size == 1 else _Reduce.apply(x, comm)


@not_compiled
def split_along(x: Tensor, dim: int, comm: Communicator | None = None) -> Tensor:
    """This rank's part of ``x`` (replicated): ``dim`` is split evenly, in rank order.

    Raises:
        ValueError: the number of ranks does not divide the dimension.
    """
    comm = tensor_comm(comm)
    return x if comm.size == 1 else _Split.apply(x, checked_dim(x, dim, comm, "split_along"), comm)


@not_compiled
def gather_along(x: Tensor, dim: int, comm: Communicator | None = None, *, partial_grad: bool = False) -> Tensor:
    """The ranks' parts ``x`` (of equal shapes), concatenated along ``dim`` in rank order, on every rank.

    Args:
        partial_grad: ranks compute different things from the result, and their gradients of it are summed. Otherwise
            they must compute the same.

    Raises:
        ValueError: ``dim`` is not a dimension.
    """
    comm = tensor_comm(comm)
    return x if comm.size == 1 else _Gather.apply(x, _from_front(x, dim, "gather_along"), comm, partial_grad)


@not_compiled
def reduce_scatter_along(x: Tensor, dim: int, comm: Communicator | None = None) -> Tensor:
    """This rank's part, along ``dim``, of the sum over ranks of ``x`` (partial).

    Raises:
        ValueError: the number of ranks does not divide the dimension.
    """
    comm = tensor_comm(comm)
    return x if comm.size == 1 else _ReduceScatter.apply(x, checked_dim(x, dim, comm, "reduce_scatter_along"), comm)


def checked_dim(x: Tensor, dim: int, comm: Communicator, what: str) -> int:
    """``dim``, counted from the front; raises ValueError unless the ranks divide it."""
    dim = _from_front(x, dim, what)
    if x.shape[dim] % comm.size:
        raise ValueError(
            f"{what}: dimension {dim} of shape {tuple(x.shape)} cannot be split evenly over {comm.size} "
            f"tensor-parallel ranks; pad it to a multiple of {comm.size}"
        )
    return dim


def _from_front(x: Tensor, dim: int, what: str) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{what}: {dim} is not a dimension of a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


# --- without gradients ----------------------------------------------------------------------------


class PendingOutput:
    """The result of a collective that is running. ``wait`` returns the tensor once it can be used."""

    def __init__(self, work: Work, result: Tensor, dim: int | None = None, source: Tensor | None = None) -> None:
        """``dim``: the dimension that ``result``, (ranks, ...), is concatenated along; None: none.

        ``source``: memory that the collective reads, to be kept until then.
        """
        self._work, self._result, self._dim, self._source = work, result, dim, source

    def wait(self) -> Tensor:
        self._work.wait()
        self._source = None
        if self._dim is None:
            return self._result
        # (ranks, ..., part, ...) to (..., ranks, part, ...): one copy.
        full = self._result.movedim(0, self._dim).flatten(self._dim, self._dim + 1)
        # If parts have length 1, flatten returns a view. A view cannot be modified in place.
        return full.clone() if full._is_view() else full


def start_gather(x: Tensor, dim: int, comm: Communicator) -> PendingOutput:
    """Start to gather the ranks' parts along ``dim`` (not negative)."""
    before, length, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    # If only dimensions of length 1 precede dim, the all-gather itself concatenates the parts. The buffer has the
    # result's shape then, because a view of it could not be modified in place.
    in_order = before.numel() == 1
    buffer = x.new_empty(*before, comm.size * length, *after) if in_order else x.new_empty(comm.size, *x.shape)
    work = comm.all_gather(buffer, x.detach().contiguous(), async_op=True)
    return PendingOutput(work, buffer, None if in_order else dim)


def start_reduce_scatter(x: Tensor, dim: int, comm: Communicator) -> PendingOutput:
    """Start to sum ``x`` over the ranks and scatter it along ``dim`` (not negative)."""
    parts = x.detach().unflatten(dim, (comm.size, -1)).movedim(dim, 0).contiguous()
    out = x.new_empty(parts.shape[1:])
    work = comm.reduce_scatter(out, parts, async_op=True)
    return PendingOutput(work, out, source=parts)


def start_all_reduce(x: Tensor, comm: Communicator) -> PendingOutput:
    """Start to sum ``x`` over the ranks, in place. ``x`` must be contiguous."""
    return PendingOutput(comm.all_reduce(x, async_op=True), x)


def part_of(x: Tensor, dim: int, comm: Communicator) -> Tensor:
    """This rank's part of ``x`` along ``dim``, in storage of its own, so that ``x`` can be freed."""
    length = x.shape[dim] // comm.size
    return x.narrow(dim, comm.rank * length, length).clone(memory_format=torch.contiguous_format)


# --- with gradients -------------------------------------------------------------------------------


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.comm.all_reduce(total)
        return total, None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(total)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, comm: Communicator) -> Tensor:
        ctx.dim, ctx.comm = dim, comm
        return part_of(x, dim, comm)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_gather(grad, ctx.dim, ctx.comm).wait(), None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, comm: Communicator, partial_grad: bool) -> Tensor:
        ctx.dim, ctx.comm, ctx.partial_grad = dim, comm, partial_grad
        return start_gather(x, dim, comm).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.partial_grad:
            return start_reduce_scatter(grad, ctx.dim, ctx.comm).wait(), None, None, None
        return part_of(grad, ctx.dim, ctx.comm), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, comm: Communicator) -> Tensor:
        ctx.dim, ctx.comm = dim, comm
        return start_reduce_scatter(x, dim, comm).wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return start_gather(grad, ctx.dim, ctx.comm).wait(), None, None
