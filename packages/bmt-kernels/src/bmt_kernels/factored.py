"""Factored second moments: the passes over memory of Adafactor and CAME, for matrices that may be sharded.

In the middle of its step, an optimizer with factored second moments needs sums of squares over the rows and columns of
the logical matrix, and the mean square of its update. If a rank holds only some rows or columns of a matrix, the ranks
must add up their sums. So a step is split there: each function is one pass over the local part of every matrix. The
caller computes what lies between two passes. It is small (one number for each row and each column) and stays on the
device.

With R x C the size of the logical matrix and ``sum`` over the ranks that hold parts of it::

    Adafactor                                                 CAME
    factored_square_sums -> sum rows, columns                 as for Adafactor, up to clip
    r = beta2 * r + (1 - beta2) * row_sums / C
    c = beta2 * c + (1 - beta2) * col_sums / R
    row_factor = rsqrt(r / mean(r)), col_factor = rsqrt(c)
    factored_update_square_sum -> sum
    clip = max(1, sqrt(out / (R * C)) / threshold)
    factored_update(step_sizes = lr / clip)                   factored_residual_square_sums(step_sizes = 1 / clip)
                                                              -> sum rows, columns; factors from them, as above
                                                              factored_update(grads=exp_avgs, step_sizes = lr)

`factored_square_sums` and `factored_residual_square_sums` add eps to every element, so sums over ranks need no
correction. Results do not depend on the number of threads.

Source: Shazeer & Stern, arXiv:1804.04235, algorithms 4 and 5; Luo et al., arXiv:2307.02047, algorithm 2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from bmt_kernels import _native, reference
from bmt_kernels._compat import increment_version, weights_written
from bmt_kernels._factored_tables import FactoredTensors, check_vector
from bmt_kernels._library import register, tracing, with_gaps, without_gaps
from bmt_kernels._tables import check_flag


def factored_square_sums(
    grads: Sequence[Tensor],
    row_sums: Sequence[Tensor],
    col_sums: Sequence[Tensor],
    *,
    eps: float,
    grad_scale: float = 1.0,
    grad_factor: Tensor | None = None,
) -> None:
    """Sum the squares of gradients over every row and every column.

    For each matrix, in fp32, with g = grad * grad_factor / grad_scale::

        row_sums[i] = sum over j of g[i, j]^2 + eps
        col_sums[j] = sum over i of g[i, j]^2 + eps

    Args:
        grads: float32, bfloat16 or float16, each of shape (*batch, R, C): a matrix, or a batch of separate
            matrices. All on one device. Only read; copied if not contiguous.
        row_sums: float32, (*batch, R), contiguous. Written; zero where C is zero.
        col_sums: float32, (*batch, C), contiguous. Written; zero where R is zero.
        eps: added to each square, not negative.
        grad_scale: what the gradients were multiplied by (the loss scale), positive.
        grad_factor: a float32 tensor of one element on the device, which the gradients are multiplied by (from
            clipping their norm, say). It is read where it is: on CUDA the host does not wait for it.

    Raises:
        TypeError: an argument or an entry has a wrong type or dtype.
        ValueError: list lengths, shapes or devices do not match; what is written to is not contiguous or shares
            memory with another tensor; a number is out of its range.
        RuntimeError: CUDA failed to launch the kernel.

        Everything is checked first: after a TypeError or a ValueError no tensor has been modified.

    Runs of up to 128 squares are added in fp32, and the runs in double precision: the relative error is below 1e-5
    and in practice about 1e-7. All CPU variants give the same bits.
    """
    if tracing():
        _square_sums_operation(
            list(grads), list(row_sums), list(col_sums), eps=eps, grad_scale=grad_scale, grad_factor=grad_factor
        )
        return
    eps = _number("eps", eps, 0.0)
    inverse = 1.0 / _number("grad_scale", grad_scale, math.ulp(0.0))
    tensors = FactoredTensors(grads, row_sums=row_sums, col_sums=col_sums)
    device = tensors.device()
    factor = _check_scalar("grad_factor", grad_factor, device, len(grads))
    rows = tensors.pack(device)
    if not rows:
        return
    if device.type == "cpu" and (cpu := _native.cpu_kernels()) is not None:
        cpu.module.factored_square_sums(cpu.variant, rows, inverse, factor, eps, torch.get_num_threads())
    elif (cuda := _native.cuda_kernels(device)) is not None:
        workspace = _workspace(cuda.module, rows, device)
        cuda.module.factored_square_sums(cuda.device, cuda.stream, rows, workspace.data_ptr(), inverse, factor, eps)
    else:
        reference.factored_square_sums(
            grads, row_sums, col_sums, eps=eps, grad_scale=grad_scale, grad_factor=grad_factor
        )
        return  # PyTorch has counted its own writes
    increment_version((*row_sums, *col_sums))


def factored_update_square_sum(
    grads: Sequence[Tensor],
    row_factors: Sequence[Tensor],
    col_factors: Sequence[Tensor],
    out: Tensor,
    *,
    grad_scale: float = 1.0,
    grad_factor: Tensor | None = None,
) -> None:
    """Sum the squares of the update of each matrix, from which the caller computes how much to clip it.

    For matrix k, in fp32, over all elements (of the whole batch)::

        out[k] = sum of u^2,  u[i, j] = grad[i, j] * grad_factor / grad_scale * row_factor[i] * col_factor[j]

    Args:
        grads: float32, bfloat16 or float16, each of shape (*batch, R, C). Only read; copied if not contiguous.
        row_factors: float32, (*batch, R). Only read.
        col_factors: float32, (*batch, C). Only read.
        out: float32, contiguous, of shape (len(grads),). Written.
        grad_scale, grad_factor: as for `factored_square_sums`.

    Raises:
        The same as `factored_square_sums`, for the same reasons.

    The relative error of the sums is below 1e-5. All CPU variants give the same bits.
    """
    if tracing():
        _update_square_sum_operation(
            list(grads), list(row_factors), list(col_factors), out, grad_scale=grad_scale, grad_factor=grad_factor
        )
        return
    inverse = 1.0 / _number("grad_scale", grad_scale, math.ulp(0.0))
    tensors = FactoredTensors(grads, row_factors=row_factors, col_factors=col_factors, vector=out)
    device = tensors.device()
    factor = _check_scalar("grad_factor", grad_factor, device, len(grads))
    check_vector("out", out, len(grads), device)
    if not out.is_contiguous():
        raise ValueError(f"out has strides {out.stride()}; what is written to must be contiguous")
    rows = tensors.pack(device)
    if not rows:
        return
    if device.type == "cpu" and (cpu := _native.cpu_kernels()) is not None:
        cpu.module.factored_update_square_sum(
            cpu.variant, rows, inverse, factor, out.data_ptr(), torch.get_num_threads()
        )
    elif (cuda := _native.cuda_kernels(device)) is not None:
        workspace = _workspace(cuda.module, rows, device)
        cuda.module.factored_update_square_sum(
            cuda.device, cuda.stream, rows, workspace.data_ptr(), inverse, factor, out.data_ptr()
        )
    else:
        reference.factored_update_square_sum(
            grads, row_factors, col_factors, out, grad_scale=grad_scale, grad_factor=grad_factor
        )
        return
    increment_version((out,))


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
    """Update CAME's first moments, and sum the squared differences to the updates over every row and every column.

    For matrix k, in fp32::

        u[i, j] = grad[i, j] * grad_factor / grad_scale * row_factor[i] * col_factor[j] * step_sizes[k]
        m[i, j] = beta1 * m[i, j] + (1 - beta1) * u[i, j]                         exp_avgs[k]
        row_sums[i] = sum over j of (u[i, j] - m[i, j])^2 + eps
        col_sums[j] = sum over i of (u[i, j] - m[i, j])^2 + eps

    Args:
        grads, row_factors, col_factors: as for `factored_update_square_sum`.
        step_sizes: float32, (len(grads),), what u is multiplied by: for CAME, 1 / clip. Only read, where it is.
        exp_avgs: float32, each of its gradient's shape, contiguous. Written.
        row_sums, col_sums: as for `factored_square_sums`. Written.
        beta1: decay rate of the first moment, in [0, 1).
        eps: added to each square, not negative.
        grad_scale, grad_factor: as for `factored_square_sums`.
        found_inf: a float32 tensor of one element on the same device. If it is not zero, nothing is written. It is
            read where it is: on CUDA the host does not wait for it.

    Raises:
        The same as `factored_square_sums`, for the same reasons.

    Sums are as accurate as those of `factored_square_sums`; the moments have the bits of the reference.
    """
    if tracing():
        _residual_square_sums_operation(
            list(grads),
            list(row_factors),
            list(col_factors),
            step_sizes,
            list(exp_avgs),
            list(row_sums),
            list(col_sums),
            beta1=beta1,
            eps=eps,
            grad_scale=grad_scale,
            grad_factor=grad_factor,
            found_inf=found_inf,
        )
        return
    beta1 = _number("beta1", beta1, 0.0, 1.0)
    eps = _number("eps", eps, 0.0)
    inverse = 1.0 / _number("grad_scale", grad_scale, math.ulp(0.0))
    tensors = FactoredTensors(
        grads,
        row_factors=row_factors,
        col_factors=col_factors,
        exp_avgs=exp_avgs,
        row_sums=row_sums,
        col_sums=col_sums,
    )
    device = tensors.device()
    factor = _check_scalar("grad_factor", grad_factor, device, len(grads))
    flag = _check_scalar("found_inf", found_inf, device, len(grads))
    check_vector("step_sizes", step_sizes, len(grads), device)
    rows = tensors.pack(device)
    if not rows:
        return
    sizes = step_sizes.contiguous()
    numbers = (inverse, factor, sizes.data_ptr(), beta1, 1.0 - beta1, eps, flag)
    if device.type == "cpu" and (cpu := _native.cpu_kernels()) is not None:
        cpu.module.factored_residual_square_sums(cpu.variant, rows, *numbers, torch.get_num_threads())
    elif (cuda := _native.cuda_kernels(device)) is not None:
        workspace = _workspace(cuda.module, rows, device)
        cuda.module.factored_residual_square_sums(cuda.device, cuda.stream, rows, workspace.data_ptr(), *numbers)
    else:
        reference.factored_residual_square_sums(
            grads,
            row_factors,
            col_factors,
            step_sizes,
            exp_avgs,
            row_sums,
            col_sums,
            beta1=beta1,
            eps=eps,
            grad_scale=grad_scale,
            grad_factor=grad_factor,
            found_inf=found_inf,
        )
        return
    increment_version((*exp_avgs, *row_sums, *col_sums))


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
    """Update parameters, and first moments if there are any, in place.

    For matrix k, in fp32::

        u[i, j] = grad[i, j] * grad_factor / grad_scale * row_factor[i] * col_factor[j] * step_sizes[k]
        u = m = beta1 * m + (1 - beta1) * u                                       if exp_avgs is given
        p = p * decay_factors[k] - u

    With a step size of lr / clip this ends Adafactor's step; with CAME's first moments as `grads`, the factors of its
    instability and a step size of lr, CAME's.

    Args:
        params: float32, bfloat16 or float16, each of its gradient's shape, contiguous. Written.
        grads, row_factors, col_factors: as for `factored_update_square_sum`.
        step_sizes: float32, (len(grads),), what u is multiplied by. Only read, where it is.
        decay_factors: float32, (len(grads),), what the parameters are multiplied by: 1 - lr * weight_decay for
            decoupled weight decay. None for no decay. Only read, where it is.
        exp_avgs: float32, each of its gradient's shape, contiguous: averages of u, step size included, as
            Adafactor defines them. Written.
        beta1: decay rate of the first moment, in [0, 1).
        masters: float32 master weights of bfloat16 and float16 parameters: the update is applied to them, and the
            parameters get copies rounded to nearest, ties to even. None for a float32 parameter. Without a master,
            a half-precision parameter is itself updated, in fp32, and rounded.
        grad_scale, grad_factor: as for `factored_square_sums`.
        found_inf: as for `factored_residual_square_sums`.

    Raises:
        The same as `factored_square_sums`, for the same reasons.

    All CPU variants and the CUDA kernel have the bits of the reference. The parameters' version counters are raised.
    """
    if tracing():
        present, with_master = without_gaps(masters)
        _update_operation(
            list(params),
            list(grads),
            list(row_factors),
            list(col_factors),
            step_sizes,
            decay_factors=decay_factors,
            exp_avgs=None if exp_avgs is None else list(exp_avgs),
            beta1=beta1,
            masters=present,
            with_master=with_master,
            grad_scale=grad_scale,
            grad_factor=grad_factor,
            found_inf=found_inf,
        )
        return
    beta1 = _number("beta1", beta1, 0.0, 1.0)
    inverse = 1.0 / _number("grad_scale", grad_scale, math.ulp(0.0))
    if exp_avgs is None and beta1 != 0.0:
        raise ValueError(f"beta1 is {beta1} without exp_avgs; pass the first moments, or leave beta1 at 0")
    tensors = FactoredTensors(grads, params, exp_avgs, masters, row_factors, col_factors)
    device = tensors.device()
    factor = _check_scalar("grad_factor", grad_factor, device, len(grads))
    flag = _check_scalar("found_inf", found_inf, device, len(grads))
    check_vector("step_sizes", step_sizes, len(grads), device)
    if decay_factors is not None:
        check_vector("decay_factors", decay_factors, len(grads), device)
    rows = tensors.pack(device)
    if not rows:
        return
    sizes = step_sizes.contiguous()
    decays = None if decay_factors is None else decay_factors.contiguous()
    decay = 0 if decays is None else decays.data_ptr()
    if (run := _native.kernel("factored_update", device)) is not None:
        run(rows, inverse, factor, sizes.data_ptr(), decay, beta1, 1.0 - beta1, flag)
    else:
        reference.factored_update(
            params,
            grads,
            row_factors,
            col_factors,
            step_sizes,
            decay_factors=decay_factors,
            exp_avgs=exp_avgs,
            beta1=beta1,
            masters=masters,
            grad_scale=grad_scale,
            grad_factor=grad_factor,
            found_inf=found_inf,
        )
        return
    weights_written(params, masters)
    if exp_avgs is not None:
        increment_version(exp_avgs)


def _number(name: str, value: float, least: float, below: float = math.inf) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be a float (use float({name}))")
    if not least <= value < below:
        bound = "not negative" if least == 0.0 else "positive"
        limit = "finite" if below == math.inf else f"less than {below}"
        raise ValueError(f"{name} is {value}; it must be {bound} and {limit}")
    return float(value)


def _check_scalar(name: str, scalar: Tensor | None, device: torch.device, count: int) -> int:
    """The address of a float32 tensor of one element, 0 for None; raises if it is anything else."""
    if scalar is None:
        return 0
    check_flag(name, scalar, device if count else scalar.device)
    return 0 if scalar.device.type == "meta" else scalar.data_ptr()


def _workspace(cuda: ModuleType, rows: bytes, device: torch.device) -> Tensor:
    """Room for the partial sums of the tiles, from PyTorch's caching allocator."""
    return torch.empty(cuda.factored_workspace(rows), dtype=torch.float32, device=device)


