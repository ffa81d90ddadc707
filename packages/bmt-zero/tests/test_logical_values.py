"""Counts, norms and penalties over ``model.parameters()`` are those of the plain model, on every rank."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from block_helpers import pair, rows_of, seeded
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, parametrize

from bmt_zero import BMTrainModelWrapper


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
    """Its value and its gradient, together with those of the data."""
    plain, block = pair(make, zero_level=level)
    batch = seeded(0, 2 * ctx.world_size, 5)
    expected = 0.1 * PENALTIES[name](list(plain.parameters()))
    (plain(batch).square().sum() / len(batch) + expected).backward()
    penalty = 0.1 * PENALTIES[name](list(block.parameters()))
    torch.testing.assert_close(penalty, expected)
    mine = batch.chunk(ctx.world_size)[ctx.rank]
    # Each rank has its samples' part of the loss. All ranks have the penalty, which counts once.
    (block(mine).square().sum() / len(batch) + penalty / ctx.world_size).backward()
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
    start = block.weight.to_local().clone()  # this rank's rows
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


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_distances_from_logical_tensors(ctx, level):
    """One rank holds all rows of the biases and of the norm: shapes are ambiguous there."""
    plain, block = pair(make, zero_level=level)
    goals = [torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(plain.parameters())]
    for model, parts in ((plain, 1), (block, ctx.world_size)):
        penalty = sum(((p - goal) ** 2).sum() for p, goal in zip(model.parameters(), goals, strict=True))
        (penalty / parts).backward()
    for (name, param), wanted in zip(block.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.add(0), rows_of(wanted.grad, param), msg=name)
    for param, goal in zip(block.parameters(), goals, strict=True):
        if param.handle.is_on_one_rank and param.bmt_slice.row_comm is not None:
            for compute in (torch.equal, torch.sub):  # this rank's rows, or the logical parameter?
                with torch.no_grad(), pytest.raises(RuntimeError, match="which one rank holds"):
                    compute(param, goal)
                with torch.no_grad(), pytest.raises(RuntimeError, match="which one rank holds"):
                    compute(param, torch.zeros_like(param.to_local()))
        assert torch.equal(param.full_tensor(), param.full_tensor())


class Scored(nn.Module):
    """A head that is the transposed embedding, which is large enough to be a group by itself."""

    def __init__(self, attribute: str) -> None:
        super().__init__()
        self.embed, self.inner, self.attribute = nn.Embedding(30_001, 12), nn.Linear(12, 12), attribute

    def forward(self, ids: Tensor) -> Tensor:
        return self.inner(self.embed(ids)) @ getattr(self.embed.weight, self.attribute)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("attribute", ["T", "mT", "H"])
def test_a_transposed_weight(ctx, level, attribute):
    torch.manual_seed(0)
    plain = Scored(attribute)
    model = BMTrainModelWrapper(copy.deepcopy(plain), zero_level=level)
    ids = torch.tensor([[1, 5, 30_000]])
    for which, parts in ((plain, 1), (model, ctx.world_size)):
        (which(ids).square().sum() / parts).backward()
    with torch.no_grad():
        torch.testing.assert_close(model(ids), plain(ids))
    for (name, param), wanted in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.grad.add(0), rows_of(wanted.grad, param), rtol=1e-4, atol=1e-5, msg=name)
    assert not hasattr(model.embed.weight, attribute)  # reading does not communicate


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 3])
@pytest.mark.parametrize("through_data", [False, True])
def test_what_nothing_has_filled_is_named(ctx, level, through_data):
    with torch.device("meta"):
        inner = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    model = BMTrainModelWrapper(inner, zero_level=level)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"meta device and nothing has filled them: \['0.weight', '0.bias'"):
            model(torch.zeros(1, 5))
    if through_data:
        for param in model.parameters():
            param.data.fill_(0.5)
    else:
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
    assert bool(model(torch.zeros(1, 5)).any()) == through_data


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_swapped_parameters_are_refused(ctx, level):
    _, block = pair(make, zero_level=level)
    torch.utils.swap_tensors(block[0].weight, nn.Parameter(torch.zeros(7, 5)))
    with pytest.raises(RuntimeError, match="swap_tensors"):
        block(seeded(0, 2, 5))


@pytest.mark.ranks(2)
def test_a_rank_evaluates_its_replica_alone(ctx):
    plain, block = pair(make, zero_level=0)
    if ctx.rank == 0:
        with torch.no_grad():
            torch.testing.assert_close(block(seeded(0, 2, 5)), plain(seeded(0, 2, 5)))
    block(seeded(0, 2, 5)).sum().backward()


FILLS: dict[str, Callable[[Tensor], object]] = {
    "constant_": lambda tensor: nn.init.constant_(tensor, 0.25),
    "ones_": nn.init.ones_,
    "zeros_": nn.init.zeros_,
    "by keyword": lambda tensor: nn.init.constant_(tensor=tensor, val=0.5),
}


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(FILLS))
def test_values_of_initializers_stay(ctx, level, name):
    """torch.nn.init calls some functions by keyword."""
    plain, block = pair(make, zero_level=level)
    for model in (plain, block):
        for param in model.parameters():
            assert FILLS[name](param) is param
    for key, value in plain.state_dict().items():
        torch.testing.assert_close(block.get_parameter(key).full_tensor().detach(), value)
    batch = seeded(0, 4, 5)
    torch.testing.assert_close(block(batch), plain(batch))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("level", [1, 3])
def test_a_normalised_weight_outside_of_its_module(ctx, level):
    """The kernel of weight_norm needs the logical operands, whose rows are cut at different places."""
    plain, block = pair(lambda: parametrizations.weight_norm(nn.Linear(8, 6)), zero_level=level)
    torch.testing.assert_close(block.weight, plain.weight)
    expected = plain.weight.detach()
    (plain.weight.square().sum() / ctx.world_size).backward()
    (block.weight.square().sum() / ctx.world_size**2).backward()
    for name, param in block.named_parameters():
        wanted = torch.zeros_like(param) if name == "bias" else rows_of(plain.get_parameter(name).grad, param)
        if param.grad is not None:
            torch.testing.assert_close(param.grad.add(0), wanted, msg=name)
    with torch.no_grad():
        parametrize.remove_parametrizations(block, "weight")
    torch.testing.assert_close(block.weight.detach(), expected)


@pytest.mark.ranks(2, 3)
def test_dimensions(ctx):
    """Parameter groups are often formed by them, and must be the same on all ranks."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.linear = nn.Parameter(torch.tensor(2.0)), nn.Linear(3, 5)

    plain, block = pair(Scaled)
    for name, param in block.named_parameters():
        wanted = plain.get_parameter(name)
        assert (param.dim(), param.ndim, param.ndimension()) == (wanted.dim(), wanted.ndim, wanted.ndimension())
