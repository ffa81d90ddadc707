"""Memory over a step by owner, against the layout and the allocator."""

from unittest import mock

import pytest
import torch
from torch import nn

import bmtrain as bmt
from bmt_comm import Communicator
from bmt_zero.shard import shard

WIDTH, LAYERS, ROWS = 31, 4, 4096


def flats(model):
    return {id(p.handle.reducer.flat): p.handle.reducer.flat for p in model.parameters()}.values()


@pytest.mark.ranks(2)
@mock.patch.object(Communicator, "shares_memory", False)  # which have one buffer
def test_owners_have_what_the_layout_says_and_together_what_was_allocated(ctx, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
    for layer in model:
        shard(layer, zero_level=3)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)

    def step(x):
        manager.zero_grad()
        manager.backward(model(x).square().mean())
        manager.step()

    x = torch.randn(ROWS, WIDTH)
    step(x)
    shards = sum(4 * flat.shard.numel() for flat in flats(model))
    logical = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    assert logical / 2 <= shards <= logical / 2 * 1.1
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
        bmt.memory_timeline(model, optimizer) as memory,
    ):
        step(x)
    assert {sample.bytes["parameters"] for sample in memory.samples} == {shards}
    state = {id(s): s for entry in optimizer.state.values() for s in entry.values()}
    assert memory.samples[-1].bytes["optimizer state"] == sum(4 * each.numel() for each in state.values())
    assert memory.samples[-1].bytes["activations"] == memory.samples[-1].bytes["unsharded parameters"] == 0
    assert memory.samples[-1].bytes["gradients"] == pytest.approx(shards, rel=0.1)
    group = 4 * max(flat.layout.numel for flat in flats(model))
    unsharded = [sample.bytes["unsharded parameters"] for sample in memory.samples]
    assert group <= max(unsharded) <= 2 * group  # and the one that is prefetched
    # A layer keeps its input, the last one its output, too; the square keeps that as well.
    assert memory.peak.bytes["activations"] == 4 * ROWS * WIDTH * (LAYERS + 1)
    assert memory.peak.where.startswith(("after", "backward"))

    allocated = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            allocated += event.nbytes()
            most = max(most, allocated)
    first = memory.samples[0]
    ours = max(sample.total - sample.bytes["gradients"] for sample in memory.samples)
    ours -= first.total - first.bytes["gradients"]
    # Backward has two gradients of an activation beside what is kept.
    assert ours <= most <= ours + 3 * 4 * ROWS * WIDTH + 4 * logical

    memory.draw(tmp_path / f"{ctx.rank}.svg")
    assert "optimizer state" in (tmp_path / f"{ctx.rank}.svg").read_text()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("deterministic", [False, True])
def test_gradients_that_wait_to_be_reduced_are_gradients(ctx, deterministic):
    model = shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), zero_level=1)
    [flat] = flats(model)
    for param in model.parameters():
        param.handle.reducer.has_fixed_order = deterministic
    x, owned = torch.randn(3, WIDTH), []
    with bmt.memory_timeline(model) as memory:
        with bmt.no_sync(model):
            model(x).square().mean().backward()
            model(x)
        owned.append(memory.samples[-1].bytes["gradients"])
        model(x).square().mean().backward()
    shards, unreduced = 4 * flat.shard.numel(), 4 * flat.layout.numel
    # Zeros in .grad show whether they were zeroed since; sums in a fixed order are of this rank's shard.
    assert owned == [2 * shards if deterministic else shards + unreduced]
    assert memory.samples[-1].bytes["gradients"] == shards
