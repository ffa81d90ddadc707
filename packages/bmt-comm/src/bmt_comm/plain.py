"""Tensors of other classes, as those in memory that collectives read and write."""

from __future__ import annotations

import torch
from torch import Tensor

PLAIN_TYPES = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def plain_tensor(tensor: Tensor) -> Tensor:
    """What a functional collective has returned, when it is there; and of a subclass, the tensor that it is.

    Other ranks, which may have that of no subclass, must go the same way. A subclass that has its own dispatch may be
    something else than a tensor in memory, so it stays what it is.
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
    """Raise unless a tensor's elements lie one after the other in memory, as they are.

    Raises:
        TypeError: it is of a class that stands for something else, such as a ``DTensor``.
        ValueError: it is not contiguous, or on the meta device, or to be conjugated or negated when it is read.
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
