"""Which parameters have a gradient after a backward pass: those that some rank has used in it, as in one process."""

from __future__ import annotations

import copy
import gc
from dataclasses import dataclass

import pytest
import torch
from block_helpers import assert_same_gradients, assert_same_parameters, pair, seeded
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from bmt_comm import local_rows
from bmt_zero import Block, BMTrainModelWrapper, no_sync, shard, verify_replicas
from bmt_zero.fully_shard import fully_shard

every_level = pytest.mark.parametrize("level", [0, 1, 2, 3])
every_option = pytest.mark.parametrize(
    "options", [{"use_checkpoint": u, "zero_level": z} for u in (False, True) for z in (0, 1, 2, 3)], ids=str
)


class PartlyUsed(nn.Module):
    def __init__(self):
        super().__init__()
        self.used = nn.Linear(5, 5)
        self.unused = nn.Linear(5, 5)

    def forward(self, x, also=False):
        x = self.used(x)
        return self.unused(x) if also else x


@pytest.mark.ranks(1, 2)
@every_option
def test_an_unused_parameter_has_no_gradient_so_that_weight_decay_leaves_it_alone(ctx, options):
    _, block = pair(PartlyUsed, **options)
    for _ in range(2):
        block(seeded(ctx.rank, 3, 5)).square().sum().backward()
    for name, param in block.named_parameters():
        assert (param.grad is None) == name.startswith("unused"), name


@pytest.mark.ranks(2)
@every_option
def test_a_parameter_that_one_rank_uses_has_a_gradient_on_all(ctx, options):
    plain, block = pair(PartlyUsed, **options)
    for step in range(3):  # unused at first, then by one rank
        for rank in range(2):
            plain(seeded(rank, 3, 5), also=rank == step == 1).square().sum().backward()
        block(seeded(ctx.rank, 3, 5), also=ctx.rank == step == 1).square().sum().backward()
    for (name, param), wanted in zip(block.named_parameters(), plain.parameters(), strict=True):
        where = param.bmt_slice
        torch.testing.assert_close(param.grad, wanted.grad[where.row_start : where.row_stop], msg=name)


def step_alike(plain, block, optimizers):
    """The same parameters have gradients in both models, and the same values after a step."""
    for (name, param), wanted in zip(block.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (wanted.grad is None), name
    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(block, plain, 1e-5)


@pytest.mark.ranks(2, 3)
@every_option
def test_a_parameter_that_was_used_before_is_left_alone_where_no_rank_uses_it(ctx, options):
    plain, block = pair(PartlyUsed, **options)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1) for model in (plain, block)]
    uses = [[True] * 3, [False] * 3, [False, True, False], [False] * 3, [True, False, False]]
    for step, by_rank in enumerate(uses):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in range(ctx.world_size):
            plain(seeded(10 * step + rank, 3, 5), also=by_rank[rank]).square().sum().backward()
        block(seeded(10 * step + ctx.rank, 3, 5), also=by_rank[ctx.rank]).square().sum().backward()
        step_alike(plain, block, optimizers)


@pytest.mark.ranks(2)
@every_level
def test_accumulation_without_reduction_gives_unused_parameters_no_gradient(ctx, level):
    plain, block = pair(PartlyUsed, zero_level=level)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1) for model in (plain, block)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for micro in range(2):
            also = step == 1 and micro == 0  # on rank 1 only
            for rank in range(2):
                plain(seeded(10 * step + 2 * micro + rank, 3, 5), also=also and rank == 1).square().sum().backward()
            with no_sync(block) if micro == 0 else torch.enable_grad():
                x = seeded(10 * step + 2 * micro + ctx.rank, 3, 5)
                block(x, also=also and ctx.rank == 1).square().sum().backward()
        step_alike(plain, block, optimizers)


