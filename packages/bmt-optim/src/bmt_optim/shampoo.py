"""Distributed Shampoo: gradients preconditioned by inverse roots of Kronecker factors, per block. Two rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from bmt_comm import shard_of

from .batch import Batch
from .distributed import DistributedOptimizer, Params
from .options import check_not_negative, check_positive, check_whole, declared
from .renewal import place_of
from .requests import Broadcast, Rule, Sum
from .shampoo_blocks import accumulate, block_shapes, blocks_of, inverse_root, matrices_of, preconditioned
from .slices import padded
from .state_layout import StateTensor, like_parameter, replicated


class DistributedShampoo(DistributedOptimizer):
    """Shampoo (Shi et al., `arXiv:2309.06497 <https://arxiv.org/abs/2309.06497>`_), as Meta's ``DistributedShampoo``.

    Neighbouring dimensions are merged while their product is at most ``max_preconditioner_dim``. Longer dimensions are
    split into blocks of that length. For each block of two dimensions (with k dimensions: k factors, and roots of 2k)::

        L ← β₂L + (1-β₂)GGᵀ     R ← β₂R + (1-β₂)GᵀG     V ← γV + (1-γ)G²
        F = β₃M + (1-β₃)G       M ← β₁M + (1-β₁)G
        A ← (L + epsilon)^-¼    B ← (R + epsilon)^-¼     every precondition_frequency steps
        P = AFB · ‖D‖/‖AFB‖, D = F / (√V + grafting_epsilon); without grafting P = AFB
        U ← momentum·U + P + weight_decay·p              p ← p - lr·U

    F, V, L and R are corrected for their bias; with a β₂ or γ of 1, L, R or V is the sum. P is D before
    ``start_preconditioning_step``. From then on each block renews its roots in steps of its own, by its place in the
    optimizer, so that steps have equal work. Ranks that share a parameter exchange G, M and V, unsharded. Its owner
    computes the roots and broadcasts them. All ranks hold them.

    Args:
        params: parameters, or parameter groups.
        lr, betas, beta3, epsilon, weight_decay, max_preconditioner_dim, precondition_frequency: as above.
            ``beta3=-1`` is β₁, and ``start_preconditioning_step=-1`` is ``precondition_frequency``.
        grafting: "adam"; "sgd": D is F; ``None``.
        grafting_beta2, grafting_epsilon, momentum: as above, with γ first.
        nesterov: the last formula has P + weight_decay·p + momentum·U in place of U.
        spread: False: all blocks renew their roots in the same steps, as in the authors' code. Otherwise the steps
            depend on the parameter's place in the optimizer or, in a pipeline, on its layer and its place in that
            layer, so training in a pipeline differs from training without one.
        stochastic_rounding, conventions: see :class:`DistributedOptimizer`.

    Raises:
        TypeError, ValueError: a parameter of another dtype than fp32, bf16 and fp16; an option out of range.
    """

    sums_over_ranks = False  # for each element, all ranks but one add 0
    layout_options = ("grafting", "momentum", "max_preconditioner_dim")

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        betas: tuple[float, float] = (0.9, 1.0),
        beta3: float = -1.0,
        epsilon: float = 1e-12,
        weight_decay: float = 0.0,
        max_preconditioner_dim: int = 1024,
        precondition_frequency: int = 1,
        start_preconditioning_step: int = -1,
        grafting: str | None = None,
        grafting_beta2: float = 0.999,
        grafting_epsilon: float = 1e-8,
        momentum: float = 0.0,
        nesterov: bool = False,
        spread: bool = True,
        stochastic_rounding: bool = False,
        **conventions: Any,
    ) -> None:
        super().__init__(params, declared(locals()), stochastic_rounding)

    def check_options(self, options: Mapping[str, Any]) -> None:
        check_not_negative(options, "lr", "weight_decay", "momentum", "grafting_epsilon")
        check_positive(options, "epsilon")
        check_whole(options, "precondition_frequency", "max_preconditioner_dim")
        (beta1, beta2), gamma, beta3 = options["betas"], options["grafting_beta2"], options["beta3"]
        if not (0 <= beta1 < 1 and 0 <= beta2 <= 1 and 0 <= gamma <= 1 and (0 <= beta3 < 1 or beta3 == -1)):
            raise ValueError(f"{beta3=}, betas={options['betas']!r}, grafting_beta2={gamma!r}: not in [0, 1]")
        if options["start_preconditioning_step"] != -1:
            check_whole(options, "start_preconditioning_step")
        if options["grafting"] not in (None, "sgd", "adam"):
            raise ValueError(f"grafting={options['grafting']!r} must be None, 'sgd' or 'adam'")

    def state_layout(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, StateTensor]:
        keys = ["exp_avg"] + ["exp_avg_sq"] * (options["grafting"] not in (None, "sgd"))
        keys += ["momentum_buffer"] * (options["momentum"] > 0)
        sides = tuple(n for block in block_shapes(shape, options) for n in block)
        matrices = replace(replicated((sum(n * n for n in sides),)), kind=sides)
        return {key: like_parameter(shape) for key in keys} | dict.fromkeys(("factors", "roots"), matrices)

    def cost(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> float:
        """About that of new roots."""
        return float(sum(n**3 for block in block_shapes(shape, options) for n in block))

    def rule(self, batch: Batch) -> Rule:
        options, params, states, t = batch.options, batch.logical_params, batch.states, batch.step
        (beta1, beta2), every, gamma = options["betas"], options["precondition_frequency"], options["grafting_beta2"]
        beta3 = beta1 if options["beta3"] == -1 else options["beta3"]
        start = every if options["start_preconditioning_step"] == -1 else options["start_preconditioning_step"]
        keys = [key for key in ("exp_avg", "exp_avg_sq") if key in states[0]]
        grads = [batch.fp32_grad(i) for i in range(len(batch))]
        parts = [[g, *(state[key] for key in keys)] for g, state in zip(grads, states)]
        stacks = [torch.stack([padded(x, p.where) for x in part]) for part, p in zip(parts, params)]
        (unsharded,) = yield [Sum(stacks, params)]
        factors, roots = (
            [matrices_of(x, p.where.shape, options) for x, p in zip(batch.state(key), params)]
            for key in ("factors", "roots")
        )
        renewed: list[tuple[int, int]] = []
        for root in (root for blocks in roots for block in blocks for root in block if t == 1):
            root.fill_diagonal_(1)
        for i, (g, state) in enumerate(zip(grads, states)):
            state["exp_avg"].lerp_(g, 1 - beta1)
            if "exp_avg_sq" in state:
                state["exp_avg_sq"].mul_(gamma).addcmul_(g, g, value=1 - gamma or 1)
            for n, (block, mine) in enumerate(zip(blocks_of(unsharded[i][0], options), factors[i])):
                place = place_of(params[i].number + n, every) if options["spread"] else 0
                renewed += [(i, n)] * (t == start or (t > start and (t + place) % every == 0))
                accumulate(mine, block, beta2)
        correction = 1 - beta2**t or 1
        owned = [factors[i][n] if params[i].owned else [] for i, n in renewed]
        values = [torch.cat([inverse_root(f / correction, options, len(o)) for f in o]) if o else None for o in owned]
        sizes = [(sum(f.numel() for f in factors[i][n]),) for i, n in renewed]
        (received,) = yield [Broadcast(values, [params[i] for i, _ in renewed], sizes)]
        for (i, n), value in zip(renewed, received):
            for root, new in zip(roots[i][n], value.split([r.numel() for r in roots[i][n]])):
                root.copy_(new.view(root.shape))
        updates = []
        for i, x in enumerate(unsharded):
            filtered = torch.lerp(x[1], x[0], 1 - beta3) / (1 - beta3 * beta1 ** (t - 1))
            grafted = filtered
            if "exp_avg_sq" in keys:
                square = (x[2] * gamma + x[0].square() * (1 - gamma or 1)) / (1 - gamma**t or 1)
                grafted = filtered / (square.sqrt() + options["grafting_epsilon"])
            for block, theirs, mine in zip(blocks_of(filtered, options), blocks_of(grafted, options), roots[i]):
                if t >= start:
                    direction = preconditioned(block, mine)
                    if options["grafting"]:
                        direction = direction * (theirs.norm() / (direction.norm() + 1e-16))
                    theirs.copy_(direction)
            updates.append(shard_of(grafted, params[i].where))
        for indices, weights in batch.writable():
            for i, weight in zip(indices, weights):
                update = updates[i] + options["weight_decay"] * weight
                if momentum := options["momentum"]:
                    buffer = states[i]["momentum_buffer"].mul_(momentum).add_(update)
                    update = update.add_(buffer, alpha=momentum) if options["nesterov"] else buffer
                weight.sub_(update, alpha=float(options["lr"]))
