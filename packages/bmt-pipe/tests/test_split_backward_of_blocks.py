"""Backward of Blocks in two passes: the weight-gradient pass reduces their gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from pipe_helpers import FusedLinear, rows_of
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from bmt_comm import Communicator, ParallelContext
from bmt_pipe.split_backward import SplitBackward
from bmt_zero import Block, DistributedModule, DistributedParameter, MixedPrecision, TransformerBlockList, no_sync
from bmt_zero.backward_context import step_context
from bmt_zero.flat_parameter import State
from bmt_zero.shard import group_of

every_level = pytest.mark.parametrize("level", [0, 1, 2, 3])
WIDTH, ROWS = 5, 3


class Layer(nn.Module):
    """Products of all kinds, some of them skipped now and then, and one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.fused, self.down = nn.Linear(WIDTH, 7), FusedLinear(7, 7), nn.Linear(7, WIDTH, bias=False)
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.skip = self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.skip:
            return x + self.norm(x)
        if self.fails:
            x = x.clone()
            x.register_hook(lambda grad: 1 / 0)
        return x + self.down(torch.tanh(self.fused(self.up(self.norm(x)))))


def three(level: int, make: Callable[[], nn.Module] = Layer, **options: Any) -> tuple[nn.ModuleList, Any]:
    """A plain model and an equal one of Blocks."""
    torch.manual_seed(2)
    plain = nn.ModuleList([make() for _ in range(3)])
    blocks = [Block(layer, use_checkpoint=False, zero_level=level, **options) for layer in copy.deepcopy(plain)]
    return plain, TransformerBlockList(blocks)


def batch(seed: int, rank: int) -> Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(10 * seed + rank))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    if isinstance(model, nn.ModuleList):
        for layer in model:
            x = layer(x)
        return x.square().mean()
    return model(x).float().square().mean()


def in_one(plain: nn.Module, ctx: ParallelContext, *seeds: int) -> None:
    """The plain model's gradients, of all ranks' batches."""
    for seed in seeds:
        for rank in range(ctx.world_size):
            loss_of(plain, batch(seed, rank)).backward()


def input_pass(model: nn.Module, ctx: ParallelContext, seed: int) -> SplitBackward:
    x = batch(seed, ctx.rank).requires_grad_()
    step = step_context(ctx)
    with step.splitting():
        loss = loss_of(model, x)
    split = SplitBackward([get_gradient_edge(loss)], [torch.ones_like(loss)], [x], step)
    split.run_input_pass()
    assert x.grad is not None
    return split


def check_gradients(model: nn.Module, plain: nn.Module, tolerance: float = 1e-5) -> None:
    wanted = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        grad = wanted[name].grad
        assert (param.grad is None) == (grad is None), name
        if grad is not None:
            rows = rows_of(grad, param)
            assert (param.grad.as_subclass(Tensor) - rows).norm() <= tolerance * grad.norm(), name


def check_equal_runs(ctx: ParallelContext, plain: nn.Module, blocks: Any, seed: int = 0) -> None:
    """Two passes give the gradients of one."""
    for module in (plain, blocks):
        module.zero_grad()
    in_one(plain, ctx, seed)
    input_pass(blocks, ctx, seed).run_weight_pass()
    check_gradients(blocks, plain)


def check_idle(blocks: Any) -> None:
    """No backward pass is running."""
    for block in blocks:
        group = group_of(block)
        assert not group.step._passes
        assert not group.in_backward


