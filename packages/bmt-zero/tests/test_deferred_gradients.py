"""Weight gradients that backward puts off: Blocks reduce them when they are run."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from block_helpers import assert_same_gradients, rows_of, seeded, space
from torch import nn

from bmt_comm import defer_weight_gradient, deferred_weight_gradients
from bmt_zero import (
    Block,
    DistributedModule,
    DistributedParameter,
    MixedPrecision,
    TransformerBlockList,
    no_sync,
)
from bmt_zero.shard import group_of

every_level = pytest.mark.parametrize("level", [0, 1, 2, 3])


class Product(torch.autograd.Function):
    """x Wᵀ, whose weight gradient can be put off; ``kept`` collects what is kept for it."""

    kept: list[torch.Tensor] | None = None

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad_weight = None
        if ctx.needs_input_grad[1]:
            if not defer_weight_gradient(ctx, 1, product_gradient, grad, x):
                grad_weight = product_gradient(grad, x)
            elif Product.kept is not None:
                Product.kept += [grad, x]
        return grad @ weight, grad_weight


def product_gradient(grad, x):
    return grad.t() @ x.to(grad.dtype)


class Linear(nn.Linear):
    def forward(self, x):
        y = Product.apply(x, self.weight)
        return y if self.bias is None else y + self.bias


class Layer(nn.Module):
    """Deferring and plain layers, one of them skipped now and then, and one never used."""

    def __init__(self, deferring=Linear):
        super().__init__()
        self.norm = nn.LayerNorm(5)
        self.up = deferring(5, 7)
        self.plain = nn.Linear(7, 7)
        self.down = deferring(7, 5, bias=False)
        self.unused = nn.Linear(5, 5)
        self.skip = False

    def forward(self, x):
        if self.skip:
            return x + self.norm(x)
        return x + self.down(torch.tanh(self.plain(self.up(self.norm(x)))))


def three(level, checkpointing=True, make=Layer, **options):
    """A plain model and an equal one of Blocks."""
    torch.manual_seed(2)
    plain = nn.ModuleList([make() for _ in range(3)])
    blocks = TransformerBlockList([Block(m, checkpointing, level, **options) for m in copy.deepcopy(plain)])
    return plain, blocks


def through(layers, x):
    for layer in layers:
        x = layer(x)
    return x


def loss_of(y):
    return y.float().square().mean()


def in_one(plain, ctx, seeds):
    """The plain model's gradients, of all ranks' batches."""
    for seed in seeds:
        for rank in range(ctx.world_size):
            loss_of(through(plain, seeded(10 * seed + rank, 3, 5))).backward()


def first_part(blocks, ctx, seed):
    loss = loss_of(blocks(seeded(10 * seed + ctx.rank, 3, 5)))
    with deferred_weight_gradients() as deferred:
        loss.backward()
    return deferred


def check_equal_runs(ctx, plain, blocks, seed=0):
    """A Block that is as new: two parts give what one would."""
    for module in (plain, blocks):
        module.zero_grad()
    in_one(plain, ctx, [seed])
    first_part(blocks, ctx, seed).run()
    assert_same_gradients(blocks, plain)


def assert_idle(blocks):
    """Nothing is under way."""
    for block in blocks:
        group = group_of(block)
        assert not group.step._passes
        assert not group.step._reducing
        assert not group.in_backward
        assert not any(r.pending or r._accumulated is not None for r in group.reducers)


@pytest.mark.ranks(1, 2)
@every_level
@pytest.mark.parametrize("checkpointing", [False, True])
def test_training_in_two_parts_is_training_in_one(ctx, level, checkpointing):
    plain, blocks = three(level, checkpointing)
    twin = copy.deepcopy(blocks)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, blocks, twin)]
    for step in range(3):
        seeds = [2 * step, 2 * step + 1]
        in_one(plain, ctx, seeds)
        inputs = [[seeded(10 * s + ctx.rank, 3, 5).requires_grad_() for s in seeds] for _ in range(2)]
        losses = [loss_of(blocks(x)) for x in inputs[0]]
        waiting = []
        for loss, x in zip(losses, inputs[0], strict=True):
            with deferred_weight_gradients() as deferred:
                loss.backward()
            waiting.append(deferred)
            assert x.grad is not None
            assert all(p.grad is None for p in blocks.parameters())
            assert len(deferred) == 6
            assert_idle(blocks)
            if level == 3 and ctx.world_size > 1:
                assert not any(space(block) for block in blocks)
        for deferred in waiting:
            deferred.run()
            assert_idle(blocks)
        for x in inputs[1]:
            loss_of(twin(x)).backward()
        assert_same_gradients(blocks, plain)
        for ours, one in zip(blocks.parameters(), twin.parameters(), strict=True):
            assert (ours.grad is None) == (one.grad is None)
            assert ours.grad is None or torch.equal(ours.grad, one.grad)
        for ours, one in zip(*inputs, strict=True):
            assert torch.equal(ours.grad, one.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 2])
def test_gradients_arrive_in_a_backward_that_goes_on(ctx, level):
    """Between the parts of one micro-batch, others go forward, backward and through their second parts."""
    plain, blocks = three(level)
    in_one(plain, ctx, [0, 1, 2])
    first = first_part(blocks, ctx, 0)
    second = first_part(blocks, ctx, 1)
    loss = loss_of(blocks(seeded(20 + ctx.rank, 3, 5)))
    first.run()
    loss.backward()  # in one
    second.run()
    assert_same_gradients(blocks, plain)


@pytest.mark.ranks(2)
@every_level
def test_no_sync_counts_when_the_gradients_are_run(ctx, level):
    plain, blocks = three(level)
    in_one(plain, ctx, [0, 1, 2])
    waiting = [first_part(blocks, ctx, seed) for seed in range(3)]
    with no_sync(blocks):
        waiting[0].run()
        waiting[1].run()
    waiting[2].run()
    assert_same_gradients(blocks, plain)


@pytest.mark.ranks(2)
@every_level
def test_mixed_precision(ctx, level):
    precision = MixedPrecision(torch.bfloat16, torch.float32)
    plain, blocks = three(level, precision=precision)
    twin = copy.deepcopy(blocks)
    deferred = first_part(blocks, ctx, 0)
    assert all(p.grad is None for p in blocks.parameters())
    deferred.run()
    loss_of(twin(seeded(ctx.rank, 3, 5))).backward()
    in_one(plain, ctx, [0])
    for ours, one in zip(blocks.parameters(), twin.parameters(), strict=True):
        assert ours.grad is None or torch.equal(ours.grad, one.grad)
    assert_same_gradients(blocks, plain, tolerance=5e-2)


@pytest.mark.ranks(2)
def test_nothing_is_kept_but_inputs_and_output_gradients(ctx):
    _, blocks = three(3)
    Product.kept = []
    deferred = first_part(blocks, ctx, 0)
    kept, Product.kept = Product.kept, None
    full = {f.unsharded.untyped_storage()._cdata for block in blocks for f in group_of(block).flats}
    assert len(kept) == 2 * len(deferred) == 12
    assert not any(t.untyped_storage()._cdata in full for t in kept)
    assert {tuple(t.shape) for t in kept} == {(3, 5), (3, 7)}
    assert not any(space(block) for block in blocks)
    deferred.run()
    assert not any(space(block) for block in blocks)


class FromParameter(nn.Module):
    """Its linear layer's input is a parameter, whose space is freed after backward."""

    def __init__(self):
        super().__init__()
        self.prompt = nn.Parameter(torch.randn(3, 5))
        self.linear = Linear(5, 5)

    def forward(self, x):
        return x + self.linear(self.prompt)


