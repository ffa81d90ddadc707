"""Parameters cut by hand, as every layout cuts them, and a plain reference beside them.

Tests of single optimizers use these: ``train`` one over shards, the reference over whole tensors, and compare with
``update_error``.
"""

import math

import torch
from torch import nn

from bmt_comm import Slice, local_tensor, slice_of
from bmt_optim.slices import assemble, cut


def tensors(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def cut_slice(shape, row_comm, tp_dim=None, tp_comm=None, blocks=()):
    """Ragged ranges of rows, the later ranks' longer, of a piece cut over ``tp_comm``."""
    offset = extent = 0
    if tp_dim is not None:
        offset = shape[tp_dim] * tp_comm.rank // tp_comm.size
        extent = shape[tp_dim] * (tp_comm.rank + 1) // tp_comm.size - offset
    else:
        tp_comm = None
    row_dims = row_dims_of(shape)
    piece = [extent if dim == tp_dim else length for dim, length in enumerate(shape)]
    rows = math.prod(piece[:row_dims])
    start, stop = rows * row_comm.rank // row_comm.size, rows * (row_comm.rank + 1) // row_comm.size
    return Slice(tuple(shape), start, stop, row_comm, tp_dim, offset, extent, tp_comm, blocks, row_dims)


def row_dims_of(shape):
    """Rows of packed experts are counted along two dimensions."""
    return 2 if len(shape) == 3 else 1


def layout(ctx, shapes):
    """Row shards over all ranks; with tensor parallelism also every way of cutting a piece, in turn."""
    if ctx.tp_size == 1:
        return [cut_slice(s, ctx.world) for s in shapes]
    found = []
    for n, shape in enumerate(shapes):
        tp_dim = [0, 1, None][n % 3] if len(shape) > 1 else [0, None][n % 2] if shape else None
        if tp_dim is None:
            found.append(cut_slice(shape, ctx.zero))
        else:
            fused = tp_dim == 0 and shape[0] % (3 * ctx.tp_size) == 0
            found.append(cut_slice(shape, ctx.tp_zero, tp_dim, ctx.tp, (shape[0] // 3,) * 3 if fused else ()))
    return found


def undivided_layout(ctx, shapes):
    """Every tensor on one rank, in turn from the last."""
    slices = []
    for n, shape in enumerate(shapes):
        rows = math.prod(shape[: row_dims_of(shape)]) if (n + ctx.rank + 1) % ctx.world_size == 0 else 0
        slices.append(Slice(tuple(shape), 0, rows, ctx.world, row_dims=row_dims_of(shape)))
    return slices


def shards(whole, slices, dtype=torch.float32):
    params = []
    for tensor, where in zip(whole, slices):
        p = nn.Parameter(cut(tensor, where).to(dtype).clone())
        p.bmt_slice = where
        params.append(p)
    return params


def train(optimizer, params, steps, grads_at, scale=1.0):
    """``grads_at(step)`` gives whole gradients; each parameter gets its part, times ``scale``."""
    for step in steps:
        for p, g in zip(params, grads_at(step)):
            p.grad = cut(g, slice_of(p)).to(p.dtype).clone() * scale
        optimizer.step(**({} if scale == 1 else {"scale": scale}))


def update_error(params, reference, start):
    """‖Δp - Δq‖ / ‖Δq‖, the largest over the parameters; NaN if one of them is."""
    errors = [0.0]
    for p, q, s in zip(params, reference, start):
        whole = assemble(local_tensor(p.detach()), slice_of(p)).double()
        q, s = q.detach().double(), s.detach().double()
        total = (q - s).norm().item()
        difference = (whole - q).norm().item()
        errors.append(difference / total if total else difference)
    return torch.tensor(errors, dtype=torch.float64).max().item()
