"""Every tool of torch on every layout: what it gives on the plain model, or an error."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from block_helpers import pair, rows_of, seeded
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parameters_to_vector, parametrizations, vector_to_parameters
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bmt_comm import Communicator

LAYOUTS = [0, 1, 2, 3, "hybrid"]


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3))


def make_pair(ctx, layout, make=make) -> tuple[nn.Module, nn.Module]:
    if layout != "hybrid":
        return pair(make, zero_level=layout)
    groups = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 1), (2, 3), (0, 2), (1, 3)]}
    shard, replicate = (
        next(groups[ranks] for ranks in kinds if ctx.rank in ranks) for kinds in ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
    )
    return pair(make, shard_comm=Communicator(shard), replicate_comm=Communicator(replicate))


def backward(ctx, plain: nn.Module, block: nn.Module, seed: int = 0, factor: float | Tensor = 1.0) -> None:
    batch = seeded(seed, 2 * ctx.world_size, 5)
    (plain(batch).square().sum() * factor).backward()
    (block(batch.chunk(ctx.world_size)[ctx.rank]).square().sum() * factor).backward()


def assert_same(block: nn.Module, plain: nn.Module) -> None:
    for name, param in block.named_parameters():
        torch.testing.assert_close(param.full_tensor().detach(), plain.get_parameter(name).detach(), msg=name)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_clipping_and_optimizers(ctx, layout, cls):
    plain, block = make_pair(ctx, layout)
    optimizers = [cls(plain.parameters(), lr=0.01), cls(block.parameters(), lr=0.01)]
    for step in range(4):
        backward(ctx, plain, block, step)
        torch.testing.assert_close(clip_grad_norm_(block.parameters(), 0.1), clip_grad_norm_(plain.parameters(), 0.1))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(block, plain)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_grad_scaler(ctx, layout):
    plain, block = make_pair(ctx, layout)
    models = (plain, block)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) for _ in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        factors = [scaler.scale(torch.ones(())) for scaler in scalers]
        backward(ctx, plain, block, step, factors[0])
        if step == 1:  # one element, which one rank of a shard group has
            plain[0].weight.grad[0, 0] = float("inf")
            where = block[0].weight.bmt_slice
            if where.row_start == 0 and where.row_stop > 0:
                block[0].weight.grad[0, 0] = float("inf")
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_same(block, plain)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hooks_of_parameters(ctx, layout):
    plain, block = make_pair(ctx, layout)
    seen = []
    for model in (plain, block):
        model[2].weight.register_hook(lambda grad: grad * 2)
        model[2].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param))
    backward(ctx, plain, block)
    assert [id(param) for param in seen] == [id(plain[2].weight), id(block[2].weight)]
    for name, param in block.named_parameters():
        torch.testing.assert_close(param.grad.add(0), rows_of(plain.get_parameter(name).grad, param), msg=name)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vectors_of_parameters(ctx, layout):
    plain, block = make_pair(ctx, layout)
    vector = parameters_to_vector(plain.parameters()).detach()
    torch.testing.assert_close(parameters_to_vector(block.parameters()).detach(), vector)
    if layout != 0:  # without gradients it would be a view, of a gathered copy
        with torch.no_grad(), pytest.raises(RuntimeError, match="full_tensor"):
            parameters_to_vector(block.parameters())
    for model in (plain, block):
        vector_to_parameters(vector * 2, model.parameters())
    assert_same(block, plain)
    backward(ctx, plain, block)
    torch.optim.SGD(block.parameters(), lr=0.01).step()
    torch.optim.SGD(plain.parameters(), lr=0.01).step()
    assert_same(block, plain)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_averages_of_models(ctx, layout):
    plain, block = make_pair(ctx, layout)
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for model in (plain, block)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, block)]
    for step in range(4):
        backward(ctx, plain, block, step)
        for optimizer, average, model in zip(optimizers, averages, (plain, block), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    assert_same(averages[1], averages[0])
    with torch.no_grad():
        batch = seeded(9, 2, 5)
        torch.testing.assert_close(averages[1](batch), averages[0](batch))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_parameters_and_models_say_and_their_copies(ctx, layout):
    plain, block = make_pair(ctx, layout)
    assert_same(copy.deepcopy(block), plain)
    for name, param in block.named_parameters():
        wanted = plain.get_parameter(name)
        assert param.logical_shape == tuple(wanted.shape)
        torch.testing.assert_close(param.to_local(), rows_of(wanted.detach(), param))
    if ctx.rank == 0:  # alone: nothing of this communicates
        assert repr(block) == repr(plain)
        for param in block.parameters():
            str(param), hash(param), hasattr(param, "placements"), param.shape, param.dtype, param.numel(), param.grad


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_normalisation_comes_before_sharding(ctx, layout):
    def make_normalised() -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 7)), nn.Linear(7, 3))

    plain, block = make_pair(ctx, layout, make_normalised)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, block)]
    for step in range(3):
        backward(ctx, plain, block, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(block, plain)
    with pytest.raises(RuntimeError, match="ShardedParameter"):
        parametrizations.weight_norm(block[1])
