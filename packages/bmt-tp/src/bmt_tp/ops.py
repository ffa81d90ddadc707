"""The linear map as one autograd function, on which layers and their parallel forms stand.

[Note: what a backward pass wants]
    A zero-bubble pipeline computes the gradients of inputs first and those of weights later, in two backward passes
    that come to the same node (``bmt_pipe.split_backward``). ``ctx.needs_input_grad`` says what requires a gradient,
    :func:`wanted` what the pass that is running asks for. A function with ``splits_backward = True`` computes only
    that, and its weights' gradients without the weights' values.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class OpLinear(torch.autograd.Function):
    """y = x Wᵀ + b, called as ``OpLinear.apply(x, weight, bias=None)``.

    Shapes: x (\\*, in), weight (out, in), bias (out,), y (\\*, out), with any leading dimensions, none included.
    Gradients are those of ``torch.nn.functional.linear``, also the second ones and under autocast. Kept for
    backward are x, if the weight needs a gradient, and the weight, if x does: the tensors themselves, so that
    full weights which are gathered for a computation and freed after it are not kept in another form.

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
        return F.linear(x, weight, bias).data  # no view of something else: models may write to it in place

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        need_x, need_weight, *need_bias = wanted(ctx)
        # Under autocast the output, and so its gradient, has another dtype than what was saved.
        grad_x = grad @ weight.to(grad.dtype) if need_x else None
        grad_weight = weight_gradient(grad, x) if need_weight else None
        grad_bias = bias_gradient(grad, ctx.bias_dtype) if any(need_bias) else None
        return grad_x, grad_weight, grad_bias


def wanted(ctx: Any) -> list[bool]:
    """Which tensors among a function's arguments the running backward pass wants the gradients of, in their order."""
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
    """Of the output's gradient (\\*, out) and the input (\\*, in): (out, in), in the dtype of ``grad``."""
    # Under autocast the output, and so its gradient, has another dtype than what was saved.
    return as_rows(grad).t() @ as_rows(x).to(grad.dtype)


def bias_gradient(grad: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Of the output's gradient (\\*, out): (out,)."""
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