@pytest.mark.ranks(2)
def test_fully_shard_gives_unused_parameters_no_gradient_while_others_wait_to_be_reduced(ctx):
    model = PartlyUsed()
    fully_shard(model)
    model.set_requires_gradient_sync(False)
    model(seeded(ctx.rank, 3, 5)).square().sum().backward()
    assert all(param.grad is None for param in model.unused.parameters())
    model.set_requires_gradient_sync(True)
    model(seeded(ctx.rank, 3, 5)).square().sum().backward()
    assert all(param.grad is None for param in model.unused.parameters())
    assert all(param.grad is not None for param in model.used.parameters())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroed_between_micro_batches_on_a_rank_that_has_used_nothing(ctx, level, set_to_none):
    plain, block = pair(PartlyUsed, zero_level=level)
    with no_sync(block):  # rank 0 uses one part, rank 1 both
        block(seeded(ctx.rank, 3, 5), also=ctx.rank == 1).square().sum().backward()
    torch.optim.SGD(block.parameters(), lr=0.1).zero_grad(set_to_none)
    for rank in range(2):
        plain(seeded(5 + rank, 3, 5), also=True).square().sum().backward()
    block(seeded(5 + ctx.rank, 3, 5), also=True).square().sum().backward()
    for (name, param), wanted in zip(block.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            param.grad[:], wanted.grad[param.bmt_slice.row_start : param.bmt_slice.row_stop], msg=name
        )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_accumulations_that_are_dropped_one_after_the_other(ctx, level, set_to_none):
    plain, block = pair(PartlyUsed, zero_level=level)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for step in range(3):
        with no_sync(block):
            block(seeded(step, 3, 5), also=step > 0 or ctx.rank == 1).square().sum().backward()
        optimizer.zero_grad(set_to_none)
    for rank in range(2):
        plain(seeded(5 + rank, 3, 5), also=True).square().sum().backward()
    block(seeded(5 + ctx.rank, 3, 5), also=True).square().sum().backward()
    assert_same_gradients(block, plain)


@pytest.mark.ranks(2)
@every_level
def test_hooks_that_communicate_run_in_one_order_on_all_ranks(ctx, level):
    plain, block = pair(PartlyUsed, zero_level=level)
    for model in (plain, block):
        for param in model.parameters():
            param.register_hook(lambda grad: grad / grad.norm())
    for step in range(2):
        inputs = [seeded(10 * step + rank, 3, 5) for rank in range(2)]
        sum(plain(x, also=rank == step).square().sum() for rank, x in enumerate(inputs)).backward()
        block(inputs[ctx.rank], also=ctx.rank == step).square().sum().backward()
    assert_same_gradients(block, plain)


@pytest.mark.ranks(2)
@every_level
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zeroed_before_micro_batches(ctx, level, set_to_none):
    plain, block = pair(lambda: nn.Linear(5, 4), zero_level=level)
    for step in range(2):
        for model in (plain, block):
            torch.optim.SGD(model.parameters(), lr=0.1).zero_grad(set_to_none)
        for micro in range(2):
            for rank in range(2):
                plain(seeded(10 * step + 2 * micro + rank, 3, 5)).square().sum().backward()
            with no_sync(block) if micro == 0 else torch.enable_grad():
                block(seeded(10 * step + 2 * micro + ctx.rank, 3, 5)).square().sum().backward()
        assert_same_gradients(block, plain)


@pytest.mark.ranks(2)
def test_gradients_that_wait_are_kept_when_others_are_written(ctx):
    """Rank 0 has only rows with zeros as reduced gradients so far. Adding zeros to them drops no waiting gradients."""
    plain, block = pair(lambda: nn.Embedding(6, 4), zero_level=1)
    first, second = torch.tensor([4, 5]), torch.tensor([0, 1])
    for ids in (first, second, first):
        (2 * plain(ids).square().sum()).backward()  # both ranks have the same batch
    block(first).square().sum().backward()
    with no_sync(block):
        block(second).square().sum().backward()
    param = block.get_parameter("weight")
    param.grad.add_(0.0)
    block(first).square().sum().backward()
    rows = slice(param.bmt_slice.row_start, param.bmt_slice.row_stop)
    torch.testing.assert_close(param.grad[:], plain.weight.grad[rows])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1])
def test_gradients_that_were_accumulated_are_given_back_when_they_are_none(ctx, level):
    block = Block(nn.Linear(5, 5), zero_level=level)
    with no_sync(block):
        block(seeded(ctx.rank, 3, 5)).sum().backward()
    block(seeded(ctx.rank, 3, 5)).sum().backward()
    storages = [StorageWeakRef(param.grad.untyped_storage()) for param in block.parameters()]
    torch.optim.SGD(block.parameters(), lr=0.1).zero_grad()
    gc.collect()
    assert all(storage.expired() for storage in storages)


