"""The two passes of a LAMB step in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_kernels.reference.adam import _square_root


def sums_dtype(device: torch.device) -> torch.dtype:
    """In which the sums are made."""
    return torch.float32 if device.type == "mps" else torch.float64  # mps has no float64


def _direction(
    weight: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool,
) -> Tensor:
    denom_factor, direction_factor = 1.0, 1.0
    if bias_correction:
        denom_factor = 1.0 / math.sqrt(1.0 - betas[1] ** step)
        direction_factor = 1.0 / (1.0 - betas[0] ** step)
    quotient = exp_avg / (_square_root(exp_avg_sq) * denom_factor + eps)
    return quotient * direction_factor + weight.float() * weight_decay


@torch.no_grad()
def lamb_moments(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    sums: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
    grad_factor: Tensor | None = None,
) -> None:
    """See `bmt_kernels.lamb_moments`; its result is written to `sums`."""
    factor = 1.0 / grad_scale if grad_factor is None else grad_factor.reshape(()) * (1.0 / grad_scale)
    for i, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs)):
        g = grad.float() * factor
        exp_avg.copy_(exp_avg * betas[0] + g * (1.0 - betas[0]))
        exp_avg_sq.copy_(exp_avg_sq * betas[1] + (g * (1.0 - betas[1])) * g)
        r = _direction(param, exp_avg, exp_avg_sq, betas, eps, weight_decay, step, bias_correction)
        for j, values in enumerate((param, r)):
            sums[i, j] = values.to(sums.dtype).square().sum()


@torch.no_grad()
def lamb_update(
    params: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    rates: Tensor,
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool = True,
    masters: Sequence[Tensor | None] | None = None,
) -> None:
    """See `bmt_kernels.lamb_update`."""
    for i, (param, exp_avg, exp_avg_sq) in enumerate(zip(params, exp_avgs, exp_avg_sqs)):
        master = None if masters is None else masters[i]
        weight = (param if master is None else master).float()
        r = _direction(weight, exp_avg, exp_avg_sq, betas, eps, weight_decay, step, bias_correction)
        weight = weight - r * rates[i]
        if master is not None:
            master.copy_(weight)
        param.copy_(weight)
