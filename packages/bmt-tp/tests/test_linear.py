import math

import pytest
import torch
from torch import nn

from bmt_tp import Linear


def reference_and_layer(bias=True, dtype=None):
    torch.manual_seed(0)
    reference = nn.Linear(7, 5, bias=bias, dtype=dtype)
    layer = Linear(7, 5, bias=bias, dtype=dtype)
    layer.load_state_dict(reference.state_dict())
    return reference, layer


@pytest.mark.ranks(1)
@pytest.mark.parametrize("bias", [True, False])
def test_training_is_that_of_torch_linear_on_the_whole_batch(ctx, bias):
    reference, layer = reference_and_layer(bias)
    start = {name: value.cpu().clone() for name, value in reference.state_dict().items()}
    for model in (reference, layer):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(10):
            batch = torch.randn(2, 6, 7, generator=torch.Generator().manual_seed(step)).to(ctx.device)
            mine = batch[:, ctx.rank :: ctx.world_size] if model is layer else batch
            # Gradients are summed over the ranks, so each rank computes its part of the batch's mean.
            (model.to(ctx.device)(mine).square().sum() / batch.numel()).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, value in layer.state_dict().items():
        update = value.cpu() - start[name]
        expected = reference.state_dict()[name].cpu() - start[name]
        assert (update - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16])
def test_state_dicts_go_both_ways(ctx, dtype):
    reference, layer = reference_and_layer(dtype=dtype)
    state = layer.state_dict()
    assert state.keys() == reference.state_dict().keys()
    for name, value in reference.state_dict().items():
        assert state[name].dtype == value.dtype
        assert torch.equal(state[name].cpu(), value.cpu())
    reference.load_state_dict(state)


@pytest.mark.ranks(1)
def test_initial_values_are_uniform_in_the_range_of_torch_linear(ctx):
    layer = Linear(100, 200)
    bound = 1 / math.sqrt(100)
    for value in layer.state_dict().values():
        assert value.abs().max() <= bound
        assert value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert repr(layer) == "Linear(in_features=100, out_features=200, bias=True)"
    assert repr(Linear(3, 2, bias=False)) == "Linear(in_features=3, out_features=2, bias=False)"


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 3), "in_features=0 must be a positive"), ((3, -1), "out_features=-1"), ((3, 2.0), "out_features=2.0")],
)
def test_wrong_sizes_are_named(ctx, arguments, message):
    with pytest.raises(ValueError, match=message):
        Linear(*arguments)


@pytest.mark.ranks(1)
def test_an_integer_dtype_is_refused(ctx):
    with pytest.raises(TypeError, match=r"torch\.int64 cannot be trained"):
        Linear(3, 2, dtype=torch.int64)
