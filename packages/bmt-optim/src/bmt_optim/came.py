"""CAME: Adafactor with momentum, and smaller steps where updates differ more from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

import bmt_kernels

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .factored import Parts, factored_layout, is_factored
from .options import check_betas, check_not_negative, check_pair_not_negative, check_positive, declared
from .requests import Rule, Sum
from .state_layout import StateTensor, like_parameter


class DistributedCAME(DistributedOptimizer):
    """CAME (Luo et al., `arXiv:2307.02047 <https://arxiv.org/abs/2307.02047>`_, algorithm 2), as ``came_pytorch``'s.

    For each parameter, with RMS(x) = ‖x‖ / √(number of elements), in fp32 whatever its dtype::

        rᵢ ← β₂rᵢ + (1-β₂)·meanⱼ(g² + eps[0])         cⱼ ← β₂cⱼ + (1-β₂)·meanᵢ(g² + eps[0])
        u = g / √(rᵢ·cⱼ / mean(r))
        u ← u / max(1, RMS(u) / clip_threshold)
        m ← β₁m + (1-β₁)u
        Rᵢ ← β₃Rᵢ + (1-β₃)·meanⱼ((u-m)² + eps[1])     Cⱼ ← β₃Cⱼ + (1-β₃)·meanᵢ((u-m)² + eps[1])
        p ← p - lr·weight_decay·p - lr·m / √(Rᵢ·Cⱼ / mean(R))

    Of a vector, v ← β₂v + (1-β₂)(g² + eps[0]), u = g / √v before clipping, and the step is lr·m. Rows and columns are
    the last two dimensions.

    A step has three rounds: row and column sums of g², the sizes of the updates, row and column sums of (u-m)².

    State dicts are those of ``came_pytorch.CAME``, without ``RMS``, which it writes and never reads.

    Args:
        params: parameters, or parameter groups.
        lr, eps, clip_threshold, betas, weight_decay: as in the formula.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range.
    """

    def __init__(
        self,
        params: Params,
        lr: float,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, declared(locals()), stochastic_rounding)

    def counts_steps(self, options: Mapping[str, Any]) -> bool:
        """As :meth:`DistributedOptimizer.counts_steps`."""
        return False

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "weight_decay")
        check_positive(options, "clip_threshold")
        check_pair_not_negative(options, "eps")
        check_betas(options["betas"], 3)

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        layout = {"exp_avg": like_parameter(shape), **factored_layout("exp_avg_sq", shape)}
        return {**layout, **factored_layout("exp_avg_res", shape)} if is_factored(shape) else layout

    def rule(self, batch: Batch) -> Rule:
        parts, options = Parts(batch), batch.options
        beta1, beta2, beta3 = (float(beta) for beta in options["betas"])
        eps = [float(e) for e in options["eps"]]
        average = parts.average("exp_avg_sq")
        bmt_kernels.factored_square_sums(parts.grads, average.rows, average.cols, eps=eps[0], **parts.scaling)
        sums = yield average.requests()
        average.update(sums, beta2)
        totals = torch.empty(len(parts.grads), dtype=torch.float32, device=batch.device)
        bmt_kernels.factored_update_square_sum(parts.grads, average.rows, average.cols, totals, **parts.scaling)
        (squares,) = yield [Sum(parts.per_param(totals), parts.logical_params)]
        clips = parts.per_entry(parts.root_mean_squares(squares).div_(options["clip_threshold"]).clamp_(min=1))
        exp_avgs, instability = parts.state("exp_avg"), parts.average("exp_avg_res", of_vectors=False)
        bmt_kernels.factored_residual_square_sums(
            parts.grads,
            average.rows,
            average.cols,
            1 / clips,
            exp_avgs,
            instability.rows,
            instability.cols,
            beta1=beta1,
            eps=eps[1],
            **parts.scaling,
        )
        sums = yield instability.requests()
        instability.update(sums, beta3)
        lr, decay = float(options["lr"]), options["weight_decay"]
        decays = torch.full_like(clips, 1 - lr * decay) if decay else None
        parts.update_weights(exp_avgs, instability, torch.full_like(clips, lr), decays)


CAME = DistributedCAME
