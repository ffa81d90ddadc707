"""Column-parallel and row-parallel linear maps.

[Note: column and row]
    y = x Wᵀ + b, W of shape (out, in).

    column parallel  a rank has rows of W, that is columns of Wᵀ, and computes its part of the features of y. Every
                     rank needs all of x. The gradient of x is the sum over the ranks.
    row parallel     a rank has columns of W and its part of the features of x. y is the sum over the ranks.

    A column-parallel map followed by a row-parallel one needs no communication between them. Around the pair, x
    and y are either replicated (all-reduce in forward, and in backward) or split along the sequence (all-gather
    before, reduce-scatter after). The forward saves the rank's own x for backward, not the gathered one. The backward
    gathers it again while it computes the gradient of x. If a later pass computes the weight's gradient (see ``ops``),
    that pass gathers x, and for a row-parallel map it gathers the gradient of y once more.

Collectives are split into chunks. The product with one chunk overlaps with the communication of the next.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from bmt_comm import Communicator, differentiable_once, not_compiled

from .ops import as_rows, bias_gradient, check_shapes, needed_now, weight_gradient
from .parameters import unsharded
from .regions import (
    PendingOutput,
    checked_dim,
    gather_along,
    split_along,
    start_all_reduce,
    start_gather,
    start_reduce_scatter,
    tensor_comm,
)
from .symmetric import gathered_products, scattered_product


class ReduceType(enum.IntEnum):
    """How the ranks' partial outputs of a row-parallel map are reduced."""

    ALL_REDUCE = 1
    """Every rank gets the sum, of the whole sequence."""
    REDUCE_SCATTER = 2
    """Every rank gets the sum of its part of the sequence."""


@not_compiled
def column_linear(
    x: Tensor,
    layers: Sequence[tuple[Tensor, Tensor | None]],
    *,
    gather_input: bool,
    sequence_dim: int = -2,
    chunks: int = 2,
    comm: Communicator | None = None,
    reduce_input_grad: bool = True,
) -> tuple[Tensor, ...]:
    """Column-parallel maps of one input, which is gathered once for all of them.

    Args:
        x: (\\*, in), replicated; with ``gather_input`` this rank's part of ``sequence_dim``.
        layers: weight (out / ranks, in) and bias (out / ranks,) or None of each map: this rank's rows.
        gather_input: gather the ranks' parts of the sequence first.
        sequence_dim: the dimension of x that is split.
        chunks: the number of chunks of the gather, which overlap with the products.
        comm: the tensor-parallel ranks; by default the context's.
        reduce_input_grad: sum the gradient of x over the ranks; without it, x must be the result of
            :func:`bmt_tp.copy_to_ranks`, which sums it. The gradient of a gathered input is always summed.

    Returns:
        (\\*, out / ranks) for each map: this rank's features, of the whole sequence.

    Raises:
        ValueError: a shape does not fit, or ``sequence_dim`` is the last or no dimension of x.
    """
    comm = tensor_comm(comm)
    layers = [(unsharded(weight), unsharded(bias)) for weight, bias in layers]
    for weight, bias in layers:
        check_shapes(x, weight, bias)
    dim = _sequence_dim(x, sequence_dim) if gather_input else 0
    _parts_gathered.note(x, dim, comm)
    flat = [tensor for layer in layers for tensor in layer]
    reduce = reduce_input_grad and comm.size > 1
    return _ColumnLinear.apply(x, comm, gather_input and comm.size > 1, reduce, dim, _checked_chunks(chunks), *flat)


@not_compiled
def row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    reduce_output_type: ReduceType = ReduceType.REDUCE_SCATTER,
    sequence_dim: int = -2,
    chunks: int = 2,
    comm: Communicator | None = None,
) -> Tensor:
    """The row-parallel map.

    Args:
        x: (\\*, in / ranks): this rank's features, of the whole sequence.
        weight: (out, in / ranks): this rank's columns.
        bias: (out,), the same on every rank; added once. Every rank gets its complete gradient.
        reduce_output_type: whether y is replicated, or split along the sequence.
        sequence_dim: the dimension of y that is split.
        chunks: the number of chunks of the reduction, which overlap with the products.
        comm: the tensor-parallel ranks; by default the context's.

    Returns:
        (\\*, out); with REDUCE_SCATTER this rank's part of ``sequence_dim``.

    Raises:
        ValueError: a shape does not fit, or the ranks do not divide the sequence.
    """
    comm = tensor_comm(comm)
    weight, bias = unsharded(weight), unsharded(bias)
    check_shapes(x, weight, bias)
    scatter = ReduceType(reduce_output_type) is ReduceType.REDUCE_SCATTER
    if scatter:
        _parts_gathered.check(x, comm)
    dim = checked_dim(x, _sequence_dim(x, sequence_dim), comm, "row_linear") if scatter else 0
    return _RowLinear.apply(x, weight, bias, comm, scatter, dim, _checked_chunks(chunks))


