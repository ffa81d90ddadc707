"""Overflow and norm of gradients, and other totals, however the parameters are sharded or replicated.

The functions reduce on the device and leave the result there. All ranks must call those that communicate, with the
same parameters. A rank without gradients or with empty shards takes part like the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

import bmt_kernels
from bmt_comm import STAGE_LOCAL_ATTRIBUTE, ParallelContext, Slice, is_dtensor, reduce_over, slice_of

from .runs import local_grad, merge_adjacent
from .slices import Mesh, by_mesh


def scale_for_means(params: Iterable[Tensor], context: ParallelContext) -> float:
    """The divisor of a loss that makes gradients means over data-parallel replicas.

    Raises:
        ValueError: gradients are summed over replicas for some parameters, and averaged, or not known to be reduced,
            for others; or there are replicas, and it is not known for any parameter. A pipeline stage may have only
            parameters of which it is not known.
    """
    replicas = context.replicas
    if replicas == 1:
        return 1
    params = list(params)
    kinds = {_is_averaged(param) for param in params if param.requires_grad}
    if {True, False} <= kinds:
        raise ValueError(
            "some parameters have gradients that are summed over data-parallel replicas (bmt_zero.shard), and others "
            "such as are averaged (FSDP2, bmt_zero.fully_shard); shard all by one of them"
        )
    if kinds == {None} and context.pipe_size == 1:
        raise ValueError(
            f"there are {replicas} data-parallel replicas, and nobody shards the parameters: OptimManager cannot know "
            f"what is done to gradients. Pass grad_scale=1 if they are averaged, as DistributedDataParallel does, or "
            f"grad_scale={replicas} if they are summed"
        )
    if kinds == {False, None}:
        param = next(param for param in params if param.requires_grad and _is_averaged(param) is None)
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is neither sharded nor replicated by bmt_zero, as others of "
            f"the optimizers are, so nobody reduces its gradient over the {replicas} data-parallel replicas: shard it, "
            f"too (BMTrainModelWrapper takes whole models), freeze it, or reduce it yourself and pass "
            f"grad_scale={replicas}"
        )
    return 1 if True in kinds else replicas


def _is_averaged(param: Tensor) -> bool | None:
    """Whether the gradient is averaged over replicas, rather than summed; ``None``: it is not known."""
    averaged: bool | None = getattr(param, "bmt_averages_gradients", None)
    if averaged is not None:
        return averaged
    if is_dtensor(param):
        return True
    where = slice_of(param)
    return None if where.row_comm is None and where.replicate_comm is None else False


def local_grads(params: Sequence[Tensor]) -> list[Tensor]:
    """This rank's gradients, as flat tensors over those that are adjacent in memory."""
    grads = (local_grad(p) for p in params)
    return merge_adjacent(_as_real(grad.detach()) for grad in grads if grad is not None)


def _as_real(grad: Tensor) -> Tensor:
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


