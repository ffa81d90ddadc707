"""Muon: momentum, orthogonalised. Each matrix is put together and orthogonalised by one of the ranks that share it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_comm import Slice

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .options import check_not_negative, declared
from .requests import Own, Return, Rule
from .state_layout import StateTensor, like_parameter

_ADJUSTMENTS = (None, "original", "match_rms_adamw")


class Muon(DistributedOptimizer):
    """Muon (Jordan et al., `Muon <https://kellerjordan.github.io/posts/muon/>`_), as ``torch.optim.Muon``.

    For each parameter, of the shape (R, C)::

        b ← momentum·b + (1-momentum)·g
        u = momentum·b + (1-momentum)·g     if nesterov, else b
        p ← p(1 - lr·weight_decay) - lr·adjusted·orthogonalised(u)

    :func:`orthogonalised` is the Newton-Schulz iteration, in bf16. ``adjusted`` is √max(1, R/C) for "original" (and
    ``None``) and 0.2·√max(R, C) for "match_rms_adamw" (Liu et al., `arXiv:2502.16982
    <https://arxiv.org/abs/2502.16982>`_).

    A step has two rounds: u goes to the matrix's owner, in bf16, which orthogonalises it and sends the result
    back. Owners have about equal numbers of floating-point operations. A parameter that is not sharded is
    orthogonalised by every rank that has a copy.

    Args:
        params: parameters of two dimensions (globally), or groups of them.
        lr, weight_decay, momentum, nesterov: as in the formula.
        ns_coefficients, eps, ns_steps: see :func:`orthogonalised`.
        adjust_lr_fn: "original", "match_rms_adamw" or ``None``.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range, or a parameter that is no matrix.
    """

    counts_steps = False
    sums_over_ranks = False

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, declared(locals()), stochastic_rounding)

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "weight_decay", "momentum", "eps")
        if len(options["ns_coefficients"]) != 3:
            raise ValueError(f"ns_coefficients={options['ns_coefficients']!r} must be three numbers")
        if not 0 <= options["ns_steps"] < 100:
            raise ValueError(f"ns_steps={options['ns_steps']!r} must be at least 0 and less than 100")
        if options["adjust_lr_fn"] not in _ADJUSTMENTS:
            raise ValueError(f"adjust_lr_fn={options['adjust_lr_fn']!r} must be one of {_ADJUSTMENTS}")

    def check_parameter(self, param: Tensor, where: Slice) -> None:
        if len(where.shape) != 2:
            raise ValueError(
                f"Muon takes matrices, and a parameter has shape {where.shape}; give it to another optimizer, such "
                "as AdamOptimizer"
            )

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        return {"momentum_buffer": like_parameter(shape)}

    def cost(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> float:
        """Floating-point operations of :func:`orthogonalised`."""
        small, large = sorted(shape)
        return options["ns_steps"] * (4.0 * small * small * large + 2.0 * small**3)

    def rule(self, batch: Batch) -> Rule:
        options, matrices = batch.options, batch.matrices
        momentum, buffers = options["momentum"], batch.state("momentum_buffer")
        updates = []
        for i, buffer in enumerate(buffers):
            grad = batch.fp32_grad(i)
            moved = torch.lerp(buffer, grad, 1 - momentum)
            update = torch.lerp(grad, moved, momentum) if options["nesterov"] else moved
            updates.append(update.bfloat16())
        (wholes,) = yield [Own(updates, matrices)]
        for i, buffer in enumerate(buffers):
            buffer.lerp_(batch.fp32_grad(i), 1 - momentum)
        settings = options["ns_coefficients"], options["ns_steps"], options["eps"]
        found = [None if whole is None else orthogonalised(whole, *settings) for whole in wholes]
        (updates,) = yield [Return(found, matrices, torch.bfloat16)]
        lr = float(options["lr"])
        for indices, weights in batch.writable():
            for i, weight in zip(indices, weights):
                weight.mul_(1 - lr * options["weight_decay"])
                weight.add_(updates[i], alpha=-lr * _adjustment(options["adjust_lr_fn"], matrices[i].where.shape))


def orthogonalised(
    matrix: Tensor, coefficients: Sequence[float] = (3.4445, -4.7750, 2.0315), steps: int = 5, eps: float = 1e-7
) -> Tensor:
    """About U·Vᵀ, where U·S·Vᵀ is the singular value decomposition of ``matrix``.

    With (a, b, c) = ``coefficients``, X = ``matrix`` divided by its norm (by ``eps`` if that is larger), and ``steps``
    times X ← aX + (bA + cA²)X where A = XXᵀ. The default coefficients leave singular values between about 0.5 and
    1.5, the fastest way there.

    Args:
        matrix: of shape (R, C). Only read.

    Returns:
        bf16, of the same shape.
    """
    a, b, c = coefficients
    x = matrix.to(_product_dtype(matrix.device), copy=True)
    tall = matrix.shape[0] > matrix.shape[1]
    if tall:
        x = x.T
    x.div_(x.norm().clamp(min=eps))
    for _ in range(steps):
        gram = x @ x.T
        gram = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        x = torch.addmm(x, gram, x, beta=a)
    return (x.T if tall else x).bfloat16()


def _product_dtype(device: torch.device) -> torch.dtype:
    """bf16; fp32 on CPUs for which torch has no fast matrix product in bf16. There bf16 takes some 40 times as long."""
    if device.type != "cpu":
        return torch.bfloat16
    fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if fast else torch.float32


def _adjustment(name: str | None, shape: Sequence[int]) -> float:
    rows, columns = shape
    return 0.2 * math.sqrt(max(rows, columns)) if name == "match_rms_adamw" else math.sqrt(max(1, rows / columns))
