"""Block-wise 8-bit numbers: a code for each element and the largest magnitude of each block of 256."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bmt_kernels import _native, reference
from bmt_kernels._compat import increment_version
from bmt_kernels._library import register, tracing
from bmt_kernels._tables import _DTYPE_CODES, _address, _check_tensor
from bmt_kernels.reference.quantize import BLOCK_SIZE, block_count


def quantize_blockwise(x: Tensor, *, signed: bool = True, block_offset: int = 0) -> tuple[Tensor, Tensor]:
    """Round each element, divided by the largest magnitude in its block, to the nearest entry of `dynamic_map`.

    Blocks are 256 elements in row-major order. With a tie between two entries, the one nearer to zero is taken.

    - A block of zeros has absmax 0 and the codes of zero.
    - A block with an infinity or a NaN has absmax NaN and the codes of zero: all of it comes back as NaN.
    - Subnormal numbers are kept; a block of nothing else is as precise as any other.
    - The most negative entry of the signed map is -0.993: -absmax comes back as -0.993 * absmax.
    - With the unsigned map, what is negative becomes 0 (but counts for absmax).

    Args:
        x: float32, bfloat16, float16 or float64 (rounded to fp32), any shape, any strides. Only read.
        signed: which of the two maps.
        block_offset: the place of x's first element within its block, 0 to 255: the first block is shorter by as
            much. For part of a larger tensor, whose blocks are counted from the tensor's beginning.

    Returns:
        The codes, uint8 and contiguous, of x's shape, and the absmax, float32, of shape
        (ceil((numel + block_offset) / 256),), or (0,) for an empty x.

    Raises:
        TypeError: an argument has a wrong type, dtype or layout.
        ValueError: `block_offset` is out of its range.
        RuntimeError: CUDA failed to launch the kernel.

    Source: Dettmers et al., arXiv:2110.02861, section 2.1.
    """
    if tracing():
        result: tuple[Tensor, Tensor] = _quantize_operation(x, signed, block_offset)
        return result
    _check_tensor("x", x)
    if x.dtype not in _DTYPE_CODES and x.dtype is not torch.float64:
        raise TypeError(f"x has dtype {x.dtype}; it must be float32, bfloat16, float16 or float64")
    check_block_offset("block_offset", block_offset)
    run = _kernel("quantize", x.device, x.dtype)
    if run is None:
        return reference.quantize_blockwise(x, signed=signed, block_offset=block_offset)
    values = x.detach().resolve_neg().contiguous()
    codes, absmax = _empty_codes(x, block_offset)
    if values.numel():
        pointers = (_address("x", values), _DTYPE_CODES[x.dtype], codes.data_ptr(), absmax.data_ptr())
        run(*pointers, values.numel(), signed, block_offset)
    return codes, absmax


def dequantize_blockwise(
    codes: Tensor,
    absmax: Tensor,
    *,
    signed: bool = True,
    block_offset: int = 0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """What the codes stand for: ``dynamic_map(signed)[code] * absmax[block]``, in fp32, rounded to `dtype`.

    Args:
        codes: uint8, any shape, as `quantize_blockwise` returned them (or part of them). Only read.
        absmax: float32, of shape (ceil((numel + block_offset) / 256),), or (0,) for no codes. Only read.
        signed, block_offset: as they were when quantising.
        dtype: of the result: float32 (default), bfloat16, float16 or float64; rounding is to nearest even.
        out: where to put the result, of the codes' shape, instead of a new tensor. Its dtype is that of the result.

    Returns:
        `out`, or a new contiguous tensor of the codes' shape.

    Raises:
        TypeError: an argument has a wrong type, dtype or layout.
        ValueError: shapes or devices do not match; `out` shares memory with an input or with itself;
            `block_offset` is out of its range.
        RuntimeError: CUDA failed to launch the kernel.
    """
    if tracing():
        if out is None:
            result: Tensor = _dequantize_operation(codes, absmax, signed, block_offset, dtype or torch.float32)
            return result
        _dequantize_out_operation(codes, absmax, signed, block_offset, dtype or out.dtype, out)
        return out
    _check_tensor("codes", codes)
    _check_tensor("absmax", absmax)
    check_block_offset("block_offset", block_offset)
    if codes.dtype is not torch.uint8:
        raise TypeError(f"codes has dtype {codes.dtype}; it must be torch.uint8")
    check_absmax("absmax", absmax, block_count(codes.numel(), block_offset), codes.device)
    if out is not None:
        _check_tensor("out", out)
        if dtype is not None and out.dtype is not dtype:
            raise TypeError(f"out has dtype {out.dtype}; with dtype={dtype} it must be that")
        dtype = out.dtype
        _check_out(out, codes, absmax)
    elif dtype is None:
        dtype = torch.float32
    if dtype not in _DTYPE_CODES and dtype is not torch.float64:
        raise TypeError(f"dtype is {dtype}; it must be float32, bfloat16, float16 or float64")

    run = _kernel("dequantize", codes.device, dtype)
    if run is None:
        return reference.dequantize_blockwise(
            codes, absmax, signed=signed, block_offset=block_offset, dtype=dtype, out=out
        )
    direct = out is not None and out.is_contiguous()
    target = out if out is not None and direct else torch.empty(codes.shape, dtype=dtype, device=codes.device)
    if codes.numel():
        codes, absmax = codes.contiguous(), absmax.contiguous()
        pointers = (_address("out", target), _DTYPE_CODES[dtype], _address("codes", codes), _address("absmax", absmax))
        run(*pointers, codes.numel(), signed, block_offset)
    if out is None:
        return target
    if direct:
        increment_version((out,))
    else:
        with torch.no_grad():
            out.copy_(target)
    return out


def check_block_offset(name: str, value: object) -> None:
    """Raise unless `value` is the place of an element within a block."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is a {type(value).__name__}; it must be an int")
    if not 0 <= value < BLOCK_SIZE:
        raise ValueError(f"{name} is {value}; it must be at least 0 and less than {BLOCK_SIZE}, the size of a block")