@pytest.mark.ranks(2)
@every_level
def test_the_space_of_parameters_is_not_kept(ctx, level):
    plain, blocks = three(level, make=FromParameter)
    in_one(plain, ctx, [0])
    deferred = first_part(blocks, ctx, 0)
    assert (len(deferred) == 0) == (level >= 2)
    deferred.run()
    assert_same_gradients(blocks, plain)


@pytest.mark.ranks(2)
@every_level
def test_plain_modules_are_complete_after_the_first_part(ctx, level):
    plain, blocks = three(level, make=lambda: Layer(nn.Linear))
    in_one(plain, ctx, [0])
    deferred = first_part(blocks, ctx, 0)
    assert len(deferred) == 0
    assert_same_gradients(blocks, plain)
    deferred.run()
    assert_same_gradients(blocks, plain)


@pytest.mark.ranks(2)
@every_level
@pytest.mark.parametrize("first", [False, True])
def test_ranks_that_take_different_ways_reduce_in_one_order(ctx, level, first):
    plain, blocks = three(level)
    if not first:
        check_equal_runs(ctx, plain, blocks)
    for module in (plain, blocks):
        module.zero_grad()
    for rank in range(2):
        for i, layer in enumerate(plain):
            layer.skip = (i + rank) % 2 == 0
            if rank == ctx.rank:
                blocks[i].skip = layer.skip
        loss_of(through(plain, seeded(40 + rank, 3, 5))).backward()
    deferred = first_part(blocks, ctx, 4)
    assert len(deferred) == 2 * (1 + ctx.rank)
    assert all(p.grad is None for p in blocks.parameters())
    deferred.run()
    assert_same_gradients(blocks, plain)


