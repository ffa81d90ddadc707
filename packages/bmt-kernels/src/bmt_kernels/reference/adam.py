"""The Adam step in plain PyTorch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AdamScalars(NamedTuple):
    """What an Adam step multiplies by, computed in double precision and used in single precision."""

    grad_factor: float
    beta1: float
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    decay_factor: float
    l2: float
    denom_factor: float
    eps: float
    step_size: float
    decoupled: bool
    update: bool


def adam_scalars(
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float,
    decoupled: bool,
    maximize: bool,
    update: bool,
) -> AdamScalars:
    """The scalars of step number `step`, counted from 1."""
    bias_correction1 = 1.0 - beta1**step
    bias_correction2 = 1.0 - beta2**step
    return AdamScalars(
        -1.0 / grad_scale if maximize else 1.0 / grad_scale,
        beta1,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        1.0 - lr * weight_decay,
        weight_decay,
        1.0 / math.sqrt(bias_correction2),
        eps,
        lr / bias_correction1,
        decoupled or weight_decay == 0.0,  # without decay, 0 * weight must not turn an infinite weight to NaN
        update,
    )


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
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    masters: Sequence[Tensor | None] | None = None,
    grad_scale: float = 1.0,
    decoupled: bool = True,
    maximize: bool = False,
    update_params: bool = True,
    found_inf: Tensor | None = None,
) -> None:
    """See `bmt_kernels.adam_step`."""
    s = adam_scalars(lr, betas[0], betas[1], eps, weight_decay, step, grad_scale, decoupled, maximize, update_params)
    skip = None if found_inf is None else found_inf.reshape(()) != 0

    def assign(target: Tensor, value: Tensor) -> None:
        target.copy_(value if skip is None else torch.where(skip, target, value.to(target.dtype)))

    for i, (param, grad, exp_avg, exp_avg_sq) in enumerate(zip(params, grads, exp_avgs, exp_avg_sqs)):
        master = None if masters is None else masters[i]
        weight = (param if master is None else master).float()
        g = grad.float() * s.grad_factor
        if not s.decoupled:
            g = g + weight * s.l2
        new_avg = exp_avg * s.beta1 + g * s.one_minus_beta1
        new_avg_sq = exp_avg_sq * s.beta2 + (g * s.one_minus_beta2) * g
        assign(exp_avg, new_avg)
        assign(exp_avg_sq, new_avg_sq)
        if not s.update:
            continue
        if s.decoupled:
            weight = weight * s.decay_factor
        denominator = _square_root(new_avg_sq) * s.denom_factor + s.eps
        weight = weight - (new_avg / denominator) * s.step_size
        if master is not None:
            assign(master, weight)
        assign(param, weight)
