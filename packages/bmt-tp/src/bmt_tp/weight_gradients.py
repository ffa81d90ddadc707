"""Gradients of a linear map's weight and bias, at once or, where backward puts them off, later (see bmt_comm)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bmt_comm import Communicator, defer_weight_gradient

from .regions import Pending, start_gather


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


class Rejoined:
    """A tensor of which this rank keeps its part of the sequence for gradients that are put off.

    The parts are gathered once for all of them, while the gradient before is computed.
    """

    def __init__(self, dim: int, comm: Communicator, dtype: torch.dtype) -> None:
        self._dim, self._comm, self._dtype = dim, comm, dtype
        self._arriving: Pending | None = None
        self._whole: Tensor | None = None
        self.uses = 0  # still to come

    def start(self, part: Tensor) -> None:
        """Begin to gather."""
        if self._arriving is None and self._whole is None:
            self._arriving = start_gather(part.to(self._dtype), self._dim, self._comm)

    def take(self, part: Tensor) -> Tensor:
        """The whole tensor; it is kept until its last use."""
        self.start(part)
        if self._arriving is not None:
            self._whole, self._arriving = self._arriving.wait(), None
        whole = self._whole
        assert whole is not None
        self.uses -= 1
        if not self.uses:
            self._whole = None
        return whole


def wanted_now(
    ctx: Any,
    weight: int,
    edge: int,
    grad: Tensor,
    x: Tensor,
    bias_dtype: torch.dtype | None,
    grad_parts: Rejoined | None = None,
    x_parts: Rejoined | None = None,
) -> tuple[bool, bool]:
    """In the backward of a linear map: put off the gradients of its weight and bias, where that is wanted.

    Args:
        ctx: the autograd function's context.
        weight: where the weight is among the function's arguments; the bias, if any, comes after it.
        edge: where it is among those arguments that are tensors.
        grad: the gradient of the output; with ``grad_parts`` this rank's part of the sequence.
        x: the input; with ``x_parts`` this rank's part of the sequence.
        bias_dtype: the bias's; None: there is no bias.
        grad_parts, x_parts: what joins the ranks' parts again.

    Returns:
        Whether the weight's gradient, and the bias's, are to be computed at once.
    """
    need_weight = ctx.needs_input_grad[weight]
    need_bias = bias_dtype is not None and ctx.needs_input_grad[weight + 1]

    def start(grad: Tensor, x: Tensor | None = None) -> None:
        if grad_parts is not None:
            grad_parts.start(grad)
        if x_parts is not None and x is not None:
            x_parts.start(x)

    def of_weight(grad: Tensor, x: Tensor) -> Tensor:
        return weight_gradient(_whole(grad, grad_parts), _whole(x, x_parts))

    def of_bias(grad: Tensor) -> Tensor:
        return bias_gradient(_whole(grad, grad_parts), bias_dtype)

    if not need_weight or not defer_weight_gradient(
        ctx, edge, of_weight, grad, x, prepare=start if grad_parts or x_parts else None
    ):
        return need_weight, need_bias
    for parts in (grad_parts, x_parts):
        if parts is not None:
            parts.uses += 1
    # The output's gradient is kept for the weight's anyway.
    if need_bias and defer_weight_gradient(ctx, edge + 1, of_bias, grad, prepare=start if grad_parts else None):
        need_bias = False
        if grad_parts is not None:
            grad_parts.uses += 1
    return False, need_bias


def _whole(tensor: Tensor, parts: Rejoined | None) -> Tensor:
    return tensor if parts is None else parts.take(tensor)
