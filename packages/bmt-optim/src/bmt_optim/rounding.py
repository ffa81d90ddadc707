"""Stochastic rounding of the rows and columns that a rank holds, the same on every layout.

A weight without a master then takes small updates with a probability, instead of losing them:
:func:`bmt_kernels.round_stochastically`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import bmt_kernels
from bmt_comm import Slice
from bmt_kernels import reference

from .slices import indices_along, row_indices


def round_stochastically(values: Tensor, where: Slice, dtype: torch.dtype, seed: int) -> Tensor:
    """``values`` (fp32, of ``where.local_shape``) in ``dtype``, bfloat16 or float16.

    Args:
        seed: rounding with another one is independent.
    """
    width = math.prod(where.shape[where.row_dims :])
    dim = where.tp_dim
    if dim is None:
        return bmt_kernels.round_stochastically(values, dtype, seed=seed, first=where.row_start * width)
    if where.row_dims == 1 and not where.tp_blocks:
        # The shard is rows of the tensor, or a range of each row.
        inner = math.prod(where.shape[dim + 1 :])
        if dim == 0:
            first = (where.tp_offset + where.row_start) * width
            return bmt_kernels.round_stochastically(values, dtype, seed=seed, first=first)
        if dim == 1:
            first = where.row_start * width + where.tp_offset * inner
            row = max(where.tp_extent * inner, 1)
            return bmt_kernels.round_stochastically(values, dtype, seed=seed, first=first, width=row, stride=width)
    return reference.round_stochastically(values, dtype, seed, _indices(where, values.device))


def _indices(where: Slice, device: torch.device) -> Tensor:
    """The index in the logical tensor, in row-major order, of every element that this rank holds: int64."""
    index = row_indices(where, device)
    for dim in range(where.row_dims, len(where.shape)):
        index = index[..., None] * where.shape[dim] + indices_along(where, dim, device)
    return index.view(where.local_shape)
