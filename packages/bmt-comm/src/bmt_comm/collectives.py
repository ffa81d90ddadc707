"""Differentiable collectives.

Backward computes the gradient of **the sum over ranks of the ranks' losses**: the gradient of a rank's input includes
the effect of the input on every rank's output.

=================  ====================================  =================================================
forward            output                                gradient of the input
=================  ====================================  =================================================
all_gather         every rank's x                        sum over ranks of the gradient of my part
all_reduce sum     Σ x                                   sum over ranks of the gradient
all_reduce avg     Σ x / n                               the same, divided by n
all_reduce max/min extreme of x                          the sum, shared equally among the ranks that tie
all_reduce prod    Π x                                   the sum × the conjugate product of the other ranks' x
reduce_scatter     my part of the reduction              as all_reduce, from the gathered gradients
broadcast          the root's x                          root: sum over ranks; elsewhere zero
send / recv        the sender's x                        the receiver's gradient, sent back
=================  ====================================  =================================================

Inputs may have any shape, strides and dtype; every rank of the communicator must take part, forward and
backward: an input that requires a gradient does so on every rank, and every rank's loss depends on its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._compat import not_compiled
from .combine import REDUCE_OPS
from .communicator import Communicator
from .context import current_context
from .memory_ranges import as_in_memory


@not_compiled
def all_gather(x: Tensor, comm: Communicator | None = None) -> Tensor:
    """Every rank's ``x``, stacked: shape (size, *x.shape)."""
    return _AllGather.apply(x, _comm(comm))


@not_compiled
def all_reduce(x: Tensor, op: str = "sum", comm: Communicator | None = None) -> Tensor:
    """The reduction (sum, avg, max, min or prod) of ``x`` over the ranks; ``x`` is left as it is."""
    return _AllReduce.apply(x, _op(op), _comm(comm))


@not_compiled
def reduce_scatter(x: Tensor, op: str = "sum", comm: Communicator | None = None) -> Tensor:
    """This rank's shard, along dim 0, of the reduction of ``x``: shape (x.shape[0] / size, ...).

    Raises:
        ValueError: ``x`` has no dim 0, or the number of ranks does not divide it.
    """
    comm = _comm(comm)
    if x.dim() == 0 or x.shape[0] % comm.size:
        raise ValueError(
            f"reduce_scatter: dim 0 of x (shape {tuple(x.shape)}) must be divisible by the {comm.size} ranks"
        )
    return _ReduceScatter.apply(x, _op(op), comm)


@not_compiled
def broadcast(src: Tensor, root: int, comm: Communicator | None = None) -> Tensor:
    """Rank ``root``'s ``src`` on every rank. ``src`` has the same shape and dtype everywhere."""
    return _Broadcast.apply(src, root, _comm(comm))


@not_compiled
def send_activations(hidden_state: Tensor, next_rank: int, comm: Communicator) -> Tensor:
    """Send ``hidden_state`` (any shape and dtype) to ``next_rank`` of ``comm``.

    Returns a zero of shape (). Include it in what ``backward`` starts from (add it to a loss, or call ``backward()`` on
    it), and the gradient comes back from the receiver.
    """
    wanted = hidden_state.requires_grad and torch.is_grad_enabled()
    return _Send.apply(hidden_state, wanted, next_rank, comm)


