"""Parameters that are added to a wrapped model (adapters) train as in the plain model; replaced ones are refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from bmt_zero import Block, BMTrainModelWrapper, ShardedParameter, TransformerBlockList

STEPS = 5


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.down = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Encoder(nn.Module):
    """Its forward asks for the number of rows of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(3, 5))
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.positions[torch.arange(x.shape[0]) % self.positions.shape[0]]
        for layer in self.layers:
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))


class Adapted(nn.Module):
    """A frozen linear layer and its adapter, as in peft."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, 2, bias=False)
        self.b = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


def make() -> Model:
    torch.manual_seed(3)
    return Model()


def adapt(model: Model, seed: int = 4) -> None:
    torch.manual_seed(seed)
    for layer in model.encoder.layers:
        layer.up, layer.down = Adapted(layer.up), Adapted(layer.down)
    model.head = Adapted(model.head)
    model.encoder.scale = nn.Parameter(torch.randn(5))  # has no effect, and no gradient


def train(model: nn.Module, rank: int = 0, size: int = 1, optimizer: torch.optim.Optimizer | None = None) -> None:
    optimizer = optimizer or torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    for step in range(STEPS):
        batch = torch.randn(18, 5, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        (model(batch).square().sum() / 18).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_trained_alike(model: nn.Module, plain: nn.Module, start: dict[str, Tensor]) -> None:
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    for name, wanted in plain.state_dict().items():
        change = wanted - start[name]
        assert (state[name] - wanted).norm() <= 1e-5 * change.norm() + 1e-7, name


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_adapters(ctx, level, use_checkpoint):
    plain, model = make(), BMTrainModelWrapper(make(), zero_level=level, use_checkpoint=use_checkpoint)
    train(plain)
    train(model, ctx.rank, ctx.world_size)
    adapt(plain)
    adapt(model, seed=4 + ctx.rank)  # the values of rank 0 count
    start = copy.deepcopy(plain.state_dict())
    params = list(model.parameters())
    train(plain)
    train(model, ctx.rank, ctx.world_size)
    assert all(a is b and isinstance(b, ShardedParameter) for a, b in zip(params, model.parameters(), strict=True))
    assert_trained_alike(model, plain, start)
    with torch.no_grad():
        batch = torch.ones(4, 5)
        torch.testing.assert_close(model.eval()(batch), plain.eval()(batch), rtol=1e-4, atol=1e-5)
    twin = copy.deepcopy(model)
    before = copy.deepcopy(plain.state_dict())
    train(plain.train())
    train(twin.train(), ctx.rank, ctx.world_size)
    assert_trained_alike(twin, plain, before)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-4, atol=1e-5)


@pytest.mark.ranks(2)
def test_added_parameters_are_sharded_at_once_when_the_model_is_wrapped_again(ctx):
    plain, model = make(), BMTrainModelWrapper(make())
    adapt(plain)
    adapt(model)
    assert not all(isinstance(p, ShardedParameter) for p in model.parameters())
    container = nn.Sequential(model)  # peft puts the model into a container, too
    assert BMTrainModelWrapper(container) is container
    assert all(isinstance(p, ShardedParameter) for p in model.parameters())
    start = copy.deepcopy(plain.state_dict())
    train(plain)
    train(model, ctx.rank, 2)
    assert_trained_alike(model, plain, start)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("added", ["model.extra", "layer.extra", "layer.append"])
def test_ranks_that_add_other_parameters_are_told(ctx, added):
    model = BMTrainModelWrapper(make())
    where = {"model": model, "layer": model.encoder.layers[1]}[added.partition(".")[0]]
    if added.endswith("extra"):
        where.extra = nn.Parameter(torch.ones(2 + ctx.rank))
    else:
        where.register_parameter(f"of_rank_{ctx.rank}", nn.Parameter(torch.ones(2)))
    with pytest.raises(RuntimeError, match="ranks disagree on the parameters"):
        model(torch.ones(2, 5))


@pytest.mark.ranks(2)
def test_what_replaces_a_parameter_is_refused_at_the_next_forward(ctx):
    x = torch.ones(2, 5)
    spare = nn.Linear(5, 3)  # from before
    for change, path in (
        (lambda m: setattr(m, "head", nn.Linear(5, 4)), "head.weight"),
        (lambda m: setattr(m.encoder.layers[1], "up", nn.Linear(5, 7)), "encoder.layers.1.up.weight"),
        (lambda m: m.encoder.layers.__setitem__(0, Layer()), "encoder.layers.0.up.weight"),
        (lambda m: setattr(m, "head", spare), "head.weight"),
    ):
        model = BMTrainModelWrapper(make())
        model(x)
        twin = copy.deepcopy(model)
        change(model)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=f"parameter '{path}', of a Linear, came into the model after"):
                model(x)
        twin(x)


@pytest.mark.ranks(2)
def test_a_new_layer_trains(ctx):
    plain, model = make(), BMTrainModelWrapper(make())
    for which in (plain, model):
        torch.manual_seed(5)
        which.encoder.layers.insert(1, Layer())
    start = copy.deepcopy(plain.state_dict())
    train(plain)
    train(model, ctx.rank, 2)
    assert_trained_alike(model, plain, start)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("gradients", [True, False])
def test_a_part_that_is_called_by_itself_sees_unsharded_parameters(ctx, gradients):
    plain, model = make(), BMTrainModelWrapper(make())
    batch = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    with torch.set_grad_enabled(gradients):
        wanted, output = plain.encoder(batch), model.encoder(batch)
    torch.testing.assert_close(output, wanted)
    if gradients:
        wanted.square().sum().backward()
        (output.square().sum() / 2).backward()
        wanted_gradient = plain.encoder.positions.grad
        torch.optim.SGD(plain.encoder.parameters(), lr=1.0).step()
        torch.optim.SGD(model.encoder.parameters(), lr=1.0).step()
        assert wanted_gradient is not None
        torch.testing.assert_close(model.state_dict(), plain.state_dict())


@pytest.mark.ranks(2)
def test_a_new_linear_elsewhere_changes_nothing(ctx):
    block = BMTrainModelWrapper(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    before = block(torch.ones(1, 3))
    Block(nn.Linear(3, 3))
    assert torch.equal(block(torch.ones(1, 3)), before)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_without_the_wrapper_they_are_refused_by_name(ctx, use_checkpoint):
    layers = TransformerBlockList([Block(Layer(), use_checkpoint) for _ in range(2)])
    x = torch.ones(2, 5)
    layers(x)
    twin = copy.deepcopy(layers)
    layers[1].up = Adapted(layers[1].up)
    for _ in range(2):
        with pytest.raises(
            RuntimeError, match=r"parameter 'up.a.weight', of a Linear, came into .* after that was sharded"
        ):
            layers(x)
    nn.Linear(2, 2)  # looks again, and finds nothing
    twin(x).sum().backward()
