"""The linear map as one autograd function, on which layers and their parallel forms stand."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .weight_gradients import bias_gradient, wanted_now, weight_gradient


class OpLinear(torch.autograd.Function):
    """y = x Wᵀ + b, called as ``OpLinear.apply(x, weight, bias=None)``.

    Shapes: x (\\*, in), weight (out, in), bias (out,), y (\\*, out), with any leading dimensions, none included.
    Gradients are those of ``torch.nn.functional.linear``, also the second ones and under autocast. Kept for
    backward are x, if the weight needs a gradient, and the weight, if x does: the tensors themselves, so that
    full weights which are gathered for a computation and freed after it are not kept in another form.

    Raises:
        ValueError: the weight is not a matrix, or a shape does not fit it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        check_shapes(x, weight, bias)
        need_x, need_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if need_weight else None, weight if need_x else None)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        grad_x = grad_weight = grad_bias = None
        # Under autocast the output, and so its gradient, has another dtype than what was saved.
        if ctx.needs_input_grad[0]:
            grad_x = grad @ weight.to(grad.dtype)
        now_weight, now_bias = wanted_now(ctx, 1, 1, grad, x, ctx.bias_dtype)
        if now_weight:
            grad_weight = weight_gradient(grad, x)
        if now_bias:
            grad_bias = bias_gradient(grad, ctx.bias_dtype)
        return grad_x, grad_weight, grad_bias


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
