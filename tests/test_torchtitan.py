"""The script in torchtitan's style has the losses of plain PyTorch. The nox session "frameworks" runs this test."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "examples" / "recipes"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.ranks(2, init=False, timeout=120)
def test_the_script_has_the_losses_of_plain_pytorch() -> None:
    from torchtitan_script import batch, build, loss_of, train

    losses = train(20, 1e-3)
    plain = build()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, weight_decay=0.0)
    wanted = []
    for step in range(20):
        loss = loss_of(plain, torch.cat([batch(step, rank) for rank in range(2)]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        wanted.append(loss.item())
    assert losses == pytest.approx(wanted, rel=1e-5)
