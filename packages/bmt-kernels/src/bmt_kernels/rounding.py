"""Stochastic rounding from fp32 to half precision, the same on every layout."""

from __future__ import annotations

from array import array

import torch
from torch import Tensor

from bmt_kernels import _native, reference
from bmt_kernels._library import tracing
from bmt_kernels._tables import _address, _check_tensor
from bmt_kernels.reference.rounding import mixed_seed


def round_stochastically(
    values: Tensor, dtype: torch.dtype, *, seed: int, first: int = 0, width: int | None = None, stride: int = 0
) -> Tensor:
    """Round each element to one of its two neighbours in `dtype`, to the nearer one with a greater probability.

    The expected result is the number itself. Small updates of a weight without a master copy are then not lost, but
    happen now and then. The random bits are a hash of the seed and of the element's index in the logical tensor, not
    those of a generator: a rank that holds a shard rounds its elements as they are rounded in the logical tensor.

    Infinities, NaN and numbers that `dtype` represents exactly are unchanged. fp16 overflows to infinity as in rounding
    to nearest.

    Args:
        values: float32, of any shape. Only read.
        dtype: bfloat16 or float16.
        seed: rounding with another one is independent.
        first: index of the first element in the logical tensor, in row-major order.
        width, stride: the elements are rows of `width` elements, which in the logical tensor begin `stride` apart.
            Default: they are neighbours there, too.

    Returns:
        A new contiguous tensor of the same shape in `dtype`.

    Raises:
        TypeError: `values` is not a float32 tensor, or `dtype` is another one.
        ValueError: an index would be negative, or `width` is less than 1.
        RuntimeError: CUDA failed to launch the kernel.
    """
    _check_tensor("values", values)
    if values.dtype is not torch.float32:
        raise TypeError(f"values has dtype {values.dtype}; it must be torch.float32")
    if dtype not in (torch.bfloat16, torch.float16):
        raise TypeError(f"dtype is {dtype}; it must be torch.bfloat16 or torch.float16")
    numel = values.shape.numel()
    width = max(numel, 1) if width is None else width
    for name, number, least in (("first", first, 0), ("width", width, 1), ("stride", stride, 0)):
        if number < least:
            raise ValueError(f"{name} is {number}; it must be at least {least}")
    device = values.device
    cpu = _native.cpu_kernels() if device.type == "cpu" else None
    cuda = _native.cuda_kernels(device) if cpu is None else None
    if tracing() or (cpu is None and cuda is None):
        index = torch.arange(numel, device=device)
        index = first + index // width * stride + index % width
        return reference.round_stochastically(values, dtype, seed, index.view(values.shape))
    values = values.detach().resolve_neg().contiguous()
    out = torch.empty(values.shape, dtype=dtype, device=device)
    if numel == 0:
        return out
    addresses = _address("values", values), out.data_ptr()
    row = array("q", (*addresses, numel, first, width, stride, mixed_seed(seed))).tobytes()
    if cpu is not None:
        cpu.module.round_stochastically(row, dtype is torch.float16, torch.get_num_threads())
    elif cuda is not None:
        cuda.module.round_stochastically(cuda.device, cuda.stream, row, dtype is torch.float16)
    return out
