"""SOAP: Adam in the eigenbases of Shampoo's preconditioners. Two rounds, and a third for new bases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bmt_comm import shard_of

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .options import check_betas, check_not_negative, check_positive, declared
from .renewal import place_of
from .requests import Broadcast, Rule, Sum
from .slices import padded
from .state_layout import StateTensor, like_parameter, replicated


class SOAP(DistributedOptimizer):
    """SOAP (Vyas et al., `arXiv:2409.11321 <https://arxiv.org/abs/2409.11321>`_), as its authors' code.

    For a matrix, with Q and S the eigenvectors of L and R::

        G' = QᵀGS       M ← β₁M + (1-β₁)G       V ← β₂V + (1-β₂)G'²
        p ← (p - lr · √(1-β₂ᵗ)/(1-β₁ᵗ) · Q((QᵀMS) / (√V + eps))Sᵀ)(1 - lr·weight_decay)
        L ← β₃L + (1-β₃)GGᵀ        R ← β₃R + (1-β₃)GᵀG
        Q ← qr(LQ)      S ← qr(RS)               every precondition_frequency steps; by eigh in the first

    The first step does only the last two lines, and t counts from the second step. A tensor of more dimensions has such
    a pair for each dimension. Vectors, and dimensions of more than ``max_precond_dim``, are not rotated. Each parameter
    renews its bases in steps of its own, by its place in the optimizer, so that steps have equal work. Ranks that share
    it exchange G, M and the update, unsharded. Its owner computes the bases and broadcasts them. All ranks hold them.

    Args:
        params: parameters, or parameter groups.
        lr, betas, eps, weight_decay, precondition_frequency, max_precond_dim: as above.
        shampoo_beta: β₃; ``None``: β₂.
        spread: False: all parameters renew their bases in the same steps, as in the authors' code. Otherwise the steps
            depend on the parameter's place in the optimizer or, in a pipeline, on its layer and its place in that
            layer, so training in a pipeline differs from training without one.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError, ValueError: a parameter of another dtype than fp32, bf16 and fp16; an option out of range.
    """

    sums_over_ranks = False  # for each element, all ranks but one add 0
    layout_options = ("max_precond_dim",)

    def __init__(
        self,
        params: Params,
        lr: float = 3e-3,
        betas: tuple[float, float] = (0.95, 0.95),
        shampoo_beta: float | None = None,
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        precondition_frequency: int = 10,
        max_precond_dim: int = 10000,
        spread: bool = True,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, declared(locals()), stochastic_rounding)

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "eps", "weight_decay", "max_precond_dim")
        check_betas(options["betas"], 2)
        check_betas((options["shampoo_beta"] or 0,), 1)
        check_positive(options, "precondition_frequency")
        if (every := options["precondition_frequency"]) % 1:
            raise ValueError(f"precondition_frequency={every!r} must be a whole number")

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        dims = _rotated_dims(shape, options)
        layout = {"exp_avg": like_parameter(shape), "exp_avg_sq": replace(like_parameter(shape), kind=tuple(dims))}
        for d in dims:
            layout.update({f"{kind}_{d}": replicated((shape[d], shape[d])) for kind in ("gram", "basis")})
        return layout

    def cost(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> float:
        """About that of new bases."""
        return float(sum(shape[d] ** 3 for d in _rotated_dims(shape, options)))

    def rule(self, batch: Batch) -> Rule:
        options, states, params, t = batch.options, batch.states, batch.logical_params, batch.step - 1
        (beta1, beta2), lr = options["betas"], float(options["lr"])
        dims = [_rotated_dims(p.where.shape, options) for p in params]
        rotated = [i for i, of_param in enumerate(dims) if of_param]
        every, spread = options["precondition_frequency"], options["spread"]
        places = [place_of(p.number, every) if spread else 0 for p in params]
        renewed = [i for i in rotated if not t or (t + places[i]) % every == 0]
        grads = [batch.fp32_grad(i) for i in range(len(batch))]
        moved = [torch.lerp(state["exp_avg"], g, 1 - beta1) for state, g in zip(states, grads)]
        both = [torch.stack([padded(x[i], params[i].where) for x in (grads, moved)]) for i in rotated]
        (sums,) = yield [Sum(both, batch.pick(params, rotated))]
        unsharded = dict(zip(rotated, sums))
        updates: list[Tensor] = []
        for i, state in enumerate(states if t else ()):
            g, m = grads[i], moved[i]
            if i in unsharded:
                g, m = (shard_of(_rotate(x, state, dims[i]), params[i].where) for x in unsharded[i])
            state["exp_avg"].copy_(moved[i])
            state["exp_avg_sq"].lerp_(g.square(), 1 - beta2)
            updates.append(m / (state["exp_avg_sq"].sqrt() + options["eps"]))
        parts = [(updates[i], i) for i in rotated if t] + [(states[i]["exp_avg_sq"], i) for i in renewed]
        (sums,) = yield [Sum([padded(x, params[i].where) for x, i in parts], [params[i] for _, i in parts])]
        squares = dict(zip(renewed, sums[len(parts) - len(renewed) :]))
        if t:
            for i, update in zip(rotated, sums):
                updates[i] = shard_of(_rotate(update, states[i], dims[i], back=True), params[i].where)
            step_size = lr * (1 - beta2**t) ** 0.5 / (1 - beta1**t)
            for indices, weights in batch.writable():
                for i, weight in zip(indices, weights):
                    weight.sub_(updates[i], alpha=step_size).mul_(1 - lr * options["weight_decay"])
        beta3 = beta2 if options["shampoo_beta"] is None else options["shampoo_beta"]
        for i, (g, _) in unsharded.items():
            for d in dims[i]:
                others = [e for e in range(g.dim()) if e != d]
                states[i][f"gram_{d}"].lerp_(torch.tensordot(g, g, dims=(others, others)), 1 - beta3)
        wanted = [(i, d) for i in renewed for d in dims[i]]
        values = [_new_basis(states[i], d, t) if params[i].owned else None for i, d in wanted]
        shapes = [(params[i].where.shape[d] + 1, params[i].where.shape[d]) for i, d in wanted]
        (received,) = yield [Broadcast(values, [params[i] for i, _ in wanted], shapes)]
        for (i, d), value in zip(wanted, received):
            states[i][f"basis_{d}"].copy_(value[:-1])
            squares[i] = squares[i].index_select(d, value[-1].long())
        for i in renewed:
            states[i]["exp_avg_sq"].copy_(shard_of(squares[i], params[i].where))


def _rotated_dims(shape: Sequence[int], options: Mapping[str, Any]) -> list[int]:
    """The dimensions that have a basis."""
    return [d for d, n in enumerate(shape) if len(shape) > 1 and 0 < n <= options["max_precond_dim"]]


def _rotate(x: Tensor, state: Mapping[str, Tensor], dims: Sequence[int], back: bool = False) -> Tensor:
    """An unsharded tensor, rotated into the eigenbases, or back."""
    for d in dims:
        basis = state[f"basis_{d}"]
        x = torch.tensordot(x, basis, dims=([d], [1 if back else 0])).movedim(-1, d)
    return x


def _new_basis(state: Mapping[str, Tensor], d: int, t: int) -> Tensor:
    """The new basis (n, n), and below it the new order of the old one's columns; NaN where values are not finite."""
    gram, basis = state[f"gram_{d}"], state[f"basis_{d}"]
    order = torch.arange(len(gram), device=gram.device)
    if t:
        order = (basis.T @ gram @ basis).diagonal().argsort(descending=True)
        basis = torch.linalg.qr(gram @ basis[:, order])[0]
    else:  # eigh would raise for what is not finite, on the owner alone; it stays in L and shows later
        basis = torch.linalg.eigh(gram.nan_to_num(0, 0, 0))[1].flip(1)
    return torch.cat([basis, order[None].to(basis.dtype)])