@pytest.mark.ranks(2, 3)
@every_level
def test_gradients_that_were_dropped_are_zeros_on_all_ranks(ctx, level):
    """Ranks have used different layers under ``no_sync``, and then filled gradients with zeros."""

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x, branch):
            return self.branches[branch](x)

    _, block = pair(Branches, zero_level=level)
    optimizer = torch.optim.AdamW(block.parameters(), lr=0.1, weight_decay=0.5)
    x = seeded(0, 2, 4)
    for branch in range(4):
        block(x, branch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with no_sync(block):
        block(x, 1 + ctx.rank).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    block(x, 0).sum().backward()
    there = [p.grad is not None for p in block.parameters()]
    assert ctx.world.all_gather_object(there) == [there] * ctx.world_size
    assert not any(local_rows(p.grad).any() for p in block.branches[1].parameters() if p.grad is not None)
    optimizer.step()
    sums = [p.full_tensor().detach().double().sum().item() for p in block.parameters()]
    assert ctx.world.all_gather_object(sums) == [sums] * ctx.world_size
    verify_replicas(block)


@dataclass(frozen=True)
class Output:
    hidden: torch.Tensor


class Conditional(nn.Module):
    """Does something else on each rank: computes, returns its input, scales it, or uses a frozen expert."""

    def __init__(self, kind_of_output=None):
        super().__init__()
        self.kind_of_output = kind_of_output or (lambda x: x)
        self.experts = nn.ParameterList([nn.Parameter(torch.randn(5, 5), requires_grad=n > 0) for n in range(2)])
        self.inner = nn.Linear(5, 5)

    def forward(self, x, kind):
        return self.kind_of_output(self.compute(x, kind))

    def compute(self, x, kind):
        if kind == "returns":
            return x
        if kind == "scales":
            return x * 0.5
        if kind == "frozen":
            return x + torch.tanh(x @ self.experts[0])
        return self.inner(x) + x @ self.experts[1]


KINDS = ["computes", "returns", "scales", "frozen"]


def stack(make_layer):
    return nn.ModuleList([make_layer() for _ in range(3)])


@pytest.mark.ranks(2, 3, timeout=90)
@every_level
@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize(("frozen", "kind_of_output"), [(False, None), (True, Output)])
def test_a_layer_of_which_a_rank_uses_no_parameter(ctx, level, use_checkpoint, frozen, kind_of_output):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), *stack(lambda: Conditional(kind_of_output)))
    plain[2].requires_grad_(not frozen)
    model = copy.deepcopy(plain)
    for index in range(1, 4):
        model[index] = Block(model[index], use_checkpoint, level)
    model = BMTrainModelWrapper(model, zero_level=level)

    def loss(model, rank, step):
        x = model[0](seeded(10 * step + rank, 3, 5))
        for index in range(3):
            x = model[index + 1](x, KINDS[(rank + (step >> index) * (index + 1)) % 4])
            x = x.hidden if kind_of_output else x
        return x.square().sum()

    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(8):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in range(ctx.world_size):
            loss(plain, rank, step).backward()
        loss(model, ctx.rank, step).backward()
        step_alike(plain, model, optimizers)


class Outer(nn.Module):
    def __init__(self, computes):
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.rand(5))
        self.computes = computes

    def forward(self, x, uses_scale):
        x = self.inner(torch.tanh(x))
        return x * self.scale if uses_scale else x * 2 if self.computes else x


@pytest.mark.ranks(2)
@every_level
@pytest.mark.parametrize("computes", [False, True])
def test_a_layer_around_another_of_which_a_rank_uses_no_parameter(ctx, level, computes):
    torch.manual_seed(0)
    plain = nn.ModuleList([Outer(computes) for _ in range(3)])
    model = copy.deepcopy(plain)
    for layer in model:
        layer.inner = Block(layer.inner, zero_level=level)
        shard(layer, level)

    def loss(layers, rank, step):
        x = seeded(rank, 3, 5)
        for index, layer in enumerate(layers):
            x = layer(x, (step + index * rank) % 3 != 1)
        return x.square().sum()

    for step in range(6):
        for rank in range(2):
            loss(plain, rank, step).backward()
        loss(model, ctx.rank, step).backward()
        assert_same_gradients(model, plain)
