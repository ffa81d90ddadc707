"""Ranks whose optimizers differ, or step differently often, are told."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from layouts import shard_slice, shards, tensors
from torch import nn

from bmt_comm import init_distributed, note_step, shutdown
from bmt_comm.agreement import CallSequences
from bmt_optim import AdamOptimizer, Lamb, OptimManager
from bmt_optim.lr_scheduler import Linear


def manager(ctx, differs, kind):
    """An OptimManager that differs on rank 1."""
    there = differs and ctx.rank == 1
    model = nn.Linear(3, 3)
    lr = 0.2 if there and kind == "lr" else 0.1
    optimizer = (Lamb if there and kind == "kind" else AdamOptimizer)(model.parameters(), lr=lr)
    result = OptimManager(loss_scale=2.0 if there and kind == "scale" else 1.0)
    result.add_optimizer(optimizer)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    return result


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("kind", "said"), [("lr", "0.1.*0.2"), ("kind", "Adam.*Lamb"), ("scale", "1.0.*2.0")])
def test_optimizers_that_differ_are_an_error_at_the_first_step(ctx, kind, said):
    for _ in range(3):
        manager(ctx, False, kind).step()
    with pytest.raises(RuntimeError, match=f"ranks disagree on the optimizers: item .*{said}"):
        manager(ctx, True, kind).step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("late", [False, True])
def test_a_hook_of_one_rank_leaves_the_collectives_as_they_are(ctx, late):
    params = [nn.Parameter(torch.ones(3))]
    optimizer = AdamOptimizer(params, lr=0.1)
    if ctx.rank == 0:
        optimizer.register_step_post_hook(lambda *_: None)
    stepped = OptimManager(loss_scale=4.0, grad_scale=1, reads_late=late)
    stepped.add_optimizer(optimizer)
    for step in range(3):
        stepped.zero_grad()
        stepped.backward(params[0].square().sum() * (torch.inf if step == ctx.rank == 1 else 1))
        stepped.step()
        assert stepped.settle() is (step != 1)
    assert stepped.loss_scale == 2
    assert ctx.world.all_gather_object(params[0].tolist()) == [params[0].tolist()] * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loss_scale", [None, 4.0])
def test_hooks_that_one_rank_gets_or_loses_later_leave_the_collectives_as_they_are(ctx, loss_scale):
    shapes = [(4, 3), (4, 2)]
    params = shards(tensors(shapes), [shard_slice(s, ctx.world) for s in shapes])
    optimizers = [Lamb(params[:1], lr=0.1), Lamb(params[1:], lr=0.1)]
    stepped = OptimManager(loss_scale=loss_scale, grad_scale=1)
    for each in optimizers:
        stepped.add_optimizer(each)
    calls, handles = [], []
    for step in range(5):
        for p in params:
            p.grad = torch.full_like(p, torch.inf if step == 2 and ctx.rank and loss_scale else 1.0)
        if step == 1 and ctx.rank == 0:
            handles.append(optimizers[0].register_step_pre_hook(lambda *_: calls.append("before")))
            handles.append(optimizers[0].register_step_post_hook(lambda *_: calls.append("after")))
        elif step == 4:
            for handle in handles:
                handle.remove()
        assert stepped.step() is not (loss_scale is not None and step == 2)
    skipped = ["before"] if loss_scale else ["before", "after"]
    assert calls == ([] if ctx.rank else ["before", "after", *skipped, "before", "after"])
    assert [o.state[p]["step"] for o, p in zip(optimizers, params)] == [4 if loss_scale else 5] * 2


@pytest.mark.ranks(2)
def test_a_disagreement_is_an_error_at_the_next_step_too(ctx):
    differs = manager(ctx, True, "lr")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="ranks disagree on the optimizers"):
            differs.step()


@pytest.mark.ranks(2, init=False)
def test_a_step_that_one_rank_leaves_out_is_found_by_the_next_comparison():
    ctx = init_distributed(device="cpu")
    sequences = CallSequences()
    label = sequences.label("a Block")
    sequences.add(ctx.world, label)
    sequences.compare()
    if ctx.rank == 0:
        note_step()
    sequences.add(ctx.world, label)
    with pytest.raises(RuntimeError, match="differently often: rank 0 1 times, rank 1 0 times"):
        sequences.compare()
    shutdown()
    ctx = init_distributed(device="cpu")
    sequences.add(ctx.world, label)
    sequences.compare()  # a new job begins at none


def a_job():
    ctx = init_distributed(device="cpu")
    params = [nn.Parameter(torch.ones(3))]
    return ctx, params, AdamOptimizer(params, lr=0.1)


def sequences_of(ctx):
    """A comparison as a backward pass of sharded modules makes it."""
    sequences = CallSequences()
    sequences.add(ctx.world, sequences.label("a Block"))
    return sequences


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("late", [False, True])
def test_learning_rates_that_differ_later_are_found_by_the_next_comparison(late):
    ctx, params, optimizer = a_job()
    warm_up = Linear(optimizer, 0.1 * (1 + ctx.rank), warmup_iter=4, end_iter=20)  # is 0 at the first step
    stepped = OptimManager(loss_scale=2.0 if late else None, grad_scale=1, reads_late=late)
    stepped.add_optimizer(optimizer, warm_up)
    for step in range(2):
        stepped.zero_grad()
        stepped.backward(params[0].square().sum())
        if step:
            sequences_of(ctx).compare()
        stepped.step()
    with pytest.raises(RuntimeError, match=r"step 2 of this job, parameter group 0: 0.025 on rank 0 and 0.05 on"):
        sequences_of(ctx).compare()
    shutdown()


@pytest.mark.ranks(2, init=False)
def test_a_skipped_step_counts_alike_with_a_hook_on_one_rank_only():
    ctx, params, optimizer = a_job()
    stepped = OptimManager(loss_scale=2.0, grad_scale=1)
    stepped.add_optimizer(optimizer)
    taken = []
    for factor in (1.0, float("inf"), 1.0):
        stepped.zero_grad()
        stepped.backward(params[0].square().sum() * factor)
        sequences_of(ctx).compare()
        if factor != 1 and ctx.rank == 0:
            optimizer.register_step_post_hook(lambda *_: None)  # its steps are not taken together with others
        taken.append(stepped.step())
    sequences_of(ctx).compare()
    assert taken == [True, False, True]
    shutdown()


@pytest.mark.ranks(2, init=False)
def test_a_step_that_raises_on_one_rank_is_found_though_the_script_goes_on():
    ctx, params, optimizer = a_job()
    if ctx.rank == 1:
        optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    stepped = OptimManager(grad_scale=1)
    stepped.add_optimizer(optimizer)
    stepped.backward(params[0].square().sum())
    with pytest.raises(ZeroDivisionError) if ctx.rank == 1 else nullcontext():
        stepped.step()
    with pytest.raises(RuntimeError, match="differently often: rank 0 1 times, rank 1 0 times"):
        sequences_of(ctx).compare()
    shutdown()
