"""Adafactor: second moments as row and column statistics, and steps relative to the size of the parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

import bmt_kernels
from bmt_comm import is_called_from

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .factored import Parts, factored_layout
from .options import check_not_negative, check_pair_not_negative, check_positive, declared
from .requests import Rule, Sum
from .state_layout import StateTensor, like_parameter, per_parameter


class DistributedAdafactor(DistributedOptimizer):
    """Adafactor (Shazeer & Stern, `arXiv:1804.04235 <https://arxiv.org/abs/1804.04235>`_).

    The step is that of ``transformers.Adafactor``. That of ``torch.optim.Adafactor`` differs in eps, weight decay and
    the meaning of lr.

    For each parameter at step t, with RMS(x) = ‖x‖ / √(number of elements), in fp32 whatever its dtype::

        β₂ = 1 - t^decay_rate
        rᵢ ← β₂rᵢ + (1-β₂)·meanⱼ(g² + eps[0])         cⱼ ← β₂cⱼ + (1-β₂)·meanᵢ(g² + eps[0])
        u = g / √(rᵢ·cⱼ / mean(r))                    of a vector: v ← β₂v + (1-β₂)(g² + eps[0]), u = g / √v
        u ← u / max(1, RMS(u) / clip_threshold)
        α = ρ·max(eps[1], RMS(p))                     if scale_parameter, else ρ
        u ← m ← beta1·m + (1-beta1)·αu                if beta1 is given, else αu
        p ← p - α·weight_decay·p - u

    ρ is min(10⁻², 1/√t) with ``relative_step``, min(10⁻⁶t, 1/√t) with ``warmup_init`` too, and otherwise ``lr``. Rows
    and columns are the last two dimensions.

    A step has two rounds: row and column sums with the sizes of the parameters, and the sizes of the updates.

    State dicts are those of ``transformers.Adafactor``, where ``RMS`` is the parameter's at the start of the last
    step; it is kept only with ``scale_parameter``.

    Args:
        params: parameters, or parameter groups.
        lr: as in the formula; without effect with ``relative_step``.
        eps, clip_threshold, decay_rate, beta1, weight_decay, scale_parameter, relative_step, warmup_init: as in the
            formula.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range, or options that exclude each other.
    """

    layout_options = ("beta1", "scale_parameter")

    def __init__(
        self,
        params: Params,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        if lr is not None and relative_step:
            raise ValueError(f"lr={lr!r} is of no effect with relative_step=True; give relative_step=False, or no lr")
        if warmup_init and not relative_step:
            raise ValueError("warmup_init=True is of no effect with relative_step=False")
        super().__init__(params, declared(locals()), stochastic_rounding)

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "weight_decay")
        check_positive(options, "clip_threshold")
        check_pair_not_negative(options, "eps")
        if options["lr"] is not None:
            check_not_negative(options, "lr")
        elif not options["relative_step"]:
            raise ValueError("lr=None with relative_step=False; give lr")
        if not -math.inf < options["decay_rate"] <= 0:
            raise ValueError(f"decay_rate={options['decay_rate']!r} must be finite and not above 0")
        if options["beta1"] is not None and not 0 <= options["beta1"] < 1:
            raise ValueError(f"beta1={options['beta1']!r} must be None or in [0, 1)")

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        layout = factored_layout("exp_avg_sq", shape)
        if options["beta1"] is not None:
            layout["exp_avg"] = like_parameter(shape)
        if options["scale_parameter"]:
            layout["RMS"] = per_parameter()
        return layout

    def rule(self, batch: Batch) -> Rule:
        parts, options = Parts(batch), batch.options
        scaled, beta1, decay = options["scale_parameter"], options["beta1"], options["weight_decay"]
        exp_avgs = None if beta1 is None else parts.state("exp_avg")
        sizes = batch.state("RMS", parts.order) if scaled else []
        average = parts.average("exp_avg_sq")
        bmt_kernels.factored_square_sums(
            parts.grads, average.rows, average.cols, eps=float(options["eps"][0]), **parts.scaling
        )
        squares = bmt_kernels.square_sums(batch.pick(batch.weights, parts.order)) if scaled else ()
        *sums, squares = yield [*average.requests(), Sum(squares, parts.logical_params if scaled else [])]
        average.update(sums, self._beta2(batch))
        if scaled:
            rms = parts.root_mean_squares(squares)
            torch._foreach_copy_(sizes, rms.unbind())
            step_sizes = rms.clamp_(min=options["eps"][1]).mul_(self._rho(batch))
        else:
            step_sizes = torch.full((len(parts.order),), self._rho(batch), dtype=torch.float32, device=batch.device)
        totals = torch.empty(len(parts.grads), dtype=torch.float32, device=batch.device)
        bmt_kernels.factored_update_square_sum(parts.grads, average.rows, average.cols, totals, **parts.scaling)
        (squares,) = yield [Sum(parts.per_param(totals), parts.logical_params)]
        clips = parts.root_mean_squares(squares).div_(options["clip_threshold"]).clamp_(min=1)
        parts.update_weights(
            parts.grads,
            average,
            parts.per_entry(step_sizes / clips),
            parts.per_entry(torch.rsub(step_sizes, 1, alpha=decay)) if decay else None,
            exp_avgs,
            beta1=float(beta1 or 0),
            **parts.scaling,
        )

    @staticmethod
    def _beta2(batch: Batch) -> float:
        """β₂ of the formula."""
        return float(1 - batch.step ** batch.options["decay_rate"])

    @staticmethod
    def _rho(batch: Batch) -> float:
        """ρ of the formula."""
        lr = batch.options["lr"]
        if not batch.options["relative_step"]:
            return float(lr)
        # torch makes initial states by a step with lr=0, which must not change weights. Schedulers set lr=0, too.
        if lr == 0 and is_called_from("torch.distributed.checkpoint.state_dict"):
            return 0.0
        most = 1e-6 * batch.step if batch.options["warmup_init"] else 1e-2
        return min(most, 1 / math.sqrt(batch.step))


Adafactor = DistributedAdafactor
