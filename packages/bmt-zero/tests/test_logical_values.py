"""Counts, norms and penalties over ``model.parameters()`` are those of the plain model, on every rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from block_helpers import pair, rows_of, seeded
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3))


PENALTIES: dict[str, Callable[[list[nn.Parameter]], Tensor]] = {
    "squares": lambda params: sum(p.pow(2).sum() for p in params),
    "operator": lambda params: sum((p**2).sum() for p in params),
    "absolute": lambda params: sum(p.abs().sum() for p in params),
    "norms": lambda params: torch.stack([p.norm() for p in params]).square().sum(),
    "vector_norm": lambda params: sum(torch.linalg.vector_norm(p) for p in params),
    "copies": lambda params: sum(p.float().clone().to(torch.float64).square().sum() for p in params),
    "vector": lambda params: parameters_to_vector(params).square().sum(),
    "of products": lambda params: sum((p * p).sum() for p in params),
}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(PENALTIES))
def test_a_penalty_in_the_loss(ctx, level, name):
    """Its value and its gradient, beside those of the data."""
    plain, block = pair(make, zero_level=level)
    batch = seeded(0, 2 * ctx.world_size, 5)
    expected = 0.1 * PENALTIES[name](list(plain.parameters()))
    (plain(batch).square().sum() / len(batch) + expected).backward()
    found = 0.1 * PENALTIES[name](list(block.parameters()))
    torch.testing.assert_close(found, expected)
    mine = batch.chunk(ctx.world_size)[ctx.rank]
    # Each rank has its samples' part of the loss; the penalty, which all have, counts once.
    (block(mine).square().sum() / len(batch) + found / ctx.world_size).backward()
    for name, param in block.named_parameters():
        wanted = rows_of(plain.get_parameter(name).grad, param)
        torch.testing.assert_close(param.grad.add(0), wanted, msg=name)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_without_gradients(ctx, level):
    plain, block = pair(make, zero_level=level)
    with torch.no_grad():
        for name in ("squares", "operator", "absolute", "norms", "vector_norm"):
            compute = PENALTIES[name]
            torch.testing.assert_close(compute(list(block.parameters())), compute(list(plain.parameters())), msg=name)
        assert float(block[0].weight.max()) == float(plain[0].weight.max())


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("level", [0, 3])
def test_counts(ctx, level):
    plain, block = pair(make, zero_level=level)
    assert [p.numel() for p in block.parameters()] == [p.numel() for p in plain.parameters()]
    assert [torch.numel(p) for p in block.parameters()] == [p.nelement() for p in plain.parameters()]
    rows = sum(p.to_local().numel() for p in block.parameters())
    total = ctx.world.all_gather_object(rows)
    assert sum(total) == sum(p.numel() for p in plain.parameters()) * (ctx.world_size if level == 0 else 1)


@pytest.mark.ranks(2)
def test_what_would_see_one_ranks_part_only_is_refused(ctx):
    _, block = pair(lambda: nn.Linear(6, 8))
    start = block.weight.detach().clone()  # this rank's rows
    with pytest.raises(RuntimeError, match=r"sub would combine this rank's rows of a parameter of shape \(8, 6\)"):
        torch.sub(block.weight, start)
    with torch.no_grad():
        assert not (block.weight - start).any()  # as an optimizer computes
        with pytest.raises(RuntimeError, match=r"view of a sharded parameter of shape \(8, 6\) without gradients"):
            parameters_to_vector(block.parameters())
    # With the logical tensor it is right.
    logical = block.weight.full_tensor().detach() + 1
    loss = (block.weight - logical).square().sum()
    assert float(loss.detach()) == 48.0
    (loss / 2).backward()
    torch.testing.assert_close(block.weight.grad.add(0), torch.full_like(start, -2.0))
