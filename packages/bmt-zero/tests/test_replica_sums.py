"""verify_replicas: a parameter that differs on a rank is found, and the rank is named."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from block_helpers import seeded
from torch import nn

from bmt_comm import Communicator, broadcast_object, local_tensor
from bmt_zero import BMTrainModelWrapper, shard, verify_replicas


def model(level: int, dtype: torch.dtype = torch.float32, **options) -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(7, 5), nn.LayerNorm(5), nn.Linear(5, 3)).to(dtype)
    layers.register_parameter("number", nn.Parameter(torch.tensor(0.5, dtype=torch.float64)))
    layers.forward = lambda x: nn.Sequential.forward(layers, x) * layers.number
    return shard(layers, zero_level=level, **options)


def flip(param: torch.Tensor, element: int, bit: int) -> None:
    values = local_tensor(param).detach().reshape(-1)
    values.view(torch.uint8)[element * values.element_size() + bit // 8] ^= 1 << bit % 8


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_bit_on_one_rank_is_found(ctx, dtype):
    module = model(0, dtype)
    verify_replicas(module)
    bits = 8 * dtype.itemsize
    for name, element, bit in (("0.weight", 34, 0), ("0.weight", 0, bits - 1), ("1.bias", 4, 3), ("2.weight", 7, 9)):
        param = dict(module.named_parameters())[name]
        if ctx.rank == 2:
            flip(param, element, bit)
        with pytest.raises(RuntimeError, match=rf"differ between ranks .*: {name} on rank 2\."):
            verify_replicas(module)
        if ctx.rank == 2:
            flip(param, element, bit)
        verify_replicas(module)


@pytest.mark.ranks(2)
def test_of_two_ranks_both_are_named(ctx):
    module = model(0)
    if ctx.rank == 0:
        flip(module.number, 0, 40)
    with pytest.raises(RuntimeError, match=r"number on rank 0, 1\."):
        verify_replicas(module)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_ranks_with_different_rows_are_not_compared(ctx, level):
    module = model(level)
    verify_replicas(module)
    if level == 3 and ctx.world_size > 1:
        assert all(param.numel() for param in module.parameters())
        flip(max(module.parameters(), key=lambda p: local_tensor(p).numel()), 0, 1)
        verify_replicas(module)  # no other rank has this part


@pytest.mark.ranks(4)
def test_replicas_of_shards_are_compared(ctx):
    groups = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 1), (2, 3), (0, 2), (1, 3)]}
    shards, replicas = (groups[each] for each in ([(0, 1), (2, 3)][ctx.rank // 2], [(0, 2), (1, 3)][ctx.rank % 2]))
    module = model(3, shard_comm=Communicator(shards), replicate_comm=Communicator(replicas))
    verify_replicas(module)
    params = dict(module.named_parameters())
    name = max(params, key=lambda each: local_tensor(params[each]).numel())  # the same on both replicas
    name = broadcast_object(name, src=3)
    if ctx.rank == 3:
        flip(params[name], 0, 5)
    with pytest.raises(RuntimeError, match=rf"{name} on rank 1, 3\."):
        verify_replicas(module)


@pytest.mark.ranks(2)
def test_parameters_that_are_not_sharded_and_those_of_one_rank_only(ctx):
    module = nn.Module()
    module.common = nn.Parameter(seeded(0, 4, 3))
    if ctx.rank == 1:
        module.own = nn.Parameter(seeded(1, 2))
    verify_replicas(module)
    if ctx.rank == 1:
        module.common.data[0, 0] += 1
    with pytest.raises(RuntimeError, match=r"common on rank 0, 1\."):
        verify_replicas(module)


@pytest.mark.ranks(2)
def test_a_wrapped_model_after_training(ctx):
    wrapped = BMTrainModelWrapper(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for _ in range(3):
        wrapped(seeded(ctx.rank, 2, 4)).square().sum().backward()
        optimizer.step()
    verify_replicas(wrapped)
