"""DistributedParameter and ParameterInitializer."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn

import bmt_zero
from bmt_zero import DistributedParameter, ParameterInitializer

SHAPES = [(), (1,), (7,), (5, 3), (0, 3), (2, 3, 5)]


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("shape", SHAPES)
def test_holds_rows_and_gathers_all_of_them(ctx: Any, shape: tuple[int, ...]) -> None:
    data = torch.arange(float(torch.Size(shape).numel())).reshape(shape) + 1
    param = DistributedParameter(data, group="decay")
    assert isinstance(param, nn.Parameter)
    assert param.requires_grad
    assert param.is_leaf
    assert param.group == "decay"
    where = param.bmt_slice
    assert tuple(param.shape) == where.local_shape
    held = ctx.world.all_gather_object((where.row_start, where.row_stop, param.tolist()))
    assert held[0][0] == 0
    assert held[-1][1] == where.tp_shard_rows
    assert all(a[1] == b[0] for a, b in itertools.pairwise(held))
    rows = data.reshape(where.tp_shard_rows, *where.row_shape)[where.row_start : where.row_stop]
    assert torch.equal(param.to_local(), rows.reshape(param.shape))
    unsharded = param.gather()
    assert unsharded.shape == data.shape
    assert torch.equal(unsharded, data)
    (unsharded * data * (ctx.rank + 1)).sum().backward()
    factor = sum(range(1, ctx.world_size + 1))
    assert torch.equal(param.grad, param.detach() * factor)  # type: ignore[arg-type]
    with torch.no_grad():
        assert not param.gather().requires_grad


@pytest.mark.ranks(4, tp_size=2)
@pytest.mark.parametrize("dim", [0, 1])
def test_tensor_parallel_shards(ctx: Any, dim: int) -> None:
    full = torch.arange(60.0).reshape(6, 10)
    shard = full.chunk(2, dim)[ctx.tp_rank]
    param = DistributedParameter(shard, tp_mode=True, tp_split_dim=dim)
    assert param.bmt_slice.shape == (6, 10)
    assert torch.equal(param.gather(), shard)
    assert torch.equal(param.gather_all(), full)
    rows = slice(param.bmt_slice.row_start, param.bmt_slice.row_stop)
    wanted = torch.cat([p[rows] for p in full.chunk(2, dim)], dim)
    assert torch.equal(param.tp_gather(), wanted)


@pytest.mark.ranks(2)
def test_a_copy_has_the_same_rows_and_its_own_storage() -> None:
    param = DistributedParameter(torch.arange(15.0).reshape(5, 3), init_method=torch.nn.init.ones_, group="g")
    param.gather().sum().backward()
    once = copy.deepcopy(param)
    twice = copy.deepcopy(once)
    for twin in (once, twice):
        assert twin is not param
        assert type(twin) is type(param)
        assert twin.shape == param.shape
        assert twin.bmt_slice == param.bmt_slice
        assert (twin.group, twin.init_method) == ("g", torch.nn.init.ones_)
        assert torch.equal(twin.gather(), param.gather())
        assert twin.grad is None  # as in a copy of a plain parameter
    with torch.no_grad():
        twice.zero_()
    assert once.gather().any()
    twice.gather().sum().backward()
    assert once.grad is None
    pair = nn.ParameterList([param, param])
    twins = copy.deepcopy(pair)
    assert twins[0] is twins[1]


@pytest.mark.ranks(2)
def test_a_block_of_a_list_is_copied_with_its_parameters() -> None:
    block = bmt_zero.Block(nn.Linear(3, 5))
    twin = copy.deepcopy(block)
    x = torch.randn(2, 3)
    assert torch.equal(twin(x), block(x))
    assert [p.shape for p in twin.parameters()] == [p.shape for p in block.parameters()]
    with torch.no_grad():
        for param in twin.parameters():
            param.zero_()
    assert not twin(x).any()
    assert block(x).any()


@pytest.mark.ranks(2)
def test_pickling_says_what_to_do_instead() -> None:
    param = DistributedParameter(torch.zeros(3))
    for dump in (pickle.dumps, lambda p: torch.save(p, io.BytesIO())):
        with pytest.raises(TypeError, match="state_dict"):
            dump(param)


@pytest.mark.ranks(2)
def test_what_it_looks_like(ctx: Any) -> None:
    rows = [(0, 3), (3, 5)][ctx.rank]
    assert repr(DistributedParameter(torch.zeros(5, 2))) == (
        f"ShardedParameter(shape=(5, 2), rows=[{rows[0]}, {rows[1]}), "
        "dtype=torch.float32, device=cpu, requires_grad=True)"
    )


@pytest.mark.ranks(2)
def test_wrong_calls() -> None:
    with pytest.raises(TypeError, match="data must be a tensor, not list"):
        DistributedParameter([1.0])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"pass data\.gather\(\)"):
        DistributedParameter(DistributedParameter(torch.zeros(3)))
    with pytest.raises(TypeError, match="init_method"):
        DistributedParameter(torch.zeros(3), init_method="normal")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tp_split_dim=2"):
        DistributedParameter(torch.zeros(3, 3), tp_mode=True, tp_split_dim=2)


def test_before_init_distributed() -> None:
    for call in (
        lambda: DistributedParameter(torch.zeros(3)),
        lambda: bmt_zero.Block(nn.Linear(2, 2)),
        lambda: bmt_zero.BMTrainModelWrapper(nn.Linear(2, 2)),
        lambda: bmt_zero.init_parameters(nn.Linear(2, 2)),
        lambda: bmt_zero.save(nn.Linear(2, 2), "m.pt"),
        lambda: bmt_zero.load(nn.Linear(2, 2), "m.pt"),
    ):
        with pytest.raises(RuntimeError, match="init_distributed"):
            call()


def test_initializer() -> None:
    fill = ParameterInitializer(torch.nn.init.normal_, 5.0, std=0.0)
    tensor = torch.zeros(3)
    fill(tensor)
    assert tensor.tolist() == [5.0] * 3
    assert repr(fill) == "ParameterInitializer(normal_, 5.0, std=0.0)"
    assert repr(ParameterInitializer(torch.nn.init.ones_)) == "ParameterInitializer(ones_)"
    with pytest.raises(TypeError, match="func"):
        ParameterInitializer("normal_")  # type: ignore[arg-type]
