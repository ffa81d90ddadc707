"""Optimizers that look at whole layers, on models that are cut in every way, against their references on one device.

Each test trains one model with all the optimizers at once, by one manager: every layer has its own, and so has every
parameter outside the layers, so that in a pipeline all stages share a parameter of each optimizer, and have others of
some. At each step the gradients of all ranks are put together. They must be those of plain PyTorch, and then go to
the references, too: the updates after 10 steps must be the same. (A reference with gradients of its own would differ
by the roundings of bf16 that Muon has, and by the signs of singular vectors.)
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_optimizers import LambFormula, galore_torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import bmt_tp
import bmt_zero.wrapper
from bmt_comm import ParallelContext, local_tensor, slice_of
from bmt_optim import (
    CAME,
    Adafactor,
    AdamOptimizer,
    AdamW,
    GaLoreAdamW,
    Lamb,
    Muon,
    OptimManager,
    ScheduleFreeAdamW,
    engine,
    to_distributed,
)
from bmt_optim.slices import unshard
from bmt_pipe import PipelineTransformerBlockList
from bmt_zero import Block, BMTrainModelWrapper, TransformerBlockList

STEPS, BATCH, VOCABULARY, WIDTH, LENGTH = 10, 12, 11, 6, 5
SCALE = 256.0
KINDS = ["lamb", "adafactor", "came", "galore", "muon", "torch adafactor"]  # of the layers, in order
OUTER = {
    "embed.weight": "adafactor",
    "position": "galore",
    "mix.weight": "muon",
    "norm.weight": "came",
    "norm.bias": "torch adafactor",
    "head.weight": "lamb",
    "head.bias": "adam",
}
PROJECTION = {"rank": 2, "update_proj_gap": 4, "scale": 0.5}
HAS_MUON = hasattr(torch.optim, "Muon")


class Layer(nn.Module):
    """No number of ranks divides its rows, but two tensor-parallel ranks do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)
        self.gain = nn.Parameter(torch.tensor([0.7]))  # FSDP2 takes no 0-dim parameters

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.mix = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList(Layer() for _ in KINDS)
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.mix(self.embed(ids) + self.position)
        if isinstance(self.layers, nn.ModuleList) and not isinstance(self.layers, TransformerBlockList):
            for layer in self.layers:
                x = layer(x)
        else:
            x = self.layers(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.roll(1, 1).flatten())


