"""Turning the parameters of any module into sharded ones."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from bmt_comm import Communicator, ParallelContext, slice_of

from .parameter import DistributedParameter, describe


def check_buffer(name: str, buffer: Tensor | None, context: ParallelContext) -> None:
    """Raise unless a buffer is, or can be moved, where this rank computes."""
    if buffer is not None and buffer.device not in (context.device, torch.device("cpu")):
        raise ValueError(
            f"buffer {name!r} is on device {buffer.device}, and this rank computes on {context.device}; "
            f"move the module there first"
        )


def check_parameter(name: str, param: nn.Parameter, context: ParallelContext) -> None:
    if isinstance(param, DistributedParameter) and not param.bucket.standalone:
        raise ValueError(
            f"parameter {name!r} (shape {param.bmt_slice.shape}) belongs to another Block already; put the modules "
            f"that share it into one Block, or keep it outside of both"
        )
    if torch.nn.parameter.is_lazy(param):
        raise ValueError(
            f"parameter {name!r} has no shape yet; run the module once, so that it gets one, and then wrap"
        )
    if hasattr(param, "placements"):
        raise ValueError(f"parameter {name!r} is a DTensor; pass the module before it is sharded by something else")
    if param.device not in (context.device, torch.device("cpu"), torch.device("meta")):
        raise ValueError(
            f"parameter {name!r} is on device {param.device}, and this rank computes on {context.device}; "
            f"move the module there first"
        )
    if param.layout is not torch.strided:
        raise ValueError(f"parameter {name!r} has layout {param.layout}; only dense parameters can be sharded")
    if param.dtype.is_complex:
        raise ValueError(f"parameter {name!r} has dtype {param.dtype}; store real and imaginary parts as real numbers")
    if not isinstance(param, DistributedParameter):
        if getattr(param, "tp_mode", False):
            _check_tensor_ranks(name, slice_of(param).tp_comm, context)
        if getattr(param, "sequence_parallel", False):
            _check_tensor_ranks(name, param.sequence_comm, context)  # type: ignore[attr-defined]


def _check_tensor_ranks(name: str, comm: Communicator | None, context: ParallelContext) -> None:
    """Raise unless ``comm``, over which bmt_tp has cut or marked a parameter, has the context's ranks."""
    ranks = (context.rank,) if comm is None else comm.ranks
    if ranks != context.tp.ranks:
        raise ValueError(
            f"parameter {name!r} is prepared for the tensor-parallel ranks {ranks}, and the context's are "
            f"{context.tp.ranks}; use the same: init_distributed(tp_size=)"
        )


def whole_values(
    param: nn.Parameter, device: torch.device, shard_comm: Communicator, replicate_comm: Communicator
) -> Tensor | None:
    """A parameter's values before it is sharded: rank 0's, or None where it has none yet."""
    with torch.no_grad():
        if isinstance(param, DistributedParameter):
            return None if param.awaits_values else param.bucket.gather_stored(param.bucket_index)
        if param.is_meta:
            return None
        if shard_comm.size == replicate_comm.size == 1:
            return param.data
        whole = param.data.to(device).clone(memory_format=torch.contiguous_format)
        shard_comm.broadcast(whole, 0)
        replicate_comm.broadcast(whole, 0)
        return whole


def convert(param: nn.Parameter, context: ParallelContext) -> DistributedParameter:
    """Turn a parameter, the same object, into one of a bucket."""
    param.grad = None
    if isinstance(param, DistributedParameter):
        whole = param.bmt_slice
        param.bmt_slice = dataclasses.replace(whole, row_start=0, row_stop=whole.piece_rows, row_comm=None)
        return param
    shape = tuple(param.shape)
    # What bmt_tp has noted: that it cut the parameter over tensor-parallel ranks, or how it is used.
    is_piece, piece = getattr(param, "tp_mode", False), slice_of(param)
    sequence_parallel = getattr(param, "sequence_parallel", False)
    if param.is_meta:
        empty = torch.empty(0, dtype=param.dtype, device=context.device)
        twin = torch.Tensor._make_subclass(DistributedParameter, empty, param.requires_grad)
        torch.utils.swap_tensors(param, twin)
        describe(param, context, shape)  # type: ignore[arg-type]
        param.awaits_values = True  # type: ignore[attr-defined]
    else:
        param.__class__ = DistributedParameter
        describe(param, context, shape)  # type: ignore[arg-type]
    if is_piece:
        param.bmt_slice, param.tp_mode = piece, True  # type: ignore[attr-defined]
    param.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    return param  # type: ignore[return-value]


def drop_weak_references(module: nn.Module) -> None:
    """Recurrent modules keep weak references to their weights, with which :func:`convert` cannot swap them."""
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            part._flat_weight_refs = [None] * len(part._flat_weights_names)


def move_buffers(module: nn.Module, device: torch.device) -> None:
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device != device:
                part._buffers[name] = buffer.to(device)
