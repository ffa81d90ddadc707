"""Dion: momentum, orthonormalised at a low rank, with feedback of the approximation error. Two rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bmt_comm import shard_of, slice_of

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .moments import adamw_rule
from .options import check_betas, check_not_negative, check_positive, check_whole, declared
from .requests import Broadcast, Rule, Sum
from .slices import padded
from .state_layout import StateTensor, like_parameter, replicated

_ADAM = {"lr": 3e-4, "eps": 1e-8, "weight_decay": 0.0}
"""Options of a group without Dion that it need not name."""


class Dion(DistributedOptimizer):
    """Dion (Ahn et al., `arXiv:2504.05295 <https://arxiv.org/abs/2504.05295>`_), as its authors' code.

    For each matrix, of shape (R, C), and transposed throughout (but for R and C) where R < C::

        B = M + G                      P = qr(BQ)      W = BᵀP      power_iters times, each with W for Q
        M ← B - (1-mu)·PWᵀ             Q ← W, its columns divided by their norms + eps
        p ← p(1 - lr·weight_decay) - lr·√(R/C)·PQᵀ

    Q has ``rank_fraction``·min(R, C) columns, rounded up to a multiple of ``rank_multiple_of``. It starts from random
    numbers, the same for all matrices of one shape.

    Groups with ``use_muon=False`` have AdamW: for embeddings, the output head and vectors; see
    :func:`~bmt_optim.get_muon_param_groups`. Their options are ``lr`` (3e-4 unless given), ``betas``, ``eps`` and
    ``weight_decay`` (0).

    Ranks that share a matrix exchange M + G, unsharded. Its owner computes P and W and broadcasts them: with
    ``rank_fraction=0.25`` half as many numbers, or fewer. All ranks hold Q.

    Args:
        params: parameters of two dimensions (globally), or groups.
        lr, mu, weight_decay, eps, power_iters, rank_fraction, rank_multiple_of: as above.
        betas: AdamW's.
        use_muon: False: AdamW.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError: a parameter of a dtype other than fp32, bf16 and fp16.
        ValueError: an option out of range, or a parameter that is no matrix.
    """

    sums_over_ranks = False  # for each element, all ranks but one add 0
    layout_options = ("use_muon", "rank_fraction", "rank_multiple_of")

    def __init__(
        self,
        params: Params,
        lr: float = 0.01,
        mu: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.01,
        eps: float = 1e-8,
        rank_fraction: float = 1.0,
        rank_multiple_of: int = 1,
        power_iters: int = 1,
        use_muon: bool = True,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, declared(locals()), stochastic_rounding)

    def extra_defaults(self, group: Mapping[str, Any]) -> Mapping[str, Any]:
        return {} if group.get("use_muon", self.defaults["use_muon"]) else _ADAM

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "mu", "weight_decay", "eps")
        check_positive(options, "rank_fraction")
        check_whole(options, "rank_multiple_of", "power_iters")
        check_betas(options["betas"], 2)
        if options["rank_fraction"] > 1:
            raise ValueError(f"rank_fraction={options['rank_fraction']!r} must be at most 1")
        for param in options["params"] if options["use_muon"] else ():
            if len(shape := slice_of(param).shape) != 2:
                raise ValueError(f"Dion takes matrices, and a parameter has shape {shape}; set use_muon=False for it")

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        if not options["use_muon"]:
            return {key: like_parameter(shape) for key in ("exp_avg", "exp_avg_sq")}
        return {"momentum": like_parameter(shape), "Q": replicated((min(shape), _rank(shape, options)))}

    def cost(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> float:
        """About that of P and W."""
        if not options["use_muon"]:
            return 0.0
        return options["power_iters"] * _rank(shape, options) * (4.0 * math.prod(shape) + 4.0 * max(shape) * min(shape))

    def rule(self, batch: Batch) -> Rule:
        return self._dion(batch) if batch.options["use_muon"] else adamw_rule(batch)

    def _dion(self, batch: Batch) -> Rule:
        options, params, states = batch.options, batch.logical_params, batch.states
        grads = [batch.fp32_grad(i) for i in range(len(batch))]
        momenta = [padded(s["momentum"] + g, m.where) for s, g, m in zip(states, grads, params)]
        (unsharded,) = yield [Sum(momenta, params)]
        values = []
        for m, state, b in zip(params, states, unsharded):
            if batch.step == 1:
                generator = torch.Generator().manual_seed(0)
                state["Q"].copy_(torch.randn(state["Q"].shape, dtype=torch.float32, generator=generator, device="cpu"))
            values.append(_low_rank(b, state["Q"], options["power_iters"]) if m.owned else None)
        shapes = [(sum(m.where.shape), _rank(m.where.shape, options)) for m in params]
        (received,) = yield [Broadcast(values, params, shapes)]
        updates = []
        for m, state, b, both in zip(params, states, unsharded, received):
            rows, columns = m.where.shape
            p, w = both.split([max(rows, columns), min(rows, columns)])
            state["Q"].copy_(w / (w.norm(dim=0) + options["eps"]))
            low, update = p @ w.T, math.sqrt(rows / max(1, columns)) * (p @ state["Q"].T)
            if rows < columns:
                low, update = low.T, update.T
            state["momentum"].copy_(shard_of(b - (1 - options["mu"]) * low, m.where))
            updates.append(shard_of(update, m.where))
        lr = float(options["lr"])
        for indices, weights in batch.writable():
            for i, weight in zip(indices, weights):
                weight.mul_(1 - lr * options["weight_decay"]).sub_(updates[i], alpha=lr)


def _rank(shape: tuple[int, ...], options: Mapping[str, Any]) -> int:
    return min(math.ceil(options["rank_fraction"] * min(shape) / (n := options["rank_multiple_of"])) * n, *shape)


def _low_rank(b: Tensor, basis: Tensor, iterations: int) -> Tensor:
    """P, orthonormal, and below it W. P·Wᵀ approximates ``b`` or its transpose. If ``b`` is 0, P is 0."""
    if b.shape[0] < b.shape[1]:
        b = b.T
    w = basis
    for _ in range(iterations):
        p = torch.linalg.qr(b @ w)[0]
        w = b.T @ p
    nothing = (b == 0).all()
    return torch.cat([torch.where(nothing, 0, p), torch.where(nothing, basis, w)])
