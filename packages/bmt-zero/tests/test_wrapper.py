"""BMTrainModelWrapper: a model written for one device trains sharded as it does by itself."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import bmt_zero


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x) for layer in self.project)
        return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


class Nested(nn.Module):
    """ModuleLists in the elements of a ModuleList, a tied head, buffers, a scalar and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([nn.Sequential(Attention(), nn.LayerNorm(6)) for _ in range(3)])
        self.head = nn.Linear(6, 11)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("shift", torch.randn(6))
        self.register_buffer("cache", torch.randn(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.shift + self.cache + self.frozen
        for layer in self.layers:
            h = h + layer(h)
        return self.head(h * self.scale)


class Stages(nn.Module):
    """A ModuleList of ModuleLists and ModuleDicts, which have no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.stages = nn.ModuleList([nn.ModuleList([nn.Linear(6, 6) for _ in range(2)]) for _ in range(2)])
        self.named = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(6, 5), "b": nn.Linear(5, 6)})])

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        for stage in self.stages:
            for layer in stage:
                h = torch.tanh(layer(h))
        for entry in self.named:
            h = entry["b"](entry["a"](h))
        return h


class Odd(nn.Module):
    """Reads parameters in all the ways that are not self.module(x)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.recurrent = nn.LSTM(6, 6, batch_first=True)
        self.list = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        self.parameters_list = nn.ParameterList([torch.randn(6), torch.randn(6)])
        self.parameters_dict = nn.ParameterDict({"shift": torch.randn(6)})
        self.normed = parametrizations.weight_norm(nn.Linear(6, 5))
        self.inner = nn.ModuleList([parametrizations.weight_norm(nn.Linear(5, 6))])
        self.again = nn.Sequential(self.list[0])

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        h = h + self.attention(h, h, h, need_weights=False)[0]
        h = h + self.recurrent(h)[0]
        h = F.linear(h, self.list[0].weight, self.list[0].bias)
        h = self.again(self.list[1](h))
        for scale in self.parameters_list:
            h = h * scale
        h = h + self.parameters_dict["shift"]
        return self.inner[0](torch.tanh(self.normed(h)))


class Encoder(nn.Module):
    """torch's own transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        layer = nn.TransformerEncoderLayer(6, 2, 10, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(self.embed(x))


def build(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return make()


STEPS = 10


def train(model: nn.Module, batches: list[Tensor], replicas: int) -> None:
    """Steps on the mean loss over all replicas; sharded gradients are sums over them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for batch in batches:
        optimizer.zero_grad()
        output = model(batch)
        # The mean square of a norm's output hardly depends on its input.
        weights = torch.linspace(0.5, 1.5, output.shape[-1])
        ((output * weights).square().mean() / replicas).backward()
        optimizer.step()


def update_error(state: dict[str, Tensor], wanted: dict[str, Tensor], start: dict[str, Tensor]) -> float:
    errors = [0.0]
    for name, value in wanted.items():
        if value.is_floating_point():
            change = value - start[name]
            error = (state[name] - value).norm()
            errors.append(float(error / change.norm()) if change.any() else float(error))
    return float(torch.tensor(errors).max())  # nan, if one is


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("make", [Nested, Stages, Odd, Encoder])
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_trains_as_the_plain_model_does(ctx: Any, make: Callable[[], nn.Module], use_checkpoint: bool) -> None:
    plain = build(make)
    start = {k: v.clone() for k, v in plain.state_dict().items()}
    names = [n for n, _ in plain.named_parameters()]
    inner = build(make)
    identities = [id(p) for p in inner.parameters()]
    model = bmt_zero.BMTrainModelWrapper(inner, use_checkpoint=use_checkpoint)
    assert model is inner
    assert isinstance(model, make)
    assert [n for n, _ in model.named_parameters()] == names
    assert [id(p) for p in model.parameters()] == identities
    assert all(isinstance(p, bmt_zero.DistributedParameter) for p in model.parameters())
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 11, (ctx.world_size * 2, 4), generator=generator) for _ in range(STEPS)]
    train(plain, batches, 1)
    train(model, [b.chunk(ctx.world_size)[ctx.rank] for b in batches], ctx.world_size)
    state = model.state_dict()
    assert list(state) == list(plain.state_dict())
    assert update_error(state, plain.state_dict(), start) < 1e-5
    model.eval(), plain.eval()
    with torch.no_grad():
        torch.testing.assert_close(model(batches[0]), plain(batches[0]), rtol=1e-4, atol=1e-5)
    plain.load_state_dict(state, strict=True)


@pytest.mark.ranks(2)
def test_lists_become_one_level_of_blocks() -> None:
    model = bmt_zero.BMTrainModelWrapper(build(Nested))
    blocks = [n for n, m in model.named_modules() if isinstance(m, bmt_zero.Block)]
    assert blocks == ["layers.0", "layers.1", "layers.2"]
    assert all(isinstance(layer, nn.Sequential) for layer in model.layers)  # what others look for
    assert model.embed._parameters["weight"] is model.head._parameters["weight"]
    stages = bmt_zero.BMTrainModelWrapper(build(Stages))
    blocks = [n for n, m in stages.named_modules() if isinstance(m, bmt_zero.Block)]
    assert blocks == ["stages.0.0", "stages.0.1", "stages.1.0", "stages.1.1"]
    odd = bmt_zero.BMTrainModelWrapper(build(Odd))
    assert odd.again[0] is odd.list[0]


