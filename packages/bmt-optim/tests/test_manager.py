"""OptimManager: loss scale, overflow, clipping, any optimizers and schedulers, and their state."""

import contextlib
import copy
import io
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bmt_comm import Slice, local_tensor
from bmt_optim import AdamOptimizer, AdamW, Lamb, OptimManager
from bmt_optim.lr_scheduler import Linear, Noam

NORMS = [2, 1, 3, 0.5, math.inf, "inf"]


def param(*values, dtype=torch.float32, grad=True):
    p = nn.Parameter(torch.tensor(values, dtype=dtype))
    if grad:
        p.grad = torch.ones_like(p)
    return p


def test_a_context_is_needed():
    with pytest.raises(RuntimeError, match="init_distributed"):
        OptimManager()


@pytest.mark.ranks(1)
def test_settings_out_of_range_are_named(ctx):
    for settings, message in (
        ({"loss_scale_factor": 0.5}, "loss_scale_factor"),
        ({"loss_scale_factor": float("nan")}, "loss_scale_factor"),
        ({"loss_scale_steps": 0}, "loss_scale_steps"),
        ({"min_loss_scale": 0}, "min_loss_scale"),
        ({"min_loss_scale": 8, "max_loss_scale": 4}, "max_loss_scale"),
        ({"loss_scale": 64, "max_loss_scale": 32}, "loss_scale=64"),
        ({"grad_scale": 0}, "grad_scale"),
        ({"loss_scale": 64, "skip_non_finite": False}, "skip_non_finite"),
        ({"max_skipped_steps": -1}, "max_skipped_steps"),
    ):
        with pytest.raises(ValueError, match=message):
            OptimManager(**settings)


# --- loss and gradient scale --------------------------------------------------------------------------------------


@pytest.mark.ranks(1, 2)
def test_the_loss_is_multiplied_by_the_loss_scale_and_divided_by_the_replicas(ctx):
    for loss_scale, grad_scale in ((None, None), (1024, None), (8, 4)):
        manager = OptimManager(loss_scale=loss_scale, grad_scale=grad_scale)
        expected = (loss_scale or 1) / (grad_scale or ctx.world_size)
        assert manager.scale_loss(torch.tensor(3.0)).item() == 3 * expected
        p = param(2.0, grad=False)
        manager.backward((p**2).sum())
        assert p.grad.item() == 4 * expected


def sharded_by_bmt_zero(model):
    bmt_zero = pytest.importorskip("bmt_zero")
    return bmt_zero.BMTrainModelWrapper(model)


def fully_sharded_by_bmt_zero(model):
    return pytest.importorskip("bmt_zero").fully_shard(model)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wrap", [sharded_by_bmt_zero, fully_sharded_by_bmt_zero, fully_shard, DistributedDataParallel])
def test_gradients_are_means_whoever_reduces_them(ctx, wrap):
    def made():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 5))

    is_ddp = wrap is DistributedDataParallel
    model, plain = wrap(made()), made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    manager = OptimManager(grad_scale=1 if is_ddp else None)
    manager.add_optimizer(optimizer)
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(2))
    manager.backward(model(x[2 * ctx.rank :][:2]).square().mean())
    plain(x).square().mean().backward()
    norm = manager.clip_grad_norm(optimizer.param_groups, 1e9)
    assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item(), rel=1e-5)
    if is_ddp:
        manager = OptimManager()
        manager.add_optimizer(optimizer)
        with pytest.raises(ValueError, match=r"Pass grad_scale=1 if they are averaged"):
            manager.scale_loss(torch.ones(()))
        manager.grad_scale = 2
        assert manager.scale_loss(torch.ones(())) == 0.5


@pytest.mark.ranks(2)
def test_sums_and_means_are_not_mixed(ctx):
    bmt_zero = pytest.importorskip("bmt_zero")
    models = bmt_zero.BMTrainModelWrapper(nn.Linear(3, 3)), fully_shard(nn.Linear(3, 3))
    manager = OptimManager()
    manager.add_optimizer(torch.optim.SGD([p for model in models for p in model.parameters()], lr=0.1))
    with pytest.raises(ValueError, match="shard all by one of them"):
        manager.backward(torch.ones((), requires_grad=True))


