"""Stages of a pipeline that have other parameters, groups or dtypes than each other, and optimizers and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bmt_optim
import bmt_zero
from bmt_comm import LAYER_ATTRIBUTE, slice_of
from bmt_pipe import PipelineTransformerBlockList

WIDTH = 8


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32, gain: bool = False) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.to(dtype)
        self.gain = nn.Parameter(torch.tensor(0.7)) if gain else None  # fp32, by itself in its bucket

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.up(self.norm(x)).tanh())
        return x + (y if self.gain is None else (self.gain * y.float()).to(x.dtype))


class Model(nn.Module):
    def __init__(self, layers: int, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        dtype = options.get("dtype", torch.float32)
        self.first = nn.Linear(4, WIDTH, dtype=dtype)
        self.layers: Any = nn.ModuleList(Layer(**options) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH, dtype=dtype), nn.Linear(WIDTH, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x.to(self.first.weight.dtype))
        for layer in self.layers if type(self.layers) is nn.ModuleList else ():
            x = layer(x)
        if type(self.layers) is not nn.ModuleList:
            x = self.layers(x)
        result: Tensor = self.head(self.norm(x))
        return result


def staged(level: int, layers: int = 3, trained: tuple[str, ...] = (), **options: Any) -> Any:
    model = Model(layers, **options)
    for name, param in model.named_parameters():
        param.requires_grad_(not trained or name.startswith(trained))
    model.layers = PipelineTransformerBlockList([bmt_zero.Block(layer, zero_level=level) for layer in model.layers])
    return bmt_zero.BMTrainModelWrapper(model, zero_level=level)


def train(ctx: Any, model: nn.Module, manager: bmt_optim.OptimManager, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(100 * step + ctx.rank))
        manager.zero_grad()
        manager.backward(model(x).float().square().mean())
        manager.step()


def managed(optimizer: torch.optim.Optimizer, scheduler: Any = None) -> bmt_optim.OptimManager:
    manager = bmt_optim.OptimManager()
    manager.add_optimizer(optimizer, scheduler)
    return manager


def by_layer(model: nn.Module, layers: int) -> list[dict[str, Any]]:
    """A group for each layer that this stage has, with a learning rate of its own, and one for what all have."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if n.startswith(f"layers.{i}.")], "lr": 0.02 * 0.5**i} for i in range(layers)
    ]
    groups = [group for group in groups if group["params"]]
    return [*groups, {"params": [p for n, p in named if not n.startswith("layers.")], "lr": 0.03}]


@pytest.mark.ranks(4, pipe_size=2, timeout=120)
@pytest.mark.parametrize("layers", [3, 4])  # with three, stages have different numbers of groups
@pytest.mark.parametrize("of_torch", [False, True])
def test_groups_and_schedulers_of_each_stage_come_back(ctx: Any, tmp_path: Path, layers: int, of_torch: bool) -> None:
    def make() -> tuple[Any, Any, bmt_optim.OptimManager]:
        model = staged(3, layers)
        kind: Any = torch.optim.AdamW if of_torch else bmt_optim.AdamOptimizer
        optimizer = kind(by_layer(model, layers), lr=0.01)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
        return model, optimizer, managed(optimizer, scheduler)

    model, optimizer, manager = make()
    train(ctx, model, manager, range(3))
    checkpointer = bmt_zero.Checkpointer(tmp_path)
    checkpointer.save(3, model=model, manager=manager)
    checkpointer.wait()
    rates = [group["lr"] for group in optimizer.param_groups]
    train(ctx, model, manager, range(3, 6))
    again, optimizer, manager = make()
    assert checkpointer.load_latest(model=again, manager=manager) == 3
    assert [group["lr"] for group in optimizer.param_groups] == rates
    train(ctx, again, manager, range(3, 6))
    for (name, param), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(param.to_local(), other.to_local()), name
    checkpointer.close()


@pytest.mark.ranks(2, init=False, timeout=120)
def test_groups_that_differ_between_stages_are_not_loaded_without_a_pipeline(tmp_path: Path) -> None:
    from bmt_comm import init_distributed, shutdown

    ctx = init_distributed(pipe_size=2)
    model = staged(3)
    optimizer = bmt_optim.AdamOptimizer(by_layer(model, 3), lr=0.01)
    checkpointer = bmt_zero.Checkpointer(tmp_path)
    checkpointer.save(1, model=model, optimizer=optimizer)
    checkpointer.close()
    ctx.world.barrier()
    shutdown()
    init_distributed()
    whole = bmt_zero.BMTrainModelWrapper(Model(3))
    optimizer = bmt_optim.AdamOptimizer(by_layer(whole, 3), lr=0.01)
    checkpointer = bmt_zero.Checkpointer(tmp_path)
    with pytest.raises(ValueError, match="saved by 2 pipeline stages with different parameter groups"):
        checkpointer.load(1, model=whole, optimizer=optimizer)
    checkpointer.load(1, model=whole)
    checkpointer.close()


