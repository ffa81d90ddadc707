"""Mean, standard deviation and extremes of tensors whose elements are spread over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bmt_comm import Communicator

WIDTH = 5
"""Numbers that describe the elements of a tensor: count, mean, sum of squared deviations, largest, smallest; fp64."""
_CHUNK = 1 << 22  # elements that are converted to fp64 at a time


@dataclass(frozen=True)
class Statistics:
    """Statistics of all elements of a tensor. The standard deviation is that of a sample, as in ``torch.std``.

    The real and the imaginary part of a complex number count as two elements.
    """

    count: int
    mean: float
    std: float
    max: float
    min: float

    def divided_by(self, scale: float) -> Statistics:
        """The statistics of the elements divided by ``scale`` > 0."""
        return Statistics(self.count, self.mean / scale, self.std / scale, self.max / scale, self.min / scale)


def describe(x: Tensor | None) -> Tensor:
    """(5,): the numbers of a tensor, on its device. None has no elements."""
    if x is None or x.numel() == 0:
        device = torch.device("cpu") if x is None else x.device
        return torch.tensor([0, 0, 0, -math.inf, math.inf], dtype=torch.float64, device=device)
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    parts = []
    for part in x.reshape(-1).split(_CHUNK):
        values = part.double()
        mean = values.mean()
        count = torch.full_like(mean, values.numel())
        parts.append(torch.stack([count, mean, (values - mean).square().sum(), values.max(), values.min()]))
    return combine(torch.stack(parts))


def combine(rows: Tensor) -> Tensor:
    """(n, …, 5) → (…, 5): combine the numbers of n tensors."""
    count = rows[..., 0].sum(0)
    weights = torch.where(count > 0, rows[..., 0] / count, 0)
    mean = (weights * rows[..., 1]).sum(0)
    squares = (rows[..., 2] + rows[..., 0] * (rows[..., 1] - mean).square()).sum(0)
    return torch.stack([count, mean, squares, rows[..., 3].amax(0), rows[..., 4].amin(0)], dim=-1)


def over_ranks(numbers: Tensor, comm: Communicator, *, replicas: bool = False) -> Tensor:
    """(k, 5) of this rank → (k, 5) of all ranks of ``comm`` together. Every rank must call it.

    Args:
        numbers: of k tensors, the same tensors on every rank.
        comm: the ranks.
        replicas: whether tensors whose numbers have the same bits on all ranks are copies of one tensor.
    """
    if comm.size == 1 or not len(numbers):
        return numbers
    rows = comm.stacked(numbers.to(comm.device).contiguous())
    together = combine(rows)
    if replicas:
        bits = rows.view(torch.int64)
        together = torch.where((bits == bits[0]).all(0).all(-1, keepdim=True), rows[0], together)
    return together


def as_statistics(numbers: Tensor) -> list[Statistics | None]:
    """The statistics of (k, 5) numbers; None for tensors without elements."""
    results: list[Statistics | None] = []
    for count, mean, squares, largest, smallest in numbers.tolist():
        std = math.sqrt(squares / (count - 1)) if count > 1 else math.nan
        results.append(Statistics(int(count), mean, std, largest, smallest) if count else None)
    return results


def summary_of(values: Statistics | None, grad: Statistics | None, absent: float | None) -> dict[str, Any]:
    """The entries of a summary: ``max``, ``min``, ``mean``, ``std`` and the same with ``grad_``."""
    return {
        prefix + key: absent if of is None else getattr(of, key)
        for prefix, of in (("", values), ("grad_", grad))
        for key in ("max", "min", "mean", "std")
    }