class _PartsGathered:
    """Detects scripts that concatenate parts of the sequence along dimension 0, as BMTrain 1.0 does.

    There a column-parallel map of (batch, sequence / ranks, in) returns (ranks · batch, sequence / ranks, out), and a
    row-parallel map takes such an input. Here the result would be right only for a batch of one sample.
    """

    def __init__(self) -> None:
        self._shapes: WeakKeyDictionary[Communicator, tuple[int, ...]] = WeakKeyDictionary()

    def note(self, x: Tensor, dim: int, comm: Communicator) -> None:
        """Remember the last input ``x``, which was gathered along ``dim``; 0: it was not gathered."""
        if dim > 0:
            self._shapes[comm] = tuple(x.shape[: dim + 1])
        else:
            self._shapes.pop(comm, None)

    def check(self, x: Tensor, comm: Communicator) -> None:
        """Check the input of a row-parallel map.

        Raises:
            ValueError: it has the parts of the last gathered input along dimension 0.
        """
        part = self._shapes.get(comm)
        if part is None or comm.size == 1 or not x.numel() or tuple(x.shape[:-1]) != (comm.size * part[0], *part[1:]):
            return
        expected = (*part[:-1], comm.size * part[-1], "features")
        raise ValueError(
            f"the input of a row-parallel map has shape {tuple(x.shape)}: {comm.size} parts of the sequence one after "
            f"the other in dimension 0, as in BMTrain 1.0. Here parts are gathered along the sequence: pass the input "
            f"in the shape ({', '.join(map(str, expected))}); leave out the view that puts them into dimension 0"
        )


_parts_gathered = _PartsGathered()


