"""AdEMAMix: Adam with a second, much slower momentum. No rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .options import check_betas, check_not_negative, declared
from .requests import Rule
from .state_layout import StateTensor, like_parameter


class AdEMAMix(DistributedOptimizer):
    """AdEMAMix (Pagliardini et al., `arXiv:2409.03137 <https://arxiv.org/abs/2409.03137>`_).

    ::

        m ← β₁m + (1-β₁)g        s ← β₃s + (1-β₃)g        v ← β₂v + (1-β₂)g²
        p ← p - lr·((m/(1-β₁ᵗ) + α·s) / (√(v/(1-β₂ᵗ)) + eps) + weight_decay·p)

    Args:
        params: parameters, or parameter groups.
        lr, eps, weight_decay: as in the formula.
        betas: β₁, β₂ and β₃.
        alpha: α.
        warm_up: the number of steps in which α grows from 0, and β₃ from β₁. α grows by equal amounts, and so does the
            half-life of β₃. About the number of steps of the run; with 0 both are final at once.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range.
    """

    sums_over_ranks = False
    keeps_copies = False

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        alpha: float = 5.0,
        warm_up: int = 0,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, declared(locals()), stochastic_rounding)

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "eps", "weight_decay", "alpha", "warm_up")
        check_betas(options["betas"], 3)

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        return {key: like_parameter(shape) for key in ("exp_avg", "exp_avg_slow", "exp_avg_sq")}

    def rule(self, batch: Batch) -> Rule:
        yield []
        options, step = batch.options, batch.step
        lr, (beta1, beta2, beta3) = float(options["lr"]), options["betas"]
        alpha = options["alpha"]
        if step < options["warm_up"]:
            done = step / options["warm_up"]
            alpha, beta3 = alpha * done, _between(beta1, beta3, done)
        correction, root = 1 - beta1**step, math.sqrt(1 - beta2**step)
        fast, slow, squares = (batch.state(key) for key in ("exp_avg", "exp_avg_slow", "exp_avg_sq"))
        for indices, weights in batch.writable():
            for i, weight in zip(indices, weights):
                grad = batch.fp32_grad(i)
                fast[i].lerp_(grad, 1 - beta1)
                slow[i].lerp_(grad, 1 - beta3)
                squares[i].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
                direction = fast[i].div(correction).add_(slow[i], alpha=alpha)
                weight.mul_(1 - lr * options["weight_decay"])
                weight.addcdiv_(direction, squares[i].sqrt().div_(root).add_(options["eps"]), value=-lr)


def _between(start: float, end: float, share: float) -> float:
    """The decay rate whose half-life is ``share`` of the way from that of ``start`` to that of ``end``."""
    first, last = (math.log(0.5) / math.log(beta) if beta else 0.0 for beta in (start, end))
    half_life = first + (last - first) * share
    return 0.5 ** (1 / half_life) if half_life else 0.0
