"""The Adam step in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AdamScalars(NamedTuple):
    """What an Adam step multiplies by, computed in double precision and used in single precision.

    Those that follow from the step or the learning rate are 0-dim tensors where these are.
    """

    grad_factor: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    decay_factor: float | Tensor
    l2: float
    denom_factor: float | Tensor
    eps: float
    step_size: float | Tensor
    direction_factor: float | Tensor
    decoupled: bool
    update: bool | Tensor


def adam_scalars(
    lr: float | Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int | Tensor,
    grad_scale: float,
    hold_steps: int,
    decoupled: bool,
    maximize: bool,
) -> AdamScalars:
    """The scalars of step number `step`, counted from 1."""
    rate, t = _precise(lr), _precise(step)
    bias_correction1 = 1.0 - beta1**t
    bias_correction2 = 1.0 - beta2**t
    root = bias_correction2.sqrt() if isinstance(bias_correction2, Tensor) else math.sqrt(bias_correction2)
    return AdamScalars(
        -1.0 / grad_scale if maximize else 1.0 / grad_scale,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        _single(1.0 - rate * weight_decay),
        weight_decay,
        _single(1.0 / root),
        eps,
        _single(rate / bias_correction1),
        _single(1.0 / bias_correction1),
        decoupled or weight_decay == 0.0,  # without decay, 0 * weight must not turn an infinite weight to NaN
        t > hold_steps,
    )


def _precise(number: float | Tensor) -> float | Tensor:
    if not isinstance(number, Tensor):
        return number
    return number.reshape(()).to(torch.float32 if number.device.type == "mps" else torch.float64)


def _single(number: float | Tensor) -> float | Tensor:
    return number.float() if isinstance(number, Tensor) else number


def _square_root(x: Tensor) -> Tensor:
    """The nearest fp32 number. PyTorch on CPU may take a vector library that is off by one bit."""
    return x.double().sqrt().float() if x.device.type == "cpu" else x.sqrt()


@torch.no_grad()
def adam_step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int | Tensor,
    masters: Sequence[Tensor | None] | None = None,
    grad_scale: float = 1.0,
    grad_factor: Tensor | None = None,
    decoupled: bool = True,
    maximize: bool = False,
    hold_steps: int = 0,
    found_inf: Tensor | None = None,
    delta_stats: Tensor | None = None,
) -> None:
    """See `bmt_kernels.adam_step`."""
    s = adam_scalars(lr, *betas, eps, weight_decay, step, grad_scale, hold_steps, decoupled, maximize)
    factor = s.grad_factor if grad_factor is None else grad_factor.reshape(()) * s.grad_factor
    skip = None if found_inf is None else found_inf.reshape(()) != 0
    hold = skip
    if isinstance(s.update, Tensor):
        hold = ~s.update if skip is None else skip | ~s.update

    def assign(target: Tensor, value: Tensor, keep: Tensor | None) -> None:
        target.copy_(value if keep is None else torch.where(keep, target, value.to(target.dtype)))

    for i, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs)):
        master = None if masters is None else masters[i]
        weight = (param if master is None else master).float()
        g = grad.float() * factor
        if not s.decoupled:
            g = g + weight * s.l2
        new_avg = exp_avg * s.beta1 + g * s.one_minus_beta1
        new_avg_sq = exp_avg_sq * s.beta2 + (g * s.one_minus_beta2) * g
        assign(exp_avg, new_avg, skip)
        assign(exp_avg_sq, new_avg_sq, skip)
        quotient = new_avg / (_square_root(new_avg_sq) * s.denom_factor + s.eps)
        if delta_stats is not None:
            direction = (quotient * s.direction_factor).double()
            assign(delta_stats, delta_stats + torch.stack([direction.sum(), direction.square().sum()]), skip)
        if s.update is False:
            continue
        if s.decoupled:
            weight = weight * s.decay_factor
        weight = weight - quotient * s.step_size
        if master is not None:
            assign(master, weight, hold)
        assign(param, weight, hold)