@pytest.mark.ranks(1)
def test_gradients_of_complex_parameters_are_clipped(ctx):
    start = torch.randn(3, 2, dtype=torch.complex64)
    params = [nn.Parameter(start.clone()) for _ in range(2)]
    for p in params:
        p.grad = 3 * start.conj()
    manager = OptimManager(loss_scale=1)
    manager.add_optimizer(torch.optim.AdamW([params[0]]))
    norms = [manager.clip_grad_norm([params[0]], 1.0), nn.utils.clip_grad_norm_([params[1]], 1.0)]
    assert norms[0].item() == pytest.approx(norms[1].item())
    torch.testing.assert_close(params[0].grad, params[1].grad)
    assert manager.step()
    with pytest.raises(ValueError, match="complex"):
        manager.clip_grad_norm([params[0]], 1.0, norm_type=3)


@pytest.mark.ranks(2, tp_size=2)
def test_tensor_parallel_ranks_are_one_replica(ctx):
    assert OptimManager().scale_loss(torch.tensor(3.0)).item() == 3


@pytest.mark.ranks(1)
def test_a_scheduler_whose_step_needs_a_metric_is_refused(ctx):
    manager, optimizer = OptimManager(), torch.optim.SGD([param(1.0)], lr=0.1)
    with pytest.raises(ValueError, match="a step of ReduceLROnPlateau needs a metric"):
        manager.add_optimizer(optimizer, torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer))
    assert not manager.optimizers


@pytest.mark.ranks(1)
def test_zero_grad_keeps_the_gradients(ctx):
    a, b = param(1.0), param(2.0)
    manager = OptimManager()
    manager.add_optimizer(AdamOptimizer([a]))
    manager.add_optimizer(torch.optim.SGD([b], lr=0.1))
    grads = a.grad, b.grad
    manager.zero_grad()
    assert (a.grad, b.grad) == grads == (0, 0)
    assert a.grad is grads[0]
    assert b.grad is grads[1]


@pytest.mark.ranks(1)
def test_without_a_loss_scale_nothing_looks_for_overflow(ctx):
    p = param(1.0)
    p.grad.fill_(math.nan)
    manager = OptimManager()
    manager.add_optimizer(torch.optim.SGD([p], lr=0.1))
    manager.step()
    assert manager.loss_scale == 1
    assert p.isnan()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_an_overflow_on_any_rank_in_any_dtype_skips_the_step_on_all(ctx, dtype, bad):
    ours, foreign = param(1.0, 2.0), param(*[1.0] * 70, dtype=dtype)
    optimizers = AdamOptimizer([ours], lr=0.1), torch.optim.SGD([foreign], lr=0.1)
    schedulers = Noam(optimizers[0], 0.1, 2, 10), torch.optim.lr_scheduler.StepLR(optimizers[1], 1, 0.5)
    manager = OptimManager(loss_scale=64, loss_scale_factor=4)
    for pair in zip(optimizers, schedulers):
        manager.add_optimizer(*pair)
    if ctx.rank == ctx.world_size - 1:
        foreign.grad[67] = bad
    with contextlib.redirect_stdout(io.StringIO()) as said:
        manager.step()
    assert manager.loss_scale == 16
    assert ours.tolist() == [1, 2]
    assert (foreign == 1).all()
    assert ours.grad.count_nonzero() == foreign.grad.count_nonzero() == 0
    assert schedulers[0].num_iter == schedulers[1].last_epoch == 0
    assert ("64 -> 16" in said.getvalue()) == (ctx.rank == 0)
    ours.grad.fill_(1)
    manager.step()
    assert (ours == torch.tensor([1.0, 2.0])).all()  # the rate of iteration 0 is 0
    assert optimizers[0].state[ours]["step"] == 1
    assert schedulers[0].num_iter == schedulers[1].last_epoch == 1
    assert manager.loss_scale == 16


@pytest.mark.ranks(2)
def test_an_overflow_in_a_shard_that_others_do_not_hold_or_without_gradient(ctx):
    ranks_with_gradient = [param(1.0, grad=ctx.rank == 1)]
    manager = OptimManager(loss_scale=64)
    manager.add_optimizer(AdamOptimizer(ranks_with_gradient))
    if ctx.rank == 1:
        ranks_with_gradient[0].grad.fill_(math.inf)
    manager.step()
    assert manager.loss_scale == 32
    assert ranks_with_gradient[0].item() == 1


