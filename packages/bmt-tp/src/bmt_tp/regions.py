"""Where an activation changes its layout over the tensor-parallel ranks.

[Note: layouts]
    whole     every rank has the same tensor and, in backward, the same gradient of the one loss
    split     every rank has its part of one dimension: of the sequence, or of the features (the last one)
    partial   the tensor is the sum of what the ranks have

    Between the functions below a rank computes as if it were alone. The gradient of a whole tensor that ranks go
    on to use for different things is partial, and so is that of a parameter that is used on parts of the sequence
    (:mod:`bmt_tp.sequence`).

    ======================  ==================  =============================  ==============================
    function                layouts             forward                        backward
    ======================  ==================  =============================  ==============================
    copy_to_ranks           whole → whole       nothing                        all-reduce
    reduce_from_ranks       partial → whole     all-reduce                     nothing
    split_along             whole → split       take my part                   all-gather
    gather_along            split → whole       all-gather                     take my part
    gather_along, partial   split → whole       all-gather                     reduce-scatter
    reduce_scatter_along    partial → split     reduce-scatter                 all-gather
    ======================  ==================  =============================  ==============================

    Backward is that of one loss which all ranks compute alike; this is where these functions differ from
    ``bmt_comm.all_gather`` and its kin, which add up the losses of the ranks.

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
    """``x`` (whole, any shape), of which every rank goes on to compute something else."""
    comm = tensor_comm(comm)
    return x if comm.size == 1 else _Copy.apply(x, comm)


@not_compiled
def reduce_from_ranks(x: Tensor, comm: Communicator | None = None) -> Tensor:
    """The sum over ranks of ``x`` (partial, any shape), on each of them."""
    comm = tensor_comm(comm)
    return x if comm.size == 1 else _Reduce.apply(x, comm)


@not_compiled
def split_along(x: Tensor, dim: int, comm: Communicator | None = None) -> Tensor:
    """This rank's part of ``x`` (whole): ``dim`` is cut evenly, in rank order.

    Raises:
        ValueError: the number of ranks does not divide the dimension.
    """
    comm = tensor_comm(comm)
    return x if comm.size == 1 else _Split.apply(x, checked_dim(x, dim, comm, "split_along"), comm)


@not_compiled
def gather_along(x: Tensor, dim: int, comm: Communicator | None = None, *, partial_grad: bool = False) -> Tensor:
    """The ranks' parts ``x`` (of equal shapes), joined along ``dim`` in rank order, on every rank.

    Args:
        partial_grad: ranks use the result for different things, so that their gradients of it add up; otherwise
            they compute the same with it.

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
            f"{what}: dimension {dim} of shape {tuple(x.shape)} cannot be cut evenly over {comm.size} tensor-parallel "
            f"ranks; pad it to a multiple of {comm.size}"
        )
    return dim


def _from_front(x: Tensor, dim: int, what: str) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ValueError(f"{what}: {dim} is not a dimension of a tensor of shape {tuple(x.shape)}")
    return dim % x.dim()


# --- without gradients ----------------------------------------------------------------------------


class Pending:
    """A tensor that is on its way; ``wait`` returns it once it can be used."""

    def __init__(self, work: Work, raw: Tensor, dim: int | None = None) -> None:
        self._work, self._raw, self._dim = work, raw, dim

    def wait(self) -> Tensor:
        self._work.wait()
        if self._dim is None:
            return self._raw
        # (ranks, ..., part, ...) to (..., ranks, part, ...): one copy.
        joined = self._raw.movedim(0, self._dim).flatten(self._dim, self._dim + 1)
        # Of parts of length 1 it is a view, which could not be written to in place.
        return joined.clone() if joined._is_view() else joined


def start_gather(x: Tensor, dim: int, comm: Communicator) -> Pending:
    """Begin to join the ranks' parts along ``dim`` (not negative)."""
    before, length, after = x.shape[:dim], x.shape[dim], x.shape[dim + 1 :]
    joined = before.numel() == 1  # as they arrive. No view, which could not be written to in place.
    raw = x.new_empty(*before, comm.size * length, *after) if joined else x.new_empty(comm.size, *x.shape)
    work = comm.all_gather(raw, x.detach().contiguous(), async_op=True)
    return Pending(work, raw, None if joined else dim)


def start_reduce_scatter(x: Tensor, dim: int, comm: Communicator) -> Pending:
    """Begin to add up ``x`` over the ranks and cut it along ``dim`` (not negative)."""
    parts = x.detach().unflatten(dim, (comm.size, -1)).movedim(dim, 0).contiguous()
    out = x.new_empty(parts.shape[1:])
    work = comm.reduce_scatter(out, parts, async_op=True)
    return Pending(_Keep(work, parts), out)


def start_all_reduce(x: Tensor, comm: Communicator) -> Pending:
    """Begin to add up ``x``, contiguous and ours to overwrite, over the ranks."""
    return Pending(comm.all_reduce(x, async_op=True), x)


class _Keep:
    """A collective, with a buffer that it reads until it is waited for."""

    def __init__(self, work: Work, buffer: Tensor) -> None:
        self._work, self._buffer = work, buffer

    def wait(self) -> None:
        self._work.wait()
        del self._buffer

    def is_completed(self) -> bool:
        return self._work.is_completed()


def part_of(x: Tensor, dim: int, comm: Communicator) -> Tensor:
    """This rank's part of ``x`` along ``dim``, in storage of its own, so that the whole can be freed."""
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
