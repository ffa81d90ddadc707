"""Random tensor-parallel models and training scripts, sharded over replicas in all ways, against plain PyTorch."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from random_programs import ACTIONS, Program, run_programs
from random_tensor_parallel_models import VOCAB, Kind, Model, plan_of, with_parallel_layers
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from bmt_comm import ParallelContext
from bmt_tp import full_state_dict, load_full_state_dict, parallelize
from bmt_zero import Block, BMTrainModelWrapper, fully_shard, shard

STYLES = ["alone", "alone", "wrapper", "blocks", "some blocks", "shard", "fully_shard"]


class TensorParallelProgram(Program):
    """A plan, or layers of bmt_tp, shard the model over the tensor-parallel ranks.

    Attributes:
        inner: the sharded model without what may wrap it.
        updates: the longest update so far of each parameter.
    """

    single_tolerance = 1e-3
    vocab, length = VOCAB, 6

    def make_plain(self) -> nn.Module:
        draw, ctx = self.draw, self.ctx
        d = Kind(planned=draw.random() < 0.65, sequence=draw.random() < 0.5, ranks=ctx.tp_size, single=self.single)
        d.shares = draw.random() < 0.1 and (d.planned or ctx.replicas == 1)
        self.drawn_for = d
        self.updates: dict[str, float] = {}
        return Model(draw, d)

    def make_sharded(self, plain: Any) -> nn.Module:
        draw, replicas, state = self.draw, self.ctx.replicas, plain.state_dict()
        # A plan takes any model, layers of bmt_tp take those without what only a plan can shard.
        # Those have no head where it is tied, and resume only what has none.
        d = replace(self.drawn_for, planned=self.drawn_for.planned or (draw.random() < 0.2 and not plain.tied))
        styles = ["alone"] if d.shares else STYLES  # Blocks share no parameters
        if not d.planned and replicas > 1:
            styles = STYLES[2:]  # bmt_zero reduces the gradients of norms, too
        style = self.draw_style(styles, averaging=["fully_shard", *(["alone"] if replicas > 1 else [])])
        plan = plan_of(plain, draw, d)
        self.style = f"{style}, {d}, {plan}"
        requires_grad = [param.requires_grad for param in plain.parameters()]
        self.inner = parallelize(plain, plan) if d.planned else with_parallel_layers(plain, plan, d.sequence)
        model = self._sharded(self.inner, style)
        self._load(state)
        for param, trains in zip(model.parameters(), requires_grad, strict=True):
            param.requires_grad_(trains)
        return model

    def _sharded(self, model: Any, style: str) -> nn.Module:
        draw, level = self.draw, self.draw.choice([0, 1, 2, 3, 3])
        options: dict[str, Any] = {"use_checkpoint": draw.choice([False, False, True, 0.5, "matmuls"])}
        self.actions = ACTIONS
        if style == "alone" and self.averages:
            # DistributedDataParallel counts on one backward pass for each forward, of the parameters that it was made
            # with, and does not work any more if that fails.
            refused = "two forwards", "backward twice", "freeze", "interrupt"
            self.actions = [action for action in ACTIONS if action not in refused]
            group = self.ctx.tp_zero.group
            return DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
        if style == "alone":
            return model
        if style == "wrapper":
            return BMTrainModelWrapper(model, zero_level=level, **options)
        for index, layer in enumerate(model.layers):
            if style == "fully_shard":
                fully_shard(layer, reshard_after_forward=draw.choice([True, False]))
            elif style == "shard":
                shard(layer, level, **options)
            elif style == "blocks" or index % 2 == 0:
                model.layers[index] = Block(layer, zero_level=level, **options)
        if style == "fully_shard":
            return fully_shard(model)
        return shard(model, level) if style == "shard" else BMTrainModelWrapper(model, zero_level=level)

    def loss(self, model: nn.Module, ids: Tensor, replica: int, step: int) -> Tensor:
        return model(ids, (3 * ids + 1) % VOCAB)

    def no_sync(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        return model.no_sync() if isinstance(model, DistributedDataParallel) else super().no_sync(model)

    def load(self, model: nn.Module) -> None:
        super().load(model)
        if model is self.model:
            self._load(full_state_dict(self.inner))

    def _load(self, state: Mapping[str, Tensor]) -> None:
        names = dict(self.inner.named_parameters(remove_duplicate=False))
        load_full_state_dict(self.inner, {name: value for name, value in state.items() if name in names})

    def norms(self, params: Mapping[str, nn.Parameter]) -> list[float]:
        # Parameters that only a plan or layers of bmt_tp have sharded are this rank's part.
        return [] if self.style.startswith("alone") else super().norms(params)

    def values(self) -> Mapping[str, Tensor]:
        return full_state_dict(self.inner)

    def update(self, name: str) -> float:
        # A scalar may come back to where it began.
        self.updates[name] = max(self.updates.get(name, 0.0), super().update(name))
        return self.updates[name]


@pytest.mark.ranks(2, tp_size=2, timeout=120)
@pytest.mark.parametrize("first", range(0, 16, 8))
def test_two_tensor_parallel_ranks(ctx: ParallelContext, first: int) -> None:
    run_programs(TensorParallelProgram, ctx, range(first, first + 8))


@pytest.mark.ranks(3, tp_size=3, timeout=120)
def test_three_tensor_parallel_ranks(ctx: ParallelContext) -> None:
    run_programs(TensorParallelProgram, ctx, range(100, 106))


@pytest.mark.ranks(4, tp_size=2, timeout=120)
def test_two_replicas(ctx: ParallelContext) -> None:
    run_programs(TensorParallelProgram, ctx, range(200, 206))


@pytest.mark.long
@pytest.mark.ranks(4, tp_size=2, timeout=900)
def test_many_programs_of_two_replicas(ctx: ParallelContext) -> None:
    run_programs(TensorParallelProgram, ctx, range(1000, 1100))


@pytest.mark.long
@pytest.mark.ranks(3, tp_size=3, timeout=900)
def test_many_programs_of_three_tensor_parallel_ranks(ctx: ParallelContext) -> None:
    run_programs(TensorParallelProgram, ctx, range(2000, 2100))
