"""PipelineTransformerBlockList: which layers a stage has, and what it needs to make them."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from list_helpers import Held, Layer, assert_own_values, plain_layers
from torch import nn

from bmt_comm import Communicator
from bmt_pipe import AbsentLayer, PipelineTransformerBlockList, split_layers
from bmt_zero import (
    Block,
    BMTrainModelWrapper,
    DistributedModule,
    DistributedParameter,
    ParameterInitializer,
    TransformerBlockList,
    init_parameters,
    is_stage_local,
)
from bmt_zero.shard import sharding_of


def indices(layers: PipelineTransformerBlockList) -> list[int]:
    return [int(name) for name, _ in layers.named_children()]


def check_absent(layer: nn.Module, index: int, stage: int) -> None:
    assert isinstance(layer, AbsentLayer)
    assert (layer.index, layer.stage) == (index, stage)
    assert not list(layer.parameters())
    assert not list(layer.grouped_parameters())
    with pytest.raises(AttributeError, match=f"layer {index} belongs to pipeline stage {stage}, and has no 'weight'"):
        layer.weight  # noqa: B018
    with pytest.raises(RuntimeError, match=f"layer {index} belongs to pipeline stage {stage}, and cannot compute"):
        layer(torch.ones(2))


def check_stages(ctx: Any, interleave: int, weights: list[float] | None = None) -> None:
    """Seven layers, or as many as there are weights."""
    count = 7 if weights is None else len(weights)
    plain = plain_layers(count)
    torch.manual_seed(1)
    layers = PipelineTransformerBlockList((Layer() for _ in range(count)), interleave=interleave, weights=weights)
    chunks = split_layers(weights or [1] * count, ctx.pipe_size * interleave)
    assert layers.all_chunks == chunks
    assert layers.chunks == [chunks[c * ctx.pipe_size + ctx.pipe_rank] for c in range(interleave)]
    assert (layers.num_layers, layers.interleave, layers.num_hidden) == (count, interleave, 1)
    mine = [index for chunk in layers.chunks for index in chunk]
    assert indices(layers) == mine
    assert len(layers) == len(list(layers)) == count
    assert [block for c in range(interleave) for block in layers.blocks_of(c)] == [layers[i] for i in mine]
    for index, layer in enumerate(layers):
        assert isinstance(layer, Block) == (index in mine)
        if index in mine:
            assert layer is layers[str(index)] is layers[index - count]
        else:
            check_absent(layer, index, next(c for c, chunk in enumerate(chunks) if index in chunk) % ctx.pipe_size)
    with pytest.raises(IndexError):
        layers[count]
    for chunk in range(interleave):  # Blocks are prefetched inside a chunk
        hooks = [sharding_of(block).hooks for block in layers.blocks_of(chunk)]
        assert [each.next for each in hooks] == [*hooks[1:], None]
    assert_own_values(layers, plain)


@pytest.mark.ranks(1)
def test_one_stage(ctx: Any) -> None:
    check_stages(ctx, 1)
    check_stages(ctx, 3)


@pytest.mark.ranks(2, pipe_size=2)
def test_two_stages(ctx: Any) -> None:
    check_stages(ctx, 1)
    check_stages(ctx, 2)
    check_stages(ctx, 1, [1, 1, 1, 5, 0.5])


@pytest.mark.ranks(3, pipe_size=3)
def test_three_stages(ctx: Any) -> None:
    check_stages(ctx, 1)
    check_stages(ctx, 2)


@pytest.mark.ranks(4, pipe_size=4)
def test_four_stages(ctx: Any) -> None:
    check_stages(ctx, 1)
    check_stages(ctx, 1, [3, 1, 1, 1, 1, 1, 1])


@pytest.mark.ranks(4, pipe_size=2)
@pytest.mark.parametrize("level", [0, 3])
def test_stages_of_several_ranks(ctx: Any, level: int) -> None:
    plain = plain_layers(5)
    torch.manual_seed(1)
    layers = PipelineTransformerBlockList([Block(Layer(), zero_level=level) for _ in range(5)])
    assert_own_values(layers, plain)
    for param in layers.parameters():
        group = param.handle.group
        flat = group.reducers[0].flat
        assert (flat.shard_comm.size, flat.replicate_comm.size) == ((1, 2) if level == 0 else (2, 1))
        assert group.level == level


class Sharded(DistributedModule):
    """A layer whose parameters are sharded when it is made, one of them over tensor-parallel ranks, too."""

    def __init__(self, ctx: Any) -> None:
        super().__init__()
        self.logical = torch.randn(3, 6)
        shard = self.logical.chunk(ctx.tp_size, 1)[ctx.tp_rank]
        self.colwise = DistributedParameter(shard, tp_mode=True, tp_split_dim=1)
        self.common = DistributedParameter(self.logical[0])


@pytest.mark.ranks(4, pipe_size=2, tp_size=2)
@pytest.mark.parametrize("as_blocks", [True, False])
def test_layers_that_are_sharded_over_all_stages_already(ctx: Any, as_blocks: bool) -> None:
    torch.manual_seed(1)
    made = [Sharded(ctx) for _ in range(5)]
    params = {f"{i}.{name}": param for i, layer in enumerate(made) for name, param in layer.named_parameters()}
    given: Any = TransformerBlockList(made) if as_blocks else made
    layers = PipelineTransformerBlockList(given)
    assert indices(layers) == ([0, 1, 2] if ctx.pipe_rank == 0 else [3, 4])
    for name, param in layers.named_parameters():
        assert param is params[name]
        logical = made[int(name[0])].logical
        assert torch.equal(param.gather_all(), logical if name.endswith("colwise") else logical[0])


@pytest.mark.ranks(4, pipe_size=2)
def test_blocks_with_communicators_of_their_own(ctx: Any) -> None:
    alone = Communicator(None, ctx.device)
    blocks = [Block(Layer(), shard_comm=ctx.zero, replicate_comm=alone) for _ in range(3)]
    layers = PipelineTransformerBlockList(blocks)
    assert list(layers.children()) == (blocks[:2] if ctx.pipe_rank == 0 else blocks[2:])
    assert all(is_stage_local(param) for param in layers.parameters())
    with pytest.raises(ValueError, match="this pipeline stage"):
        PipelineTransformerBlockList([Block(Layer(), shard_comm=ctx.world, replicate_comm=alone) for _ in range(3)])


@pytest.mark.ranks(2, pipe_size=2)
def test_no_more_than_one_layer_of_another_stage_is_alive(ctx: Any) -> None:
    made: list[Any] = []
    owned = range(4) if ctx.pipe_rank == 0 else range(4, 8)

    def alive() -> list[int]:
        return [index for index, layer in enumerate(made) if layer() is not None]

    def generate() -> Iterator[nn.Module]:
        for index in range(8):
            assert alive() == [i for i in range(index) if i in owned]  # only the next one is alive, too
            layer = Layer()
            made.append(weakref.ref(layer))
            yield layer
            del layer

    layers = PipelineTransformerBlockList(generate(), weights=[1] * 8)
    assert alive() == list(owned) == indices(layers)


@pytest.mark.ranks(4, pipe_size=4)
def test_on_the_meta_device_nothing_of_other_stages_is_allocated(ctx: Any) -> None:
    with Held() as held, torch.device("meta"):
        layers = PipelineTransformerBlockList(nn.Linear(64, 64, bias=False) for _ in range(8))
    mine = 2 * 64 * 64 * 4
    assert mine <= held.most < mine + 64 * 64
    assert all(param.awaits_values for param in layers.parameters())


@pytest.mark.ranks(4, pipe_size=2)
def test_a_rank_holds_its_share_of_parameters_and_optimizer_states(ctx: Any) -> None:
    layers = PipelineTransformerBlockList((nn.Linear(8, 8, bias=False) for _ in range(6)), weights=[1] * 6)
    optimizer = torch.optim.Adam(layers.parameters())
    for param in layers.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    everything = 6 * 64 * 4
    share = everything // 2 // 2  # of the stage, and of the rank in it
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in layers.parameters()}
    assert sum(held.values()) == share
    states = [value for state in optimizer.state.values() for value in state.values() if value.dim()]
    assert sum(value.nbytes for value in states) == 2 * share


class Started(nn.Module):
    """A layer whose parameters have initialisers of their own."""

    def __init__(self) -> None:
        super().__init__()
        init = ParameterInitializer(nn.init.normal_, mean=1.0, std=0.5)
        self.weight = DistributedParameter(torch.empty(5, 3), init_method=init)


@pytest.mark.ranks(4, pipe_size=2)
def test_initial_values_do_not_depend_on_stages(ctx: Any) -> None:
    def build(kind: Any) -> nn.Module:
        with torch.device("meta"):
            on_meta = kind([nn.Linear(5, 3) for _ in range(5)])
        outer = nn.Module()
        outer.layers, outer.started = on_meta, kind([Started() for _ in range(5)])
        init_parameters(outer, seed=0)
        return outer

    reference = dict(build(TransformerBlockList).named_parameters())
    params = dict(build(PipelineTransformerBlockList).named_parameters())
    assert len(params) == (9 if ctx.pipe_rank == 0 else 6)
    wanted = {name: param.gather_all() for name, param in reference.items()}
    for name, param in params.items():
        assert param.gather_all().std() > 0
        assert torch.equal(param.gather_all(), wanted[name]), name


@pytest.mark.ranks(4, pipe_size=2)
def test_a_layer_may_come_twice_in_a_stage(ctx: Any) -> None:
    for wrap in (lambda layer: layer, Block):
        first, second = wrap(Layer()), wrap(Layer())
        layers = PipelineTransformerBlockList([first, first, second, second])
        own = 2 * ctx.pipe_rank
        assert len(layers) == 4
        assert layers[own] is layers[own + 1]
        assert len(list(layers.parameters())) == 4
        one = wrap(Layer())
        with pytest.raises(ValueError, match=r"modules\[1\] and modules\[2\] are the same module.*stages 0 and 1"):
            PipelineTransformerBlockList([Layer(), one, one, Layer()])


@pytest.mark.ranks(3, pipe_size=3)
def test_bad_arguments_raise_on_every_rank(ctx: Any) -> None:
    def tied() -> list[nn.Module]:
        layers = [Layer() for _ in range(6)]
        layers[4].a.weight = layers[1].a.weight
        return layers

    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ValueError, "modules has 5 layers, and 3 stages of interleave=2 chunks need 6", 5, {"interleave": 2}),
        (ValueError, "modules has 2 layers", 2, {}),
        (ValueError, "modules has 0 layers", iter(()), {}),
        (ValueError, "interleave=0 must be", 6, {"interleave": 0}),
        (ValueError, "num_hidden=0 must be", 6, {"num_hidden": 0}),
        (ValueError, "weights has 3 elements and modules 6", 6, {"weights": [1, 2, 3]}),
        (ValueError, r"weights\[1\]=-1.0 must be", 6, {"weights": [1, -1, 1, 1, 1, 1]}),
        (ValueError, "modules has 4 layers and weights 5", (Layer() for _ in range(4)), {"weights": [1] * 5}),
        (ValueError, "modules has more than 4 layers", (Layer() for _ in range(5)), {"weights": [1] * 4}),
        (TypeError, r"modules\[4\] is a str", [*(Layer() for _ in range(4)), "layer", Layer()], {}),
        (ValueError, r"'a.weight' of modules\[4\] is also one of modules\[1\]", tied(), {}),
        (ValueError, "complex64", [*(Layer() for _ in range(4)), nn.Linear(2, 2, dtype=torch.complex64)], {}),
    ]
    for kind, message, given, options in cases:
        layers = [Layer() for _ in range(given)] if isinstance(given, int) else given
        with pytest.raises(kind, match=message):
            PipelineTransformerBlockList(layers, **options)
    with pytest.raises(RuntimeError, match=r"ranks disagree on the layers of a Pipe.*interleave=1 on rank 0 and"):
        PipelineTransformerBlockList([Layer() for _ in range(9)], interleave=1 + ctx.rank % 2)


@pytest.mark.ranks(2, pipe_size=2)
def test_it_behaves_as_a_module(ctx: Any) -> None:
    layers = PipelineTransformerBlockList(nn.Linear(3, 3) for _ in range(4))
    model = BMTrainModelWrapper(nn.Sequential(nn.Linear(3, 3), layers))
    assert model[1] is layers
    assert [p.bmt_slice.row_comm is not None for p in model[0].parameters()] == [True, True]
    twin = copy.deepcopy(layers)
    assert indices(twin) == indices(layers)
    assert twin.chunks == layers.chunks
    with torch.no_grad():
        for param in twin.parameters():
            param.fill_(2.0)
    assert all(is_stage_local(p) for p in twin.parameters())
    assert all((p == 2).all() for p in twin.parameters())
    assert not any((p == 2).any() for p in layers.parameters())
    hooks = [sharding_of(block).hooks for block in twin.blocks_of(0)]
    assert hooks[0].next is hooks[1]
    assert torch.equal(twin(torch.ones(2, 3)), torch.full((2, 3), 1814.0))  # four times 6 x + 2
    layers.eval()
    assert not any(module.training for block in layers.children() for module in block.modules())
    layers.train()
    layers.requires_grad_(False)
    assert not any(p.requires_grad for p in layers.parameters())
    identities = [id(p) for p in layers.parameters()]
    layers.to(torch.float64)
    assert [id(p) for p in layers.parameters()] == identities
    assert layers[2 * ctx.pipe_rank](torch.ones(2, 3, dtype=torch.float64)).dtype == torch.float64
    assert "of 4" in repr(layers)
