"""A pipeline on communicators that obey NCCL's rules; see bmt_comm.testing.in_order.

``nox -s nccl_rules`` runs more tests like this.
"""

from __future__ import annotations

import pytest
from pipe_helpers import compare
from test_pipeline_failures import check_failing_layers

from bmt_comm import ParallelContext


@pytest.mark.ranks(2, pipe_size=2, timeout=90, nccl_rules="lazy")
def test_two_stages(ctx: ParallelContext) -> None:
    compare(ctx, 6, [3], interleave=2)


@pytest.mark.ranks(3, pipe_size=3, num_micro_batches=6, timeout=120, nccl_rules="eager")
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v"])
def test_loss_inside(ctx: ParallelContext, schedule: str) -> None:
    interleave = 2 if schedule.startswith("interleaved") else None
    compare(ctx, 6, [4, 2, 5], tail=True, tail_schedule=schedule, interleave=interleave)


@pytest.mark.ranks(4, pipe_size=2, num_micro_batches=4, timeout=120, nccl_rules="eager")
def test_data_parallel_stages(ctx: ParallelContext) -> None:
    compare(ctx, 5, [3], tied=True)


@pytest.mark.ranks(3, pipe_size=3, num_micro_batches=6, timeout=90, nccl_rules="lazy")
def test_a_layer_fails(ctx: ParallelContext) -> None:
    check_failing_layers(ctx, 7, 1)
