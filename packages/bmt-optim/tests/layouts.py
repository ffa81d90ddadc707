"""Parameters sharded by hand, as every layout shards them, and a plain reference beside them.

Tests of single optimizers use these: ``train`` one over shards, the reference over unsharded ones, and compare with
``update_error``.
"""

import math

import torch
from torch import nn

from bmt_comm import Slice, local_tensor, shard_of, slice_of
from bmt_optim.slices import unshard


def tensors(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def shard_slice(shape, row_comm, tp_dim=None, tp_comm=None, blocks=()):
    """Ragged ranges of rows, longer on later ranks, of a shard over ``tp_comm``."""
    offset = extent = 0
    if tp_dim is not None:
        offset = shape[tp_dim] * tp_comm.rank // tp_comm.size
        extent = shape[tp_dim] * (tp_comm.rank + 1) // tp_comm.size - offset
    else:
        tp_comm = None
    row_dims = row_dims_of(shape)
    tp_shard_shape = [extent if dim == tp_dim else length for dim, length in enumerate(shape)]
    rows = math.prod(tp_shard_shape[:row_dims])
    start, stop = rows * row_comm.rank // row_comm.size, rows * (row_comm.rank + 1) // row_comm.size
    return Slice(tuple(shape), start, stop, row_comm, tp_dim, offset, extent, tp_comm, blocks, row_dims)


def row_dims_of(shape):
    """Rows of packed experts are counted along two dimensions."""
    return 2 if len(shape) == 3 else 1


def layout(ctx, shapes):
    """Row shards over all ranks; with tensor parallelism also every way of sharding, in turn."""
    if ctx.tp_size == 1:
        return [shard_slice(s, ctx.world) for s in shapes]
    slices = []
    for n, shape in enumerate(shapes):
        tp_dim = [0, 1, None][n % 3] if len(shape) > 1 else [0, None][n % 2] if shape else None
        if tp_dim is None:
            slices.append(shard_slice(shape, ctx.zero))
        else:
            fused = tp_dim == 0 and shape[0] % (3 * ctx.tp_size) == 0
            slices.append(shard_slice(shape, ctx.tp_zero, tp_dim, ctx.tp, (shape[0] // 3,) * 3 if fused else ()))
    return slices


def undivided_layout(ctx, shapes):
    """Every tensor on one rank, in turn from the last."""
    slices = []
    for n, shape in enumerate(shapes):
        rows = math.prod(shape[: row_dims_of(shape)]) if (n + ctx.rank + 1) % ctx.world_size == 0 else 0
        slices.append(Slice(tuple(shape), 0, rows, ctx.world, row_dims=row_dims_of(shape)))
    return slices


def shards(unsharded, slices, dtype=torch.float32):
    params = []
    for tensor, where in zip(unsharded, slices):
        p = nn.Parameter(shard_of(tensor, where).to(dtype).clone())
        p.bmt_slice = where
        params.append(p)
    return params


def train(optimizer, params, steps, grads_at, scale=1.0):
    """``grads_at(step)`` gives unsharded gradients; each parameter gets its shard, times ``scale``."""
    for step in steps:
        for p, g in zip(params, grads_at(step)):
            p.grad = shard_of(g, slice_of(p)).to(p.dtype).clone() * scale
        optimizer.step(**({} if scale == 1 else {"scale": scale}))


def update_error(params, reference, start):
    """‖Δp - Δq‖ / ‖Δq‖, the largest over the parameters; NaN if one of them is."""
    errors = [0.0]
    for p, q, s in zip(params, reference, start):
        unsharded = unshard(local_tensor(p.detach()), slice_of(p)).double()
        q, s = q.detach().double(), s.detach().double()
        total = (q - s).norm().item()
        difference = (unsharded - q).norm().item()
        errors.append(difference / total if total else difference)
    return torch.tensor(errors, dtype=torch.float64).max().item()
