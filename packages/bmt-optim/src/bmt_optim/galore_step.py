"""The rules of GaLore: a step of AdamW, and one of AdamW on projected gradients."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import Batch
from .galore_projection import BASES, CONTRACTED, KEPT, Side, basis_layout, basis_shape, leading_bases, side_of
from .moments import Moments
from .percentile_clipping import clip_factors
from .requests import Max, Own, Request, Rule, Share, Sum, reduced
from .slices import cut


def plain_rule(batch: Batch, moments: Moments) -> Rule:
    """The step of a batch in a group without a rank: AdamW."""
    options, factors = batch.options, None
    lr = float(options["lr"])
    if options["percentile_clipping"] < 100:
        squares = [batch.fp32_grad(i).square().sum() for i in range(len(batch))]
        (squares,) = yield [Sum(squares, batch.matrices)]
        factors = _factors(batch, squares)

    # 8-bit moments take no factor; and there is one copy of a gradient, or of a state in host memory, at a time.
    one_by_one = factors is not None or options["is_paged"] or (batch.grad_factor is not None and options["nbits"] == 8)
    scaled: dict[str, Any] = {} if one_by_one else {"grad_scale": batch.grad_scale, "grad_factor": batch.grad_factor}

    def grad(i: int) -> Tensor:
        if not one_by_one:
            return batch.grads[i]
        return batch.fp32_grad(i) if factors is None else batch.fp32_grad(i) * factors[i]

    shared = moments.shared
    matrices = batch.pick(batch.matrices, list(shared.parts))
    (maxima,) = yield [Max(moments.maxima_ahead(grad, **scaled), matrices, sizes=shared.sizes)]
    moments.agree(maxima)
    # Kernels decay first: p·kept - lr·kept·u is (p - lr·u)·kept but for rounding, which only 8-bit moments outweigh.
    kept = 1 - lr * options["weight_decay"]
    fused = options["nbits"] == 8
    rates = {"lr": lr * kept, "weight_decay": options["weight_decay"] / kept} if fused else {"lr": lr}
    portions = batch.for_kernels() if fused else ((indices, weights, None) for indices, weights in batch.writable())
    for indices, params, masters in portions:
        if one_by_one:
            for n, i in enumerate(indices):
                master = None if masters is None else masters[n : n + 1]
                moments.step([i], [params[n]], [grad(i)], **rates, masters=master)
        else:
            moments.step(indices, params, [grad(i) for i in indices], **rates, masters=masters, **scaled)
        if not fused and options["weight_decay"]:
            torch._foreach_mul_(params, kept)


def projected_rule(batch: Batch, moments: Moments) -> Rule:
    """The step of a batch in a group with a rank: GaLore."""
    return _Projected(batch, moments).rule()


class _Projected:
    """What the rounds of a step have in common."""

    def __init__(self, batch: Batch, moments: Moments) -> None:
        self.batch, self.moments = batch, moments
        self.sides = [side_of(m.where.shape, batch.options["proj_type"]) for m in batch.matrices]
        self.lows: dict[int, Tensor] = {}
        """Projected gradients that are known, for they took a round. Others are computed where they are needed."""

    def rule(self) -> Rule:
        batch, options = self.batch, self.batch.options
        if (batch.step - 1) % options["update_proj_gap"] == 0:
            yield from self._renew()
        contracted = [
            i
            for i, (m, side) in enumerate(zip(batch.matrices, self.sides))
            if any(comm is not None for comm in m.cut_along(CONTRACTED[side]))
        ]
        self.lows = yield from self._reduced(Sum, {i: self._project(i) for i in contracted}, CONTRACTED)
        if options["percentile_clipping"] < 100:
            self.lows = {i: self._low(i) for i in range(len(batch))}
            squares = yield from self._reduced(Sum, {i: r.square().sum() for i, r in self.lows.items()}, KEPT)
            factors = _factors(batch, [squares[i] for i in range(len(batch))])
            self.lows = {i: r * factors[i] for i, r in self.lows.items()}
        shared, ahead = self.moments.shared, self.moments.maxima_ahead(lambda i: self._low(i).contiguous())
        maxima = yield from self._reduced(Max, {i: shared.of(ahead, i) for i in shared.parts}, KEPT)
        self.moments.agree(torch.cat([m.reshape(-1) for m in maxima.values()]) if maxima else ahead)
        for indices, weights in batch.writable():
            for i, weight in zip(indices, weights):
                self._step(i, weight)

    def _renew(self) -> Generator[Sequence[Request], list[Any], None]:
        """New bases, each by the owner of its matrix."""
        batch, rank, svd = self.batch, self.batch.options["rank"], self.batch.options["svd"]
        # In the dtype of the parameter, which all ranks know, also those whose part is empty and has no gradient.
        (wholes,) = yield [Own([g.to(m.param.dtype) for g, m in zip(batch.grads, batch.matrices)], batch.matrices)]
        values: list[Tensor | None] = []
        wanted: list[tuple[int, str]] = []
        for i, gradient in enumerate(wholes):
            keys = BASES[self.sides[i]]
            found = None if gradient is None else leading_bases(gradient.float(), rank, self.sides[i], svd)
            values += [None if found is None else found[key] for key in keys]
            wanted += [(i, key) for key in keys]
        matrices = [batch.matrices[i] for i, _ in wanted]
        shapes = [basis_shape(key, m.where.shape, batch.options["rank"]) for (_, key), m in zip(wanted, matrices)]
        (bases,) = yield [Share(values, matrices, shapes)]
        for (i, key), matrix, basis in zip(wanted, matrices, bases):
            layout = basis_layout(key, matrix.where.shape, batch.options["rank"])
            batch.states[i][key].copy_(cut(basis, layout.part(matrix.where)))

    def _reduced(
        self, kind: type[Sum], values: Mapping[int, Tensor], over: Mapping[Side, tuple[int, ...]]
    ) -> Generator[Sequence[Request], list[Any], dict[int, Tensor]]:
        """``values`` by matrix, reduced over the ranks that cut what ``over`` names for the side of each."""
        return (yield from reduced(kind, values, self.batch.matrices, [over[side] for side in self.sides]))

    def _project(self, i: int) -> Tensor:
        """What this rank's part of the gradient contributes to the projected one."""
        state, low = self.batch.states[i], self.batch.fp32_grad(i)
        if "ortho_left" in state:
            low = state["ortho_left"].T @ low
        return low @ state["ortho_right"].T if "ortho_right" in state else low

    def _low(self, i: int) -> Tensor:
        found = self.lows.get(i)
        return self._project(i) if found is None else found

    def _step(self, i: int, weight: Tensor) -> None:
        state, options = self.batch.states[i], self.batch.options
        low = self._low(i)
        self.lows.pop(i, None)
        down = torch.zeros_like(low)  # it becomes -d
        self.moments.step([i], [down], [low], lr=1.0)
        lr = float(options["lr"])
        kept = 1 - lr * options["weight_decay"]
        rate = kept * lr * options["scale"]
        if self.sides[i] == "right":
            weight.addmm_(down, state["ortho_right"], beta=kept, alpha=rate)
        else:
            if self.sides[i] == "full":
                down = down @ state["ortho_right"]
            weight.addmm_(state["ortho_left"], down, beta=kept, alpha=rate)


def _factors(batch: Batch, squares: Sequence[Tensor]) -> list[Tensor]:
    return clip_factors(batch.state("gnorm_vec"), squares, batch.step, batch.options["percentile_clipping"])
