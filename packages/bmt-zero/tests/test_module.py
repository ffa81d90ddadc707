"""DistributedModule and DistributedParameter outside of Blocks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from block_helpers import rows_of, seeded, space
from test_block_list import Counted
from torch import nn

from bmt_comm import DisagreementError, local_rows, slice_of
from bmt_zero import Block, DistributedModule, DistributedParameter, MixedPrecision


class Embedding(DistributedModule):
    def __init__(self, rows=9):
        super().__init__()
        self.weight = DistributedParameter(seeded(3, rows, 5))
        self.gain = DistributedParameter(torch.tensor(0.7))

    def forward(self, ids, projection=False):
        return F.linear(ids, self.weight) if projection else F.embedding(ids, self.weight) * self.gain


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("rows", [9, 3, 1])
def test_tied_use_sums_gradients(ctx, rows):
    module = Embedding(rows)
    weight, gain = seeded(3, rows, 5).requires_grad_(), torch.tensor(0.7, requires_grad=True)
    for rank in range(ctx.world_size):
        ids = torch.arange(rank, rank + 4) % rows
        F.linear(torch.tanh(F.embedding(ids, weight) * gain), weight).square().sum().backward()
    for _ in range(2):
        module.zero_grad()
        ids = torch.arange(ctx.rank, ctx.rank + 4) % rows
        module(torch.tanh(module(ids)), projection=True).square().sum().backward()
        for name, expected in [("weight", weight), ("gain", gain)]:
            param = module._parameters[name]
            torch.testing.assert_close(local_rows(param.grad), rows_of(expected.grad, param), rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(2)
def test_a_parameter_in_use_is_not_gathered_again(ctx):
    module = Embedding()
    del module.gain
    for step in range(2):
        with Counted() as counted:
            x = seeded(1, 3, 5).requires_grad_()
            (module(x, projection=True) + module(x * 2, projection=True)).sum().backward()
        assert +counted.calls == {"all_gather": 1, "reduce_scatter": 1}, step


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("shape", [(9, 5), (3, 2, 2), (1,), (), (0, 4), (5, 0)])
def test_gather_and_gather_all_give_the_unsharded_parameter(ctx, shape):
    value = seeded(1, *shape)
    param = DistributedParameter(value)
    where = slice_of(param)
    assert where.shape == shape
    assert param.shape == where.local_shape
    for unsharded in (param.gather(), param.gather_all()):
        assert torch.equal(unsharded, value)
    torch.testing.assert_close(param.tp_gather(), param.data)
    if value.numel():
        (param.gather() * seeded(2 + ctx.rank, *shape)).sum().backward()
        expected = sum(seeded(2 + rank, *shape) for rank in range(ctx.world_size))
        torch.testing.assert_close(local_rows(param.grad), rows_of(expected, param))


@pytest.mark.ranks(2)
def test_what_was_read_follows_the_optimizer(ctx):
    module = Embedding()
    weight = seeded(3, 9, 5)
    optimizer = torch.optim.SGD([module._parameters["weight"]], lr=0.1)
    for _ in range(3):
        assert torch.allclose(module.weight, weight)
        with torch.no_grad():
            assert torch.allclose(module.weight, weight)
        module.weight.square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        weight = weight - 0.1 * 2 * 2 * weight


@pytest.mark.ranks(2)
def test_a_distributed_module_becomes_part_of_a_block(ctx):
    module = Embedding()
    block = Block(module)
    weight = seeded(3, 9, 5).requires_grad_()
    expected = sum((F.embedding(torch.tensor([r, 4]), weight) * 0.7).square().sum() for r in range(2))
    expected.backward()
    for _ in range(2):
        block.zero_grad()
        block(torch.tensor([ctx.rank, 4])).square().sum().backward()
        param = dict(block.named_parameters())["weight"]
        torch.testing.assert_close(local_rows(param.grad), rows_of(weight.grad, param))
        assert space(block) == 0


@pytest.mark.ranks(2)
def test_values_written_into_a_parameter_of_the_meta_device_go_into_a_block(ctx):
    def layer():
        module = DistributedModule()
        module.weight = DistributedParameter(torch.empty(5, 3, device="meta"))
        return module

    block = Block(layer())
    assert block.weight.is_unfilled
    module = layer()
    with torch.no_grad():
        module.weight.fill_(2)
    assert torch.equal(Block(module).weight.full_tensor(), torch.full((5, 3), 2.0))
    module = layer()
    if ctx.rank:
        with torch.no_grad():
            module.weight.fill_(2)
    with pytest.raises(DisagreementError, match="on meta"):
        Block(module)


@pytest.mark.ranks(2)
def test_one_parameter_of_a_block_is_gathered_as_it_is_stored(ctx):
    linear = nn.Linear(5, 5)
    value = linear.weight.detach() * 1.0001
    linear.weight.data.copy_(value)
    block = Block(linear, precision=MixedPrecision(param_dtype=torch.bfloat16))
    with torch.no_grad():
        assert torch.equal(linear.weight.gather_all(), value)
    with Counted() as counted:
        block.state_dict()
    assert counted.calls["all_gather"] == 0  # only the rows of each parameter travel
    assert torch.equal(block.state_dict()["weight"], value)