@pytest.mark.ranks(1)
def test_the_scale_falls_to_its_minimum_and_grows_to_its_maximum_after_good_steps_in_a_row(ctx):
    p = param(1.0)
    manager = OptimManager(loss_scale=8, loss_scale_steps=3, min_loss_scale=3, max_loss_scale=20)
    manager.add_optimizer(torch.optim.SGD([p], lr=0.0))

    def step(good=True):
        p.grad = torch.full_like(p, 1.0 if good else math.inf)
        manager.step()
        return manager.loss_scale

    assert [step(False) for _ in range(3)] == [4, 3, 3]
    assert [step() for _ in range(3)] == [3, 3, 6]
    assert [step(), step(), step(False)] == [6, 6, 3]
    assert [step() for _ in range(12)] == [3, 3, 6, 6, 6, 12, 12, 12, 20, 20, 20, 20]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("clips", [False, True])
def test_without_a_loss_scale_all_ranks_skip_what_is_not_finite_on_one(ctx, clips):
    p, q = param(1.0), param(1.0)
    optimizer = AdamOptimizer([p], lr=0.1)
    manager = OptimManager(skip_non_finite=True)
    manager.add_optimizer(optimizer, Noam(optimizer, 0.1, 2, 10))
    manager.add_optimizer(torch.optim.SGD([q], lr=0.5))
    if ctx.rank == ctx.world_size - 1:
        q.grad.fill_(math.nan)
    if clips:
        manager.clip_grad_norm([p, q], 1.0)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert manager.step() is False
    assert ("step skipped" in said.getvalue()) == (ctx.rank == 0)
    assert (p.item(), q.item(), p.grad.item(), q.grad.item()) == (1, 1, 0, 0)
    assert (manager.loss_scale, manager.skipped_steps) == (1, 1)
    q.grad.fill_(1)
    assert manager.step() is True
    assert (q.item(), manager.skipped_steps) == (0.5, 0)


@pytest.mark.ranks(1)
@pytest.mark.parametrize(("saved", "own", "loaded"), [(None, 1024, 1024), (512, None, 1), (512, 1024, 512)])
def test_a_state_does_not_switch_the_loss_scale_on_or_off(ctx, saved, own, loaded):
    state, manager = OptimManager(loss_scale=saved).state_dict(), OptimManager(loss_scale=own)
    manager.load_state_dict(state)
    assert (manager.loss_scale, manager.loss_scale_enabled) == (loaded, own is not None)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("loss_scale", [None, 64.0])
def test_a_rank_rejects_the_step_of_all(ctx, loss_scale):
    p = param(1.0)
    manager = OptimManager(loss_scale=loss_scale, skip_non_finite=True)
    manager.add_optimizer(torch.optim.SGD([p], lr=0.5))
    if ctx.rank == ctx.world_size - 1:
        manager.reject_step("the loss is 99")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert manager.step() is False
    assert (f"Rank {ctx.rank}: the loss is 99" in said.getvalue()) == (ctx.rank == ctx.world_size - 1)
    assert p.item() == 1
    p.grad.fill_(manager.loss_scale)
    assert manager.step() is True
    assert p.item() == 0.5
    with pytest.raises(RuntimeError, match="skip_non_finite=True"):
        OptimManager().reject_step("")


@pytest.mark.ranks(1, 2)
def test_too_many_skipped_steps_in_a_row_end_training_on_all_ranks(ctx):
    p = param(1.0)
    manager = OptimManager(loss_scale=4, max_skipped_steps=3)
    manager.add_optimizer(torch.optim.SGD([p], lr=0.5))

    def step(good):
        p.grad.fill_(math.inf if ctx.rank == 0 and not good else 1)
        return manager.step()

    assert [step(good) for good in (False, False, False, True, False, False, False)] == [False] * 3 + [True] + [
        False
    ] * 3
    with pytest.raises(RuntimeError, match="4 steps in a row had gradients that are not finite"):
        step(False)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("loss_scale", [None, 2.0**10])
def test_any_optimizer_sees_the_unscaled_gradient(ctx, loss_scale):
    def quadratic(p):
        return ((p - 3) ** 2).sum()

    factories = [
        lambda ps: AdamOptimizer(ps, lr=0.1),
        lambda ps: torch.optim.SGD(ps, lr=0.1),
        lambda ps: torch.optim.Adagrad(ps, lr=0.1),
    ]
    managed, plain = ([param(1.0, -2.0, grad=False) for _ in factories] for _ in range(2))
    manager = OptimManager(loss_scale=loss_scale)
    for make, p in zip(factories, managed):
        manager.add_optimizer(make([p]))
    alone = [make([p]) for make, p in zip(factories, plain)]
    for _ in range(5):
        manager.zero_grad()
        manager.backward(sum(quadratic(p) for p in managed))
        manager.step()
        for optimizer, p in zip(alone, plain):
            optimizer.zero_grad()
            quadratic(p).backward()
            optimizer.step()
    for p, q in zip(managed, plain):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


