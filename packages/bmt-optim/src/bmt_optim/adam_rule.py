"""Adam as a rule: no rounds, one kernel call per batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import bmt_kernels

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .options import check_betas, check_not_negative, declared
from .requests import Rule
from .state_layout import StateTensor, like_parameter


class Adam(DistributedOptimizer):
    """Adam (Kingma & Ba, `arXiv:1412.6980 <https://arxiv.org/abs/1412.6980>`_), as ``torch.optim.Adam``.

    ::

        g ← g + weight_decay·p                      unless the weight decay is decoupled
        m ← β₁m + (1-β₁)g        v ← β₂v + (1-β₂)g²
        p ← p(1 - lr·weight_decay)                  if it is
        p ← p - lr · m/(1-β₁ᵗ) / (√(v/(1-β₂ᵗ)) + eps)

    State dicts are those of :class:`AdamOptimizer`, which is decoupled and has the shorter way to the kernel. This one
    steps together with optimizers that communicate, and can do without master weights.

    Args:
        params: parameters, or parameter groups.
        lr, betas, eps, weight_decay, decoupled_weight_decay: as in the formula.
        maximize: step along the gradients, not against them.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range.
    """

    sums_over_ranks = False
    maximizes = True
    takes_found_inf = True
    _is_decoupled = False  # whatever a state dict that was loaded says

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        decoupled_weight_decay: bool = False,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, declared(locals()), stochastic_rounding)

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "eps", "weight_decay")
        check_betas(options["betas"], 2)
        if options.get("amsgrad"):  # of a state dict of torch's
            raise ValueError("amsgrad=True is not supported; only amsgrad=False is")

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        return {"exp_avg": like_parameter(shape), "exp_avg_sq": like_parameter(shape)}

    def rule(self, batch: Batch) -> Rule:
        yield []
        for indices, params, masters in batch.for_kernels():
            bmt_kernels.adam_step(
                params,
                batch.pick(batch.grads, indices),
                batch.state("exp_avg", indices),
                batch.state("exp_avg_sq", indices),
                lr=float(batch.options["lr"]),
                betas=batch.options["betas"],
                eps=batch.options["eps"],
                weight_decay=batch.options["weight_decay"],
                decoupled=self._is_decoupled or batch.options["decoupled_weight_decay"],
                maximize=batch.options["maximize"],
                step=batch.step,
                masters=masters,
                grad_scale=batch.grad_scale,
                grad_factor=batch.grad_factor,
                found_inf=batch.found_inf,
            )


class AdamW(Adam):
    """Adam with decoupled weight decay (Loshchilov & Hutter, `arXiv:1711.05101 <https://arxiv.org/abs/1711.05101>`_).

    Args:
        params, lr, betas, eps, weight_decay, maximize, stochastic_rounding, conventions: as for :class:`Adam`.
    """

    _is_decoupled = True

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        maximize: bool = False,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, True, maximize, stochastic_rounding, **conventions)
