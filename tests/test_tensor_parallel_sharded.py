"""Linear layers of bmt_tp whose parameters bmt_zero shards."""

import math

import pytest
import torch
from torch import nn

from bmt_tp import Linear
from bmt_zero import Block, init_parameters


def reference_and_layer(bias=True, dtype=None):
    torch.manual_seed(0)
    reference = nn.Linear(7, 5, bias=bias, dtype=dtype)
    layer = Linear(7, 5, bias=bias, dtype=dtype)
    layer.load_state_dict(reference.state_dict())
    return reference, layer


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("bias", [True, False])
def test_training_is_that_of_torch_linear_on_the_whole_batch(ctx, bias):
    reference, layer = reference_and_layer(bias)
    start = {name: value.clone() for name, value in reference.state_dict().items()}
    for model in (reference, layer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(10):
            batch = torch.randn(2, 6, 7, generator=torch.Generator().manual_seed(step)).to(ctx.device)
            mine = batch[:, ctx.rank :: ctx.world_size] if model is layer else batch
            # Gradients of the ranks are summed; each rank's part of the mean makes them the whole batch's.
            (model.to(ctx.device)(mine).square().sum() / batch.numel()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in layer.state_dict().items():
        update = value.cpu() - start[name]
        expected = reference.state_dict()[name].cpu() - start[name]
        assert (update - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.ranks(2)
def test_each_rank_stores_its_rows(ctx):
    weight = Linear(7, 6)._parameters["weight"]
    assert weight.shape == (3, 7)


@pytest.mark.ranks(1, 2)
def test_a_layer_without_values_gets_them_from_init_parameters(ctx):
    with torch.device("meta"):
        layer = Linear(100, 200)
    init_parameters(layer)
    bound = 1 / math.sqrt(100)
    for value in layer.state_dict().values():
        assert value.abs().max() <= bound
        assert value.std() == pytest.approx(bound / math.sqrt(3), rel=0.1)
        assert torch.equal(ctx.world.broadcast_object(value), value)


@pytest.mark.ranks(2)
def test_it_works_in_a_block(ctx):
    reference, layer = reference_and_layer()
    block = Block(layer)
    x = torch.randn(3, 7)
    torch.testing.assert_close(block(x.to(ctx.device)).cpu(), reference(x))
    block(x.to(ctx.device)).sum().backward()
    reference(x).sum().backward()
    weight = block._parameters["weight"]
    found = weight.bmt_slice
    expected = 2 * reference.weight.grad[found.row_start : found.row_stop]  # the same x on both ranks
    torch.testing.assert_close(weight.grad.cpu(), expected)
