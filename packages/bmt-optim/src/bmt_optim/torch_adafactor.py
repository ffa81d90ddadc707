"""Adafactor with the conventions of ``torch.optim.Adafactor``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import bmt_kernels

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .experts import by_row, experts_of, sum_by_expert
from .logical_params import LogicalParam
from .options import check_not_negative, declared
from .requests import Rule, Sum
from .state_layout import Size, StateTensor, like_parameter


class TorchAdafactor(DistributedOptimizer):
    """Adafactor (Shazeer & Stern, `arXiv:1804.04235 <https://arxiv.org/abs/1804.04235>`_), as torch has it.

    For each parameter of the shape (\\*, R, C), with w = t^beta2_decay, in fp32::

        row ← row + w(mean of g² over C - row)        col ← col + w(mean of g² over R - col)
        v = row · col / max(mean of row, eps₁)
        u = g / √max(v, eps₁²)
        p ← p(1 - lr·weight_decay) - max(eps₂, RMS(p)) · min(lr, 1/√t) · u / max(1, RMS(u)/d)

    RMS(p) is that before the step. Vectors and numbers have one ``variance`` per element for v.

    It differs from :class:`Adafactor` in the use of eps₁ (there it is added to g²), in the weight decay, which is not
    scaled by RMS(p), and in the learning rate, which here bounds a relative step. State dicts are those of
    ``torch.optim.Adafactor``, which loads ours, too.

    A step has two rounds: the sums of squares; then RMS(u).

    Args:
        params: parameters, or parameter groups.
        lr, beta2_decay, d, weight_decay: as in the formula.
        eps: eps₁ and eps₂; eps₁ is by default the machine epsilon of the parameter's dtype.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3),
        d: float = 1.0,
        weight_decay: float = 0.0,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        # torch's Adafactor, which loads the state, needs ``maximize`` in it.
        super().__init__(params, {"maximize": False, **declared(locals())}, stochastic_rounding)

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "weight_decay")
        if not -math.inf < options["beta2_decay"] <= 0:
            raise ValueError(f"beta2_decay={options['beta2_decay']!r} must be finite and not positive")
        if not 1 <= options["d"] < math.inf:
            raise ValueError(f"d={options['d']!r} must be finite and at least 1")
        eps = options["eps"]
        if len(eps) != 2 or not all(0 <= (e or 0) < math.inf for e in eps) or eps[1] is None:
            raise ValueError(f"eps={eps!r} must be two numbers, finite and not negative; the first may be None")

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        dims = len(shape)
        if dims < 2:
            return {"variance": like_parameter(shape)}
        return {
            "row_var": StateTensor((*range(dims - 1), Size(1))),
            "col_var": StateTensor((*range(dims - 2), Size(1), dims - 1)),
        }

    def rule(self, batch: Batch) -> Rule:
        options, params, everything = batch.options, batch.logical_params, range(len(batch))
        factored = [i for i in everything if len(params[i].where.shape) > 1]
        shared = batch.pick(params, factored)
        grads = [batch.fp32_grad(i) for i in everything]
        row_vars, col_vars = batch.state("row_var", factored), batch.state("col_var", factored)
        norms, rows, columns, totals, means = yield [
            Sum(bmt_kernels.square_sums(batch.weights).unbind(), params),
            Sum([_square_sum(grads[i], -1) for i in factored], shared, (-1,)),  # (*, R)
            Sum([_sum_of_rows(grads[i].square(), params[i]) for i in factored], shared, (-2,)),  # (*, C)
            Sum([_sum_of_rows(_square_sum(grads[i], -1, True), params[i])[..., 0] for i in factored], shared, (-2, -1)),
            Sum([_sum_of_rows(r, p)[..., 0] for r, p in zip(row_vars, shared)], shared, (-2,)),  # (*), before the step
        ]
        weight = batch.step ** options["beta2_decay"]
        eps, least_scale = options["eps"]
        updates: list[Tensor] = list(grads)
        for n, i in enumerate(factored):
            *_, height, width = (max(length, 1) for length in params[i].where.shape)
            row_vars[n].lerp_((rows[n] / width).unsqueeze(-1), weight)
            mean = torch.lerp(means[n] / height, totals[n] / (height * width), weight)[..., None, None]
            column = (columns[n] / height).unsqueeze(-2)
            where = params[i].where
            if where.row_dims == 2:
                held = experts_of(where)
                mean, column = mean[held.start : held.stop], column[held.start : held.stop]
            per_column = col_vars[n].lerp_(column, weight) / mean.clamp(min=_epsilon(eps, params[i].param))
            estimate = row_vars[n] * (by_row(per_column.squeeze(-2), where) if where.row_dims == 2 else per_column)
            updates[i] = _scaled(grads[i], estimate, _epsilon(eps, params[i].param))
        for i in sorted(set(everything) - set(factored)):
            variance = batch.states[i]["variance"].lerp_(grads[i].square(), weight)
            updates[i] = _scaled(grads[i], variance.clone(), _epsilon(eps, params[i].param))
        (squares,) = yield [Sum(bmt_kernels.square_sums(updates).unbind(), params)]
        lr = float(options["lr"])
        step_size = min(lr, 1 / math.sqrt(batch.step))
        sizes = [float(max(math.prod(p.where.shape), 1)) for p in params]
        scales, magnitudes = (torch.stack(torch._foreach_div(s, sizes)).sqrt() for s in (norms, squares))
        factors = (scales.clamp(min=least_scale) / (magnitudes / options["d"]).clamp(min=1) * -step_size).unbind()
        for indices, locals_ in batch.writable():
            if options["weight_decay"]:
                torch._foreach_mul_(locals_, 1 - lr * options["weight_decay"])
            for i, local in zip(indices, locals_):
                local.addcmul_(updates[i], factors[i])


def _square_sum(tensor: Tensor, dim: int, keepdim: bool = False) -> Tensor:
    return torch.linalg.vector_norm(tensor, dim=dim, keepdim=keepdim, dtype=torch.float32).square()


def _sum_of_rows(values: Tensor, logical: LogicalParam) -> Tensor:
    """Sums of (\\*, R, C) over this rank's rows, (\\*, C), for all experts if they are packed."""
    return sum_by_expert(values, logical.where) if logical.where.row_dims == 2 else values.sum(-2)


def _epsilon(eps: float | None, param: Tensor) -> float:
    return torch.finfo(param.dtype).eps if eps is None else eps


def _scaled(grad: Tensor, variance: Tensor, eps: float) -> Tensor:
    """grad / √variance, in the memory of ``variance``."""
    return variance.clamp_(min=eps * eps).rsqrt_().mul_(grad)
