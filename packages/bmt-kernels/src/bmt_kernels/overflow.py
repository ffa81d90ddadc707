"""The overflow check: whether any element of many tensors is infinite or NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bmt_kernels import _library, _native, reference
from bmt_kernels._compat import increment_version
from bmt_kernels._tables import check_data, check_flag, check_sequence, data_table, fast_data_table


def has_inf_or_nan(tensors: Sequence[Tensor], out: Tensor | None = None) -> Tensor:
    """Tell whether any element of any tensor is infinite or NaN, in one native call or one CUDA launch.

    Args:
        tensors: float32, bfloat16, float16 or float64, of any shapes, all on one device. Tensors that are not
            contiguous, and float64, take the plain PyTorch way. Only read.
        out: where to accumulate, a float32 tensor of one element on the same device: it becomes
            max(out, 1.0) if any element is infinite or NaN and otherwise stays, so one flag can collect many calls.
            Default: a new zero.

    Returns:
        `out`, or a new float32 tensor of shape (): 1.0 if any element is infinite or NaN, else 0.0. On CUDA the
        host does not wait for it. For an empty list without `out` it is on the CPU.

    Raises:
        TypeError: an argument or an entry has a wrong type, dtype or layout.
        ValueError: devices do not match, or `out` has not exactly one element.
        RuntimeError: CUDA failed to launch the kernel.
    """
    check_sequence("tensors", tensors)
    if len(tensors) and isinstance(tensors[0], Tensor):
        device = tensors[0].device
    else:
        device = out.device if isinstance(out, Tensor) else torch.device("cpu")
    if out is not None:
        check_flag("out", out, device)
    if out is None:
        out = torch.zeros((), dtype=torch.float32, device=device)
    if _library.tracing():
        _operation(tensors, out)
    else:
        _search(tensors, out)
    return out


def _search(tensors: Sequence[Tensor], out: Tensor) -> None:
    device = out.device
    rows = fast_data_table(tensors, device)
    if rows is None:
        check_data(tensors, device)
        rows = data_table(tensors, device)
    if rows is not None and (run := _native.kernel("overflow_check", device)) is not None:
        run(rows, out.data_ptr())
    else:
        reference.has_inf_or_nan(tensors, out)
        return  # PyTorch has counted its own writes
    increment_version((out,))


_operation = _library.register("has_inf_or_nan(Tensor[] tensors, Tensor(a!) out) -> ()", _search)