def rounding(params: list[Any]) -> torch.optim.Optimizer:
    return bmt_optim.AdamW(params, lr=1e-2, stochastic_rounding=True)


def apollo(params: list[Any]) -> torch.optim.Optimizer:
    wide = [p for p in params if len(slice_of(p).shape) == 2]
    others = [p for p in params if len(slice_of(p).shape) != 2]
    return bmt_optim.APOLLO([{"params": wide, "rank": 4}, {"params": others}], lr=1e-2)


@pytest.mark.ranks(2, pipe_size=2, timeout=120)
@pytest.mark.parametrize(("dtype", "make"), [(torch.bfloat16, rounding), (torch.float32, apollo)])
def test_what_all_stages_have_gets_the_same_random_numbers(ctx: Any, dtype: torch.dtype, make: Any) -> None:
    model = staged(0, dtype=dtype)
    manager = managed(make(list(model.parameters())))
    train(ctx, model, manager, range(5))
    bmt_zero.verify_replicas(model)


@pytest.mark.ranks(4, pipe_size=2, timeout=120)
@pytest.mark.parametrize("level", [1, 2])
def test_buckets_that_one_rank_holds(ctx: Any, level: int) -> None:
    model = staged(level, layers=4, dtype=torch.bfloat16, gain=True)
    manager = managed(bmt_optim.AdamOptimizer(model.parameters(), lr=0.01))
    train(ctx, model, manager, range(3))
    bmt_zero.verify_replicas(model)


@pytest.mark.ranks(4, pipe_size=2, timeout=120)
@pytest.mark.parametrize("kind", ["CAME", "SOAP"])
def test_a_restart_where_one_stage_trains_no_matrices(ctx: Any, tmp_path: Path, kind: str) -> None:
    def make() -> tuple[Any, bmt_optim.OptimManager]:
        model = staged(3, layers=4, trained=("layers.0.", "norm."))
        return model, managed(getattr(bmt_optim, kind)(list(model.parameters()), lr=1e-3))

    model, manager = make()
    train(ctx, model, manager, range(2))
    checkpointer = bmt_zero.Checkpointer(tmp_path)
    checkpointer.save(2, model=model, manager=manager)
    checkpointer.wait()
    model, manager = make()
    assert checkpointer.load_latest(model=model, manager=manager) == 2
    train(ctx, model, manager, range(2, 4))
    checkpointer.close()


@pytest.mark.ranks(2, pipe_size=2, timeout=120)
def test_a_stage_with_nothing_to_train_can_make_an_optimizer(ctx: Any) -> None:
    model = staged(3, layers=4, trained=("layers.3.",))
    before = {name: param.to_local().clone() for name, param in model.named_parameters()}
    manager = managed(bmt_optim.AdamOptimizer([p for p in model.parameters() if p.requires_grad], lr=0.01))
    train(ctx, model, manager, range(2))
    for name, param in model.named_parameters():
        assert torch.equal(param.to_local(), before[name]) != name.startswith("layers.3."), name


class WithAdapter(Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        return x + x @ self.a @ self.b if hasattr(self, "a") else x


def add_adapters(layers: Any, which: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(3)
    for number, layer in enumerate(layers):
        a, b = torch.randn(WIDTH, 2, generator=generator), torch.randn(2, WIDTH, generator=generator)
        if number in which and isinstance(layer, WithAdapter):  # not one of another stage
            layer.a, layer.b = nn.Parameter(a / 4), nn.Parameter(b / 4)


@pytest.mark.ranks(2, pipe_size=2, timeout=120)
@pytest.mark.parametrize("which", [(0, 1, 2), (0,)])
def test_adapters_that_come_into_layers_after_wrapping(ctx: Any, which: tuple[int, ...]) -> None:
    plain, model = Model(3), Model(3)
    for each in (plain, model):
        for layer in each.layers:
            layer.__class__ = WithAdapter
    model.layers = PipelineTransformerBlockList([bmt_zero.Block(layer) for layer in model.layers])
    wrapped: Any = bmt_zero.BMTrainModelWrapper(model)
    x = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(ctx.rank))
    wrapped(x)
    for each in (plain, wrapped):
        each.requires_grad_(False)
        add_adapters(each.layers, which)
    wrapped(x)
    params = [p for p in wrapped.parameters() if p.requires_grad]
    manager = managed(bmt_optim.AdamW([{"params": params}], lr=0.01))
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=0.01)
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    for step in range(3):
        train(ctx, wrapped, manager, range(step, step + 1))
        reference.zero_grad()
        for rank in range(2):
            x = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(100 * step + rank))
            (plain(x).square().mean() / 2).backward()
        reference.step()
    found = wrapped.state_dict()
    assert list(found) == list(before)
    layers = {n: getattr(p, LAYER_ATTRIBUTE)[1] for n, p in wrapped.named_parameters() if n.startswith("layers.")}
    assert all(name.startswith(f"layers.{number}.") for name, number in layers.items())
    for name, value in plain.state_dict().items():
        change = value - before[name]
        assert (found[name] - value).norm() <= 1e-4 * change.norm(), name