@pytest.mark.ranks(2)
def test_values_are_those_of_rank_0(ctx: Any) -> None:
    torch.manual_seed(ctx.rank)
    model = bmt_zero.BMTrainModelWrapper(Nested())
    torch.manual_seed(0)
    wanted = dict(Nested().named_parameters())
    assert all(torch.equal(v, wanted[k]) for k, v in model.state_dict().items() if k in wanted)


@pytest.mark.ranks(1, 2)
def test_wrapping_again_changes_nothing() -> None:
    model = bmt_zero.BMTrainModelWrapper(build(Nested))
    modules, classes = list(model.modules()), [type(m) for m in model.modules()]
    params = [(id(p), p.data_ptr()) for p in model.parameters()]
    assert bmt_zero.BMTrainModelWrapper(model) is model
    assert list(model.modules()) == modules
    assert [type(m) for m in model.modules()] == classes
    assert [(id(p), p.data_ptr()) for p in model.parameters()] == params
    block = bmt_zero.Block(build(Nested))
    assert bmt_zero.BMTrainModelWrapper(block) is block
    assert not any(isinstance(m, bmt_zero.Block) for m in block.children())


@pytest.mark.ranks(2)
def test_a_copied_model_trains_by_itself(ctx: Any) -> None:
    model = bmt_zero.BMTrainModelWrapper(build(Nested))
    twin = copy.deepcopy(model)
    before = model.state_dict()
    assert [p.shape for p in twin.parameters()] == [p.shape for p in model.parameters()]
    train(twin, [torch.arange(4).reshape(1, 4)] * 2, ctx.world_size)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert not torch.equal(twin.state_dict()["layers.0.1.bias"], before["layers.0.1.bias"])


class Shared(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.head = nn.Linear(6, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6)])
        if how == "layers":
            self.layers[1].weight = self.layers[0].weight
        else:
            self.layers[1].weight = self.head.weight


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(("how", "message"), [("layers", "another layer"), ("rest", "outside of the layers")])
def test_a_parameter_of_two_owners(how: str, message: str) -> None:
    model = Shared(how)
    before = [(type(m), id(m)) for m in model.modules()], [(type(p), id(p)) for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        bmt_zero.BMTrainModelWrapper(model)
    assert before == (
        [(type(m), id(m)) for m in model.modules()],
        [(type(p), id(p)) for p in model.parameters()],
    )


@pytest.mark.ranks(2)
def test_wrong_calls(ctx: Any) -> None:
    with pytest.raises(TypeError, match="int"):
        bmt_zero.BMTrainModelWrapper(3)  # type: ignore[type-var]
    with pytest.raises(ValueError, match="'weight' has no shape yet"):
        bmt_zero.BMTrainModelWrapper(nn.LazyLinear(3))
    with pytest.raises(ValueError, match="recurrent"):
        bmt_zero.BMTrainModelWrapper(nn.LSTM(3, 4))
    with pytest.raises(RuntimeError, match="disagree"):
        bmt_zero.BMTrainModelWrapper(nn.Linear(3, 3 + ctx.rank))


class OfWrapped(nn.Module):
    """Its parts are wrapped one by one: a small one, a large one, and one with repeated layers."""

    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(5)
        self.small = wrap(nn.Linear(6, 6))
        self.large = wrap(nn.Sequential(nn.Linear(6, 30_000, bias=False), nn.Linear(30_000, 6, bias=False)))
        self.layers = wrap(nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))))

    def forward(self, x):
        return self.layers(self.small(x) + self.large(x) / 300)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("levels", [(3, 3), (0, 3), (3, 0), (2, 1)])
@pytest.mark.parametrize("around", [False, True])
def test_a_block_takes_over_what_is_wrapped(ctx, levels, around):
    plain = OfWrapped(lambda module: module)
    if around:
        model = bmt_zero.BMTrainModelWrapper(OfWrapped(lambda module: module), zero_level=levels[0])
    else:
        model = OfWrapped(lambda module: bmt_zero.BMTrainModelWrapper(module, zero_level=levels[0]))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(ctx.rank))
    model(x).sum().backward()
    assert bmt_zero.Block(model, zero_level=levels[1]) is model
    assert isinstance(model, bmt_zero.Block)
    assert not any(isinstance(part, bmt_zero.Block) for part in model.modules() if part is not model)
    assert all(p.grad is None for p in model.parameters())
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        batches = [
            torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + r)) for r in range(ctx.world_size)
        ]
        sum(plain(each).square().mean() for each in batches).backward()
        model(batches[ctx.rank]).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    wanted = plain.state_dict()
    state = model.state_dict()
    assert list(state) == list(wanted)
    assert all(torch.allclose(state[name], wanted[name], rtol=1e-4, atol=1e-5) for name in wanted)


@pytest.mark.ranks(2)
def test_a_block_in_what_is_wrapped_is_no_part_of_another_block(ctx):
    model = bmt_zero.BMTrainModelWrapper(nn.Sequential(bmt_zero.Block(nn.Linear(3, 3)), nn.Linear(3, 3)))
    with pytest.raises(ValueError, match=r"its part '0' in a Block already"):
        bmt_zero.Block(model)
    assert torch.isfinite(model(torch.ones(1, 3))).all()
    with pytest.raises(ValueError, match=r"belongs to another Block already"):
        bmt_zero.Block(model[1])
