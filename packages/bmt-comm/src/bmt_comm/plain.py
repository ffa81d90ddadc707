"""Subclasses of Tensor, as plain tensors in memory that collectives read and write."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PLAIN_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def plain_tensor(tensor: Tensor) -> Tensor:
    """Wait for the result of a functional collective, and turn a subclass of Tensor into a plain tensor.

    Other ranks may have plain tensors, and must go the same way. A subclass with its own ``__torch_dispatch__`` is
    returned as it is, because it may not be a tensor in memory.
    """
    if type(tensor) in PLAIN_TYPES:
        return tensor
    if hasattr(tensor, "trigger_wait"):
        return plain_tensor(tensor.trigger_wait())
    if isinstance(tensor, Tensor) and not _has_own_dispatch(tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return tensor.detach().as_subclass(Tensor)
    return tensor


def _has_own_dispatch(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is not Tensor.__torch_dispatch__


def check_in_memory(name: str, tensor: Tensor, may_be_meta: bool = False) -> None:
    """Raise unless a tensor is contiguous in memory, without lazy conjugation or negation.

    Raises:
        TypeError: it is of a class without memory of its own, such as a ``DTensor``.
        ValueError: it is not contiguous, or on the meta device, or conjugated or negated lazily.
    """
    if not tensor.is_contiguous():
        raise ValueError(
            f"{name} of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; "
            f"pass {name}.contiguous()"
        )
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{name} is conjugated or negated lazily; pass {name}.resolve_conj().resolve_neg()")
    if tensor.is_meta:
        if may_be_meta:
            return
        raise ValueError(f"{name} is on the meta device, and has no values")
    if type(tensor) in PLAIN_TYPES or hasattr(tensor, "trigger_wait"):
        return
    if _has_own_dispatch(tensor) and tensor.numel() and tensor.data_ptr() == 0:
        raise TypeError(f"{name} is a {type(tensor).__name__}; pass the tensor that it wraps (to_local())")


def is_dense(value: Any) -> bool:
    """Whether a value is a plain tensor whose elements lie in host memory as they are."""
    # The bytes of a quantized tensor do not include its scale.
    return type(value) in PLAIN_TYPES and value.is_cpu and value.layout is torch.strided and not value.is_quantized
