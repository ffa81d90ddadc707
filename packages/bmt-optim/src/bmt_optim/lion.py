"""Lion: the sign of a momentum. No rounds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .options import check_betas, check_not_negative, declared
from .requests import Rule
from .state_layout import StateTensor, like_parameter


class Lion(DistributedOptimizer):
    """Lion (Chen et al., `arXiv:2302.06675 <https://arxiv.org/abs/2302.06675>`_).

    ::

        p ← p(1 - lr·weight_decay) - lr·sign(β₁m + (1-β₁)g)
        m ← β₂m + (1-β₂)g

    Its learning rate is about a third to a tenth of AdamW's, and its weight decay as many times larger.

    Args:
        params: parameters, or parameter groups.
        lr, betas, weight_decay: as in the formula.
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
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, declared(locals()), stochastic_rounding)

    def counts_steps(self, options: Mapping[str, Any]) -> bool:
        """As :meth:`DistributedOptimizer.counts_steps`."""
        return False

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "weight_decay")
        check_betas(options["betas"], 2)

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        return {"exp_avg": like_parameter(shape)}

    def rule(self, batch: Batch) -> Rule:
        yield []
        lr, (beta1, beta2) = float(batch.options["lr"]), batch.options["betas"]
        averages = batch.state("exp_avg")
        for indices, weights in batch.writable():
            for i, weight in zip(indices, weights):
                grad = batch.fp32_grad(i)
                weight.mul_(1 - lr * batch.options["weight_decay"])
                weight.add_(averages[i].mul(beta1).add_(grad, alpha=1 - beta1).sign_(), alpha=-lr)
                averages[i].mul_(beta2).add_(grad, alpha=1 - beta2)
