"""Numbers that travel between ranks in 8 bits, as integers or floats, with a scale for each block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmt_kernels import _native, reference
from bmt_kernels._compat import increment_version
from bmt_kernels._tables import _DTYPE_CODES, _address, _check_tensor
from bmt_kernels.reference.packing import LARGEST


def pack_blocks(values: Tensor, numbers: Tensor, scales: Tensor, *, kind: str, block: int) -> None:
    """Write ``values`` as 8-bit numbers with one scale for every ``block`` of them: value ≈ number × scale.

    A scale is the block's largest absolute value over the largest 8-bit number. Rounding is to nearest, ties to even.

    - A block with an infinity or a NaN has the scale NaN, and numbers 0.
    - A block whose scale would be below the smallest normal number of fp32 has the scale 0, and numbers 0.

    Args:
        values: float32, bfloat16 or float16, of one dimension, contiguous. Only read.
        numbers: uint8, as many, contiguous: where the bytes go.
        scales: float32, ceil(numel / block) of them, contiguous: where the scales go.
        kind: "int8" (-127 to 127) or "float8" (e4m3, -448 to 448).
        block: how many numbers share a scale.

    Raises:
        TypeError: a tensor has a wrong dtype.
        ValueError: ``kind`` or ``block`` is unknown, or shapes, strides or devices do not fit together.
        RuntimeError: CUDA failed to launch the kernel.

    Source: Wang et al., "ZeRO++", arXiv:2306.10209, section 3.1.
    """
    _check(values, numbers, scales, kind, block)
    run = _native.kernel("pack_blocks", values.device)
    if run is None:
        reference.pack_blocks(values, numbers, scales, kind=kind, block=block)
    elif values.numel():
        block = min(block, values.numel())
        where = _address("numbers", numbers), _address("scales", scales), block, values.numel()
        run(_address("values", values), _DTYPE_CODES[values.dtype], *where, kind == "float8")
        increment_version((numbers, scales))


def unpack_blocks(numbers: Tensor, scales: Tensor, out: Tensor, *, kind: str, block: int, add: bool = False) -> None:
    """Write number × scale into ``out``, or add it to what is there.

    Args:
        numbers, scales, kind, block: as of :func:`pack_blocks`. Only read.
        out: float32, bfloat16 or float16, of one dimension, contiguous. Arithmetic is in fp32.
        add: whether to add.

    Raises:
        TypeError, ValueError, RuntimeError: as :func:`pack_blocks`.
    """
    _check(out, numbers, scales, kind, block)
    run = _native.kernel("unpack_blocks", out.device)
    if run is None:
        reference.unpack_blocks(numbers, scales, out, kind=kind, block=block, add=add)
    elif out.numel():
        block = min(block, out.numel())
        where = _address("numbers", numbers), _address("scales", scales), block, out.numel()
        run(_address("out", out), _DTYPE_CODES[out.dtype], *where, kind == "float8", add)
        increment_version((out,))


def _check(values: Tensor, numbers: Tensor, scales: Tensor, kind: Any, block: Any) -> None:
    for name, tensor in (("values", values), ("numbers", numbers), ("scales", scales)):
        _check_tensor(name, tensor)
        if tensor.dim() != 1 or not tensor.is_contiguous():
            raise ValueError(f"{name} has the shape {tuple(tensor.shape)}; it must have one dimension, contiguous")
        if tensor.device != values.device:
            raise ValueError(f"{name} is on {tensor.device}; it must be on {values.device} like the values")
    if values.dtype not in _DTYPE_CODES:
        raise TypeError(f"values have dtype {values.dtype}; it must be float32, bfloat16 or float16")
    if numbers.dtype is not torch.uint8 or scales.dtype is not torch.float32:
        raise TypeError(f"numbers have dtype {numbers.dtype} and scales {scales.dtype}; they must be uint8 and float32")
    if kind not in LARGEST:
        raise ValueError(f"kind={kind!r} is unknown; choose 'int8' or 'float8'")
    if isinstance(block, bool) or not isinstance(block, int) or block < 1:
        raise ValueError(f"block={block!r} must be a whole number above 0")
    count = -(-values.numel() // block)
    if numbers.numel() != values.numel() or scales.numel() != count:
        raise ValueError(
            f"{values.numel()} values in blocks of {block} have as many numbers and {count} scales, and there are "
            f"{numbers.numel()} numbers and {scales.numel()} scales"
        )