class HostCopy:
    """A number that is copied to the host (D2H) asynchronously. :meth:`read` waits for it."""

    def __init__(self, number: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if number.is_cuda:
            stream = torch.cuda.current_stream(number.device)
            number = torch.empty_like(number, device="cpu", pin_memory=True).copy_(number, non_blocking=True)
            self._arrived = stream.record_event()
        self._number = number

    def read(self) -> float:
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._number.item()


def overflow_here(grads: Sequence[Tensor], context: ParallelContext, flags: Sequence[Tensor] = ()) -> Tensor:
    """1 if this rank has an inf or a NaN among ``grads``, or a 1 among ``flags``, else 0.

    0-dim fp32 on the context's device, as the flags are. Nothing is communicated.
    """
    flag = torch.zeros((), dtype=torch.float32, device=context.device)
    for other in flags:
        flag = torch.maximum(flag, other)
    for device in {grad.device for grad in grads}:
        overflow = bmt_kernels.has_inf_or_nan([grad for grad in grads if grad.device == device])
        flag = torch.maximum(flag, overflow.to(context.device))
    return flag


def global_norm(params: Sequence[Tensor], norm_type: float, context: ParallelContext) -> tuple[Tensor, list[Tensor]]:
    """The p-norm over the gradients of all logical parameters, and this rank's gradients in flat tensors.

    The norm is 0-dim fp64 on the context's device, and infinite where fp32 could not hold it. Each logical
    element counts once. Sums over the ranks that share a parameter are packed: one all-reduce for each
    communicator of each distinct mesh, and one over the pipeline where there is one. A NaN gives NaN, or inf
    where ``norm_type`` is inf.

    Raises:
        ValueError: a gradient is complex, and ``norm_type`` is not 2.
    """
    if norm_type != 2 and any(p.is_complex() for p in params):
        raise ValueError(f"norm_type={norm_type!r} of complex gradients is not computed; use 2")
    op = "max" if math.isinf(norm_type) else "sum"
    if op == "sum" and context.deterministic:
        return _norm_in_fixed_order(params, norm_type, context), local_grads(params)
    grads: list[Tensor] = []

    def power(some: Sequence[Tensor]) -> Tensor:
        here = local_grads(some)
        grads.extend(here)
        return _local_power(here, norm_type, context.device)

    total = reduce_over_ranks(params, power, context, op)
    norm = total if op == "max" else total ** (1 / norm_type)
    return norm.float().double(), grads


def _norm_in_fixed_order(params: Sequence[Tensor], norm_type: float, context: ParallelContext) -> Tensor:
    """The norm as of :func:`global_norm`, with the same bits on any number of ranks.

    Every row is on one rank. All ranks get the powers of all rows, and add them up in the same order.
    """
    slices = [slice_of(p) for p in params]
    shards = [1 if where.tp_comm is None else where.tp_comm.size for where in slices]
    starts = [0, *accumulate(count * where.tp_shard_rows for count, where in zip(shards, slices))]
    powers = torch.zeros(starts[-1], dtype=torch.float64, device=context.device)
    for mesh, indices in by_mesh(slices):
        mine = torch.zeros_like(powers)
        for i in indices:
            grad, where = local_grad(params[i]), slices[i]
            if grad is not None and grad.numel():
                first = starts[i] + where.row_start
                if where.tp_comm is not None:
                    first += where.tp_comm.rank * where.tp_shard_rows
                rows = grad.detach().reshape(where.row_stop - where.row_start, -1)
                mine[first : first + len(rows)] = _row_powers(rows, norm_type)
        reduce_over(mine, mesh, "sum")  # one rank's value and zeros: nothing is rounded
        powers += mine
    return (powers.sum() ** (1 / norm_type)).float().double()


def _row_powers(rows: Tensor, norm_type: float) -> Tensor:
    """Σ|g|ᵖ of each row of a matrix, fp64."""
    if rows.shape[1] == 1:
        return rows[:, 0].double().abs() ** norm_type
    dtype = torch.float32 if rows.dtype.itemsize < 4 else None
    return torch.linalg.vector_norm(rows, norm_type, dim=1, dtype=dtype).double() ** norm_type


def reduce_over_ranks(
    params: Sequence[Tensor], local: Callable[[list[Tensor]], Tensor], context: ParallelContext | None, op: str
) -> Tensor:
    """The sum or maximum of ``local`` over all logical parameters. Each of their elements counts once.

    Reductions over the ranks that share parameters are packed: one for each communicator of each distinct
    mesh, and one over the pipeline where there is one.

    Args:
        params: the same ones in the same order on every rank that shares them.
        local: the value of this rank's shards of parameters of one :class:`Sharing`, 0 for none; always of one shape,
            dtype and device. Never negative if the maximum is wanted.
        context: the ranks that step together; ``None``: no pipeline.
        op: "sum" or "max".
    """
    combine = torch.maximum if op == "max" else torch.add
    sharings = [sharing_of(p, context) for p in params]
    everywhere, own_stage = local([]), local([])
    for mesh, indices in by_mesh([slice_of(p) for p in params]):
        values = torch.stack(
            [local([params[i] for i in indices if sharings[i].own_stage == own]) for own in (False, True)]
        )
        reduce_over(values, mesh, op)
        everywhere, own_stage = combine(everywhere, values[0]), combine(own_stage, values[1])
    if context is not None:
        reduce_over(own_stage, (context.pipe,), op)
    return combine(everywhere, own_stage)


class Sharing(NamedTuple):
    """The ranks that hold other elements of a parameter, and whether only this pipeline stage has it."""

    mesh: Mesh
    own_stage: bool


def sharing_of(param: Tensor, context: ParallelContext | None) -> Sharing:
    where = slice_of(param)
    return Sharing(where.communicators, context is not None and _is_stage_local(param, where, context))


def scale_grads(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place by ``factor``, 0-dim fp32. The product is computed in fp32 for all dtypes."""
    for (device, dtype), group in _by_device_and_dtype(grads):
        here = factor.to(device)
        if dtype is torch.float32:
            torch._foreach_mul_(group, here)
            continue
        for grad in group:
            # A 1-dim factor takes part in type promotion; a 0-dim one would be rounded to half precision first.
            (grad if grad.dim() else grad.view(1)).mul_(here.view(1))


def _local_power(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Σ|g|ᵖ (for inf: max|g|, with NaN as inf) of this rank's gradients, 0-dim fp64 on ``device``."""
    infinite = math.isinf(norm_type)
    power = torch.zeros((), dtype=torch.float64, device=device)
    for where in {grad.device for grad in grads}:
        here = [grad for grad in grads if grad.device == where]
        part = bmt_kernels.power_sum(here, norm_type).total.to(device)
        power = torch.maximum(power, part) if infinite else power + part
    # NaN does not survive every max.
    return torch.nan_to_num(power, nan=math.inf, posinf=math.inf) if infinite else power


def _by_device_and_dtype(grads: Sequence[Tensor]) -> Iterable[tuple[tuple[torch.device, torch.dtype], list[Tensor]]]:
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        groups.setdefault((grad.device, grad.dtype), []).append(grad)
    return groups.items()


def _is_stage_local(param: Tensor, where: Slice, context: ParallelContext) -> bool:
    if context.pipe_size == 1:
        return False
    said = getattr(param, STAGE_LOCAL_ATTRIBUTE, None)
    if said is not None:
        return bool(said)
    if where.row_comm is None:
        return False
    per_stage = context.data_size * context.tp_size
    return all(rank // per_stage == context.pipe_rank for rank in where.row_comm.ranks)
