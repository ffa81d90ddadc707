"""APOLLO: gradients scaled as AdamW scales their random projections. Two or three rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import bmt_kernels

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .galore_projection import low_rank
from .logical_params import LogicalParam
from .options import check_betas, check_not_negative, check_whole, declared
from .requests import Rule, Sum, reduced
from .slices import indices_along, row_indices
from .state_layout import Size, StateTensor, like_parameter, per_parameter

SCALES = ("channel", "tensor")
_GROWTH = 1.01
"""The largest ratio of the norm of an update to that of the one before."""


class APOLLO(DistributedOptimizer):
    """APOLLO (Zhu et al., `arXiv:2412.05270 <https://arxiv.org/abs/2412.05270>`_).

    For a matrix of shape (R, C) with R ≥ C in a group with a ``rank`` r, and a random P of shape (C, r) that is renewed
    every ``update_proj_gap`` steps::

        L = gP        m ← β₁m + (1-β₁)L        v ← β₂v + (1-β₂)L²        n = m / (√v + eps)
        u = g · ‖n‖ / (‖L‖ + 1e-8)      norms of each row, or, for "tensor", of all
        p ← (p - lr·√(1-β₂ᵗ)/(1-β₁ᵗ)·√scale·u)(1 - lr·weight_decay)

    With R < C it is L = Pᵀg, with norms of each column. ‖u‖ grows by at most 1 % per step. Other parameters, and groups
    without a rank, have p ← (p - lr·√(1-β₂ᵗ)/(1-β₁ᵗ)·n)(1 - lr·weight_decay) with L = g. APOLLO-Mini is ``rank=1`` and
    ``scale=128`` in the groups, and ``scale_type="tensor"``.

    P depends on the parameter's place in the optimizer or, in a pipeline, on its layer and its place in that layer.
    So training resumes with the same P on any number of pipeline stages, but not in a pipeline after a run without one.

    Args:
        params: parameters, or groups; :func:`get_galore_param_groups` makes suitable ones, with a scale of their own.
        lr, betas, eps, weight_decay, update_proj_gap, scale: as in the formula.
        scale_type: "channel" or "tensor".
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range, or what is no matrix in a group with a rank.
    """

    layout_options = ("rank",)

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        update_proj_gap: int = 200,
        scale: float = 1.0,
        scale_type: str = "channel",
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        self._projections: dict[int, tuple[Any, Tensor]] = {}
        super().__init__(params, declared(locals()), stochastic_rounding)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_projections": {}})

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "eps", "weight_decay", "scale")
        check_betas(options["betas"], 2)
        check_whole(options, "update_proj_gap", *(["rank"] if "rank" in options else []))
        if options["scale_type"] not in SCALES:
            raise ValueError(f"scale_type={options['scale_type']!r} must be one of {SCALES}")
        if options.get("proj_type", "std") != "std":
            raise ValueError(f"proj_type={options['proj_type']!r}: APOLLO projects the longer dimension's rows (std)")

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        if "rank" not in options:
            return {key: like_parameter(shape) for key in ("exp_avg", "exp_avg_sq")}
        if len(shape) != 2:
            raise ValueError(f"APOLLO projects matrices, and a parameter in a group with a rank has shape {shape}")
        r = Size(low_rank(shape, options["rank"]))
        moment = StateTensor((0, r) if shape[0] >= shape[1] else (r, 1))
        return {"exp_avg": moment, "exp_avg_sq": moment, "update_norm": per_parameter()}

    def rule(self, batch: Batch) -> Rule:
        options, params = batch.options, batch.logical_params
        (beta1, beta2), everything = options["betas"], range(len(batch))
        grads = [batch.fp32_grad(i) for i in everything]
        low = grads
        if "rank" in options:
            tall = [p.where.shape[0] >= p.where.shape[1] for p in params]
            bases = [self._basis(params[i], options, batch.step, tall[i]) for i in everything]
            low = [grads[i] @ bases[i] if tall[i] else bases[i].T @ grads[i] for i in everything]
            along, across = ([(-1,) if t is wanted else (-2,) for t in tall] for wanted in (True, False))
            low = list((yield from reduced(Sum, dict(enumerate(low)), params, along)).values())
        else:
            yield []
        averages, squares = batch.state("exp_avg"), batch.state("exp_avg_sq")
        for i in everything:
            averages[i].lerp_(low[i], 1 - beta1)
            squares[i].mul_(beta2).addcmul_(low[i], low[i], value=1 - beta2)
        updates = [m / v.sqrt().add_(options["eps"]) for m, v in zip(averages, squares)]
        if "rank" in options:
            norms = [_square_norms(updates[i], low[i], tall[i], options["scale_type"]) for i in everything]
            if options["scale_type"] == "tensor":
                norms = list((yield from reduced(Sum, dict(enumerate(norms)), params, across)).values())
            updates = [g * (n[0].sqrt() / (n[1].sqrt() + 1e-8)) for g, n in zip(grads, norms)]
            (totals,) = yield [Sum(bmt_kernels.square_sums(updates).unbind(), params)]
            for i, before in enumerate(batch.state("update_norm")):
                norm = totals[i].sqrt()
                limit = 1.0 if batch.step == 1 else (norm / (before + 1e-8)).clamp(min=_GROWTH) / _GROWTH
                before.copy_(norm / limit)
                updates[i].mul_(math.sqrt(options["scale"]) / limit)
        lr = float(options["lr"])
        step_size = lr * math.sqrt(1 - beta2**batch.step) / (1 - beta1**batch.step)
        for indices, weights in batch.writable():
            for i, weight in zip(indices, weights):
                weight.sub_(updates[i], alpha=step_size).mul_(1 - lr * options["weight_decay"])

    def _basis(self, logical: LogicalParam, options: Mapping[str, Any], step: int, tall: bool) -> Tensor:
        """This rank's part of the random basis: of shape (C, r) for a tall matrix, or (R, r)."""
        period, where = (step - 1) // options["update_proj_gap"], logical.where
        key = period, logical.number, where, options["rank"], tall
        kept = self._projections.get(logical.index)
        if kept is not None and kept[0] == key and kept[1].device == logical.param.device:
            return kept[1]
        generator = torch.Generator().manual_seed((logical.number * 0x9E3779B1 + period) % (1 << 63))
        r = low_rank(where.shape, options["rank"])
        basis = torch.randn(
            where.shape[1 if tall else 0], r, dtype=torch.float32, generator=generator, device="cpu"
        ) / math.sqrt(r)
        held = indices_along(where, 1, basis.device) if tall else row_indices(where, basis.device)
        self._projections[logical.index] = key, basis[held].to(logical.param.device)
        return self._projections[logical.index][1]


def _square_norms(update: Tensor, low: Tensor, tall: bool, scale_type: str) -> Tensor:
    """The square norms of both: of each channel, (2, rows, 1) or (2, 1, columns), or of this rank's shard, (2,)."""
    both = torch.stack([update, low]).square_()
    return both.sum((1, 2)) if scale_type == "tensor" else both.sum(2 if tall else 1, keepdim=True)
