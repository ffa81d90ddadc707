"""Overflow and norm of gradients, and other totals, whatever shards, replicates or splits the parameters.

All reduce on the device and leave the result there. All ranks must call those that communicate with the same
parameters; a rank without gradients or with empty shards takes part like the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

import bmt_kernels
from bmt_comm import STAGE_LOCAL_ATTRIBUTE, ParallelContext, Slice, is_dtensor, slice_of

from .runs import local_grad, merge_adjacent
from .slices import Comms, all_reduce_over, by_comms


def scale_for_means(params: Iterable[Tensor], context: ParallelContext) -> float:
    """What a loss is to be divided by for the gradients to be means over data-parallel replicas.

    Raises:
        ValueError: some parameters have gradients that are summed over replicas, and others such as are averaged, or
            such as nobody is known to reduce; or there are replicas, and of no parameter it is known. In a pipeline, a
            stage may have only such.
    """
    replicas = context.replicas
    if replicas == 1:
        return 1
    params = list(params)
    found = {_is_averaged(param) for param in params if param.requires_grad}
    if {True, False} <= found:
        raise ValueError(
            "some parameters have gradients that are summed over data-parallel replicas (bmt_zero.shard), and others "
            "such as are averaged (FSDP2, bmt_zero.fully_shard); shard all by one of them"
        )
    if found == {None} and context.pipe_size == 1:
        raise ValueError(
            f"there are {replicas} data-parallel replicas, and nobody shards the parameters: OptimManager cannot know "
            f"what is done to gradients. Pass grad_scale=1 if they are averaged, as DistributedDataParallel does, or "
            f"grad_scale={replicas} if they are summed"
        )
    if found == {False, None}:
        param = next(param for param in params if param.requires_grad and _is_averaged(param) is None)
        raise ValueError(
            f"a parameter of shape {tuple(param.shape)} is neither sharded nor replicated by bmt_zero, as others of "
            f"the optimizers are, so nobody reduces its gradient over the {replicas} data-parallel replicas: shard it, "
            f"too (BMTrainModelWrapper takes whole models), freeze it, or reduce it yourself and pass "
            f"grad_scale={replicas}"
        )
    return 1 if True in found else replicas


def _is_averaged(param: Tensor) -> bool | None:
    """Whether the gradient is averaged over replicas, rather than summed; None: it is not known."""
    averaged: bool | None = getattr(param, "bmt_averages_gradients", None)
    if averaged is not None:
        return averaged
    if is_dtensor(param):
        return True
    where = slice_of(param)
    return None if where.row_comm is None and where.replicate_comm is None else False


def local_grads(params: Sequence[Tensor]) -> list[Tensor]:
    """The gradients there are on this rank, in as few flat tensors as they lie in."""
    grads = (local_grad(p) for p in params)
    return merge_adjacent(_as_real(grad.detach()) for grad in grads if grad is not None)


def _as_real(grad: Tensor) -> Tensor:
    return torch.view_as_real(grad.resolve_conj()) if grad.is_complex() else grad


class HostCopy:
    """A number on its way to the host, which waits for it when it is read."""

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
        found = bmt_kernels.has_inf_or_nan([grad for grad in grads if grad.device == device])
        flag = torch.maximum(flag, found.to(context.device))
    return flag


def global_norm(params: Sequence[Tensor], norm_type: float, context: ParallelContext) -> tuple[Tensor, list[Tensor]]:
    """The p-norm over the gradients of all logical parameters, and this rank's gradients in flat tensors.

    The norm is 0-dim fp64 on the context's device, and infinite where fp32 could not hold it. Each logical
    element counts once. Sums over the ranks that share a parameter are packed: one all-reduce for each
    communicator of each distinct set, and one over the pipeline where there is one. A NaN gives NaN, or inf
    where ``norm_type`` is inf.

    Raises:
        ValueError: a gradient is complex, and the norm is not that of two.
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
    """The norm to the same bits on any number of ranks, as :func:`global_norm` gives it.

    No rank holds a part of a row. The powers of all rows are put together on all ranks, and added up in one order.
    """
    slices = [slice_of(p) for p in params]
    shards = [1 if where.tp_comm is None else where.tp_comm.size for where in slices]
    starts = [0, *accumulate(count * where.tp_shard_rows for count, where in zip(shards, slices))]
    powers = torch.zeros(starts[-1], dtype=torch.float64, device=context.device)
    for comms, indices in by_comms(slices):
        mine = torch.zeros_like(powers)
        for i in indices:
            grad, where = local_grad(params[i]), slices[i]
            if grad is not None and grad.numel():
                first = starts[i] + where.row_start
                if where.tp_comm is not None:
                    first += where.tp_comm.rank * where.tp_shard_rows
                rows = grad.detach().reshape(where.row_stop - where.row_start, -1)
                mine[first : first + len(rows)] = _row_powers(rows, norm_type)
        all_reduce_over(mine, comms, "sum")  # one rank's value and zeros: nothing is rounded
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
    """The sum or maximum of ``local`` over all logical parameters, each of whose elements counts once.

    Reductions over the ranks that share parameters are packed: one for each communicator of each distinct
    set, and one over the pipeline where there is one.

    Args:
        params: the same ones in the same order on every rank that shares them.
        local: what this rank's parts of parameters of one share (:func:`share_of`) come to, 0 for none; of
            one shape, dtype and device. Never negative if the maximum is wanted.
        context: the ranks that step together; ``None``: no pipeline.
        op: "sum" or "max".
    """
    combine = torch.maximum if op == "max" else torch.add
    shares = [share_of(p, context) for p in params]
    everywhere, own_stage = local([]), local([])
    for comms, indices in by_comms([slice_of(p) for p in params]):
        values = torch.stack(
            [local([params[i] for i in indices if shares[i].own_stage == own]) for own in (False, True)]
        )
        all_reduce_over(values, comms, op)
        everywhere, own_stage = combine(everywhere, values[0]), combine(own_stage, values[1])
    if context is not None:
        all_reduce_over(own_stage, (context.pipe,), op)
    return combine(everywhere, own_stage)


