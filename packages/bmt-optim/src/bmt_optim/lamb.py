"""LAMB: Adam directions, scaled by layer so that a step is a fraction of the weights."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

import bmt_kernels

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .options import check_betas, check_not_negative
from .requests import Rule, Sum
from .state_layout import StateTensor, like_parameter

_CHUNK = 1 << 16
"""Elements that stay in a CPU core's cache from one pass to the next."""
_SETTLED = 1 << 30
"""A step at which bias corrections are 1."""


class DistributedLamb(DistributedOptimizer):
    """LAMB (You et al., `Large Batch Optimization <https://arxiv.org/abs/1904.00962>`_, algorithm 2).

    For each parameter, in fp32 whatever its dtype::

        m ← β₁m + (1-β₁)g        v ← β₂v + (1-β₂)g²
        r = m̂ / (√v̂ + eps) + weight_decay·p
        p ← p - lr·(‖p‖ / ‖r‖)·r                  without the ratio where one of the norms is 0

    There are three conventions for m̂ and v̂, which ``bias_correction`` chooses between:

    - ``True`` or ``"moments"``: m/(1-β₁ᵗ) and v/(1-β₂ᵗ), as in the published algorithm 2 and NVIDIA's FusedLAMB.
    - ``"lr"``: m and v, and lr·√(1-β₂ᵗ)/(1-β₁ᵗ) for lr, as in pytorch-lamb and ColossalAI's DistributedLamb with
      ``bias_correction=True``. The ratio of norms undoes most of a correction of m̂ and v̂, but not of lr: the
      first steps are smaller by up to √(1-β₂)/(1-β₁).
    - ``False``: m, v and lr, as in the third version of the paper on arXiv.

    A step has one round: the norms.

    Args:
        params: parameters, or parameter groups.
        lr, betas, eps, weight_decay: as in the formula.
        bias_correction: as above.
        stochastic_rounding: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        bias_correction: bool | Literal["moments", "lr"] = True,
        stochastic_rounding: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults, stochastic_rounding)

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "eps", "weight_decay")
        check_betas(options["betas"], 2)
        if options["bias_correction"] not in (True, False, "moments", "lr"):
            raise ValueError(f"bias_correction={options['bias_correction']!r} must be True, False, 'moments' or 'lr'")

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        return {"exp_avg": like_parameter(shape), "exp_avg_sq": like_parameter(shape)}

    def rule(self, batch: Batch) -> Rule:
        yield []  # the norms are of a direction that the moments have to move for
        options, step, lr = batch.options, batch.step, float(batch.options["lr"])
        correct = options["bias_correction"]
        if correct == "lr":
            beta1, beta2 = options["betas"]
            lr *= math.sqrt(1 - beta2**step) / (1 - beta1**step)
        directions, squares = _directions(batch, step if correct in (True, "moments") else _SETTLED)
        (squares,) = yield [Sum(squares, batch.matrices)]
        if not squares:
            return
        norms = torch.stack(squares).sqrt()  # (matrices, 2): of weights and of directions
        ratios = torch.where((norms > 0).all(dim=1), norms[:, 0] / norms[:, 1], 1)
        sizes = (ratios * lr).unbind()
        for indices, weights in batch.writable():
            for i, weight in zip(indices, weights):
                weight.addcmul_(directions[i], sizes[i])


def _directions(batch: Batch, step: int) -> tuple[list[Tensor], Sequence[Tensor]]:
    """-r of every matrix, and per matrix Σp² and Σr² of this rank's part, fp32 of shape (2,). The moments move.

    A step of Adam with rate 1 turns -weight_decay·p into -r.
    """
    weights, exp_avgs, exp_avg_sqs = batch.weights, batch.state("exp_avg"), batch.state("exp_avg_sq")
    directions = [torch.empty_like(w, dtype=torch.float32) for w in weights]
    if not weights or weights[0].device.type != "cpu":
        _move(batch, step, weights, list(batch.grads), exp_avgs, exp_avg_sqs, directions)
        norms = [torch._foreach_norm(tensors, 2, dtype=torch.float32) for tensors in (weights, directions)]
        return directions, [torch.stack(pair).square() for pair in zip(*norms)]
    squares = torch.zeros(len(batch), 2, dtype=torch.float64)
    infinite = torch.zeros(())
    for i, tensors in enumerate(zip(weights, batch.grads, exp_avgs, exp_avg_sqs, directions)):
        # Bit by bit, so that each pass finds what the one before it has left in the cache.
        for weight, grad, exp_avg, exp_avg_sq, direction in zip(*(t.view(-1).split(_CHUNK) for t in tensors)):
            _move(batch, step, [weight], [grad], [exp_avg], [exp_avg_sq], [direction])
            bmt_kernels.power_sum([weight], out=(infinite, squares[i, 0]))
            bmt_kernels.power_sum([direction], out=(infinite, squares[i, 1]))
    return directions, squares.float().unbind()


def _move(
    batch: Batch,
    step: int,
    weights: list[Tensor],
    grads: list[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    directions: list[Tensor],
) -> None:
    """Move the moments, and write -r into the directions."""
    if batch.options["weight_decay"]:
        torch._foreach_copy_(directions, weights)
        torch._foreach_mul_(directions, -batch.options["weight_decay"])
    else:
        torch._foreach_zero_(directions)
    bmt_kernels.adam_step(
        directions,
        grads,
        exp_avgs,
        exp_avg_sqs,
        lr=1.0,
        betas=batch.options["betas"],
        eps=batch.options["eps"],
        weight_decay=0.0,
        step=step,
        grad_scale=batch.grad_scale,
        grad_factor=batch.grad_factor,
    )


Lamb = DistributedLamb