class OpParallelLinear:
    """A column-parallel or row-parallel linear map; see [Note: column and row]."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        gather_input: bool = False,
        gather_output: bool = False,
        split_input: bool = False,
        reduce_output_type: ReduceType | int | None = None,
        async_gather_chunks: int = 2,
        *,
        sequence_dim: int = -2,
        comm: Communicator | None = None,
    ) -> Tensor:
        """y = x Wᵀ + b.

        Args:
            input: x. Column parallel: (\\*, in), replicated, or with ``gather_input`` this rank's part of the sequence.
                Row parallel: (\\*, in / ranks), or with ``split_input`` (\\*, in), which with ``gather_input`` is this
                rank's part of the sequence.
            weight: this rank's rows (out / ranks, in). Row parallel: its columns (out, in / ranks).
            bias: (out / ranks,). Row parallel: (out,).
            gather_input: gather the ranks' parts of the sequence first.
            gather_output: gather the ranks' features of y; column parallel only.
            split_input: take this rank's features of x; row parallel only.
            reduce_output_type: None: column parallel. A :class:`ReduceType` (or its number): row parallel, and
                y is replicated (1) or split along the sequence (2).
            async_gather_chunks: the number of chunks of the communication, which overlap with the products.
            sequence_dim: the dimension along which the sequence is split.
            comm: the tensor-parallel ranks; by default the context's.

        Raises:
            ValueError: the arguments contradict each other, or a shape does not fit.
        """
        comm = tensor_comm(comm)
        if reduce_output_type is None:
            if split_input:
                raise ValueError(
                    "split_input=True without reduce_output_type would leave the ranks' partial sums apart; "
                    "give a ReduceType"
                )
            (y,) = column_linear(
                input,
                [(weight, bias)],
                gather_input=gather_input,
                sequence_dim=sequence_dim,
                chunks=async_gather_chunks,
                comm=comm,
            )
            return gather_along(y, -1, comm) if gather_output else y
        if gather_output:
            raise ValueError("gather_output=True is for column-parallel maps; the sum over ranks has all features")
        if gather_input:
            if not split_input:
                raise ValueError(
                    "gather_input=True with reduce_output_type needs split_input=True: ranks that have different "
                    "features and different parts of the sequence share nothing to gather"
                )
            input = gather_along(input, _sequence_dim(input, sequence_dim), comm)
        if split_input:
            input = split_along(input, -1, comm)
        return row_linear(
            input,
            weight,
            bias,
            reduce_output_type=ReduceType(reduce_output_type),
            sequence_dim=sequence_dim,
            chunks=async_gather_chunks,
            comm=comm,
        )


_LAYER = "a tensor-parallel linear layer"


class _ColumnLinear(torch.autograd.Function):
    splits_backward = True

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        comm: Communicator,
        gather: bool,
        reduce: bool,
        dim: int,
        chunks: int,
        *layers: Tensor | None,
    ) -> tuple[Tensor, ...]:
        weights, biases = layers[::2], layers[1::2]
        ctx.comm, ctx.gather, ctx.reduce, ctx.dim = comm, gather, reduce, dim
        ctx.bias_dtypes = [None if bias is None else bias.dtype for bias in biases]
        ctx.needs_weight = any(ctx.needs_input_grad[6::2])
        need_x = ctx.needs_input_grad[0]
        ctx.save_for_backward(x if ctx.needs_weight else None, *(w if need_x else None for w in weights))
        if not gather:
            return tuple(F.linear(x, w, b).data for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]
        x = _autocast(x)
        if comm.symmetric_memory:
            _, products = gathered_products(x, [w.t() for w in weights if w is not None], dim, comm)
            return tuple(y if b is None else y.add_(b) for y, b in zip(products, biases, strict=True))
        parts = [part for part in x.tensor_split(chunks, dim) if part.shape[dim]] or [x]
        pending = [start_gather(part, dim, comm) for part in parts]
        if len(parts) == 1:
            full = pending[0].wait()
            return tuple(F.linear(full, w, b).data for w, b in zip(weights, biases, strict=True))  # type: ignore[arg-type]
        outputs: list[Tensor] = []
        start = 0
        for part, gather_of_part in zip(parts, pending, strict=True):
            length = part.shape[dim]
            full = gather_of_part.wait()
            for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
                y = F.linear(full, weight, bias)  # type: ignore[arg-type]
                if start == 0:
                    shape = list(y.shape)
                    shape[dim] = comm.size * x.shape[dim]
                    outputs.append(y.new_empty(shape))
                # y has this chunk of each rank's part of the sequence.
                chunk = outputs[i].unflatten(dim, (comm.size, -1)).narrow(dim + 1, start, length)
                chunk.copy_(y.unflatten(dim, (comm.size, -1)))
            start += length
        return tuple(outputs)

    @staticmethod
    @differentiable_once(_LAYER, lambda ctx: ctx.needs_input_grad[0] and any(ctx.needs_input_grad[6::2]))
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        comm: Communicator = ctx.comm
        x, *weights = ctx.saved_tensors
        need_x, *needed = needed_now(ctx)
        flags = iter(needed)
        layers = [(next(flags), dtype is not None and next(flags)) for dtype in ctx.bias_dtypes]
        gathering: PendingOutput | None = None
        if ctx.gather and any(need_weight for need_weight, _ in layers):
            gathering = start_gather(x.to(grads[0].dtype), ctx.dim, comm)
        summing: PendingOutput | None = None
        grad_x = None
        if need_x and ctx.gather and comm.symmetric_memory and len(grads) == 1:
            grad_x = scattered_product(grads[0], weights[0], ctx.dim, comm)
        elif need_x:
            grad_x = grads[0] @ weights[0].to(grads[0].dtype)
            for grad, weight in zip(grads[1:], weights[1:], strict=True):
                as_rows(grad_x).addmm_(as_rows(grad), weight.to(grad.dtype))
            if ctx.gather:
                summing = start_reduce_scatter(grad_x, ctx.dim, comm)
            elif ctx.reduce:
                summing = start_all_reduce(grad_x.contiguous(), comm)
        full = gathering.wait() if gathering is not None else x
        results: list[Tensor | None] = []
        for grad, bias_dtype, (need_weight, need_bias) in zip(grads, ctx.bias_dtypes, layers, strict=True):
            results.append(weight_gradient(grad, full) if need_weight else None)
            results.append(bias_gradient(grad, bias_dtype) if need_bias else None)
        if summing is not None:
            grad_x = summing.wait()
        return (grad_x, None, None, None, None, None, *results)


class _RowLinear(torch.autograd.Function):
    splits_backward = True

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        comm: Communicator,
        scatter: bool,
        dim: int,
        chunks: int,
    ) -> Tensor:
        need_x, need_weight = ctx.needs_input_grad[:2]
        ctx.comm, ctx.dim = comm, dim
        ctx.scatter = scatter and comm.size > 1
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        if comm.size == 1:
            return F.linear(x, weight, bias).data
        x = _autocast(x)
        y = _scattered_product(x, weight, comm, dim, chunks) if scatter else _reduced_product(x, weight, comm, chunks)
        y = y if bias is None else y.add_(bias)
        return y.data  # not a view of another tensor: models may modify it in place

    @staticmethod
    @differentiable_once(_LAYER, lambda ctx: all(ctx.needs_input_grad[:2]))
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = None
        need_x, need_weight, *need_bias = needed_now(ctx)
        if ctx.scatter and ctx.comm.symmetric_memory and need_x:
            gathered, (grad_x,) = gathered_products(grad, [weight], ctx.dim, ctx.comm, return_gathered=True)
            assert gathered is not None
            grad = gathered
        elif ctx.scatter and any((need_x, need_weight, *need_bias)):
            grad = start_gather(grad, ctx.dim, ctx.comm).wait()
        if need_x and grad_x is None:
            grad_x = grad @ weight.to(grad.dtype)
        grad_weight = weight_gradient(grad, x) if need_weight else None
        # grad has the whole sequence, on every rank.
        grad_bias = bias_gradient(grad, ctx.bias_dtype) if any(need_bias) else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _scattered_product(x: Tensor, weight: Tensor, comm: Communicator, dim: int, chunks: int) -> Tensor:
    """x Wᵀ, summed over the ranks; this rank's part of dimension ``dim``."""
    if comm.symmetric_memory:
        return scattered_product(x, weight.t(), dim, comm)
    mine = x.shape[dim] // comm.size
    chunks = max(1, min(chunks, mine))
    if chunks == 1:
        return start_reduce_scatter(F.linear(x, weight), dim, comm).wait()
    parts = x.unflatten(dim, (comm.size, -1))
    lengths = [len(positions) for positions in torch.arange(mine, device="cpu").tensor_split(chunks)]
    pending = []
    for chunk in parts.split(lengths, dim + 1):
        # This chunk of each rank's part of the sequence: (..., ranks · length, ..., features).
        pending.append(start_reduce_scatter(F.linear(chunk.flatten(dim, dim + 1), weight), dim, comm))
    return torch.cat([reduction.wait() for reduction in pending], dim)