class Share(NamedTuple):
    """Whom a parameter is shared with: the ranks with other elements of it, and whether other stages have it."""

    comms: Comms
    own_stage: bool


def share_of(param: Tensor, context: ParallelContext | None) -> Share:
    where = slice_of(param)
    return Share(where.communicators, context is not None and _is_stage_local(param, where, context))


def scale_grads(grads: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply in place by ``factor``, 0-dim fp32, computing in fp32 whatever the dtype of the gradients."""
    for (device, dtype), group in _by_device_and_dtype(grads):
        here = factor.to(device)
        if dtype is torch.float32:
            torch._foreach_mul_(group, here)
            continue
        for grad in group:
            # A factor of one dimension takes part in type promotion; a 0-dim one would be rounded to half first.
            (grad if grad.dim() else grad.view(1)).mul_(here.view(1))


def _local_power(grads: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Σ|g|ᵖ (for inf: max|g|, with NaN as inf) of this rank's gradients, 0-dim fp64 on ``device``."""
    infinite = math.isinf(norm_type)
    power = torch.zeros((), dtype=torch.float64, device=device)
    for where in {grad.device for grad in grads}:
        here = [grad for grad in grads if grad.device == where]
        found = bmt_kernels.power_sum(here, norm_type).total.to(device)
        power = torch.maximum(power, found) if infinite else power + found
    # NaN does not survive every max.
    return torch.nan_to_num(power, nan=math.inf, posinf=math.inf) if infinite else power


def _by_device_and_dtype(grads: Sequence[Tensor]) -> Iterable[tuple[tuple[torch.device, torch.dtype], list[Tensor]]]:
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for grad in grads:
        found.setdefault((grad.device, grad.dtype), []).append(grad)
    return found.items()


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