def _eager_update(
    params: list[Tensor], *tensors: Any, masters: list[Tensor], with_master: list[int], **options: Any
) -> None:
    """`factored_update` with the masters as a registered operation takes them: without gaps, and their indices."""
    factored_update(params, *tensors, masters=with_gaps(masters, with_master, len(params)), **options)


_SCALE = "float grad_scale, Tensor? grad_factor"
_FACTORS = "Tensor[] grads, Tensor[] row_factors, Tensor[] col_factors"
_square_sums_operation = register(
    f"factored_square_sums(Tensor[] grads, Tensor(a!)[] row_sums, Tensor(b!)[] col_sums, *, float eps, {_SCALE}) -> ()",
    factored_square_sums,
)
_update_square_sum_operation = register(
    f"factored_update_square_sum({_FACTORS}, Tensor(a!) out, *, {_SCALE}) -> ()",
    factored_update_square_sum,
)
_residual_square_sums_operation = register(
    f"factored_residual_square_sums({_FACTORS}, Tensor step_sizes, Tensor(a!)[] exp_avgs, Tensor(b!)[] row_sums, "
    f"Tensor(c!)[] col_sums, *, float beta1, float eps, {_SCALE}, Tensor? found_inf) -> ()",
    factored_residual_square_sums,
)
_update_operation = register(
    f"factored_update(Tensor(a!)[] params, {_FACTORS}, Tensor step_sizes, *, Tensor? decay_factors, "
    f"Tensor(b!)[]? exp_avgs, float beta1, Tensor(c!)[] masters, int[] with_master, {_SCALE}, Tensor? found_inf) -> ()",
    _eager_update,
)