def _reduced_product(x: Tensor, weight: Tensor, comm: Communicator, chunks: int) -> Tensor:
    """x Wᵀ, summed over the ranks, on each of them."""
    rows = as_rows(x)
    chunks = max(1, min(chunks, len(rows)))
    if chunks == 1:
        return start_all_reduce(F.linear(x, weight), comm).wait()
    pending = [start_all_reduce(F.linear(chunk, weight), comm) for chunk in rows.tensor_split(chunks)]
    return torch.cat([reduction.wait() for reduction in pending]).view(*x.shape[:-1], weight.shape[0])


def _autocast(x: Tensor) -> Tensor:
    """``x`` in the dtype that autocast multiplies it in, so that it is also communicated in it. Float64 is kept."""
    device_type = x.device.type
    if x.is_meta or x.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return x
    return x.to(torch.get_autocast_dtype(device_type))


def _sequence_dim(x: Tensor, dim: int) -> int:
    """``dim`` counted from the front. It must not be the last, which holds the features."""
    if not -x.dim() <= dim < x.dim() or dim % x.dim() == x.dim() - 1:
        raise ValueError(
            f"sequence_dim={dim} of x of shape {tuple(x.shape)}: it must be a dimension other than the last, "
            "which holds the features"
        )
    return dim % x.dim()


def _checked_chunks(chunks: int) -> int:
    if not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"the number of chunks is {chunks!r}; it must be a positive integer")
    return chunks
