"""The linear map as an autograd function, and helpers that the parallel maps use, too.

[Note: which gradients a backward pass computes]
    A zero-bubble pipeline runs an input-gradient pass first and a weight-gradient pass later. Both come to the same
    autograd node (``bmt_pipe.split_backward``). ``ctx.needs_input_grad`` says what requires a gradient,
    :func:`needed_now` which gradients the running pass needs. A function with ``splits_backward = True`` computes only
    these, and computes weight gradients without the weights' values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class OpLinear(torch.autograd.Function):
    """y = x Wᵀ + b, called as ``OpLinear.apply(x, weight, bias=None)``.

    Shapes: x (\\*, in), weight (out, in), bias (out,), y (\\*, out), with any number of leading dimensions, or none.
    Gradients are those of ``torch.nn.functional.linear``, also second ones and under autocast. It saves x for backward
    if the weight needs a gradient, and the weight if x does. It saves these tensors themselves and no copies, so that
    unsharded weights can be released after the computation.

    Raises:
        ValueError: the weight is not a matrix, or a shape does not fit it.
    """

    splits_backward = True

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        check_shapes(x, weight, bias)
        need_x, need_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight, bias).data  # not a view of another tensor: models may modify it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        need_x, need_weight, *need_bias = needed_now(ctx)
        # Under autocast the dtype of the output, and so of its gradient, differs from that of the saved tensors.
        grad_x = grad @ weight.to(grad.dtype) if need_x else None
        grad_weight = weight_gradient(grad, x) if need_weight else None
        grad_bias = bias_gradient(grad, ctx.bias_dtype) if any(need_bias) else None
        return grad_x, grad_weight, grad_bias


def needed_now(ctx: Any) -> list[bool]:
    """For each tensor argument of a function, in order: whether the running backward pass needs its gradient."""
    if torch.compiler.is_compiling():
        return [bool(need) for need in ctx.needs_input_grad]
    return [node is not None and _runs(node) for node, _ in ctx.next_functions]


def _runs(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf, whose gradient torch.autograd.grad returns
        return True


def as_rows(x: Tensor) -> Tensor:
    """(\\*, n) as a matrix (N, n)."""
    return x.flatten(0, -2) if x.dim() > 1 else x[None]


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """The weight gradient (out, in), in the dtype of ``grad``, the output's gradient (\\*, out); x is (\\*, in)."""
    # Under autocast the dtype of the output, and so of its gradient, differs from that of the saved tensors.
    return as_rows(grad).t() @ as_rows(x).to(grad.dtype)


def bias_gradient(grad: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The bias gradient (out,) from the output's gradient (\\*, out)."""
    return as_rows(grad).sum(dim=0, dtype=dtype)


def check_shapes(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise ValueError unless x Wᵀ + b can be computed."""
    if weight.dim() != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}; a matrix (out, in) is needed")
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has shape {tuple(x.shape)}; a weight of shape {tuple(weight.shape)} takes (*, {weight.shape[1]})"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(
            f"bias has shape {tuple(bias.shape)}; a weight of shape {tuple(weight.shape)} takes ({weight.shape[0]},)"
        )
