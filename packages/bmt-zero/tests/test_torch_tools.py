"""torch's tools on sharded parameters return the same as on the plain model, on every rank, or raise an error."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from block_helpers import pair, rows_of, seeded
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm

from bmt_comm import Communicator
from bmt_zero import Block, TransformerBlockList


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3))


def backward(ctx, plain: nn.Module, block: nn.Module, seed: int = 0) -> None:
    """The same gradients in both: ours are sums over the ranks."""
    batch = seeded(seed, 2 * ctx.world_size, 5).to(next(plain.parameters()).dtype)
    plain(batch).square().sum().backward()
    block(batch.chunk(ctx.world_size)[ctx.rank]).square().sum().backward()


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("foreach", [None, True, False])
def test_clipping_by_the_norm(ctx, level, foreach):
    for order in (2.0, 1.0, 3.0, math.inf):
        plain, block = pair(make, zero_level=level)
        backward(ctx, plain, block)
        expected = clip_grad_norm_(plain.parameters(), 0.1, order)
        total = get_total_norm([p.grad for p in block.parameters() if p.grad is not None], order, foreach=foreach)
        torch.testing.assert_close(total, expected)
        torch.testing.assert_close(clip_grad_norm_(block.parameters(), 0.1, order, foreach=foreach), expected)
        for name, param in block.named_parameters():
            torch.testing.assert_close(param.grad.add(0), rows_of(plain.get_parameter(name).grad, param), msg=name)


@pytest.mark.ranks(4)
def test_clipping_when_pairs_of_ranks_shard_and_pairs_replicate(ctx):
    groups = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 1), (2, 3), (0, 2), (1, 3)]}
    shard = next(group for ranks, group in groups.items() if ctx.rank in ranks and ranks in [(0, 1), (2, 3)])
    replicate = next(group for ranks, group in groups.items() if ctx.rank in ranks and ranks in [(0, 2), (1, 3)])
    plain, block = pair(make, shard_comm=Communicator(shard), replicate_comm=Communicator(replicate))
    backward(ctx, plain, block)
    torch.testing.assert_close(clip_grad_norm_(block.parameters(), 0.1), clip_grad_norm_(plain.parameters(), 0.1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize("overflow", [False, True])
def test_the_grad_scaler_skips_a_step_on_all_ranks_or_on_none(ctx, level, overflow):
    plain, block = pair(make, zero_level=level)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    batch = seeded(0, 4, 5)
    loss = block(batch.chunk(2)[ctx.rank]).square().sum()
    scaler.scale(loss).backward()
    if (overflow and ctx.rank == 1) or (overflow and level == 0):  # in rows that this rank alone has, at levels above 0
        next(p for p in block.parameters() if p.to_local().numel()).grad.mul_(math.inf)
    before = [p.detach().clone() for p in block.parameters()]
    scaler.step(optimizer)
    scaler.update()
    changed = any(not torch.equal(p.detach(), b) for p, b in zip(block.parameters(), before, strict=True))
    assert changed == (not overflow)
    assert scaler.get_scale() == (4.0 if overflow else 16.0)
    if not overflow:
        plain(batch).square().sum().backward()
        for name, param in block.named_parameters():
            wanted = plain.get_parameter(name)
            torch.testing.assert_close(param.detach(), rows_of((wanted - 0.1 * wanted.grad).detach(), param), msg=name)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("level", [0, 1, 3])
def test_hooks_of_parameters_see_and_change_the_reduced_gradient(ctx, level):
    plain, _ = pair(make)
    inner = copy.deepcopy(plain)
    calls: list[str] = []
    inner[0].weight.register_hook(lambda grad: calls.append("before sharding"))
    block = Block(inner, zero_level=level)
    model = TransformerBlockList([block])
    weight, bias = block[0].weight, block[2].bias
    doubled = weight.register_hook(lambda grad: grad * 2)
    bias.register_post_accumulate_grad_hook(lambda p: calls.append(f"after {p is bias} {p.grad is not None}"))
    plain[0].weight.register_hook(lambda grad: grad * 2)
    backward(ctx, plain, model)
    assert sorted(calls) == ["after True True", "before sharding"]
    torch.testing.assert_close(weight.grad.add(0), rows_of(plain[0].weight.grad, weight))
    doubled.remove()
    calls.clear()
    plain[0].weight._backward_hooks.clear()
    backward(ctx, plain, model, seed=1)
    assert sorted(calls) == ["after True True", "before sharding"]
    torch.testing.assert_close(weight.grad.add(0), rows_of(plain[0].weight.grad, weight))


@pytest.mark.ranks(2)
def test_an_optimizer_that_steps_in_backward(ctx):
    """As torch's tutorial has it: a post-accumulate hook steps, and drops the gradient."""
    plain, block = pair(make)
    for param in block.parameters():
        optimizer = torch.optim.SGD([param], lr=0.1)

        def step(param: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    for seed in range(3):
        backward(ctx, plain, block, seed)
        with torch.no_grad():
            for param in plain.parameters():
                param.sub_(0.1 * param.grad)
                param.grad = None
    for name, param in block.named_parameters():
        assert param.grad is None
        torch.testing.assert_close(param.detach(), rows_of(plain.get_parameter(name).detach(), param), msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon"])
def test_optimizers_of_logical_parameters_are_refused_where_parameters_are_sharded(ctx, level, name):
    if not hasattr(torch.optim, name):
        return  # this version of torch lacks it
    plain, block = pair(lambda: nn.Linear(5, 7, bias=False), zero_level=level)
    optimizers = [getattr(torch.optim, name)(m.parameters(), lr=0.01) for m in (plain, block)]
    backward(ctx, plain, block)
    if level == 0:
        for optimizer, model in zip(optimizers, (plain, block), strict=True):
            optimizer.step(*[lambda model=model: model.weight.detach().sum()] * (name == "LBFGS"))
        torch.testing.assert_close(block.weight.detach(), plain.weight.detach())
        return
    before = block.weight.detach().clone()
    with pytest.raises(TypeError, match=f"torch.optim.{name}"):
        optimizers[1].step(lambda: block(seeded(1, 2, 5)).sum())
    torch.testing.assert_close(block.weight.detach(), before)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_what_a_parameter_says_of_itself(ctx, level):
    plain, block = pair(make, zero_level=level)
    for name, param in block.named_parameters():
        wanted = plain.get_parameter(name)
        torch.testing.assert_close(param.full_tensor().detach(), wanted.detach())
        assert type(param.to_local()) is Tensor
        torch.testing.assert_close(param.to_local(), rows_of(wanted.detach(), param))
        assert param.to_local().data_ptr() == param.data_ptr()
        assert param.logical_shape == tuple(wanted.shape)
        assert param.device_mesh is ctx.mesh
        assert not hasattr(param, "placements")  # Shard(0) would promise other rows
        assert str(tuple(wanted.shape)) in repr(param)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_copies_of_parameters_and_models(ctx, level):
    plain, block = pair(make, zero_level=level)
    twin = copy.deepcopy(block[0].weight)
    model = copy.deepcopy(block)
    with torch.no_grad():
        for param in block.parameters():
            param.zero_()
    torch.testing.assert_close(twin.full_tensor().detach(), plain[0].weight.detach())
    backward(ctx, plain, model)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.full_tensor().detach(), plain.get_parameter(name).detach())
        torch.testing.assert_close(param.grad.add(0), rows_of(plain.get_parameter(name).grad, param))
    assert all(p.grad is None for p in block.parameters())
    assert repr(model) == repr(plain)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_models_in_another_dtype_or_on_another_device(ctx, level):
    plain, block = pair(make, zero_level=level)
    for arguments in [(torch.float64,), ("cpu",), (ctx.device, torch.float32)]:
        params = list(block.parameters())
        assert plain.to(*arguments) is plain
        assert block.to(*arguments) is block
        assert all(a is b for a, b in zip(params, block.parameters(), strict=True))
        dtype = plain[0].weight.dtype
        batch = seeded(0, 4, 5).to(dtype)
        for model in (plain, block):
            model.zero_grad()
        plain(batch).square().sum().backward()
        block(batch.chunk(2)[ctx.rank]).square().sum().backward()
        for name, param in block.named_parameters():
            wanted = plain.get_parameter(name)
            assert param.dtype == dtype == param.grad.dtype
            torch.testing.assert_close(param.full_tensor().detach(), wanted.detach())
            torch.testing.assert_close(param.grad.add(0), rows_of(wanted.grad, param))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_initializers_of_torch_fill_the_logical_parameter(ctx, level):
    plain, block = pair(make, zero_level=level)
    init = nn.init
    for fill in (
        init.normal_,
        init.kaiming_uniform_,
        lambda w: init.trunc_normal_(w, std=0.02),
        init.zeros_,
        lambda w: w.detach().mul_(0) if not hasattr(w, "full_tensor") else init.constant_(w, 0.0),
    ):
        torch.manual_seed(ctx.rank)  # ranks need not agree
        fill(block[0].weight)
        torch.manual_seed(0)
        fill(plain[0].weight)
        torch.testing.assert_close(block[0].weight.full_tensor().detach(), plain[0].weight.detach())
    for fill in (init.xavier_uniform_, init.orthogonal_, init.kaiming_normal_):
        if level == 0:
            fill(block[0].weight)
        elif len(block[0].weight):  # torch itself warns of an empty tensor, or divides by its rows
            with pytest.raises(RuntimeError, match="init_parameters"):
                fill(block[0].weight)
