"""What reductions compute, on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .fixed_order import TREE_SUM, tree_sum

_COMBINE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,  # divided afterwards
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
    TREE_SUM: torch.add,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
TORCH_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}
REDUCE_OPS = ("sum", "avg", "max", "min", "prod")


_defined: set[tuple[str, torch.dtype, bool]] = set()  # reductions that were checked


def check_op(op: str, tensor: Tensor) -> None:
    """Raise unless ``op`` is a reduction, and defined for tensors like this one."""
    if (op, tensor.dtype, tensor.is_cpu) in _defined:
        return
    if op not in REDUCE_OPS and op != TREE_SUM:
        raise ValueError(f"op={op!r} is not a reduction; choose one of {', '.join(REDUCE_OPS)}")
    dtype = tensor.dtype
    undefined = (op in ("max", "min") and dtype.is_complex) or (op == "avg" and dtype == torch.bool)
    if undefined or (tensor.device.type == "cpu" and not combines(op, dtype)):
        raise TypeError(f"op={op!r} is not defined for {dtype}")
    _defined.add((op, dtype, tensor.is_cpu))


@functools.cache
def combines(op: str, dtype: torch.dtype) -> bool:
    """Whether torch has what :func:`combine` needs for a dtype."""
    try:
        a, b = torch.zeros(2, 1, dtype=torch.uint8, device="cpu").to(dtype)
        combine(a, [a, b], op)
    except RuntimeError:  # NotImplementedError is one
        return False
    return True


@functools.cache
def copies(dtype: torch.dtype) -> bool:
    """Whether torch copies plain tensors of a dtype; not those of less than a byte, and quantized ones."""
    a, b = torch.zeros(2, 16, dtype=torch.uint8, device="cpu").view(dtype)
    try:
        a.copy_(b)
    except RuntimeError:  # NotImplementedError is one
        return False
    return not str(dtype).startswith("torch.q")


def combine(out: Tensor, parts: Sequence[Tensor], op: str) -> None:
    """Reduce the ranks' ``parts``, two at least, into ``out``.

    In rank order, so that a sum does not depend on who computes it; :data:`TREE_SUM` as :func:`tree_sum`, in the dtype
    of ``out``. ``out`` may be one of the first two parts.
    """
    if op == TREE_SUM:
        tree_sum([part.to(out.dtype) for part in parts], out)
        return
    torch_op = _COMBINE[op]
    torch_op(parts[0], parts[1], out=out)
    for part in parts[2:]:
        torch_op(out, part, out=out)
    if op == "avg":
        if out.is_floating_point() or out.is_complex():
            out.div_(len(parts))
        else:
            out.floor_divide_(len(parts))
