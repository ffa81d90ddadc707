"""LAMB: Adam directions, scaled by a trust ratio per parameter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import torch

import bmt_kernels

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .options import check_betas, check_not_negative, declared
from .requests import Rule, Sum
from .state_layout import StateTensor, like_parameter


class DistributedLamb(DistributedOptimizer):
    """LAMB (You et al., `Large Batch Optimization <https://arxiv.org/abs/1904.00962>`_, algorithm 2).

    For each parameter, in fp32 whatever its dtype::

        m ← β₁m + (1-β₁)g        v ← β₂v + (1-β₂)g²
        r = m̂ / (√v̂ + eps) + weight_decay·p
        p ← p - lr·(‖p‖ / ‖r‖)·r                  without the trust ratio ‖p‖ / ‖r‖ where one of the norms is 0

    ``bias_correction`` chooses one of three conventions for m̂ and v̂:

    - ``True`` or ``"moments"``: m/(1-β₁ᵗ) and v/(1-β₂ᵗ), as in the published algorithm 2 and NVIDIA's FusedLAMB.
    - ``"lr"``: m and v, and lr·√(1-β₂ᵗ)/(1-β₁ᵗ) for lr, as in pytorch-lamb and ColossalAI's DistributedLamb with
      ``bias_correction=True``. The trust ratio undoes most of a correction of m̂ and v̂, but not of lr: the first
      steps are smaller by up to √(1-β₂)/(1-β₁).
    - ``False``: m, v and lr, as in the third version of the paper on arXiv.

    A step has one round: the norms.

    Args:
        params: parameters, or parameter groups.
        lr, betas, eps, weight_decay: as in the formula.
        bias_correction: as above.
        adapt_undecayed: whether groups without weight decay have a trust ratio. With False, biases and norms in such a
            group are stepped as by AdamW (NVIDIA apex's rule).
        max_trust_ratio: the largest ratio ‖p‖ / ‖r‖.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range.
    """

    keeps_copies = False

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        bias_correction: bool | Literal["moments", "lr"] = True,
        adapt_undecayed: bool = True,
        max_trust_ratio: float = math.inf,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, declared(locals()), stochastic_rounding)

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "eps", "weight_decay")
        if not options["max_trust_ratio"] > 0:
            raise ValueError(f"max_trust_ratio={options['max_trust_ratio']!r} must be positive")
        check_betas(options["betas"], 2)
        if options["bias_correction"] not in (True, False, "moments", "lr"):
            raise ValueError(f"bias_correction={options['bias_correction']!r} must be True, False, 'moments' or 'lr'")

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        return {"exp_avg": like_parameter(shape), "exp_avg_sq": like_parameter(shape)}

    def rule(self, batch: Batch) -> Rule:
        yield []  # the norms are of the new direction, so the moments change before them
        options, lr = batch.options, float(batch.options["lr"])
        numbers: dict[str, Any] = {
            "betas": tuple(map(float, options["betas"])),
            "eps": float(options["eps"]),
            "weight_decay": float(options["weight_decay"]),
            "step": batch.step,
            "bias_correction": options["bias_correction"] in (True, "moments"),
        }
        if options["bias_correction"] == "lr":
            beta1, beta2 = numbers["betas"]
            lr *= math.sqrt(1 - beta2**batch.step) / (1 - beta1**batch.step)
        directions = batch.scratch()
        squares = bmt_kernels.lamb_moments(
            batch.weights,
            batch.grads,
            batch.state("exp_avg"),
            batch.state("exp_avg_sq"),
            grad_scale=batch.grad_scale,
            grad_factor=batch.grad_factor,
            directions=directions,
            **numbers,
        )
        (squares,) = yield [Sum(squares.float(), batch.logical_params)]  # (parameters, 2): of weights and of directions
        norms = squares.sqrt()
        trust_ratios = (norms[:, 0] / norms[:, 1]).clamp(max=options["max_trust_ratio"])
        adapted = (norms > 0).all(dim=1) & bool(options["adapt_undecayed"] or options["weight_decay"])
        step_sizes = lr * torch.where(adapted, trust_ratios, 1)
        for indices, params, masters in batch.for_kernels():
            bmt_kernels.lamb_update(
                params,
                batch.state("exp_avg", indices),
                batch.state("exp_avg_sq", indices),
                step_sizes if len(indices) == len(batch) else torch.stack([step_sizes[i] for i in indices]),
                masters=masters,
                directions=None if directions is None else batch.pick(directions, indices),
                **numbers,
            )


Lamb = DistributedLamb