@pytest.mark.ranks(1, 2)
@every_level
def test_training_in_two_passes_is_training_in_one(ctx: ParallelContext, level: int) -> None:
    plain, blocks = three(level)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, blocks)]
    for step in range(3):
        seeds = 2 * step, 2 * step + 1
        in_one(plain, ctx, *seeds)
        waiting = [input_pass(blocks, ctx, seed) for seed in seeds]
        check_idle(blocks)
        if level == 3 and ctx.world_size > 1:
            flats = [flat for block in blocks for flat in group_of(block).flats]
            assert all(flat.is_shared or not flat.unsharded.untyped_storage().size() for flat in flats)
        for split in waiting:
            assert not any(group.reads_parameters for group in split._groups)
            split.run_weight_pass()
            check_idle(blocks)
        check_gradients(blocks, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(2)
@every_level
def test_the_settings_of_the_weight_gradient_pass_count(ctx: ParallelContext, level: int) -> None:
    plain, blocks = three(level)
    in_one(plain, ctx, 0, 1, 2)
    waiting = [input_pass(blocks, ctx, seed) for seed in range(3)]
    with no_sync(blocks):
        waiting[0].run_weight_pass()
        waiting[1].run_weight_pass()
    waiting[2].run_weight_pass()
    check_gradients(blocks, plain)


@pytest.mark.ranks(2)
@every_level
def test_mixed_precision(ctx: ParallelContext, level: int) -> None:
    plain, blocks = three(level, precision=MixedPrecision(torch.bfloat16, torch.float32))
    in_one(plain, ctx, 0)
    input_pass(blocks, ctx, 0).run_weight_pass()
    check_gradients(blocks, plain, tolerance=5e-2)


@pytest.mark.ranks(2)
@every_level
@pytest.mark.parametrize("first", [False, True])
def test_ranks_that_take_different_ways_reduce_in_one_order(ctx: ParallelContext, level: int, first: bool) -> None:
    plain, blocks = three(level)
    if not first:
        check_equal_runs(ctx, plain, blocks)
    for module in (plain, blocks):
        module.zero_grad()
    for rank in range(2):
        for i, layer in enumerate(plain):
            layer.skip = (i + rank) % 2 == 0  # type: ignore[assignment]
            if rank == ctx.rank:
                blocks[i].skip = layer.skip
        loss_of(plain, batch(4, rank)).backward()
    input_pass(blocks, ctx, 4).run_weight_pass()
    check_gradients(blocks, plain)


class Tied(nn.Module):
    """One weight in two products and as a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x))) * self.a.weight[0]


class Computed(nn.Module):
    """Its weight is computed from parameters. The weight-gradient pass reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x) @ (self.a * self.b)


@pytest.mark.ranks(2)
@every_level
def test_a_weight_that_is_used_thrice(ctx: ParallelContext, level: int) -> None:
    check_equal_runs(ctx, *three(level, Tied))


@pytest.mark.ranks(2)
@every_level
@mock.patch.object(Communicator, "shares_memory", False)  # ranks with shared memory share one buffer
def test_weights_that_are_computed(ctx: ParallelContext, level: int) -> None:
    plain, blocks = three(level, Computed)
    in_one(plain, ctx, 0)
    split = input_pass(blocks, ctx, 0)
    assert all(group.reads_parameters for group in split._groups)
    unsharded: list[int] = []
    weights_of = SplitBackward._weights_of

    def noting(self: SplitBackward, group: Any) -> None:
        unsharded.append(sum(flat.state is State.UNSHARDED for block in blocks for flat in group_of(block).flats))
        weights_of(self, group)

    with mock.patch.object(SplitBackward, "_weights_of", noting):
        split.run_weight_pass()
    assert unsharded == [1, 1, 1]
    check_gradients(blocks, plain)


@pytest.mark.ranks(2)
@every_level
def test_frozen_parameters(ctx: ParallelContext, level: int) -> None:
    def make() -> nn.Module:
        layer = Layer()
        layer.norm.requires_grad_(False)
        layer.up.weight.requires_grad_(False)
        return layer

    plain, blocks = three(level, make)
    check_equal_runs(ctx, plain, blocks)
    for module in (plain, blocks):
        for param in module.parameters():
            param.requires_grad_(True)
    check_equal_runs(ctx, plain, blocks, 1)


@pytest.mark.ranks(2)
@every_level
def test_what_is_dropped_or_fails_leaves_the_blocks_usable(ctx: ParallelContext, level: int) -> None:
    plain, blocks = three(level)
    input_pass(blocks, ctx, 1)
    assert all(p.grad is None for p in blocks.parameters())
    check_equal_runs(ctx, plain, blocks)
    blocks[1].fails = True
    with pytest.raises(ZeroDivisionError):
        input_pass(blocks, ctx, 2)
    blocks[1].fails = False
    check_equal_runs(ctx, plain, blocks, 1)
    check_idle(blocks)


class Alone(DistributedModule):
    """Parameters outside of any Block, one of them used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = DistributedParameter(torch.randn(WIDTH, WIDTH))
        self.scale = DistributedParameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight.t()) @ self.weight.t() * self.scale


@pytest.mark.ranks(1, 2)
def test_parameters_outside_of_blocks(ctx: ParallelContext) -> None:
    torch.manual_seed(3)
    model = Alone()
    params = [model._parameters[name] for name in ("weight", "scale")]
    weight, scale = (param.full_tensor().detach().requires_grad_() for param in params)
    for rank in range(ctx.world_size):
        x = batch(0, rank)
        (torch.tanh(x @ weight.t()) @ weight.t() * scale).square().mean().backward()
    for times in (1, 2):
        input_pass(model, ctx, 0).run_weight_pass()
        for param, wanted in zip(params, (weight, scale)):
            torch.testing.assert_close(param.grad.as_subclass(Tensor), times * rows_of(wanted.grad, param))
