"""gathered_parameters: writes are kept, modules compute with the copies, mistakes change nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from block_helpers import seeded
from torch import Tensor, nn

from bmt_comm import ParallelContext
from bmt_zero import Block, BMTrainModelWrapper, DistributedParameter, MixedPrecision, ShardedParameter
from bmt_zero import gathered_parameters as gathered


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 7), nn.Linear(7, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    """With tied weights, a module outside of the layers, and a parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.layers = nn.ModuleList([Layer() for _ in range(2)])
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) * self.scale
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def twins(level: int, **options: object) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = Model()
    return plain, BMTrainModelWrapper(copy.deepcopy(plain), zero_level=level, **options)


def full(grad: Tensor) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def add_to_all(model: nn.Module) -> None:
    """As adapters are merged: ``data`` of each weight gets a sum with a logical tensor."""
    for number, param in enumerate(model.parameters()):
        param.data += seeded(number, *param.shape)


def assert_equal(model: nn.Module, plain: nn.Module) -> None:
    logical = {name: value.full_tensor() for name, value in model.named_parameters()}
    for name, param in plain.named_parameters():
        assert logical[name].equal(param), name


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_writes_are_kept(ctx: ParallelContext, level: int) -> None:
    plain, model = twins(level)
    tokens = torch.arange(8).view(2, 4)
    before = list(model.parameters())
    with gathered(model):
        assert model.head.weight is model.embedding.weight
        assert [type(p) for p in model.parameters()] == [nn.Parameter] * len(before)
        add_to_all(model)
        add_to_all(plain)
        assert model(tokens).equal(plain(tokens))
    assert all(param is same for param, same in zip(model.parameters(), before, strict=True))
    assert_equal(model, plain)
    loss, expected = model(tokens).square().sum(), plain(tokens).square().sum()
    torch.testing.assert_close(loss, expected)
    (loss / ctx.world_size).backward()
    expected.backward()
    for (name, param), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (full(param.grad) - theirs.grad).norm() <= 1e-5 * theirs.grad.norm(), name


@pytest.mark.ranks(2)
def test_modules_that_are_made_within_do_not_make_copies_new(ctx: ParallelContext) -> None:
    """A wrapped model looks for added parameters when modules were registered, as a slice of a ModuleList does."""

    class Slices(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers, self.head = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)]), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers[:2]:
                x = layer(x)
            return self.head(x)

    torch.manual_seed(0)
    plain = Slices()
    model, x = BMTrainModelWrapper(copy.deepcopy(plain)), seeded(1, 3, 4)
    with gathered(model), torch.no_grad():
        torch.testing.assert_close(model(x), plain(x))
    model.extra = nn.Parameter(torch.ones(3))
    model(x).sum().backward()  # and finds what was added, afterwards
    assert isinstance(model.extra, ShardedParameter)


@pytest.mark.ranks(2)
def test_a_part_of_a_block_and_a_parameter_alone(ctx: ParallelContext) -> None:
    torch.manual_seed(0)
    plain = Layer()
    block = Block(copy.deepcopy(plain), zero_level=3)
    with gathered(block.down):
        assert not isinstance(block.up.weight, ShardedParameter)  # gathered with it
        block.down.weight.data.zero_()
        plain.down.weight.data.zero_()
    assert_equal(block, plain)
    with gathered(block):
        for layer in (block.up, plain.up):
            layer.weight = nn.Parameter(layer.weight + 1)
    assert_equal(block, plain)
    holder = nn.Module()
    holder.weight = DistributedParameter(torch.ones(3, 2))
    with gathered(holder):
        holder.weight.data += torch.arange(6.0).view(3, 2)
    assert holder.weight.full_tensor().equal(1 + torch.arange(6.0).view(3, 2))


@pytest.mark.ranks(2)
def test_copies_to_compute_with(ctx: ParallelContext) -> None:
    """They have the dtype of computation, nothing is sent, and writes to them are dropped."""
    plain, model = twins(3, precision=MixedPrecision(param_dtype=torch.bfloat16))
    tokens = torch.arange(8).view(2, 4)
    with torch.no_grad():
        expected = model(tokens)
    with gathered(model, write_back=False), torch.no_grad():
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        if ctx.rank == 0:  # alone
            assert model(tokens).equal(expected)
        for param in model.parameters():
            param.zero_()
    assert_equal(model, plain)


@pytest.mark.ranks(2)
def test_recurrent_layers(ctx: ParallelContext) -> None:
    """They keep a list of their weights."""
    torch.manual_seed(0)
    plain = nn.LSTM(6, 5)
    block = Block(copy.deepcopy(plain), zero_level=3)
    x = torch.ones(3, 2, 6)
    with gathered(block):
        add_to_all(block)
        add_to_all(plain)
        assert block(x)[0].equal(plain(x)[0])
    torch.testing.assert_close(block(x)[0], plain(x)[0])


@pytest.mark.ranks(2)
def test_mistakes(ctx: ParallelContext) -> None:
    plain, model = twins(3)

    def changed(problem: Callable[[], object]) -> None:
        with gathered(model):
            add_to_all(model)
            problem()

    with pytest.raises(ZeroDivisionError):
        changed(lambda: 1 / 0)
    assert_equal(model, plain)
    with pytest.raises(ValueError, match="no other shape"):
        changed(lambda: setattr(model.scale, "data", torch.ones(7)))
    assert_equal(model, plain)

    def enters(*_: object) -> None:
        with gathered(model):
            pass

    handle = model.layers[0].register_forward_hook(enters)
    with pytest.raises(RuntimeError, match="gathered in a forward"):
        model(torch.arange(4)[None])
    handle.remove()
    assert_equal(model, plain)