@not_compiled
def recv_activations(prev_rank: int, comm: Communicator) -> Tensor:
    """The tensor that ``prev_rank`` of ``comm`` sends by :func:`send_activations`.

    Where gradients are enabled and the sender's tensor required one, the result requires a gradient, and
    its backward sends it to the sender.
    """
    return _Recv.apply(torch.empty(0, requires_grad=True, device="cpu"), prev_rank, comm)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return comm.stacked(as_in_memory(x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty(grad.shape[1:])
        ctx.comm.reduce_scatter(out, as_in_memory(grad))
        return out, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, comm: Communicator) -> Tensor:
        out = x.clone(memory_format=torch.contiguous_format)
        comm.all_reduce(out, op)
        ctx.op, ctx.comm = op, comm
        if op in ("max", "min", "prod"):
            ctx.save_for_backward(x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.comm.all_reduce(total)
        if ctx.op == "avg":
            total /= ctx.comm.size
        elif ctx.op != "sum":
            x, out = ctx.saved_tensors
            total *= _share(ctx.comm.stacked(as_in_memory(x)), ctx.op, out)[ctx.comm.rank].conj()
        return total, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, op: str, comm: Communicator) -> Tensor:
        out = x.new_empty((x.shape[0] // comm.size, *x.shape[1:]))
        comm.reduce_scatter(out, as_in_memory(x), op)
        ctx.op, ctx.comm = op, comm
        if op in ("max", "min", "prod"):
            ctx.save_for_backward(x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        comm: Communicator = ctx.comm
        total = comm.stacked(as_in_memory(grad))  # (size, rows / size, ...)
        if ctx.op == "avg":
            total /= comm.size
        elif ctx.op != "sum":
            x, out = ctx.saved_tensors
            everyone = comm.stacked(as_in_memory(x)).view(comm.size, *total.shape)  # whose, part, rows...
            total *= _share(everyone, ctx.op, comm.stacked(out))[comm.rank].conj()
        return total.flatten(0, 1), None, None


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, src: Tensor, root: int, comm: Communicator) -> Tensor:
        out = src.clone(memory_format=torch.contiguous_format)
        comm.broadcast(out, root)
        ctx.root, ctx.comm = root, comm
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        total = grad.clone(memory_format=torch.contiguous_format)
        ctx.comm.all_reduce(total)
        return (total if ctx.comm.rank == ctx.root else torch.zeros_like(total)), None, None


# A message's header: whether a gradient is wanted, the dtype (an index), the number of dimensions, then these.
_MAX_DIMS = 16
_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
)


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, wanted: bool, peer: int, comm: Communicator) -> Tensor:
        if x.dim() > _MAX_DIMS or x.dtype not in _DTYPES:
            raise ValueError(f"cannot send a tensor of shape {tuple(x.shape)} and dtype {x.dtype}")
        header = [int(wanted), _DTYPES.index(x.dtype), x.dim(), *x.shape]
        header += [0] * (3 + _MAX_DIMS - len(header))
        comm.send(torch.tensor(header, dtype=torch.int64, device=comm.device), peer)
        if x.numel():
            comm.send(as_in_memory(x), peer)
        ctx.shape, ctx.dtype, ctx.device, ctx.peer, ctx.comm = x.shape, x.dtype, x.device, peer, comm
        return torch.zeros((), dtype=x.dtype if x.is_floating_point() else torch.float32, device=x.device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, None, None]:
        grad = torch.empty(ctx.shape, dtype=ctx.dtype, device=ctx.device)
        if grad.numel():
            ctx.comm.recv(grad, ctx.peer)
        return grad, None, None, None


class _Recv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _anchor: Tensor, peer: int, comm: Communicator) -> Tensor:
        box = torch.empty(3 + _MAX_DIMS, dtype=torch.int64, device=comm.device)
        comm.recv(box, peer)
        header = box.tolist()
        x = torch.empty(header[3 : 3 + header[2]], dtype=_DTYPES[header[1]], device=comm.device)
        if x.numel():
            comm.recv(x, peer)
        ctx.peer, ctx.comm = peer, comm
        if not header[0]:
            ctx.mark_non_differentiable(x)
        return x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None]:
        if grad.numel():
            ctx.comm.send(as_in_memory(grad), ctx.peer)
        return None, None, None


def _share(everyone: Tensor, op: str, out: Tensor) -> Tensor:
    """d out / d x of every rank, where ``everyone`` (size, ...) stacks the ranks' x and ``out`` is reduced."""
    if op == "prod":
        ones = torch.ones_like(everyone[:1])
        before = torch.cat([ones, everyone[:-1]]).cumprod(0)
        after = torch.cat([everyone[1:], ones]).flip(0).cumprod(0).flip(0)
        return before * after
    wins = (everyone == out).to(everyone.dtype)
    return wins / wins.sum(0)


def _op(op: str) -> str:
    if op not in REDUCE_OPS:
        raise ValueError(f"op={op!r} is not a reduction; choose one of {', '.join(REDUCE_OPS)}")
    return op


def _comm(comm: Communicator | None) -> Communicator:
    return current_context().world if comm is None else comm
