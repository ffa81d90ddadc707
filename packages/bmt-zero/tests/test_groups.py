"""grouped_parameters and no_sync."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import bmt_zero
from bmt_zero.shard import group_of


@pytest.mark.ranks(2)
def test_parameters_by_group() -> None:
    model = bmt_zero.DistributedModule()
    for name, group in (("a", "decay"), ("b", None), ("c", "decay"), ("d", "other")):
        model.register_parameter(name, bmt_zero.DistributedParameter(torch.zeros(5), group=group))
    model.plain = nn.Parameter(torch.zeros(1))
    block = bmt_zero.Block(model)
    own = dict(block.named_parameters())
    groups = list(bmt_zero.grouped_parameters(block))
    assert [group for group, _ in groups] == ["decay", None, "other"]
    for (_, params), names in zip(groups, ("ac", ["b", "plain"], "d"), strict=True):
        assert [id(p) for p in params] == [id(own[n]) for n in names]


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 3])
def test_flat_parameters_share_communicators_and_so_a_side_stream(ctx: Any, level: int) -> None:
    blocks = [bmt_zero.Block(nn.Linear(3, 5, dtype=dtype), zero_level=level) for dtype in (torch.half, torch.float)]
    reducers = [reducer for block in blocks for reducer in group_of(block).reducers]
    assert len(reducers) == 2
    communicators = {(reducer.flat.shard_comm, reducer.flat.replicate_comm) for reducer in reducers}
    assert communicators == {(ctx.alone, ctx.zero) if level == 0 else (ctx.zero, ctx.alone)}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("block", [True, False])
def test_accumulated_gradients_are_the_same_without_synchronising(ctx: Any, level: int, block: bool) -> None:
    torch.manual_seed(0)
    plain, inner = nn.Linear(3, 5), nn.Linear(3, 5)
    inner.load_state_dict(plain.state_dict())
    model: nn.Module = (
        bmt_zero.Block(inner, zero_level=level) if block else bmt_zero.BMTrainModelWrapper(inner, zero_level=level)
    )
    batches = torch.randn(3, ctx.world_size, 3)
    with bmt_zero.no_sync(model):
        for batch in batches[:2]:
            model(batch[ctx.rank]).square().sum().backward()
        waiting = not any(p.grad is not None and p.grad.any() for p in model.parameters())
    if level <= 1:
        assert waiting
    model(batches[2][ctx.rank]).square().sum().backward()
    plain(batches).square().sum().backward()
    for name, param in model.named_parameters():
        full_grad = dict(plain.named_parameters())[name].grad
        assert full_grad is not None
        rows = slice(param.bmt_slice.row_start, param.bmt_slice.row_stop)  # type: ignore[attr-defined]
        assert param.grad is not None
        torch.testing.assert_close(param.grad, full_grad[rows])


@pytest.mark.ranks(2)
def test_synchronising_comes_back_after_an_error() -> None:
    model = bmt_zero.Block(nn.Linear(3, 5), zero_level=1)

    def fail() -> None:
        with bmt_zero.no_sync(model), bmt_zero.no_sync(model):
            raise KeyError("no")

    with pytest.raises(KeyError):
        fail()
    model(torch.ones(3)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
