"""Unsharded parameters as modules see them in a forward. Their gradients are computed in a flat gradient.

[Note: operations that write gradients]
    ``F.linear``, ``torch.addmm`` and, on the CPU, ``F.embedding`` compute the gradient of a weight in the flat
    gradient, whichever module calls them. Autograd computes it for other operations, and for these operations under
    ``torch.compile``, autocast and transforms of ``torch.func``, and with inputs that are not plain tensors.

    If another operation is seen to use a parameter in the same call, autograd computes and adds up all of the
    parameter's gradients. Hooks on the parameter then see them all. If autograd has gradients of uses that were not
    seen (by a ``torch.autograd.Function``, for example), they are added to the written gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from bmt_comm.plain import PLAIN_TYPES

from .gradient_target import GradientTarget, Place

LEAST_BYTES = 1 << 18
"""The least size of a parameter whose gradient is written there: smaller copies are faster than Python code."""


class UnshardedParameter(Tensor):
    """A parameter of one call.

    Attributes:
        target: the flat gradient for its gradient.
        number: its number in the flat parameter.
    """

    target: GradientTarget
    number: int

    @staticmethod
    def of(view: Tensor, target: GradientTarget, number: int) -> UnshardedParameter:
        """``view`` as an unsharded parameter."""
        param: UnshardedParameter = Tensor._make_subclass(UnshardedParameter, view)
        param.target, param.number = target, number
        return param

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if not torch.compiler.is_compiling() and func not in _READS and torch.is_grad_enabled():
                writing = _WRITING.get(func)
                result = None if writing is None else writing(*args, **(kwargs or {}))
                if result is not None:
                    return result
                _note_other_uses(args)
                if kwargs:
                    _note_other_uses(kwargs.values())
            return func(*args, **(kwargs or {}))


FACTS = {
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad")),
    *(getattr(Tensor, name).__get__ for name in ("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized")),
    *(getattr(Tensor, name).__get__ for name in ("is_leaf", "nbytes", "_version")),
    *(getattr(Tensor, name) for name in ("size", "dim", "numel", "nelement", "ndimension", "__len__", "element_size")),
    *(getattr(Tensor, name) for name in ("is_floating_point", "is_complex", "is_inference", "get_device", "__hash__")),
}
"""Functions that read facts of a parameter and do not need its values."""
_READS = FACTS | {Tensor.stride, Tensor.is_contiguous, Tensor.data_ptr}


def _note_other_uses(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, UnshardedParameter):
            value.target.note_other_use(value.number)
        elif isinstance(value, (list, tuple)):
            _note_other_uses(value)


# --- operations that write gradients --------------------------------------------------------------


def _linear(input: Any, weight: Any, bias: Any = None) -> Tensor | None:
    if not _writes(weight, input, bias) or input.dim() == 0 or input.shape[-1] != weight.shape[1]:
        return None
    if bias is not None and bias.dim() != 1:
        return None
    rows = input if input.dim() == 2 else input.reshape(-1, input.shape[-1])
    out: Tensor = _Product.apply(rows, weight.t(), bias, weight.target, weight.number, True)
    return out if input.dim() == 2 else out.view(*input.shape[:-1], out.shape[-1])


def _addmm(*args: Any, **kwargs: Any) -> Tensor | None:
    if len(args) != 3 or kwargs:
        return None
    bias, a, b = args
    if not _writes(b, a, bias) or bias.dim() != 1 or a.dim() != 2:
        return None
    return _Product.apply(a, b, bias, b.target, b.number, False)


def _embedding(
    input: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor | None:
    if max_norm is not None or scale_grad_by_freq or sparse or not _writes(weight) or not weight.is_cpu:
        return None  # on a GPU the order of index_add_'s sums is not fixed
    if type(input) is not Tensor:
        return None
    return _Embedding.apply(input, weight, padding_idx)


def _writes(weight: Any, *others: Any) -> bool:
    """Whether an operation of a weight and tensors of the same dtype, or None, can write the weight's gradient."""
    return (
        type(weight) is UnshardedParameter
        and weight.dim() == 2
        and weight.requires_grad
        and all(
            other is None
            or (type(other) in PLAIN_TYPES and other.dtype == weight.dtype and other.device == weight.device)
            for other in others
        )
        and (weight.is_meta or not torch.is_autocast_enabled(weight.device.type))
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
    )


_WRITING: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    F.linear: _linear,
    torch.addmm: _addmm,
    F.embedding: _embedding,
}


class _Product(torch.autograd.Function):
    """a (M, K), b (K, N), a bias (N) or None → a b + bias (M, N). The gradient of b, or of bᵀ, may have a place.

    It saves the same tensors as autograd's product, in the same order: a checkpoint may recompute with that product.
    """

    @staticmethod
    def forward(
        ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, target: GradientTarget, index: int, transposed: bool
    ) -> Tensor:
        target.note_use(index)
        saved = a if ctx.needs_input_grad[1] else None, b if ctx.needs_input_grad[0] else None
        ctx.save_for_backward(*(saved if bias is not None else reversed(saved)))
        ctx.target, ctx.index, ctx.transposed, ctx.has_bias = target, index, transposed, bias is not None
        return a.mm(b) if bias is None else torch.addmm(bias, a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # a checkpoint recomputes here, with operations that have places, too
        a, b = saved if ctx.has_bias else reversed(saved)
        with torch._C.DisableTorchFunctionSubclass():
            grad_a = grad.mm(b.t()) if ctx.needs_input_grad[0] else None
            grad_b = None
            if ctx.needs_input_grad[1]:
                place = _place(ctx)
                if place is None:
                    grad_b = grad.t().mm(a).t() if ctx.transposed else a.t().mm(grad)
                else:
                    left, right = (grad.t(), a) if ctx.transposed else (a.t(), grad)
                    if place.adds:
                        place.view.addmm_(left, right)
                    else:
                        torch.mm(left, right, out=place.view)
            grad_bias = grad.sum(0) if ctx.needs_input_grad[2] else None
            return grad_a, grad_b, grad_bias, None, None, None


class _Embedding(torch.autograd.Function):
    """Numbers of rows (...) and a weight (V, H) → rows (..., H)."""

    @staticmethod
    def forward(ctx: Any, numbers: Tensor, weight: UnshardedParameter, padding_idx: int | None) -> Tensor:
        weight.target.note_use(weight.number)
        ctx.save_for_backward(numbers)
        ctx.target, ctx.index = weight.target, weight.number
        ctx.rows, ctx.padding = weight.shape[0], -1 if padding_idx is None else padding_idx % weight.shape[0]
        return F.embedding(numbers, weight, padding_idx)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        [numbers] = ctx.saved_tensors
        with torch._C.DisableTorchFunctionSubclass():
            place = _place(ctx)
            if place is None:
                dense = torch.ops.aten.embedding_dense_backward(grad, numbers, ctx.rows, ctx.padding, False)
                return None, dense, None
            chosen, rows = numbers.reshape(-1), grad.reshape(-1, grad.shape[-1])
            if ctx.padding >= 0:
                kept = chosen != ctx.padding
                chosen, rows = chosen[kept], rows[kept]
            (place.view if place.adds else place.view.zero_()).index_add_(0, chosen, rows)
            return None, None, None


def _place(ctx: Any) -> Place | None:
    """Where to compute the gradient; None with ``create_graph=True``, because autograd must see the computation."""
    return None if torch.is_grad_enabled() else ctx.target.place(ctx.index)
