"""Losses and updates of a pipeline equal those of plain PyTorch on the whole batch."""

from __future__ import annotations

import pytest
import torch
from pipe_helpers import STEPS, FusedLinear, batch_of, compare, pipeline_model

from bmt_comm import ParallelContext


@pytest.mark.ranks(2, pipe_size=2, timeout=90)
@pytest.mark.parametrize("interleave", [1, 2, 3])
def test_two_stages(ctx: ParallelContext, interleave: int) -> None:
    compare(ctx, 6, [3], interleave=interleave)  # in 3, a layer is a chunk, which need not be run twice


@pytest.mark.ranks(3, pipe_size=3, num_micro_batches=6, timeout=90)
def test_three_stages_with_uneven_micro_batches(ctx: ParallelContext) -> None:
    compare(ctx, 5, [3], tied=True)


@pytest.mark.ranks(4, pipe_size=4, num_micro_batches=12, timeout=90)
def test_four_stages_with_batches_of_different_sizes(ctx: ParallelContext) -> None:
    # The smallest batch has fewer samples than micro-batches.
    compare(ctx, 9, [4, 2, 5], interleave=2, checkpoint=False)


@pytest.mark.ranks(4, pipe_size=2, num_micro_batches=4, timeout=90)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_data_parallel_stages(ctx: ParallelContext, level: int) -> None:
    compare(ctx, 5, [3], tied=True, level=level)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=90)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v"])
def test_loss_inside(ctx: ParallelContext, schedule: str) -> None:
    interleave = 2 if schedule.startswith("interleaved") else None
    before = FusedLinear.backwards()
    compare(ctx, 6, [3], tied=True, tail=True, interleave=interleave, tail_schedule=schedule)
    # A function that makes all gradients at once runs once: for three layers and four micro-batches here, and for six
    # layers and two batches in plain PyTorch.
    assert FusedLinear.backwards() - before == STEPS * (3 * 4 + 6 * 2)


@pytest.mark.ranks(3, pipe_size=3, num_micro_batches=6, timeout=90)
@pytest.mark.parametrize("tail", [False, True])
def test_a_v_shaped_pipeline(ctx: ParallelContext, tail: bool) -> None:
    compare(ctx, 7, [4, 2, 5], tied=True, tail=tail, tail_schedule="zero_bubble_v", checkpoint=tail)


@pytest.mark.ranks(4, pipe_size=2, num_micro_batches=4, timeout=90)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1", "zero_bubble_v"])
def test_loss_inside_with_data_parallel_stages(ctx: ParallelContext, level: int, schedule: str) -> None:
    compare(ctx, 5, [2, 3], tail=True, level=level, tail_schedule=schedule)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=90)
@pytest.mark.parametrize("tail", [False, True])
def test_hooks_of_parameters_change_a_gradient_once(ctx: ParallelContext, tail: bool) -> None:
    model = pipeline_model(5, False)
    batch = batch_of(0, 3)
    model(*batch, tail=tail).backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    for param in model.parameters():
        param.grad = None
        param.register_hook(lambda grad: 2 * grad)
    model(*batch, tail=tail).backward()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.add(0), 2 * grads[name], msg=name)


@pytest.mark.ranks(1, timeout=60)
@pytest.mark.parametrize("tail", [False, True])
def test_one_stage(ctx: ParallelContext, tail: bool) -> None:
    compare(ctx, 4, [3], tail=tail, interleave=2)
