"""Blocks that one pipeline stage has for itself."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from block_helpers import assert_same_gradients, assert_same_parameters, rows_of, seeded
from torch import Tensor, nn

import bmt_zero
from bmt_comm import Communicator, slice_of
from bmt_zero import Block, DistributedModule, DistributedParameter, MixedPrecision, is_stage_local, stage_block
from bmt_zero.shard import group_of, sharding_of

LEVEL = pytest.mark.parametrize("level", [0, 1, 2, 3])


class Layer(nn.Module):
    """Ragged, with a tied, a frozen and a double parameter, and a buffer."""

    def __init__(self, seed: int = 1, width: int = 5) -> None:
        super().__init__()
        self.a = nn.Linear(width, width)
        self.b = nn.Linear(width, width, bias=False)
        self.b.weight = self.a.weight
        self.scale = nn.Parameter(torch.empty(width), requires_grad=False)
        self.wide = nn.Parameter(torch.empty(3, dtype=torch.float64))
        self.register_buffer("steps", torch.tensor(7))
        with torch.no_grad():
            for index, param in enumerate(self.parameters()):
                param.copy_(seeded(10 * seed + index, *param.shape))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(self.a(x)) * self.scale) + self.wide.float().sum()


@pytest.mark.ranks(4, pipe_size=2)
@LEVEL
def test_a_stages_own_module_is_trained_by_its_ranks_alone(ctx: Any, level: int) -> None:
    plain = Layer(ctx.pipe_rank, width=5 + ctx.pipe_rank)  # stages need not agree
    block = Block(copy.deepcopy(plain), zero_level=level, stage_local=True)
    for param in block.parameters():
        assert is_stage_local(param)
        assert math.prod(c.size for c in param.handle.group.reducers[0].flat.communicators) == 2
    data = seeded(3, 2, 4, 5 + ctx.pipe_rank)
    block(data[ctx.data_rank]).square().sum().backward()
    plain(data.flatten(0, 1)).square().sum().backward()
    assert_same_gradients(block, plain)
    twin = copy.deepcopy(block)
    assert all(is_stage_local(p) for p in twin.parameters())
    assert twin(data[0]).equal(block(data[0]))


@pytest.mark.ranks(4, pipe_size=2)
def test_ranks_of_a_stage_must_agree(ctx: Any) -> None:
    with pytest.raises(RuntimeError, match=r"ranks disagree on the parameters of a Linear"):
        Block(nn.Linear(3, 3 + ctx.data_rank), stage_local=True)
    assert not is_stage_local(Block(nn.Linear(3, 3)).weight)


def held_by(block: nn.Module) -> int:
    """Bytes that the parameters of a sharded module take."""
    flats = {param.handle.flat for param in block.parameters()}
    storages = {f.unsharded.untyped_storage() for f in flats} | {f.shard.untyped_storage() for f in flats}
    storages |= {p.untyped_storage() for p in block.parameters()}
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.ranks(4, pipe_size=2)
@LEVEL
def test_a_block_of_all_stages_moves_to_one(ctx: Any, level: int) -> None:
    precision = MixedPrecision(reduce_dtype=torch.float32)
    settings = {"use_checkpoint": False, "initialized": True, "zero_level": level, "precision": precision}
    plain = Layer()
    blocks = [Block(Layer(), **settings) for _ in range(2)]
    assert held_by(blocks[0]) > 0
    blocks[0].a._parameters["bias"].requires_grad = False  # after the Block has sorted its parameters
    plain.a.bias.requires_grad = ctx.pipe_rank != 0
    blocks[0].a._parameters["bias"].group = "biases"
    blocks[0].a._parameters["bias"].init_method = nn.init.zeros_
    identities = [id(p) for p in blocks[ctx.pipe_rank].parameters()]
    blocks[0](seeded(0, 2, 5)).sum().backward()  # leaves gradients
    flats = [flat for block in blocks for flat in group_of(block).flats]
    kept = [stage_block(block, keep=index == ctx.pipe_rank) for index, block in enumerate(blocks)]
    assert all(flat.shard.numel() == flat.unsharded.numel() == 0 for flat in flats)
    assert kept[1 - ctx.pipe_rank] is None
    assert held_by(blocks[1 - ctx.pipe_rank]) == 0  # also as long as somebody refers to it
    block = kept[ctx.pipe_rank]
    assert block is blocks[ctx.pipe_rank]
    assert stage_block(block, True) is block  # it is one already
    assert [id(p) for p in block.parameters()] == identities
    assert_same_parameters(block, plain, tolerance=0.0)
    assert block.a.weight is block.b.weight
    assert [p.requires_grad for p in block.parameters()] == [p.requires_grad for p in plain.parameters()]
    sharding = sharding_of(block)
    assert (sharding.checkpoint, sharding.initialized) == (None, True)
    assert (sharding.group.level, sharding.group.precision) == (level, precision)
    for param in block.parameters():
        assert is_stage_local(param)
        assert param.grad is None
        assert param.handle.group.level == level
        assert param.handle.flat.shard_comm.size == (1 if level == 0 else 2)
    bias = block.a._parameters["bias"]
    assert (bias.group, bias.init_method) == (("biases", nn.init.zeros_) if ctx.pipe_rank == 0 else (None, None))
    data = seeded(3, 2, 4, 5)
    block(data[ctx.data_rank]).square().sum().backward()
    plain(data.flatten(0, 1)).square().sum().backward()
    assert_same_gradients(block, plain)


@pytest.mark.ranks(2, pipe_size=2)
@pytest.mark.parametrize("use_checkpoint", [True, "matmuls", 0.5, 0.0, False])
@pytest.mark.parametrize("offload", [False, True])
def test_a_block_that_moves_to_one_stage_keeps_what_it_keeps(ctx: Any, use_checkpoint: Any, offload: bool) -> None:
    settings = {"use_checkpoint": use_checkpoint, "offload": offload, "zero_level": 3}
    moved = stage_block(Block(nn.Linear(5, 5), **settings), keep=True)
    expected = sharding_of(Block(nn.Linear(5, 5), **settings, stage_local=True))
    sharding = sharding_of(moved)
    assert sharding.group.options.offload == offload
    assert (sharding.checkpoint is None) == (expected.checkpoint is None)
    if expected.checkpoint is not None:
        assert type(sharding.checkpoint.kept) is type(expected.checkpoint.kept)
        assert vars(sharding.checkpoint.kept) == vars(expected.checkpoint.kept)


class Split(DistributedModule):
    """A module with parameters that are sharded already, one of them also over tensor-parallel ranks."""

    def __init__(self, ctx: Any, seed: int, on_meta: bool = False) -> None:
        super().__init__()
        self.full = {"split": seeded(seed, 3, 6), "common": seeded(seed + 1, 7)}
        shard = self.full["split"].chunk(ctx.tp_size, 1)[ctx.tp_rank]
        common = self.full["common"]
        if on_meta:
            shard, common = shard.to("meta"), common.to("meta")
        self.split = DistributedParameter(shard, tp_mode=True, tp_split_dim=1, group="split")
        self.common = DistributedParameter(common, init_method=nn.init.ones_)


@pytest.mark.ranks(4, pipe_size=2, tp_size=2)
@pytest.mark.parametrize("as_block", [True, False])
def test_sharded_parameters_move_to_one_stage(ctx: Any, as_block: bool) -> None:
    modules: list[nn.Module] = [Split(ctx, 1), Split(ctx, 5)]
    identities = [[id(p) for p in m.parameters()] for m in modules]
    if not as_block:
        with pytest.raises(ValueError, match=r"'split' is sharded over ranks \(.*stage_block"):
            Block(modules[0], stage_local=True)
    layers = [Block(m) if as_block else m for m in modules]
    kept = [stage_block(m, index == ctx.pipe_rank) for index, m in enumerate(layers)]
    assert [block is not None for block in kept] == [ctx.pipe_rank == 0, ctx.pipe_rank == 1]
    block = kept[ctx.pipe_rank]
    assert block is not None
    assert [id(p) for p in block.parameters()] == identities[ctx.pipe_rank]
    for name, param in block.named_parameters():
        where = slice_of(param)
        assert (where.row_comm or ctx.tp).ranks == ctx.zero.ranks
        assert where.shape == block.full[name].shape
        assert torch.equal(param.gather_all(), block.full[name])
    assert dict(block.named_parameters())["split"].group == "split"
    assert dict(block.named_parameters())["common"].init_method is nn.init.ones_


@pytest.mark.ranks(4, pipe_size=2, tp_size=2)
@pytest.mark.parametrize("as_block", [True, False])
def test_parameters_that_await_values_are_not_unsharded(ctx: Any, as_block: bool) -> None:
    module: nn.Module = Split(ctx, 1, on_meta=True)
    layer = Block(module) if as_block else module

    def sent() -> int:
        communicators = (ctx.outer_zero, ctx.outer_tp_zero)
        return sum(t.bytes for c in communicators for op, t in c.traffic.items() if op == "send")

    before = sent()
    block = stage_block(layer, ctx.pipe_rank == 1)
    assert sent() == before
    if block is not None:
        assert all(p.awaits_values for p in block.parameters())


@pytest.mark.ranks(4, pipe_size=2)
def test_communicators_of_its_own_stay_if_they_are_of_the_stage(ctx: Any) -> None:
    alone = Communicator(None, ctx.device)
    block = Block(nn.Linear(3, 3), shard_comm=alone, replicate_comm=ctx.zero)
    group = group_of(block)
    assert stage_block(block, True) is block
    assert group_of(block) is group
    assert all(is_stage_local(p) for p in block.parameters())
    same = Block(nn.Linear(3, 3), shard_comm=alone, replicate_comm=ctx.zero, stage_local=True)
    assert all(is_stage_local(p) for p in same.parameters())
    with pytest.raises(ValueError, match=r"include ranks \(0, 1, 2, 3\).*this pipeline stage"):
        Block(nn.Linear(3, 3), shard_comm=ctx.world, replicate_comm=alone, stage_local=True)
    with pytest.raises(ValueError, match=r"include ranks \(0, 1, 2, 3\).*this pipeline stage"):
        stage_block(Block(nn.Linear(3, 3), shard_comm=ctx.world, replicate_comm=alone), ctx.pipe_rank == 0)
    with pytest.raises(ValueError, match=r"spread parameters over 1 ranks.*belongs to 2"):
        stage_block(Block(nn.Linear(3, 3), shard_comm=alone, replicate_comm=alone), ctx.pipe_rank == 0)


@pytest.mark.ranks(2, pipe_size=2)
def test_what_cannot_become_a_block_is_refused_on_every_stage(ctx: Any) -> None:
    with pytest.raises(TypeError, match="one of them is a int"):
        stage_block(3, ctx.pipe_rank == 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="complex64"):
        stage_block(nn.Linear(2, 2, dtype=torch.complex64), ctx.pipe_rank == 0)
    with pytest.raises(ValueError, match="in a Block already"):
        stage_block(nn.Sequential(Block(nn.Linear(2, 2))), ctx.pipe_rank == 0)


class Stages(nn.Module):
    """A model with one Block for each stage, and parameters that all stages have."""

    def __init__(self, ctx: Any, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)
        self.own = Block(nn.Linear(4, 5 + ctx.pipe_rank), stage_local=True)
        self.head = nn.Linear(width, 9)


@pytest.mark.ranks(4, pipe_size=2)
def test_the_rest_of_the_model_is_sharded_over_all_stages(ctx: Any) -> None:
    model = bmt_zero.BMTrainModelWrapper(Stages(ctx))
    for name, param in model.named_parameters():
        comm = slice_of(param).row_comm
        assert comm is not None
        assert comm.ranks == (ctx.zero.ranks if name.startswith("own") else ctx.world.ranks), name
    with pytest.raises(RuntimeError, match="ranks disagree on the parameters of Stages"):
        bmt_zero.BMTrainModelWrapper(Stages(ctx, width=4 + ctx.pipe_rank))


@pytest.mark.ranks(2, pipe_size=2)
def test_what_cannot_be_initialised_on_one_stage_is_told_to_all(ctx: Any) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))

    with torch.device("meta"):
        inner = Bare() if ctx.pipe_rank == 1 else nn.Linear(3, 3)
    block = Block(inner, stage_local=True)
    with pytest.raises(ValueError, match=r"built on the meta device, .* fills them: 'weight' of a Bare"):
        bmt_zero.init_parameters(block)
    assert all(p.awaits_values for p in block.parameters())


@pytest.mark.ranks(2, pipe_size=2)
def test_at_level_zero_too_values_are_those_of_the_stage(ctx: Any) -> None:
    weight = torch.full((2, 2), float(ctx.rank))
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = weight
    param = dict(Block(layer, zero_level=0, stage_local=True).named_parameters())["weight"]
    assert torch.equal(param, weight)
    assert torch.equal(rows_of(weight, param), param)