# --- clipping -----------------------------------------------------------------------------------------------------


def sharded(full, comm, start, stop, **more):
    p = nn.Parameter(torch.zeros(stop - start, *full.shape[1:]))
    p.bmt_slice = Slice(tuple(full.shape), start, stop, comm, **more)
    p.grad = full[start:stop].clone()
    return p


def gradients():
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator) for shape in ((7, 3), (1, 4), (5,), (4, 6))]


def clipped_by_torch(grads, max_norm, norm_type):
    params = [nn.Parameter(torch.zeros_like(g)) for g in grads]
    for p, g in zip(params, grads):
        p.grad = g.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, float(norm_type))
    return norm, [p.grad for p in params]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("max_norm", [0.3, 1e4])
def test_every_logical_element_counts_once_whether_sharded_empty_or_replicated(ctx, norm_type, max_norm):
    full = gradients()
    scale = 256.0
    expected, clipped = clipped_by_torch(full, max_norm, norm_type)
    params, parts = [], []
    for i, g in enumerate(full):
        n = g.shape[0]
        if i == 2:  # replicated
            start, stop = 0, n
            params.append(param(*[0.0] * n))
            params[-1].grad = g * scale
        else:  # ragged shards; the one row of [1] leaves other ranks empty
            start, stop = n * ctx.rank // ctx.world_size, n * (ctx.rank + 1) // ctx.world_size
            params.append(sharded(g * scale, ctx.world, start, stop))
            if start == stop:
                params[-1].grad = None
        parts.append((start, stop))
    manager = OptimManager(loss_scale=scale)
    optimizer = torch.optim.SGD(params, lr=0.1)
    manager.add_optimizer(optimizer)
    for argument in (optimizer.param_groups, params, iter(params)):
        norm = manager.clip_grad_norm(argument, math.inf, norm_type)
        assert norm.shape == ()
        torch.testing.assert_close(norm, expected.to(norm), rtol=1e-5, atol=1e-6)
    manager.clip_grad_norm(params, max_norm, norm_type)
    for p, g, (start, stop) in zip(params, clipped, parts):
        if p.grad is not None:
            torch.testing.assert_close(p.grad / scale, g[start:stop], rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2, tp_size=2)
