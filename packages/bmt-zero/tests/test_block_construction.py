"""Modules that can become Blocks, errors for others, and the ranks that share a Block."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from block_helpers import assert_same_gradients, seeded, space
from torch import nn

from bmt_comm import Communicator, shutdown
from bmt_zero import Block, BMTrainModelWrapper, DistributedModule, DistributedParameter, MixedPrecision


def unchanged(module):
    return all(type(p) is nn.Parameter for p in module.parameters())


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"zero_level": 4}, "zero_level=4"),
        ({"zero_level": "3"}, "zero_level='3'"),
        ({"mode": "STAGE"}, "mode='STAGE'"),
        ({"shard_comm": Communicator(None, "cpu")}, "given together"),
    ],
)
def test_bad_options(ctx, options, message):
    module = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=message):
        Block(module, **options)
    assert unchanged(module)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("what", [None, "layer", nn.Linear, torch.zeros(3)])
def test_what_is_no_module(ctx, what):
    with pytest.raises(TypeError, match="inner_module must be a torch"):
        Block(what)


@pytest.mark.ranks(1, 2)
def test_a_block_in_a_block(ctx):
    inner = Block(nn.Linear(3, 3))
    with pytest.raises(ValueError, match="only one level"):
        Block(inner)
    outer = nn.Sequential(nn.Linear(3, 3), inner)
    with pytest.raises(ValueError, match="its part '1'"):
        Block(outer)
    assert unchanged(outer[0])


@pytest.mark.ranks(1, 2)
def test_a_parameter_in_two_blocks(ctx):
    first, second = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))
    second[0].weight = first.weight
    Block(first)
    with pytest.raises(ValueError, match=r"'0.weight'.*another Block"):
        Block(second)
    assert type(second[0].bias) is nn.Parameter


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_sharded(ctx):
    module = nn.Sequential(nn.Linear(3, 3), nn.Module())
    module[1].phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"'1\.phase'"):
        Block(module)
    assert unchanged(module)


@pytest.mark.ranks(1)
def test_before_init_distributed(ctx):
    shutdown()
    with pytest.raises(RuntimeError, match="init_distributed"):
        Block(nn.Linear(3, 3))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("difference", ["shape", "dtype", "frozen", "missing", "meta", "level"])
def test_ranks_that_built_different_modules(ctx, difference):
    odd = ctx.rank == ctx.world_size - 1
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4 if odd and difference == "shape" else 3))
    if odd and difference == "dtype":
        module[1].bfloat16()
    if odd and difference == "frozen":
        module[1].weight.requires_grad_(False)
    if odd and difference == "missing":
        del module[1]
    if odd and difference == "meta":
        module[1].to("meta")
    before = [id(p) for p in module.parameters()]
    with pytest.raises(RuntimeError, match="level" if difference == "level" else r"1\.weight"):
        Block(module, zero_level=2 if odd and difference == "level" else 3)
    assert unchanged(module)
    assert [id(p) for p in module.parameters()] == before


@pytest.mark.ranks(2)
def test_parameters_take_the_values_of_rank_0(ctx):
    torch.manual_seed(ctx.rank)
    block = Block(nn.Linear(5, 5))
    torch.manual_seed(0)
    expected = nn.Linear(5, 5)
    torch.testing.assert_close(block(seeded(0, 3, 5)), expected(seeded(0, 3, 5)))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("precision", [None, MixedPrecision(reduce_dtype=torch.float64)])
def test_sharding_in_pairs_and_replicating_over_them(ctx, level, precision):
    groups = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 1), (2, 3), (0, 2), (1, 3)]}
    shard = next(g for r, g in groups.items() if ctx.rank in r and r in [(0, 1), (2, 3)])
    replicate = next(g for r, g in groups.items() if ctx.rank in r and r in [(0, 2), (1, 3)])
    torch.manual_seed(ctx.rank)  # values are rank 0's
    block = Block(
        nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)),
        zero_level=level,
        precision=precision,
        shard_comm=Communicator(shard),
        replicate_comm=Communicator(replicate),
    )
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (block, plain)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in range(4):
            plain(seeded(step + rank, 3, 5)).square().mean().backward()
        block(seeded(step + ctx.rank, 3, 5)).square().mean().backward()
        assert_same_gradients(block, plain)
        for optimizer in optimizers:
            optimizer.step()
    assert sum(p.data.numel() for p in block.parameters()) < sum(p.numel() for p in plain.parameters())
    if level > 1:
        assert space(block) == 0
    twin = copy.deepcopy(block)
    torch.testing.assert_close(twin(seeded(0, 3, 5)), plain(seeded(0, 3, 5)))


class Standalone(DistributedModule):
    def __init__(self, rows):
        super().__init__()
        self.weight = DistributedParameter(torch.full((rows, 4), 7.0))
        self.bias = DistributedParameter(torch.full((4,), 7.0))

    def forward(self, x):
        return x @ self.weight.t()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("rows", [4, 1])
@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("wrapper", [False, True])
def test_what_was_written_into_data_before_is_kept(ctx, rows, level, wrapper):
    module = Standalone(rows)
    own = module.weight.bmt_slice
    values = torch.arange(4.0 * rows).view(rows, 4)
    module.weight.data.copy_(values[own.row_start : own.row_stop])
    module.bias.data.zero_()
    if wrapper:
        model = nn.ModuleList([module, Standalone(rows)])
        BMTrainModelWrapper(model, zero_level=level)
    else:
        Block(module, zero_level=level)
    assert torch.equal(module.weight.full_tensor(), values)
    assert not module.bias.full_tensor().any()
    assert torch.equal(module(torch.ones(1, 4)), values.sum(1)[None])
