"""The rules of GaLore: a step of AdamW, and one of AdamW on projected gradients."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bmt_comm import shard_of

from .batch import Batch
from .galore_projection import BASES, CONTRACTED, KEPT, Side, basis_layout, basis_shape, leading_bases, side_of
from .moments import Moments
from .percentile_clipping import clip_factors
from .requests import Broadcast, GatherToOwner, Max, Request, Rule, Sum, reduced


def plain_rule(batch: Batch, moments: Moments) -> Rule:
    """The step of a batch in a group without a rank: AdamW."""
    options, factors = batch.options, None
    lr = float(options["lr"])
    if options["percentile_clipping"] < 100:
        squares = [batch.fp32_grad(i).square().sum() for i in range(len(batch))]
        (squares,) = yield [Sum(squares, batch.logical_params)]
        factors = _factors(batch, squares)

    # 8-bit moments take no factor. One by one, only one gradient, or state from host memory, is copied at a time.
    one_by_one = factors is not None or options["is_paged"] or (batch.grad_factor is not None and options["nbits"] == 8)
    scaled: dict[str, Any] = {} if one_by_one else {"grad_scale": batch.grad_scale, "grad_factor": batch.grad_factor}

    def grad(i: int) -> Tensor:
        if not one_by_one:
            return batch.grads[i]
        return batch.fp32_grad(i) if factors is None else batch.fp32_grad(i) * factors[i]

    shared = moments.shared
    sharing = batch.pick(batch.logical_params, list(shared.parts))
    (absmax,) = yield [Max(moments.next_absmax(grad, **scaled), sharing, sizes=shared.sizes)]
    moments.agree(absmax)
    # Kernels decay first: p·kept - lr·kept·u is (p - lr·u)·kept up to rounding, which only 8-bit moments outweigh.
    kept = 1 - lr * options["weight_decay"]
    fused = options["nbits"] == 8
    settings = {"lr": lr * kept, "weight_decay": options["weight_decay"] / kept} if fused else {"lr": lr}
    portions = batch.for_kernels() if fused else ((indices, weights, None) for indices, weights in batch.writable())
    for indices, params, masters in portions:
        if one_by_one:
            for n, i in enumerate(indices):
                master = None if masters is None else masters[n : n + 1]
                moments.step([i], [params[n]], [grad(i)], **settings, masters=master)
        else:
            moments.step(indices, params, [grad(i) for i in indices], **settings, masters=masters, **scaled)
        if not fused and options["weight_decay"]:
            torch._foreach_mul_(params, kept)


class Projected:
    """The step of a batch in a group with a rank: GaLore. It holds the state between the rounds."""

    def __init__(self, batch: Batch, moments: Moments) -> None:
        self.batch, self.moments = batch, moments
        self.sides = [side_of(p.where.shape, batch.options["proj_type"]) for p in batch.logical_params]
        self.lows: dict[int, Tensor] = {}
        """Projected gradients that took a round. Others are computed where they are needed."""

    def rule(self) -> Rule:
        batch, options = self.batch, self.batch.options
        if (batch.step - 1) % options["update_proj_gap"] == 0:
            yield from self._renew()
        contracted = [
            i
            for i, (p, side) in enumerate(zip(batch.logical_params, self.sides))
            if any(comm is not None for comm in p.shard_groups(CONTRACTED[side]))
        ]
        self.lows = yield from self._reduced(Sum, {i: self._project(i) for i in contracted}, CONTRACTED)
        if options["percentile_clipping"] < 100:
            self.lows = {i: self._low(i) for i in range(len(batch))}
            squares = yield from self._reduced(Sum, {i: r.square().sum() for i, r in self.lows.items()}, KEPT)
            factors = _factors(batch, [squares[i] for i in range(len(batch))])
            self.lows = {i: r * factors[i] for i, r in self.lows.items()}
        shared, local = self.moments.shared, self.moments.next_absmax(lambda i: self._low(i).contiguous())
        absmax = yield from self._reduced(Max, {i: shared.of(local, i) for i in shared.parts}, KEPT)
        self.moments.agree(torch.cat([m.reshape(-1) for m in absmax.values()]) if absmax else local)
        for indices, weights in batch.writable():
            for i, weight in zip(indices, weights):
                self._step(i, weight)

    def _renew(self) -> Generator[Sequence[Request], list[Any], None]:
        """New bases, computed by the owners."""
        batch, rank, svd = self.batch, self.batch.options["rank"], self.batch.options["svd"]
        params = batch.logical_params
        # In the dtype of the parameter, which all ranks know: a rank with an empty shard may have no gradient.
        (unsharded,) = yield [GatherToOwner([g.to(p.param.dtype) for g, p in zip(batch.grads, params)], params)]
        values: list[Tensor | None] = []
        wanted: list[tuple[int, str]] = []
        for i, gradient in enumerate(unsharded):
            keys = BASES[self.sides[i]]
            new_bases = None if gradient is None else leading_bases(gradient.float(), rank, self.sides[i], svd)
            values += [None if new_bases is None else new_bases[key] for key in keys]
            wanted += [(i, key) for key in keys]
        shapes = [basis_shape(key, params[i].where.shape, rank) for i, key in wanted]
        (bases,) = yield [Broadcast(values, [params[i] for i, _ in wanted], shapes)]
        for (i, key), basis in zip(wanted, bases):
            layout = basis_layout(key, params[i].where.shape, rank)
            batch.states[i][key].copy_(shard_of(basis, layout.part(params[i].where)))

    def _reduced(
        self, kind: type[Sum], values: Mapping[int, Tensor], over: Mapping[Side, tuple[int, ...]]
    ) -> Generator[Sequence[Request], list[Any], dict[int, Tensor]]:
        """``values`` by parameter, reduced over the ranks that shard the dimensions ``over`` of each one's side."""
        return (yield from reduced(kind, values, self.batch.logical_params, [over[side] for side in self.sides]))

    def _project(self, i: int) -> Tensor:
        """The contribution of this rank's shard of the gradient to the projected one."""
        state, low = self.batch.states[i], self.batch.fp32_grad(i)
        if "ortho_left" in state:
            low = state["ortho_left"].T @ low
        return low @ state["ortho_right"].T if "ortho_right" in state else low

    def _low(self, i: int) -> Tensor:
        low = self.lows.get(i)
        return self._project(i) if low is None else low

    def _step(self, i: int, weight: Tensor) -> None:
        state, options = self.batch.states[i], self.batch.options
        low = self._low(i)
        self.lows.pop(i, None)
        down = torch.zeros_like(low)  # it becomes -d
        self.moments.step([i], [down], [low], lr=1.0)
        lr = float(options["lr"])
        kept = 1 - lr * options["weight_decay"]
        step_size = kept * lr * options["scale"]
        if self.sides[i] == "right":
            weight.addmm_(down, state["ortho_right"], beta=kept, alpha=step_size)
        else:
            if self.sides[i] == "full":
                down = down @ state["ortho_right"]
            weight.addmm_(state["ortho_left"], down, beta=kept, alpha=step_size)


def _factors(batch: Batch, squares: Sequence[Tensor]) -> list[Tensor]:
    return clip_factors(batch.state("gnorm_vec"), squares, batch.step, int(batch.options["percentile_clipping"]))
