"""The fused Adam step: one native call, or one CUDA launch, over a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_kernels import _native, reference
from bmt_kernels._compat import increment_version
from bmt_kernels._tables import adam_table, check_flag
from bmt_kernels.reference.adam import adam_scalars


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
    """Update parameters and moments in place, as ``torch.optim.AdamW`` (or ``Adam``) would.

    For each i, in fp32, with g = grad / grad_scale (negated to maximize) and t = step::

        g  = g + weight_decay * p                   if not decoupled
        m  = beta1 * m + (1 - beta1) * g            exp_avgs[i]
        v  = beta2 * v + (1 - beta2) * g * g        exp_avg_sqs[i]
        p  = p * (1 - lr * weight_decay)            if decoupled
        p  = p - lr / (1 - beta1^t) * m / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Infinities and NaN propagate as in IEEE arithmetic, and subnormal numbers are kept. All the tensors of index i
    have one shape and are on one device, the same for all i; they are contiguous, or dense with equal strides.
    Empty lists and empty tensors are fine.

    Args:
        params: float32, bfloat16 or float16. Written, unless ``update_params`` is false.
        grads: float32, bfloat16 or float16, not necessarily their parameters' dtype. Only read.
        exp_avgs: float32, first moments. Written.
        exp_avg_sqs: float32, second moments. Written.
        lr: learning rate, not negative.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the denominator, not negative.
        weight_decay: not negative.
        step: the number of this step, counted from 1.
        masters: float32 master weights of bfloat16 and float16 parameters: the update is applied to them, and the
            parameters get copies rounded to nearest, ties to even. None for a float32 parameter. Without a master,
            a half-precision parameter is itself updated, in fp32, and rounded.
        grad_scale: what the gradients were multiplied by (the loss scale), positive.
        decoupled: decay the weights (AdamW) rather than add an L2 term to the gradients (Adam).
        maximize: ascend rather than descend.
        update_params: false to move the moments and hold the weights where they are.
        found_inf: a float32 tensor of one element on the same device. If it is not zero, nothing changes. It is
            read where it is: on CUDA the host does not wait for it.

    Raises:
        TypeError: an argument or an entry has a wrong type, dtype or layout.
        ValueError: list lengths, shapes, devices or strides do not match; a tensor that is written to shares memory
            with another; a number is out of its range.
        RuntimeError: CUDA failed to launch the kernel.

        Everything is checked first: after a TypeError or a ValueError no tensor has been modified.

    Source: Kingma & Ba, arXiv:1412.6980, algorithm 1; Loshchilov & Hutter, arXiv:1711.05101, algorithm 2.
    """
    beta1, beta2 = _checked_betas(betas)
    scalars = adam_scalars(
        _checked("lr", lr, 0.0),
        beta1,
        beta2,
        _checked("eps", eps, 0.0),
        _checked("weight_decay", weight_decay, 0.0),
        _checked_step(step),
        _checked("grad_scale", grad_scale, math.ulp(0.0)),
        decoupled,
        maximize,
        update_params,
    )
    rows, device = adam_table(params, grads, exp_avgs, exp_avg_sqs, masters)
    if found_inf is not None:
        check_flag("found_inf", found_inf, device if len(params) else found_inf.device)
    if not rows:
        return

    if device.type == "cpu" and (cpu := _native.cpu_kernels()) is not None:
        flag = 0 if found_inf is None else found_inf.data_ptr()
        cpu.module.adam_step(cpu.variant, rows, *scalars, flag, torch.get_num_threads())
    elif device.type == "cuda" and (cuda := _native.cuda_kernels(device.index)) is not None:
        flag = 0 if found_inf is None else found_inf.data_ptr()
        stream = torch.cuda.current_stream(device).cuda_stream
        cuda.adam_step(device.index, stream, rows, *scalars, flag)
    else:
        reference.adam_step(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            masters=masters,
            grad_scale=grad_scale,
            decoupled=decoupled,
            maximize=maximize,
            update_params=update_params,
            found_inf=found_inf,
        )
        return  # PyTorch has counted its own writes
    # The moments are nobody's leaves: only weights can have been saved for a backward.
    if update_params:
        increment_version(params)
        if masters is not None:
            increment_version([master for master in masters if master is not None])


def _checked(name: str, value: float, least: float) -> float:
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} is a {type(value).__name__}; it must be a float (use float({name}))")
        value = float(value)
    if not least <= value < math.inf:
        bound = "not negative" if least == 0.0 else "positive"
        raise ValueError(f"{name} is {value}; it must be finite and {bound}")
    return value


def _checked_step(step: int) -> int:
    if type(step) is not int:
        raise TypeError(f"step is a {type(step).__name__}; it must be an int (use int(step))")
    if step < 1:
        raise ValueError(f"step is {step}; steps count from 1")
    return step


def _checked_betas(betas: tuple[float, float]) -> tuple[float, float]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas is {betas!r}; it must be a pair of floats")
    beta1 = _checked("betas[0]", betas[0], 0.0)
    beta2 = _checked("betas[1]", betas[1], 0.0)
    for i, beta in enumerate((beta1, beta2)):
        if beta >= 1.0:
            raise ValueError(f"betas[{i}] is {beta}; it must be less than 1")
    return beta1, beta2