class Tied(nn.Module):
    """One weight, used by two deferring layers and as a plain tensor."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Linear(5, 5), Linear(5, 5, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) * self.a.weight[0]


@pytest.mark.ranks(2)
@every_level
def test_a_weight_that_is_used_thrice(ctx, level):
    plain, blocks = three(level, make=Tied)
    check_equal_runs(ctx, plain, blocks)


@pytest.mark.ranks(2)
@every_level
def test_frozen_parameters(ctx, level):
    def make():
        layer = Layer()
        layer.norm.requires_grad_(False)
        layer.up.weight.requires_grad_(False)
        return layer

    plain, blocks = three(level, make=make)
    check_equal_runs(ctx, plain, blocks)
    # All deferring weights frozen, and the bias of one trained: nothing is put off.
    for module in (plain, blocks):
        for layer in module:
            layer.down._parameters["weight"].requires_grad_(False)
        module.zero_grad()
    in_one(plain, ctx, [1])
    assert len(first_part(blocks, ctx, 1)) == 0
    assert_same_gradients(blocks, plain)
    for module in (plain, blocks):
        for param in module.parameters():
            param.requires_grad_(True)
    assert len(first_part(blocks, ctx, 2)) == 6
    check_equal_runs(ctx, plain, blocks, 2)


class TakesWeight(nn.Module):
    """Its linear layer's weight is an argument; where parameters are frozen, arguments' gradients end the call."""

    def __init__(self):
        super().__init__()
        self.linear = Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x, weight):
        return Product.apply(self.linear(x), weight) * self.scale


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_argument_that_is_a_leaf_gets_its_gradient_with_the_parameters(ctx, checkpointing):
    plain = TakesWeight()
    block = Block(copy.deepcopy(plain), checkpointing)
    weights = [seeded(3, 5, 5).requires_grad_() for _ in range(2)]
    with deferred_weight_gradients() as deferred:
        loss_of(block(seeded(1, 3, 5), weights[0])).backward()
    loss_of(plain(seeded(1, 3, 5), weights[1])).backward()
    assert len(deferred) == 2
    deferred.run()
    torch.testing.assert_close(weights[0].grad, weights[1].grad)
    grad = block.linear._parameters["weight"].grad
    assert grad is not None
    assert grad.any()


class Fails(Layer):
    fails = False

    def forward(self, x):
        if self.fails:
            x = x.clone()
            x.register_hook(lambda grad: 1 / 0)
        return super().forward(x)


@pytest.mark.ranks(2)
@every_level
def test_what_is_abandoned_or_fails_leaves_the_blocks_usable(ctx, level):
    plain, blocks = three(level, make=Fails)
    first_part(blocks, ctx, 0).abandon()
    first_part(blocks, ctx, 1)  # dropped
    gc.collect()
    assert all(p.grad is None for p in blocks.parameters())
    check_equal_runs(ctx, plain, blocks)
    blocks[1].fails = True
    with pytest.raises(ZeroDivisionError):
        first_part(blocks, ctx, 2)
    blocks[1].fails = False
    check_equal_runs(ctx, plain, blocks, 1)
    # An input is overwritten, on every rank: the second part fails.
    kept = Product.kept = []
    deferred = first_part(blocks, ctx, 2)
    Product.kept = None
    kept[0].zero_()
    with pytest.raises(RuntimeError, match="written to in place"):
        deferred.run()
    check_equal_runs(ctx, plain, blocks, 2)
    assert_idle(blocks)


class Alone(DistributedModule):
    """Parameters outside of any Block, one of them used twice."""

    def __init__(self):
        super().__init__()
        self.weight = DistributedParameter(seeded(1, 5, 5))
        self.scale = DistributedParameter(seeded(2, 5))

    def forward(self, x):
        return Product.apply(torch.tanh(Product.apply(x, self.weight)), self.weight) * self.scale


@pytest.mark.ranks(1, 2)
def test_parameters_outside_of_blocks(ctx):
    model = Alone()
    weight, scale = (seeded(*a).requires_grad_() for a in ((1, 5, 5), (2, 5)))
    for rank in range(ctx.world_size):
        x = seeded(rank, 3, 5)
        loss_of(torch.tanh(x @ weight.t()) @ weight.t() * scale).backward()
    x = seeded(ctx.rank, 3, 5).requires_grad_()
    with deferred_weight_gradients() as deferred:
        loss_of(model(x)).backward()
    assert x.grad is not None
    assert model._parameters["weight"].grad is None
    assert len(deferred) == 2
    for again in (False, True):
        if again:
            with deferred_weight_gradients() as deferred:
                loss_of(model(x)).backward()
        found = model._parameters["scale"].grad  # its unit had nothing to wait for
        expected = rows_of((1 + again) * scale.grad, model._parameters["scale"])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        deferred.run()
        found = model._parameters["weight"].grad
        expected = rows_of((1 + again) * weight.grad, model._parameters["weight"])
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