@pytest.mark.parametrize("norm_type", [2, 1, math.inf])
def test_tensor_parallel_shards_and_parameters_that_tensor_ranks_share(ctx, norm_type):
    full = gradients()
    expected, _ = clipped_by_torch(full, 1.0, norm_type)
    columns = sharded(full[0][:, [0, 1] if ctx.tp_rank == 0 else [2]], None, 0, 7)
    columns.bmt_slice = Slice((7, 3), 0, 7, ctx.tp_zero, 1, *((0, 2) if ctx.tp_rank == 0 else (2, 1)), ctx.tp)
    over_tensor_ranks = sharded(full[3], ctx.zero, 0 if ctx.tp_rank == 0 else 1, 1 if ctx.tp_rank == 0 else 4)
    replicas = [sharded(full[i], None, 0, full[i].shape[0]) for i in (1, 2)]
    norm = OptimManager().clip_grad_norm([columns, over_tensor_ranks, *replicas], 1.0, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.ranks(2, pipe_size=2)
@pytest.mark.parametrize("norm_type", [2, math.inf])
def test_stages_add_their_own_parameters_and_share_the_others(ctx, norm_type):
    full = gradients()
    expected, _ = clipped_by_torch(full, 1.0, norm_type)
    mine = [sharded(full[i], ctx.zero, 0, full[i].shape[0]) for i in ((0,) if ctx.pipe_rank == 0 else (1, 2))]
    half = slice(0, 2) if ctx.rank == 0 else slice(2, 4)
    shared = sharded(full[3], ctx.outer_zero, half.start, half.stop)
    norm = OptimManager().clip_grad_norm([*mine, shared], 1.0, norm_type)
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-6)
    for p in mine:  # a replica says itself whose it is
        p.bmt_slice = Slice(p.bmt_slice.shape, 0, p.shape[0])
        p.bmt_stage_local = True
    for p, whose in zip([*mine, shared], [full[i] for i in ((0,) if ctx.pipe_rank == 0 else (1, 2))] + [full[3][half]]):
        p.grad.copy_(whose)
    torch.testing.assert_close(
        OptimManager().clip_grad_norm([*mine, shared], 1.0, norm_type), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.ranks(2, 3, init=False)
def test_dtensors_of_fsdp2_are_clipped_as_unsharded_parameters():
    import bmt_comm

    ctx = bmt_comm.init_distributed()
    torch.manual_seed(0)
    layers = [nn.Linear(5, 7) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    fully_shard(layers[1])
    x = torch.randn(ctx.world_size * 2, 5)
    layers[0](x).pow(2).mean().backward()
    layers[1](x[ctx.rank * 2 : ctx.rank * 2 + 2]).pow(2).mean().backward()
    expected = torch.nn.utils.clip_grad_norm_(layers[0].parameters(), 0.1)
    norm = OptimManager().clip_grad_norm(layers[1].parameters(), 0.1)
    torch.testing.assert_close(norm, expected)
    for p, q in zip(layers[1].parameters(), layers[0].parameters()):
        start = p.bmt_slice.row_start if hasattr(p, "bmt_slice") else -(-q.shape[0] // ctx.world_size) * ctx.rank
        mine = local_tensor(p.grad)
        torch.testing.assert_close(mine, q.grad[start : start + len(mine)])
    dist.barrier()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_gradients_have_their_norm_and_their_factor_in_fp32(ctx, dtype):
    p = nn.Parameter(torch.zeros(4000, dtype=dtype))
    p.grad = torch.linspace(1, 2000, 4000).to(dtype)
    exact = p.grad.float().norm()
    before = p.grad.clone()
    assert exact > torch.finfo(torch.float16).max
    manager = OptimManager(loss_scale=1024)
    norm = manager.clip_grad_norm([p], 1.0)
    torch.testing.assert_close(norm, exact / 1024)
    # A factor rounded to half precision would shift every element the same way.
    assert torch.equal(p.grad, (before.float() * (1.0 / (norm.double() + 1e-6)).float()).to(dtype))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("norm_type", [2, math.inf, 3])
@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_an_overflow_is_still_seen_after_clipping(ctx, norm_type, bad):
    p, q = sharded(torch.ones(2 * ctx.world_size), ctx.world, 2 * ctx.rank, 2 * ctx.rank + 2), param(3.0)
    manager = OptimManager(loss_scale=64)
    manager.add_optimizer(AdamOptimizer([p, q]))
    if ctx.rank == 0:
        p.grad[1] = bad
    norm = manager.clip_grad_norm([p, q], 1.0, norm_type)
    assert not torch.isfinite(norm)
    assert q.grad.item() == 1, "other gradients stay as they are"
    manager.step()
    assert manager.loss_scale == 32
    assert p.count_nonzero() == 0
    assert q.item() == 3


@pytest.mark.ranks(2)
def test_ranks_agree_on_the_step_even_where_replicas_do_not(ctx):
    p = param(1.0, 2.0)
    manager = OptimManager(loss_scale=64)
    manager.add_optimizer(AdamOptimizer([p]))
    if ctx.rank == 1:
        p.grad.fill_(3e38)  # finite; their sum, the 1-norm, is not
    manager.clip_grad_norm([p], 1.0, 1)
    manager.step()
    assert manager.loss_scale == 32
    assert p.tolist() == [1, 2]


@pytest.mark.ranks(1)
def test_a_norm_out_of_range_over_finite_gradients_is_an_overflow_once(ctx):
    p = param(1.0, 2.0)
    manager = OptimManager(loss_scale=64)
    manager.add_optimizer(AdamOptimizer([p], lr=0.5))
    p.grad.fill_(3e38)
    manager.clip_grad_norm([p], 1.0, 1)
    assert p.grad.tolist() == torch.full((2,), 3e38).tolist()
    manager.step()
    assert manager.loss_scale == 32
    assert p.tolist() == [1, 2]
    manager.clip_grad_norm([p], 1.0, 1)
    manager.step()
    assert manager.loss_scale == 32
    p.grad.fill_(3e38)
    manager.clip_grad_norm([p], 1.0, 1)
    manager.zero_grad()
    manager.step()
    assert manager.loss_scale == 32


@pytest.mark.ranks(1)
def test_clipping_arguments_out_of_range(ctx):
    manager = OptimManager()
    for norm_type in (0, -1, math.nan):
        with pytest.raises(ValueError, match="norm_type"):
            manager.clip_grad_norm([param(1.0)], 1.0, norm_type)
    with pytest.raises(ValueError, match="max_norm"):
        manager.clip_grad_norm([param(1.0)], -1.0)
    assert manager.clip_grad_norm([], 1.0) == 0
    assert manager.clip_grad_norm([param(1.0, grad=False)], 1.0, math.inf) == 0


@pytest.mark.ranks(1)
def test_zero_dim_and_repeated_parameters_count_once(ctx):
    p = nn.Parameter(torch.tensor(1.0))
    p.grad = torch.tensor(3.0)
    assert OptimManager().clip_grad_norm([p, p], 1.0) == 3
    torch.testing.assert_close(p.grad, torch.tensor(1.0))
    assert float(OptimManager().clip_grad_norm(p, 0.0)) == pytest.approx(1)
    assert p.grad == 0


# --- state --------------------------------------------------------------------------------------------------------


def build(loss_scale=64.0):
    params = [param(1.0, 2.0), param(3.0), param(4.0, dtype=torch.float16)]
    manager = OptimManager(loss_scale=loss_scale, loss_scale_steps=3)
    adam, sgd = AdamOptimizer([params[0], params[2]], lr=0.1), torch.optim.SGD([params[1]], lr=0.1, momentum=0.9)
    manager.add_optimizer(adam, Linear(adam, 0.1, 2, 20))
    manager.add_optimizer(sgd, torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5))
    plain = torch.optim.Adagrad([param(5.0)], lr=0.1)
    manager.add_optimizer(plain)
    return manager, [*params, plain.param_groups[0]["params"][0]]


def run(manager, params, steps):
    for step in steps:
        for p in params:
            p.grad = torch.full_like(p, (step + 1.0) * manager.loss_scale)
        manager.step()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("gather", [False, True])
def test_the_state_of_any_optimizers_with_or_without_schedulers_goes_on(ctx, gather):
    straight, expected = build()
    run(straight, expected, range(7))
    stopped, params = build()
    run(stopped, params, range(4))
    saved = copy.deepcopy(stopped.state_dict(gather_opt=gather))
    assert saved["lr_schedulers"][2] is None
    if gather:
        box = [saved]
        dist.broadcast_object_list(box)
        saved = box[0]
    resumed, others = build(loss_scale=2.0)
    with torch.no_grad():
        for p, q in zip(others, params):
            p.copy_(q)
    resumed.load_state_dict(saved)
    assert resumed.loss_scale == stopped.loss_scale == 128
    assert resumed.steps_since_last_scale == 1
    run(resumed, others, range(4, 7))
    assert resumed.loss_scale == straight.loss_scale == 256
    for p, q in zip(others, expected):
        assert torch.equal(p, q)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, AdamOptimizer])
