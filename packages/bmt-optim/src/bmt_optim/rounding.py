"""Stochastic rounding from fp32 to half precision, the same on every layout.

A number between two neighbours becomes the upper one with a probability of how near it is: the expected result is
the number. Small updates of a weight without a master are then not lost, but happen now and then.

The random bits are a hash of a seed and of the element's index in the logical tensor, not a generator's: a rank
that holds a part rounds its elements as one that holds the whole would.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bmt_comm import Slice

from .slices import indices_along, row_indices

_LOW = 0xFFFFFFFF


def round_stochastically(values: Tensor, where: Slice, dtype: torch.dtype, seed: int) -> Tensor:
    """``values`` (fp32, of ``where.local_shape``) in ``dtype``, bfloat16 or float16.

    Infinities, NaN and what ``dtype`` has exactly stay what they are; fp16 overflows to infinity as in rounding
    to nearest.

    Args:
        seed: rounding with another one is independent.
    """
    noise = _hash(_indices(where, values.device) ^ _mixed(seed))
    dropped = 16 if dtype is torch.bfloat16 else 13
    bits = values.contiguous().view(torch.int32)
    low = (1 << dropped) - 1
    rounded = ((bits + (noise & low).to(torch.int32)) & ~low).view(torch.float32)
    if dtype is torch.float16:  # below its smallest normal number it has steps of 2^-24
        steps = (values * 2.0**24 + (noise & low) / 2.0**dropped).floor() * 2.0**-24
        rounded = torch.where(values.abs() < 2.0**-14, steps, rounded)
    return torch.where(values.isfinite(), rounded, values).to(dtype)


def _indices(where: Slice, device: torch.device) -> Tensor:
    """The index in the logical tensor, in row-major order, of every element that this rank holds: int64."""
    index = row_indices(where, device)
    for dim in range(where.row_dims, len(where.shape)):
        index = index[..., None] * where.shape[dim] + indices_along(where, dim, device)
    return index.view(where.local_shape)


def _mixed(number: int) -> int:
    return int(_hash(torch.tensor(number & (_LOW >> 1))))


def _hash(numbers: Tensor) -> Tensor:
    """32 well-mixed bits of each number (int64, not negative).

    Two rounds of multiplying and shifting, with the constants that C. Wellons found to have the least bias
    (https://nullprogram.com/blog/2018/07/31/).
    """
    x = (numbers ^ (numbers >> 32)) & _LOW
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & _LOW
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _LOW
    return x ^ (x >> 16)
