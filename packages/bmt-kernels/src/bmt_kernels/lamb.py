"""Fused LAMB steps over lists of tensors, in two passes: the moments with the norms, and the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_kernels import _library, _native, reference
from bmt_kernels._compat import weights_written
from bmt_kernels._factored_tables import check_vector
from bmt_kernels._lamb_table import lamb_table
from bmt_kernels._tables import check_flag, check_sequence
from bmt_kernels.adam import _address, _checked, _checked_betas, _checked_count
from bmt_kernels.reference.lamb import sums_dtype


def lamb_moments(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    *,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    bias_correction: bool = True,
    grad_scale: float = 1.0,
    grad_factor: Tensor | None = None,
    directions: Sequence[Tensor] | None = None,
) -> Tensor:
    """Update the moments, and add up the squares of weights and directions. The first pass of a LAMB step.

    For each i, in fp32, with g = grad / grad_scale * grad_factor and t = step::

        m  = beta1 * m + (1 - beta1) * g            exp_avgs[i]
        v  = beta2 * v + (1 - beta2) * g * g        exp_avg_sqs[i]
        r  = m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps) + weight_decay * p

    without the divisions by 1 - beta^t if there is no bias correction. Without `directions`, r is not kept, and
    `lamb_update` computes it again. The caller adds up the sums over the ranks that hold parts of a tensor, and
    computes the tensor's rate: lr times the trust ratio ‖p‖ / ‖r‖. A step reads and writes 40 bytes per fp32 element;
    a step of Adam 28.

    Infinities and NaN propagate as in IEEE arithmetic, and subnormal numbers are kept. All the tensors of index i
    have one shape and are on one device, the same for all i; they are contiguous, or dense with equal strides.
    Empty lists and empty tensors are fine. The host does not wait for CUDA.

    Args:
        params: the weights, float32, bfloat16 or float16; the masters of those that have one. Only read.
        grads: float32, bfloat16 or float16, not necessarily their parameters' dtype. Only read.
        exp_avgs: float32, first moments. Written.
        exp_avg_sqs: float32, second moments. Written.
        betas: decay rates of the two moments, each in [0, 1).
        eps: added to the denominator, not negative.
        weight_decay: not negative.
        step: the number of this step, counted from 1.
        bias_correction: whether r is of the moments divided by 1 - beta^t.
        grad_scale: what the gradients were multiplied by (the loss scale), positive.
        grad_factor: a float32 tensor with one element, on the same device, by which the gradients are multiplied
            besides, such as a clip coefficient.
        directions: float32, memory for r, which `lamb_update` then reads on the CPU. That is faster if the tensors of
            a call stay in the caches between the passes. Not used on other devices. Not for `torch.compile`.

    Returns:
        float64 of shape (number of parameters, 2), on the device: Σp² and Σr² of each, 0 of an empty one. They do not
        depend on the number of threads nor on the CPU variant; between CPU, GPU and the reference they may differ in
        rounding: on the CPU runs of eight squares are added in fp32. (float32 on mps, which has no float64.)

    Raises:
        TypeError: an argument or an entry has a wrong type, dtype or layout.
        ValueError: list lengths, shapes, devices or strides do not match; a tensor that is written to shares memory
            with another; a number is out of its range.
        RuntimeError: CUDA failed to launch the kernel.

        Everything is checked first: after a TypeError or a ValueError no tensor has been modified.

    Source: You et al., arXiv:1904.00962, algorithm 2.
    """
    if _library.tracing():
        result: Tensor = _moments_operation(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            bias_correction=bias_correction,
            grad_scale=grad_scale,
            grad_factor=grad_factor,
        )
        return result
    settings = _settings(betas, eps, weight_decay, step, bias_correction, grad_scale)
    check_sequence("grads", grads)
    rows, device = lamb_table(params, grads, exp_avgs, exp_avg_sqs, None, directions)
    if grad_factor is not None:
        check_flag("grad_factor", grad_factor, device if len(params) else None)
    sums = torch.zeros(len(params), 2, dtype=sums_dtype(device), device=device)
    if not rows:
        return sums
    if device.type == "cpu" and (cpu := _native.cpu_kernels()) is not None:
        factor, threads = _address(grad_factor), torch.get_num_threads()
        cpu.module.lamb_moments(cpu.variant, rows, settings, factor, sums.data_ptr(), threads)
    elif (cuda := _native.cuda_kernels(device)) is not None:
        partials = torch.empty(2 * cuda.module.lamb_blocks(rows), dtype=torch.float64, device=device)
        factor = _address(grad_factor)
        cuda.module.lamb_moments(cuda.device, cuda.stream, rows, settings, factor, sums.data_ptr(), partials.data_ptr())
    else:
        reference.lamb_moments(
            params,
            grads,
            exp_avgs,
            exp_avg_sqs,
            sums,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            bias_correction=bias_correction,
            grad_scale=grad_scale,
            grad_factor=grad_factor,
        )
    return sums  # no backward can have saved the moments: they are not part of a graph


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
    directions: Sequence[Tensor] | None = None,
) -> None:
    """Subtract rates[i] * r from every parameter, with the r of `lamb_moments`. The second pass of a LAMB step.

    r is computed again from the moments and the weights, which must be unchanged since `lamb_moments`, and with the
    same numbers. The requirements on the tensors are the same.

    Args:
        params: float32, bfloat16 or float16. Written.
        exp_avgs, exp_avg_sqs: float32, the moments. Only read.
        rates: float32 of shape (number of parameters,), on the device of the parameters. Only read, there.
        betas, eps, weight_decay, step, bias_correction: as in `lamb_moments`.
        masters: float32 master weights of bfloat16 and float16 parameters: the update is applied to them, and the
            parameters get copies rounded to nearest, ties to even. None for a float32 parameter. Without a master,
            a half-precision parameter is itself updated, in fp32, and rounded.
        directions: as passed to `lamb_moments`.

    Raises:
        TypeError, ValueError, RuntimeError: as in `lamb_moments`.
    """
    if _library.tracing():
        present, mastered = _library.without_gaps(masters)
        with torch.no_grad():
            _update_operation(
                params,
                exp_avgs,
                exp_avg_sqs,
                rates,
                masters=present,
                mastered=mastered,
                betas=betas,
                eps=eps,
                weight_decay=weight_decay,
                step=step,
                bias_correction=bias_correction,
            )
        return
    settings = _settings(betas, eps, weight_decay, step, bias_correction, 1.0)
    rows, device = lamb_table(params, None, exp_avgs, exp_avg_sqs, masters, directions)
    check_vector("rates", rates, len(params), device, like="the parameters")
    rates = rates.contiguous()
    if not rows:
        return
    if (run := _native.kernel("lamb_update", device)) is not None:
        run(rows, settings, rates.data_ptr())
    else:
        reference.lamb_update(
            params,
            exp_avgs,
            exp_avg_sqs,
            rates,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            step=step,
            bias_correction=bias_correction,
            masters=masters,
        )
        return  # PyTorch has counted its own writes
    weights_written(params, masters)


def _settings(
    betas: tuple[float, float], eps: float, weight_decay: float, step: int, bias_correction: bool, grad_scale: float
) -> tuple[object, ...]:
    """In the order of LambSettings in csrc/common/lamb.h."""
    beta1, beta2 = _checked_betas(betas)
    eps = _checked("eps", eps, 0.0)
    weight_decay = _checked("weight_decay", weight_decay, 0.0)
    grad_scale = _checked("grad_scale", grad_scale, math.ulp(0.0))
    _checked_count("step", step, 1)
    if not isinstance(bias_correction, bool):
        raise TypeError(f"bias_correction is a {type(bias_correction).__name__}; it must be a bool")
    return beta1, beta2, eps, weight_decay, step, grad_scale, bias_correction


# For torch.compile; masters come without the gaps between them.
def _run_moments(*lists: list[Tensor], betas: list[float], **options: Any) -> Tensor:
    return lamb_moments(*lists, betas=(betas[0], betas[1]), **options)


def _fake_moments(params: list[Tensor], *lists: list[Tensor], **options: object) -> Tensor:
    device = params[0].device if params else torch.device("cpu")
    return torch.empty(len(params), 2, dtype=sums_dtype(device), device=device)


def _run_update(
    params: list[Tensor],
    *lists: Any,
    masters: list[Tensor],
    mastered: list[int],
    betas: list[float],
    **options: Any,
) -> None:
    lamb_update(
        params,
        *lists,
        masters=_library.with_gaps(masters, mastered, len(params)),
        betas=(betas[0], betas[1]),
        **options,
    )


_moments_operation = _library.register(
    "lamb_moments(Tensor[] params, Tensor[] grads, Tensor(a!)[] exp_avgs, Tensor(b!)[] exp_avg_sqs, *, "
    "float[] betas, float eps, float weight_decay, SymInt step, bool bias_correction, float grad_scale, "
    "Tensor? grad_factor) -> Tensor",
    _run_moments,
    _fake_moments,
)
_update_operation = _library.register(
    "lamb_update(Tensor(a!)[] params, Tensor[] exp_avgs, Tensor[] exp_avg_sqs, Tensor rates, *, Tensor(b!)[] masters, "
    "int[] mastered, float[] betas, float eps, float weight_decay, SymInt step, bool bias_correction) -> ()",
    _run_update,
)