def test_hooks_of_optimizers_may_give_their_states_another_form(ctx, cls):
    def saved_form(_, state_dict):
        return {"of parameters": state_dict["state"], "groups": state_dict["param_groups"]}

    def loaded_form(_, state_dict):
        return {"state": state_dict.pop("of parameters"), "param_groups": state_dict.pop("groups")}

    managers = []
    for lr in (0.1, 0.2):
        optimizer = cls([param(1.0, 2.0)], lr=lr)
        optimizer.register_state_dict_post_hook(saved_form)
        optimizer.register_load_state_dict_pre_hook(loaded_form)
        managers.append(OptimManager())
        managers[-1].add_optimizer(optimizer)
    managers[0].step()
    managers[1].load_state_dict(managers[0].state_dict())
    first, second = (manager.optimizers[0] for manager in managers)
    assert second.param_groups[0]["lr"] == 0.1
    assert torch.equal(*(each.state[each.param_groups[0]["params"][0]]["exp_avg"] for each in (first, second)))


@pytest.mark.ranks(1)
@pytest.mark.parametrize("cls", [torch.optim.AdamW, AdamOptimizer])
def test_a_hook_for_one_load_is_called_in_the_load(ctx, cls):
    manager, optimizer = OptimManager(), cls([param(1.0)], lr=0.1)
    manager.add_optimizer(optimizer)

    def halved(_, state_dict):
        handle.remove()
        state_dict["param_groups"][0]["lr"] /= 2

    handle = optimizer.register_load_state_dict_pre_hook(halved)
    state = copy.deepcopy(manager.state_dict())
    manager.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.05