def check_absmax(name: str, absmax: Tensor, blocks: int, device: torch.device) -> None:
    """Raise unless `absmax` holds a float32 number for each block, on `device`."""
    if absmax.dtype is not torch.float32:
        raise TypeError(f"{name} has dtype {absmax.dtype}; it must be torch.float32")
    if absmax.shape != (blocks,):
        raise ValueError(f"{name} has shape {tuple(absmax.shape)}; it must be ({blocks},), one for each block")
    if absmax.device != device:
        raise ValueError(f"{name} is on {absmax.device}; it must be on {device} like the codes")


def _check_out(out: Tensor, codes: Tensor, absmax: Tensor) -> None:
    if out.shape != codes.shape:
        raise ValueError(f"out has shape {tuple(out.shape)}; it must be {tuple(codes.shape)}, that of codes")
    if out.device != codes.device:
        raise ValueError(f"out is on {out.device}; it must be on {codes.device} like codes")
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError("out requires grad; pass out.detach(), or call under torch.no_grad()")
    if any(stride == 0 and size > 1 for stride, size in zip(out.stride(), out.shape)):
        raise ValueError(f"out has strides {out.stride()}: its elements share memory; pass a tensor of its own")
    begin, end = _extent(out)
    for name, tensor in (("codes", codes), ("absmax", absmax)):
        other_begin, other_end = _extent(tensor)
        if begin < other_end and other_begin < end:
            raise ValueError(f"out overlaps {name} in memory; it needs its own memory")


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The addresses between which the elements lie."""
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return 0, 0
    reach = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape))
    return tensor.data_ptr(), tensor.data_ptr() + (reach + 1) * tensor.element_size()


def _empty_codes(x: Tensor, block_offset: int) -> tuple[Tensor, Tensor]:
    codes = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    return codes, torch.empty(block_count(x.numel(), block_offset), dtype=torch.float32, device=x.device)


def _kernel(name: str, device: torch.device, dtype: torch.dtype) -> Callable[..., None] | None:
    """The compiled function, given (values, dtype, codes, absmax, numel, signed, block_offset); None: reference."""
    return _native.kernel(name, device) if dtype in _DTYPE_CODES else None


def _quantize(x: Tensor, signed: bool, block_offset: int) -> tuple[Tensor, Tensor]:
    return quantize_blockwise(x, signed=signed, block_offset=block_offset)


def _dequantize(codes: Tensor, absmax: Tensor, signed: bool, block_offset: int, dtype: torch.dtype) -> Tensor:
    return dequantize_blockwise(codes, absmax, signed=signed, block_offset=block_offset, dtype=dtype)


def _dequantize_out(
    codes: Tensor, absmax: Tensor, signed: bool, block_offset: int, dtype: torch.dtype, out: Tensor
) -> None:
    dequantize_blockwise(codes, absmax, signed=signed, block_offset=block_offset, dtype=dtype, out=out)


_quantize_operation = register(
    "quantize_blockwise(Tensor x, bool signed, int block_offset) -> (Tensor, Tensor)",
    _quantize,
    lambda x, signed, block_offset: _empty_codes(x, block_offset),
)
_dequantize_operation = register(
    "dequantize_blockwise(Tensor codes, Tensor absmax, bool signed, int block_offset, ScalarType dtype) -> Tensor",
    _dequantize,
    lambda codes, absmax, signed, block_offset, dtype: torch.empty(codes.shape, dtype=dtype, device=codes.device),
)
_dequantize_out_operation = register(
    "dequantize_blockwise_out(Tensor codes, Tensor absmax, bool signed, int block_offset, ScalarType dtype, "
    "Tensor(a!) out) -> ()",
    _dequantize_out,
    lambda codes, absmax, signed, block_offset, dtype, out: None,
)
