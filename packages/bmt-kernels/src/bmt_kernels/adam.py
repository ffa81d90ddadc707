"""The fused Adam step: one native call, or one CUDA launch, over a list of tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_kernels import _library, _native, reference
from bmt_kernels._compat import increment_version, weights_written
from bmt_kernels._tables import adam_table, check_flag, check_stats

_FLOATS = (torch.float32, torch.float64)
_NUMBERS = (*_FLOATS, torch.int64)
"""The dtypes of numbers on the device, in the order of NumberType in csrc/cuda/adam.h."""
_LR, _STEP = 0, 5
"""Where among the settings the two are that may be on the device."""


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
    """Update parameters and moments in place, as ``torch.optim.AdamW`` (or ``Adam``) would.

    For each i, in fp32, with g = grad / grad_scale * grad_factor (negated to maximize) and t = step::

        g  = g + weight_decay * p                   if not decoupled
        m  = beta1 * m + (1 - beta1) * g            exp_avgs[i]
        v  = beta2 * v + (1 - beta2) * g * g        exp_avg_sqs[i]
        d  = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps)
        p  = p * (1 - lr * weight_decay)            if decoupled, and t > hold_steps
        p  = p - lr * d                             if t > hold_steps

    Infinities and NaN propagate as in IEEE arithmetic, and subnormal numbers are kept. All the tensors of index i
    have one shape and are on one device, the same for all i; they are contiguous, or dense with equal strides.
    Empty lists and empty tensors are fine.

    Numbers that may be tensors have one element and are on that device. On CUDA they are read there when the step
    runs, without the host waiting and without a check of their range, so that a step captured in a CUDA graph
    follows them from replay to replay. On CPU they are checked like numbers.

    Args:
        params: float32, bfloat16 or float16. Written, unless held.
        grads: float32, bfloat16 or float16, not necessarily their parameters' dtype. Only read.
        exp_avgs: float32, first moments. Written.
        exp_avg_sqs: float32, second moments. Written.
        lr: learning rate, not negative; or a float32 or float64 tensor. torch.compile makes a graph for each float: in
            what it compiles, pass one that changes as a tensor.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the denominator, not negative.
        weight_decay: not negative.
        step: the number of this step, counted from 1; or a float32, float64 or int64 tensor.
        masters: float32 master weights of bfloat16 and float16 parameters: the update is applied to them, and the
            parameters get copies rounded to nearest, ties to even. None for a float32 parameter. Without a master,
            a half-precision parameter is itself updated, in fp32, and rounded.
        grad_scale: what the gradients were multiplied by (the loss scale), positive.
        grad_factor: a float32 tensor by which the gradients are also multiplied, such as a clip coefficient.
        decoupled: decay the weights (AdamW) rather than add an L2 term to the gradients (Adam).
        maximize: ascend rather than descend.
        hold_steps: up to this step only the moments are updated, and the weights stay unchanged.
        found_inf: a float32 tensor. If it is not zero, nothing changes.
        delta_stats: a float64 tensor of shape (2,), to which the sum of d over all elements of all tensors and the
            sum of d * d are added, held weights included. The sums do not depend on the number of threads; between
            CPU, GPU and the reference they may differ in rounding.

    Raises:
        TypeError: an argument or an entry has a wrong type, dtype or layout.
        ValueError: list lengths, shapes, devices or strides do not match; a tensor that is written to shares memory
            with another; a number is out of its range.
        RuntimeError: CUDA failed to launch the kernel.

        Everything is checked first: after a TypeError or a ValueError no tensor has been modified.

    Source: Kingma & Ba, arXiv:1412.6980, algorithm 1; Loshchilov & Hutter, arXiv:1711.05101, algorithm 2.
    """
    if _library.tracing():
        present, mastered = _library.without_gaps(masters)
        with torch.no_grad():
            _operation(
                params,
                grads,
                exp_avgs,
                exp_avg_sqs,
                masters=present,
                mastered=mastered,
                lr=0.0 if isinstance(lr, Tensor) else lr,
                lr_tensor=lr if isinstance(lr, Tensor) else None,
                step=1 if isinstance(step, Tensor) else step,
                step_tensor=step if isinstance(step, Tensor) else None,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                grad_scale=grad_scale,
                grad_factor=grad_factor,
                decoupled=decoupled,
                maximize=maximize,
                hold_steps=hold_steps,
                found_inf=found_inf,
                delta_stats=delta_stats,
            )
        return

    beta1, beta2 = _checked_betas(betas)
    eps = _checked("eps", eps, 0.0)
    weight_decay = _checked("weight_decay", weight_decay, 0.0)
    grad_scale = _checked("grad_scale", grad_scale, math.ulp(0.0))
    _checked_count("hold_steps", hold_steps, 0)
    rows, device = adam_table(params, grads, exp_avgs, exp_avg_sqs, masters)
    needed = device if len(params) else None
    if found_inf is not None:
        check_flag("found_inf", found_inf, needed)
    if grad_factor is not None:
        check_flag("grad_factor", grad_factor, needed)
    if delta_stats is not None:
        check_stats("delta_stats", delta_stats, needed)
    if isinstance(lr, Tensor):
        check_flag("lr", lr, needed, _FLOATS)
        lr = lr.item() if lr.device.type == "cpu" else lr
    if not isinstance(lr, Tensor):
        lr = _checked("lr", lr, 0.0)
    if isinstance(step, Tensor):
        check_flag("step", step, needed, _NUMBERS)
        step = _checked_integer(step.item()) if step.device.type == "cpu" else step
    if not isinstance(step, Tensor):
        _checked_count("step", step, 1)
    if not rows:
        return

    # In the order of AdamSettings in csrc/common/adam.h.
    settings = (lr, beta1, beta2, eps, weight_decay, step, grad_scale, hold_steps, bool(decoupled), bool(maximize))
    if device.type == "cpu" and (cpu := _native.cpu_kernels()) is not None:
        cpu.module.adam_step(
            cpu.variant,
            rows,
            settings,
            _address(found_inf),
            _address(grad_factor),
            _address(delta_stats),
            torch.get_num_threads(),
        )
    elif (cuda := _native.cuda_kernels(device)) is not None:
        _step_on_cuda(cuda, device, rows, settings, found_inf, grad_factor, delta_stats)
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
            grad_factor=grad_factor,
            decoupled=decoupled,
            maximize=maximize,
            hold_steps=hold_steps,
            found_inf=found_inf,
            delta_stats=delta_stats,
        )
        return  # PyTorch has counted its own writes
    # Only weights can have been saved for a backward: the moments are not part of a graph.
    if isinstance(step, Tensor) or step > hold_steps:
        weights_written(params, masters)
    if delta_stats is not None:
        increment_version((delta_stats,))


def _step_on_cuda(
    cuda: _native.CudaKernels,
    device: torch.device,
    rows: bytes,
    settings: tuple[object, ...],
    found_inf: Tensor | None,
    grad_factor: Tensor | None,
    delta_stats: Tensor | None,
) -> None:
    """Queue a step. Workspaces come from PyTorch, so that its allocator and CUDA graphs know of them."""
    numbers = [value if isinstance(value, Tensor) else None for value in (settings[_LR], settings[_STEP])]
    scalars = partials = None
    if any(number is not None for number in numbers):
        settings = tuple(1.0 if isinstance(value, Tensor) else value for value in settings)
        scalars = torch.empty(cuda.module.ADAM_SCALARS_BYTES, dtype=torch.uint8, device=device)
    if delta_stats is not None:
        partials = torch.empty(2 * cuda.module.adam_blocks(rows), dtype=torch.float64, device=device)
    cuda.module.adam_step(
        cuda.device,
        cuda.stream,
        rows,
        settings,
        *((_address(number), 0 if number is None else _NUMBERS.index(number.dtype)) for number in numbers),
        _address(scalars),
        _address(found_inf),
        _address(grad_factor),
        _address(delta_stats),
        _address(partials),
    )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _checked(name: str, value: float, least: float) -> float:
    if type(value) is not float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise TypeError(f"{name} is a {type(value).__name__}; it must be a float (use float({name}))")
        value = float(value)
    if not least <= value < math.inf:
        bound = "not negative" if least == 0.0 else "positive"
        raise ValueError(f"{name} is {value}; it must be finite and {bound}")
    return value


def _checked_count(name: str, value: int, least: int) -> None:
    if type(value) is not int:
        raise TypeError(f"{name} is a {type(value).__name__}; it must be an int (use int({name}))")
    if value < least:
        raise ValueError(f"{name} is {value}; {'steps count from 1' if least else 'it must not be negative'}")


def _checked_integer(value: float) -> int:
    if not float(value).is_integer():
        raise ValueError(f"step is {value}; it must be a whole number")
    return int(value)


def _checked_betas(betas: tuple[float, float]) -> tuple[float, float]:
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise TypeError(f"betas is {betas!r}; it must be a pair of floats")
    beta1 = _checked("betas[0]", betas[0], 0.0)
    beta2 = _checked("betas[1]", betas[1], 0.0)
    for i, beta in enumerate((beta1, beta2)):
        if beta >= 1.0:
            raise ValueError(f"betas[{i}] is {beta}; it must be less than 1")
    return beta1, beta2


# For torch.compile: a number is in one of two arguments, and masters come without the gaps between them.
def _run_operation(
    params: list[Tensor],
    *lists: list[Tensor],
    masters: list[Tensor],
    mastered: list[int],
    lr: float,
    lr_tensor: Tensor | None,
    step: int,
    step_tensor: Tensor | None,
    betas: list[float],
    **options: Any,
) -> None:
    adam_step(
        params,
        *lists,
        masters=_library.with_gaps(masters, mastered, len(params)),
        lr=lr if lr_tensor is None else lr_tensor,
        step=step if step_tensor is None else step_tensor,
        betas=(betas[0], betas[1]),
        **options,
    )


_operation = _library.register(
    "adam_step(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, *, "
    "Tensor(d!)[] masters, int[] mastered, float lr, Tensor? lr_tensor, SymInt step, Tensor? step_tensor, "
    "float[] betas, float eps, float weight_decay, float grad_scale, Tensor? grad_factor, bool decoupled, "
    "bool maximize, SymInt hold_steps, Tensor? found_inf, Tensor(e!)? delta_stats) -> ()",
    _run_operation,
)
