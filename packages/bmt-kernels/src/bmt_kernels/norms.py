"""Sums of powers, which norms are made of, with the overflow check in the same pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bmt_kernels import _library, _native, reference
from bmt_kernels._compat import increment_version
from bmt_kernels._tables import check_data, check_flag, check_sequence, data_table, fast_data_table


class PowerSum(NamedTuple):
    """The result of `power_sum`. Both tensors are on the device of its arguments."""

    found_inf: Tensor
    """float32, shape (): 1.0 if any element is infinite or NaN, else 0.0."""
    total: Tensor
    """float64, shape (): the sum of the powers."""


def power_sum(
    tensors: Sequence[Tensor], norm_type: float = 2.0, *, out: tuple[Tensor, Tensor] | None = None
) -> PowerSum:
    """Add up |x|^p over all elements of all tensors, and look for infinities and NaN, in one pass over memory.

    Every power is computed in double precision and the sums are kept in it: from float32, bfloat16 and float16 the
    powers 1 and 2 neither overflow nor vanish. ``total ** (1 / p)`` is the p-norm. The host does not wait for CUDA.

    The result does not depend on the number of threads nor on the CPU variant; between CPU, GPU and the reference it
    may differ in rounding.

    Args:
        tensors: float32, bfloat16, float16 or float64, of any shapes, all on one device. Tensors that are not
            contiguous, and float64, take the plain PyTorch way. Only read.
        norm_type: p, positive; for infinity, `total` is the largest magnitude. Powers other than 1, 2 and infinity
            take longer, and may leave the range of double precision.
        out: where to accumulate, for instance the result of an earlier call: a float32 and a float64 tensor of one
            element each, on the same device. The first becomes max(first, 1.0) if any element is infinite or
            NaN, and otherwise stays; the second is added to, or for infinity raised to the maximum. Default: new zeros.

    Returns:
        `out`, or new 0-dim tensors. A NaN makes `total` NaN; an infinity without a NaN makes it infinite. Of nothing,
        the sum is 0. For an empty list without `out` they are on the CPU.

    Raises:
        TypeError: an argument or an entry has a wrong type, dtype or layout.
        ValueError: devices do not match, `norm_type` is not positive, or an entry of `out` has not exactly one element.
        RuntimeError: CUDA failed to launch the kernel.
    """
    norm_type = _checked_norm_type(norm_type)
    check_sequence("tensors", tensors)
    if out is not None and (not isinstance(out, (tuple, list)) or len(out) != 2):
        raise TypeError(f"out is a {type(out).__name__}; it must be a pair of tensors")
    if len(tensors) and isinstance(tensors[0], Tensor):
        device = tensors[0].device
    else:
        device = out[0].device if out is not None and isinstance(out[0], Tensor) else torch.device("cpu")
    if out is None:
        zeros = (torch.zeros((), dtype=dtype, device=device) for dtype in (torch.float32, torch.float64))
        result = PowerSum(*zeros)
    else:
        check_flag("out[0]", out[0], device)
        check_flag("out[1]", out[1], device, (torch.float64,))
        result = PowerSum(*out)
    if _library.tracing():
        _operation(tensors, norm_type, *result)
    else:
        _add(tensors, norm_type, *result)
    return result


@torch.no_grad()
def square_sums(tensors: Sequence[Tensor]) -> Tensor:
    """Add up the squares of the elements of each tensor.

    Args:
        tensors: as for `power_sum`, one at least. Only read.

    Returns:
        float32 of shape (number of tensors,), on their device. On the CPU sums are kept in double precision.

    Raises:
        What `power_sum` raises.
    """
    check_sequence("tensors", tensors)
    device = tensors[0].device
    cpu = None if _library.tracing() or device.type != "cpu" else _native.cpu_kernels()
    if cpu is not None:
        filled = [i for i, t in enumerate(tensors) if t.numel()]  # the table has a row for each of them
        if len(filled) < len(tensors):
            check_data(tensors, device)
        rows = fast_data_table([tensors[i] for i in filled], device)
        if rows is not None:
            sums = torch.empty(len(filled), dtype=torch.float64, device=device)
            cpu.module.square_sums(cpu.variant, rows, sums.data_ptr(), torch.get_num_threads())
            if len(filled) == len(tensors):
                return sums.float()
            places = torch.tensor(filled, dtype=torch.long, device=device)
            return torch.zeros(len(tensors), dtype=torch.float32, device=device).index_copy_(0, places, sums.float())
    check_data(tensors, device)
    if device.type == "cpu":
        return torch.stack([t.double().square().sum() for t in tensors]).float()
    dtype = torch.float64 if any(t.dtype is torch.float64 for t in tensors) else torch.float32
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=dtype)).square().float()  # in one launch


def _add(tensors: Sequence[Tensor], norm_type: float, found_inf: Tensor, total: Tensor) -> None:
    device = total.device
    rows = fast_data_table(tensors, device)
    if rows is None:
        check_data(tensors, device)
        rows = data_table(tensors, device)
    if rows == b"":
        return
    if rows is not None and device.type == "cpu" and (cpu := _native.cpu_kernels()) is not None:
        flag, sums = found_inf.data_ptr(), total.data_ptr()
        cpu.module.power_sum(cpu.variant, rows, norm_type, flag, sums, torch.get_num_threads())
    elif rows is not None and (cuda := _native.cuda_kernels(device)) is not None:
        partials = torch.empty(cuda.module.power_sum_blocks(rows), dtype=torch.float64, device=device)
        flag, sums = found_inf.data_ptr(), total.data_ptr()
        cuda.module.power_sum(cuda.device, cuda.stream, rows, norm_type, flag, sums, partials.data_ptr())
    else:
        reference.power_sum(tensors, norm_type, out=(found_inf, total))
        return  # PyTorch has counted its own writes
    increment_version((found_inf, total))


def _checked_norm_type(norm_type: float) -> float:
    if isinstance(norm_type, bool) or not isinstance(norm_type, (int, float)):
        raise TypeError(f"norm_type is a {type(norm_type).__name__}; it must be a float")
    if not 0.0 < norm_type <= math.inf:
        raise ValueError(f"norm_type is {norm_type}; it must be positive")
    return float(norm_type)


_operation = _library.register(
    "power_sum(Tensor[] tensors, float norm_type, Tensor(a!) found_inf, Tensor(b!) total) -> ()",
    _add,
)
