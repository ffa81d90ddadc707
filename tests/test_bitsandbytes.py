"""The state of AdamW8bit goes to bitsandbytes, and that of bitsandbytes comes back. `nox -s optimizers` installs it."""

import bitsandbytes
import pytest
import torch
from torch import nn

from bmt_comm import local_tensor, shard_of, slice_of
from bmt_optim import AdamW8bit
from bmt_optim.slices import unshard
from bmt_zero import shard

# Without decay, which bitsandbytes has before the step or after it, by device and number of bits.
OPTIONS = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.0}
STEPS = 3


def model() -> nn.Sequential:
    """A weight whose moments have 8 bits, and smaller parameters, which have 32."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """Steps along gradients that do not depend on the weights: roundings do not spread."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(STEPS):
        for p in model.parameters():
            where = slice_of(p)
            p.grad = shard_of(torch.randn(where.shape, generator=generator), where)
        optimizer.step()
        optimizer.zero_grad()


def whole(param: torch.Tensor) -> torch.Tensor:
    return unshard(local_tensor(param.detach()), slice_of(param)).clone()


def check(found: nn.Module, expected: nn.Module, start: list[torch.Tensor]) -> None:
    """Compare updates, relative to their norm. A moment between two of 256 values may be rounded to either."""
    for p, q, s in zip(found.parameters(), expected.parameters(), start):
        error = (whole(p) - whole(q)).norm() / (whole(q) - s).norm()
        assert error < (2e-2 if s.numel() >= 4096 else 1e-5), f"{tuple(s.shape)}: {error:.1e}"


@pytest.mark.ranks(1, 2)
def test_each_goes_on_from_the_state_of_the_other(ctx):
    ours, theirs = model(), model()
    for layer in (ours[0], ours[1]):
        shard(layer)
    mine, plain = AdamW8bit(ours.parameters(), **OPTIONS), bitsandbytes.optim.AdamW8bit(theirs.parameters(), **OPTIONS)
    start = [whole(p) for p in ours.parameters()]
    train(ours, mine, seed=0)
    train(theirs, plain, seed=0)
    check(ours, theirs, start)
    # Ours becomes theirs.
    saved = ctx.world.broadcast_object(mine.bitsandbytes_state_dict())
    weights = [whole(p) for p in ours.parameters()]
    with torch.no_grad():
        for p, w in zip(theirs.parameters(), weights):
            p.copy_(w)
    plain = bitsandbytes.optim.AdamW8bit(theirs.parameters(), **OPTIONS)
    plain.load_state_dict(saved)
    train(ours, mine, seed=1)
    train(theirs, plain, seed=1)
    check(ours, theirs, weights)
    # Theirs becomes ours, at another layout.
    again = model()
    again.load_state_dict(theirs.state_dict())
    start = [whole(p) for p in again.parameters()]
    for layer in (again[0], again[1]):
        shard(layer, zero_level=1)
    resumed = AdamW8bit(again.parameters(), **OPTIONS)
    resumed.load_state_dict(plain.state_dict())
    train(again, resumed, seed=2)
    train(theirs, plain, seed=2)
    check(again, theirs, start)
