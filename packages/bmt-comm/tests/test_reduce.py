"""Averages and collections for logging."""

import time

import pytest
import torch

from bmt_comm import gather_result, sum_loss, synchronize, wait_loader


@pytest.mark.ranks(1, 2, 3)
def test_sum_loss_is_the_mean_and_leaves_the_loss_alone(ctx, device_type):
    n, rank = ctx.world_size, ctx.rank
    loss = torch.tensor(2.0 * rank, device=device_type, requires_grad=True)
    mean = sum_loss(loss)
    assert mean.item() == n - 1
    assert not mean.requires_grad
    assert loss.item() == 2.0 * rank
    assert sum_loss(torch.full((2, 3), float(rank), device=device_type).t()).shape == (3, 2)
    half = sum_loss(torch.tensor(60000.0, dtype=torch.float16, device=device_type))  # whose sum overflows
    assert (half.dtype, half.item()) == (torch.float16, 60000.0)
    assert sum_loss(torch.tensor(rank, device=device_type)).item() == pytest.approx((n - 1) / 2)


@pytest.mark.ranks(4, tp_size=2)
def test_sum_loss_over_a_part_of_the_world(ctx, device_type):
    mean = sum_loss(torch.tensor(float(ctx.rank), device=device_type), ctx.tp)
    assert mean.item() == sum(ctx.tp.ranks) / 2


@pytest.mark.ranks(1, 3)
def test_gather_result_joins_along_the_batch(ctx, device_type):
    n, rank = ctx.world_size, ctx.rank
    x = (torch.arange(6, device=device_type) + 100 * rank).view(3, 2).t()  # (2, 3), not contiguous
    joined = gather_result(x)
    assert joined.shape == (2 * n, 3)
    assert joined.device == x.device
    assert torch.equal(joined.cpu(), torch.cat([(torch.arange(6) + 100 * r).view(3, 2).t() for r in range(n)]))
    assert gather_result(torch.tensor(rank)).tolist() == list(range(n))
    assert gather_result(torch.tensor(rank)).device.type == "cpu"
    assert not gather_result(torch.ones(1, device=device_type, requires_grad=True)).requires_grad


@pytest.mark.ranks(2)
def test_synchronize_waits_for_every_rank(ctx):
    synchronize()
    start = time.monotonic()
    if ctx.rank == 1:
        time.sleep(0.2)
    wait_loader()
    synchronize()
    assert time.monotonic() - start >= 0.18
