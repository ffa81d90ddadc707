"""Factored second moments in plain PyTorch.

Elements are computed in fp32 in the order of the compiled kernels; sums over them are made in double precision, where
the compiled kernels add short runs in fp32 first.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def _scale(grad_scale: float, grad_factor: Tensor | None) -> float | Tensor:
    inverse = 1.0 / grad_scale
    return inverse if grad_factor is None else grad_factor.reshape(()) * inverse


def _direction(
    grad: Tensor, row_factor: Tensor, col_factor: Tensor, scale: float | Tensor, step_size: Tensor | None
) -> Tensor:
    multiplier = row_factor * scale
    if step_size is not None:
        multiplier = multiplier * step_size
    return grad.float() * multiplier.unsqueeze(-1) * col_factor.unsqueeze(-2)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float32 if tensor.device.type == "mps" else torch.float64  # mps has no float64


def _assign(target: Tensor, value: Tensor, found_inf: Tensor | None) -> None:
    if found_inf is not None:
        value = torch.where(found_inf.reshape(()) != 0, target, value.to(target.dtype))
    target.copy_(value)


@torch.no_grad()
def factored_square_sums(
    grads: Sequence[Tensor],
    row_sums: Sequence[Tensor],
    col_sums: Sequence[Tensor],
    *,
    eps: float,
    grad_scale: float = 1.0,
    grad_factor: Tensor | None = None,
) -> None:
    """See `bmt_kernels.factored_square_sums`."""
    scale = _scale(grad_scale, grad_factor)
    for grad, row_sum, col_sum in zip(grads, row_sums, col_sums):
        g = grad.float() * scale
        squares = g * g + eps
        row_sum.copy_(squares.sum(-1, dtype=_sum_dtype(squares)))
        col_sum.copy_(squares.sum(-2, dtype=_sum_dtype(squares)))


@torch.no_grad()
def factored_update_square_sum(
    grads: Sequence[Tensor],
    row_factors: Sequence[Tensor],
    col_factors: Sequence[Tensor],
    out: Tensor,
    *,
    grad_scale: float = 1.0,
    grad_factor: Tensor | None = None,
) -> None:
    """See `bmt_kernels.factored_update_square_sum`."""
    scale = _scale(grad_scale, grad_factor)
    for i, (grad, row_factor, col_factor) in enumerate(zip(grads, row_factors, col_factors)):
        u = _direction(grad, row_factor, col_factor, scale, None)
        out[i] = (u * u).sum(dtype=_sum_dtype(u))


@torch.no_grad()
def factored_residual_square_sums(
    grads: Sequence[Tensor],
    row_factors: Sequence[Tensor],
    col_factors: Sequence[Tensor],
    step_sizes: Tensor,
    exp_avgs: Sequence[Tensor],
    row_sums: Sequence[Tensor],
    col_sums: Sequence[Tensor],
    *,
    beta1: float,
    eps: float,
    grad_scale: float = 1.0,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """See `bmt_kernels.factored_residual_square_sums`."""
    scale = _scale(grad_scale, grad_factor)
    for i, (grad, exp_avg) in enumerate(zip(grads, exp_avgs)):
        u = _direction(grad, row_factors[i], col_factors[i], scale, step_sizes[i])
        m = exp_avg * beta1 + u * (1.0 - beta1)
        squares = (u - m) * (u - m) + eps
        _assign(exp_avg, m, found_inf)
        _assign(row_sums[i], squares.sum(-1, dtype=_sum_dtype(squares)), found_inf)
        _assign(col_sums[i], squares.sum(-2, dtype=_sum_dtype(squares)), found_inf)


@torch.no_grad()
def factored_update(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    row_factors: Sequence[Tensor],
    col_factors: Sequence[Tensor],
    step_sizes: Tensor,
    *,
    decay_factors: Tensor | None = None,
    exp_avgs: Sequence[Tensor] | None = None,
    beta1: float = 0.0,
    masters: Sequence[Tensor | None] | None = None,
    grad_scale: float = 1.0,
    grad_factor: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:
    """See `bmt_kernels.factored_update`."""
    scale = _scale(grad_scale, grad_factor)
    for i, (param, grad) in enumerate(zip(params, grads)):
        change = _direction(grad, row_factors[i], col_factors[i], scale, step_sizes[i])
        if exp_avgs is not None:
            change = exp_avgs[i] * beta1 + change * (1.0 - beta1)
            _assign(exp_avgs[i], change, found_inf)
        master = None if masters is None else masters[i]
        weight = (param if master is None else master).float()
        if decay_factors is not None:
            weight = weight * decay_factors[i]
        weight = weight - change
        if master is not None:
            _assign(master, weight, found_inf)
        _assign(param, weight, found_inf)