@pytest.mark.ranks(2, pipe_size=2, timeout=120)
@pytest.mark.parametrize("kind", ["Lamb", "AdamOptimizer"])
def test_an_optimizer_that_one_rank_steps_by_itself(ctx: Any, kind: str) -> None:
    model = staged(3)
    optimizer = getattr(bmt_optim, kind)(list(model.parameters()), lr=0.01)
    steps: list[int] = []
    if ctx.rank == 0:
        optimizer.register_step_post_hook(lambda *_: steps.append(1))
    manager = bmt_optim.OptimManager(loss_scale=64.0)
    manager.add_optimizer(optimizer)
    before = model.state_dict()
    train(ctx, model, manager, range(3))
    assert sum(steps) == (3 if ctx.rank == 0 else 0)
    other = staged(3)
    plain = bmt_optim.OptimManager(loss_scale=64.0)
    plain.add_optimizer(getattr(bmt_optim, kind)(list(other.parameters()), lr=0.01))
    train(ctx, other, plain, range(3))
    for (name, value), wanted in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert not torch.equal(value, before[name])
        torch.testing.assert_close(value, wanted, msg=name)


@pytest.mark.ranks(2, pipe_size=2, timeout=120)
def test_the_gathered_state_of_another_stage_is_refused(ctx: Any) -> None:
    model = staged(3, layers=4)  # the same shapes on both stages
    manager = managed(bmt_optim.AdamOptimizer(model.parameters(), lr=0.01))
    train(ctx, model, manager, range(2))
    states = ctx.world.all_gather_object(manager.state_dict(gather_opt=True))
    with pytest.raises(ValueError, match="is of other layers of a pipeline than this rank has"):
        manager.load_state_dict(states[1 - ctx.pipe_rank])
    other = staged(3, layers=4)  # as another script would have it, which has made other pipelines before
    manager = managed(bmt_optim.AdamOptimizer(other.parameters(), lr=0.01))
    manager.load_state_dict(states[ctx.pipe_rank])
    assert "pipeline_layers" not in manager.optimizers[0].param_groups[0]


@pytest.mark.ranks(2, pipe_size=2, timeout=120)
def test_random_projections_go_on_in_another_model(ctx: Any) -> None:
    model = staged(3)
    manager = managed(apollo(list(model.parameters())))
    train(ctx, model, manager, range(3))
    again = staged(3)
    resumed = managed(apollo(list(again.parameters())))
    bmt_zero.load_state_dict(again, model.state_dict())
    resumed.load_state_dict(manager.state_dict())
    for each, its in ((model, manager), (again, resumed)):
        train(ctx, each, its, range(3, 5))
    for (name, param), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(param.to_local(), other.to_local()), name


@pytest.mark.ranks(2, pipe_size=2, timeout=120)
def test_parameters_that_no_stage_has(ctx: Any) -> None:
    model = staged(3)
    used = iter(list(model.parameters()))
    assert sum(1 for _ in used) > 0
    manager = managed(bmt_optim.AdamOptimizer(used, lr=0.01))
    with pytest.raises(ValueError, match="optimizer 0 has no parameters on any stage of the pipeline"):
        train(ctx, model, manager, range(1))


class Failing(Layer):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if Failing.fails:
            raise ValueError("a bad batch")
        return super().forward(x)


@pytest.mark.ranks(2, pipe_size=2, timeout=120)
@pytest.mark.parametrize("level", [1, 3])
def test_what_follows_an_exception_in_forward(ctx: Any, level: int) -> None:
    """A state dict, to be saved in a hurry, and further steps."""
    model = Model(3)
    model.layers[2].__class__ = Failing
    model.layers = PipelineTransformerBlockList([bmt_zero.Block(layer, zero_level=level) for layer in model.layers])
    wrapped: Any = bmt_zero.BMTrainModelWrapper(model, zero_level=level)
    manager = managed(bmt_optim.AdamOptimizer(wrapped.parameters(), lr=0.01))
    train(ctx, wrapped, manager, range(1))
    before = wrapped.state_dict()
    Failing.fails = True
    try:
        with pytest.raises((ValueError, RuntimeError), match="a bad batch"):
            train(ctx, wrapped, manager, range(1, 2))
    finally:
        Failing.fails = False
    saved = wrapped.state_dict()
    assert all(torch.equal(saved[name], value) for name, value in before.items())
    assert ctx.world.all_gather_object(ctx.rank) == [0, 1]
    train(ctx, wrapped, manager, range(1, 2))
    assert not torch.equal(wrapped.state_dict()["head.weight"], before["head.weight"])