def batch(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


def by_kind(named: Iterable[tuple[str, Tensor]]) -> dict[str, list[Tensor]]:
    """The parameters of each optimizer."""
    found: dict[str, list[Tensor]] = {}
    for name, param in named:
        kind = OUTER[name] if name in OUTER else KINDS[int(name.split(".")[1])]
        dims = len(slice_of(param).shape)
        kind = {"muon": "muon" if dims == 2 else "adam", "galore": "galore" if dims == 2 else "galore, plain"}.get(
            kind, kind
        )
        found.setdefault(kind, []).append(param)
    return {kind: found[kind] for kind in sorted(found)}


def galore_groups(params: dict[str, list[Tensor]]) -> list[dict[str, Any]]:
    """Tall matrices are projected from the left, so that their projection sums over rows, and over tensor ranks."""
    tall = [slice_of(p).shape[0] > slice_of(p).shape[1] for p in params["galore"]]
    groups: list[dict[str, Any]] = []
    for kind, wanted in (("std", False), ("reverse_std", True)):
        found = [p for p, is_tall in zip(params["galore"], tall) if is_tall is wanted]
        groups += [{"params": found, **PROJECTION, "proj_type": kind}] if found else []
    plain = [{"params": params["galore, plain"]}] if "galore, plain" in params else []
    return [*groups, *plain]


LAMB = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
ADAFACTOR = {"lr": 0.05, "relative_step": False, "beta1": 0.8, "weight_decay": 0.1}
OF_TORCH = {"lr": 0.2, "weight_decay": 0.1}
CAME_OPTIONS = {"lr": 0.05, "weight_decay": 0.1}
MUON = {"lr": 0.05, "weight_decay": 0.1}
ADAM = {"lr": 0.05, "weight_decay": 0.1}
GALORE = {"lr": 0.05, "weight_decay": 0.1}


def distributed(named: Iterable[tuple[str, Tensor]]) -> list[torch.optim.Optimizer]:
    params = by_kind(named)
    found: dict[str, torch.optim.Optimizer] = {
        "lamb": Lamb(params["lamb"], **LAMB),
        "adafactor": Adafactor(params["adafactor"], **ADAFACTOR),
        "came": CAME(params["came"], **CAME_OPTIONS),
        "galore": GaLoreAdamW(galore_groups(params), nbits=32, **GALORE),
        "muon": Muon(params["muon"], **MUON),
        "torch adafactor": to_distributed(torch.optim.Adafactor(params["torch adafactor"], **OF_TORCH)),
        "adam": AdamW(params["adam"], **ADAM),
    }
    return list(found.values())


# --- the references -----------------------------------------------------------------------------------------------


def references(named: Iterable[tuple[str, Tensor]]) -> list[Any]:
    """The published implementations; ours on one device for what is not installed."""
    params = by_kind(named)
    galore: Any
    if importlib.util.find_spec("galore_torch") is None:
        galore = GaLoreAdamW(galore_groups(params), nbits=32, **GALORE)
    else:
        galore = galore_torch()(galore_groups(params), no_deprecation_warning=True, eps=1e-8, **GALORE)
    return [
        LambFormula(params["lamb"], **LAMB),
        importlib.import_module("transformers").Adafactor(params["adafactor"], **ADAFACTOR),
        importlib.import_module("came_pytorch").CAME(params["came"], **CAME_OPTIONS),
        galore,
        (torch.optim.Muon if HAS_MUON else Muon)(params["muon"], **MUON),
        torch.optim.Adafactor(params["torch adafactor"], **OF_TORCH),
        torch.optim.AdamW(params["adam"], **ADAM),
    ]


# --- the comparison -----------------------------------------------------------------------------------------------


def gathered(named: Iterable[tuple[str, Tensor]], value: Callable[[Tensor], Tensor | None]) -> dict[str, Tensor]:
    """What is whole of each parameter on any rank, in ranks' order; copies must agree."""
    mine = {}
    for name, param in named:
        found, where = value(param), slice_of(param)
        local = torch.zeros(where.local_shape) if found is None else local_tensor(found.detach())
        mine[name] = unshard(local, where)
    everywhere: list[dict[str, Tensor]] = [{}] * dist.get_world_size()
    dist.all_gather_object(everywhere, mine)
    union: dict[str, Tensor] = {}
    for theirs in everywhere:
        for name, tensor in theirs.items():
            first = union.setdefault(name, tensor)
            assert (tensor - first).norm() <= 1e-5 * first.norm(), f"copies of {name}"
    return union


def check(
    ctx: ParallelContext,
    cut: Callable[[Model], nn.Module],
    inner: Callable[[Any], nn.Module] = lambda model: model,
    grad_scale: float | None = None,
    replicas: tuple[int, int] | None = None,
    steps: int = STEPS,
) -> None:
    """Train ``cut(model)`` and compare. ``replicas`` are this rank's number among them, and how many there are."""
    pytest.importorskip("transformers")
    pytest.importorskip("came_pytorch")
    plain = Model()
    model = cut(copy.deepcopy(plain))
    named = [(name, p) for name, p in inner(model).named_parameters() if p.requires_grad]
    manager = OptimManager(loss_scale=SCALE, grad_scale=grad_scale)
    for optimizer in distributed(named):
        manager.add_optimizer(optimizer)
    number, count = (ctx.rank // ctx.tp_size, ctx.replicas) if replicas is None else replicas
    of_plain = dict(plain.named_parameters())
    start = {name: p.detach().clone() for name, p in of_plain.items()}
    judge = ctx.rank == 0  # who alone has the references; the others go on
    theirs = references(of_plain.items()) if judge else []
    for step in range(steps):
        ids = batch(step)
        manager.zero_grad()
        manager.backward(model(ids.chunk(count)[number]))
        gradients = gathered(named, lambda p: p.grad)
        if judge:
            assert gradients.keys() == of_plain.keys()
            plain.zero_grad()
            plain(ids).backward()
            pairs = [(gradients[name] / SCALE, p.grad) for name, p in of_plain.items()]
            wanted = torch.cat([g.flatten() for _, g in pairs])
            difference = torch.cat([(g - w).flatten() for g, w in pairs])
            assert difference.norm() <= 1e-4 * wanted.norm(), f"gradients of step {step}"
            for p, (g, _) in zip(of_plain.values(), pairs):
                p.grad = g
            for optimizer in theirs:
                optimizer.step()
        manager.step()
    assert manager.loss_scale == SCALE
    found = gathered(named, lambda p: p)
    if judge:
        for name, p in of_plain.items():
            change = p.detach() - start[name]
            assert change.norm() > 1e-5, name
            error = (found[name] - p.detach()).norm() / change.norm()
            assert error <= 1e-5, f"update of {name}: {error}"


def in_blocks(level: int, plan: dict[str, str] | None = None) -> Callable[[Model], nn.Module]:
    def cut(model: Model) -> nn.Module:
        if plan is not None:
            bmt_tp.parallelize(model, plan)
        model.layers = TransformerBlockList([Block(layer, zero_level=level) for layer in model.layers])
        return BMTrainModelWrapper(model, zero_level=level)

    return cut


PLAN = {"layers.*.up": "colwise", "layers.*.down": "rowwise"}


@pytest.mark.ranks(3, timeout=120)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_zero(ctx: ParallelContext, level: int) -> None:
    check(ctx, in_blocks(level))


@pytest.mark.ranks(4, tp_size=2, timeout=120)
@pytest.mark.parametrize("level", [0, 3])
def test_zero_and_tensor_parallelism(ctx: ParallelContext, level: int) -> None:
    check(ctx, in_blocks(level, PLAN))


def in_stages(level: int, plan: dict[str, str] | None = None) -> Callable[[Model], nn.Module]:
    def cut(model: Model) -> nn.Module:
        if plan is not None:
            bmt_tp.parallelize(model, plan)
        blocks = [Block(layer, zero_level=level) for layer in model.layers]
        model.layers = PipelineTransformerBlockList(blocks)
        return BMTrainModelWrapper(model, zero_level=level)

    return cut


@pytest.mark.ranks(4, pipe_size=2, timeout=120)
@pytest.mark.parametrize("level", [0, 3])
def test_pipeline_and_zero(ctx: ParallelContext, level: int) -> None:
    check(ctx, in_stages(level))


@pytest.mark.ranks(4, pipe_size=2, tp_size=2, timeout=120)
def test_pipeline_and_tensor_parallelism(ctx: ParallelContext) -> None:
    check(ctx, in_stages(3, PLAN))


def fully_sharded(mesh: Any = None) -> Callable[[Model], nn.Module]:
    def cut(model: Model) -> nn.Module:
        for part in (*model.layers, model):
            fully_shard(part, **({} if mesh is None else {"mesh": mesh}))
        return model

    return cut


@pytest.mark.ranks(3, timeout=120)
def test_fsdp2(ctx: ParallelContext) -> None:
    check(ctx, fully_sharded(), grad_scale=1)


@pytest.mark.ranks(4, tp_size=2, timeout=120)
def test_fsdp2_and_tensor_parallelism_of_torch(ctx: ParallelContext) -> None:
    def cut(model: Model) -> nn.Module:
        for layer in model.layers:
            parallelize_module(layer, ctx.mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return fully_sharded(ctx.mesh["data"])(model)

    check(ctx, cut, grad_scale=1, replicas=(ctx.data_rank, ctx.data_size))


@pytest.mark.ranks(2, timeout=120)
def test_ddp(ctx: ParallelContext) -> None:
    check(ctx, DistributedDataParallel, lambda model: model.module, grad_scale=1)


@pytest.mark.ranks(4, pipe_size=2, timeout=120)
def test_a_sum_over_one_stage_in_place_of_all_is_noticed(ctx: ParallelContext) -> None:
    reduce_packed = engine.reduce_packed

    def broken(reductions: Any, record: Any, *overlap: Any) -> None:
        # Parameters outside the layers are spread over the world. The overflow flag, a single number, is spared.
        flags = [r for r in reductions if r.value.numel() == 1]
        others = [r for r in reductions if r.value.numel() > 1]
        for r in others:
            r.comm = ctx.zero
        reduce_packed(others, record, *overlap)
        reduce_packed(flags, record)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "reduce_packed", broken)
        patch.setattr(bmt_zero.wrapper, "_LARGE", 0)  # every module is sharded by itself, over all ranks
        if ctx.rank == 0:
            with pytest.raises(AssertionError, match="update of "):
                check(ctx, in_stages(3), steps=1)
        else:
            check(ctx, in_stages(3), steps=1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("managed", [False, True])
def test_a_micro_batch_is_dropped_by_zeroing_its_gradients(ctx, level, managed):
    torch.manual_seed(0)
    plain = nn.Linear(6, 5)
    block = bmt_zero.Block(copy.deepcopy(plain), zero_level=level)
    optimizer = AdamOptimizer(block.parameters(), lr=0.1)
    zeroing = OptimManager() if managed else optimizer
    if managed:
        zeroing.add_optimizer(optimizer)
    with bmt_zero.no_sync(block):
        block(torch.ones(2, 6)).square().sum().backward()
    zeroing.zero_grad()
    batch = torch.arange(24.0).view(4, 6)
    plain(batch).square().sum().backward()
    block(batch.chunk(2)[ctx.rank]).square().sum().backward()
    for param, wanted in zip(block.parameters(), plain.parameters(), strict=True):
        rows = slice(param.bmt_slice.row_start, param.bmt_slice.row_stop)
        torch.testing.assert_close(param.grad[:], wanted.grad[rows])


@pytest.mark.ranks(2)
def test_optimizers_of_sharded_parameters_step_together(ctx: ParallelContext) -> None:
    blocks = TransformerBlockList([Block(nn.Linear(4, 4)) for _ in range(2)])
    manager = OptimManager(loss_scale=SCALE)
    optimizers = [Lamb(block.parameters(), lr=0.1) for block in blocks]
    for optimizer in optimizers:
        manager.add_optimizer(optimizer)
    manager.backward(blocks(torch.ones(1, 4)).sum())
    manager.step()
    assert optimizers[0].communication is optimizers[1].communication


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [1, 3])
def test_weights_come_back_from_averages_also_if_the_first_forward_computes_with_these(ctx: Any, level: int) -> None:
    """The first forward moves parameters to memory that ranks share."""

    def made() -> tuple[Block, ScheduleFreeAdamW]:
        torch.manual_seed(0)
        block = Block(nn.Linear(8, 8), zero_level=level)
        return block, ScheduleFreeAdamW(block.parameters(), lr=0.1)

    block, optimizer = made()
    for _ in range(3):
        block(torch.randn(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    resumed, its_optimizer = made()
    resumed.load_state_dict(block.state_dict())
    its_optimizer.load_state_dict(optimizer.state_dict())
    trained = [local_tensor(param).detach().clone() for param in resumed.parameters()]
    with its_optimizer.evaluating(), torch.no_grad():
        resumed(torch.ones(1, 8))
        averages = [local_tensor(param).detach().clone() for param in resumed.parameters()]
    for param, values, average in zip(resumed.parameters(), trained, averages, strict=True):
        assert torch.equal(local_tensor(param), values)
        assert not values.numel() or not torch.equal(average, values)