@pytest.mark.ranks(1)
def test_a_state_that_does_not_fit_loads_nothing(ctx):
    source, params = build()
    run(source, params, range(4))
    good = source.state_dict()

    def changed(key, index, value):
        saved = copy.deepcopy(good)
        saved[key][index] = value
        return saved

    cases = [
        ({**good, "optimizers": good["optimizers"][:2]}, "2 optimizers and this manager has 3"),
        ({**good, "lr_schedulers": []}, "0 lr_schedulers and this manager has 3"),
        (changed("lr_schedulers", 1, None), "lr_scheduler 1: the manager has one and the state dict has none"),
        (changed("lr_schedulers", 2, {}), "lr_scheduler 2: the state dict has one and the manager has none"),
        (changed("lr_schedulers", 0, {"num_iter": 3}), "lr_scheduler 0: .* lacks start_lr"),
        (changed("optimizers", 2, {"state": {}, "param_groups": []}), "optimizer 2: .* 0 parameter groups"),
        (changed("optimizers", 0, {"state": {}, "param_groups": []}), "optimizer 0: .* 0 parameter groups"),
        ({key: value for key, value in good.items() if key != "loss_scale"}, "no 'loss_scale'"),
    ]
    for saved, message in cases:
        manager, others = build(loss_scale=2.0)
        run(manager, others, range(1))
        before = copy.deepcopy(manager.state_dict())
        with pytest.raises(ValueError, match=message):
            manager.load_state_dict(saved)
        torch.testing.assert_close(manager.state_dict(), before, rtol=0, atol=0)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("loss_scale", [None, 1024.0])
@pytest.mark.parametrize("ours", [AdamW, Lamb])
def test_optimizers_that_share_a_parameter_are_stepped_in_the_order_in_which_they_were_added(ctx, loss_scale, ours):
    def make():
        params = [nn.Parameter(torch.full((3,), 2.0)) for _ in range(2)]
        options = {"lr": 0.1, "weight_decay": 1.0}
        return params, [torch.optim.SGD(params[:1], lr=0.5), ours(params, **options), ours(params[1:], **options)]

    (params, optimizers), (expected, by_hand) = make(), make()
    manager = OptimManager(loss_scale=loss_scale)
    for each in optimizers:
        manager.add_optimizer(each)
    for p, q in zip(params, expected):
        p.grad, q.grad = torch.full((3,), float(manager.loss_scale)), torch.ones(3)
    manager.step()
    for each in by_hand:
        each.step()
    for p, q in zip(params, expected):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=0)


@pytest.mark.ranks(2)
def test_two_of_ours_that_share_a_divided_parameter_are_stepped_in_order(ctx):
    def make():
        param = nn.Parameter(torch.full((2, 3), 2.0))
        param.bmt_slice = Slice((4, 3), 2 * ctx.rank, 2 * ctx.rank + 2, ctx.world)
        param.grad = torch.full((2, 3), 1.0 + ctx.rank)
        return param, [Lamb([param], lr=0.1), AdamW([param], lr=0.1), Lamb([param], lr=0.1)]

    (param, optimizers), (expected, by_hand) = make(), make()
    manager = OptimManager(grad_scale=1.0)
    for each in optimizers:
        manager.add_optimizer(each)
    manager.step()
    for each in by_hand:
        each.step()
    torch.testing.assert_close(param, expected, rtol=1e-6, atol=0)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("loss_scale", [None, 1024.0])
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_optimizers_that_share_a_parameter_see_one_gradient(ctx, loss_scale, max_norm):
    param = nn.Parameter(torch.ones(3))
    manager = OptimManager(loss_scale=loss_scale)
    for _ in range(2):
        manager.add_optimizer(torch.optim.SGD([param], lr=0.1))
    manager.backward((param * 0.5).sum())
    manager.step(max_norm)
    grad = 0.5 if max_norm is None else max_norm / 3**0.5
    torch.testing.assert_close(param.detach(), torch.full((3,), 1 - 2 * 0.1 * grad), atol=1e-6, rtol=0)
