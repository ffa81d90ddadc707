"""Losses and updates of a pipeline are those of plain PyTorch on the whole batch."""

from __future__ import annotations

import pytest
import torch

from bmt_comm import ParallelContext
from pipe_helpers import batch_of, pipeline_model, plain_training, replica, rows_of

STEPS = 10


def compare(ctx: ParallelContext, count: int, rows: list[int], tied: bool = False, tail: bool = False, **options) -> None:
    """Train on batches of as many rows as the replicas have, and compare all parameters."""
    batches = [
        [batch_of(step * 10 + r, rows[r % len(rows)]) for r in range(ctx.replicas)] for step in range(STEPS)
    ]
    wanted, losses = plain_training(count, tied, batches)
    model = pipeline_model(count, tied, **options)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, batch in enumerate(batches):
        loss = model(*batch[replica(ctx)], tail=tail)
        assert loss.item() == pytest.approx(losses[step][replica(ctx)], rel=1e-5)
        optimizer.zero_grad()
        (loss / ctx.replicas).backward()
        optimizer.step()
    for name, param in model.named_parameters():
        change = rows_of(wanted[name], param)
        assert (param - before[name] - change).norm() <= 1e-5 * wanted[name].norm(), name


@pytest.mark.ranks(2, pipe_size=2, timeout=60)
def test_two_stages(ctx: ParallelContext) -> None:
    compare(ctx, 5, [3])
