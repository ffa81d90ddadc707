"""The modules that the wrapper takes for layers, wherever a model has them, and its message about them."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from torch import Tensor, nn

from bmt_zero import Block, BMTrainModelWrapper
from bmt_zero.repeated_layers import find_layers


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


class Stage(nn.ModuleDict):
    """A container with its own forward, as in DenseNet."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.values():
            x = layer(x)
        return x


def paths(model: nn.Module) -> list[str]:
    layers = find_layers(model)
    return [path for path, module in model.named_modules() if module in layers]


def layers(count: int) -> list[nn.Module]:
    return [Layer() for _ in range(count)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (nn.Sequential(nn.Linear(3, 4), *layers(2), nn.LayerNorm(4)), ["1", "2"]),
        (nn.ModuleDict({"a": Layer(), "norm": nn.LayerNorm(4), "b": Layer()}), ["a", "b"]),
        (nn.Sequential(nn.Sequential(*layers(2)), nn.Sequential(Layer())), ["0.0", "0.1", "1.0"]),
        (nn.ModuleList([nn.ModuleList(layers(2)), nn.ModuleList(layers(1))]), ["0.0", "0.1", "1.0"]),
        (nn.ModuleList([nn.Sequential(*layers(2)), nn.Linear(3, 3)]), ["0", "1"]),
        (nn.Sequential(Stage({"x": Layer()}), Stage({"x": Layer()})), ["0", "1"]),
        (nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), []),
        (nn.Sequential(Layer(), nn.LayerNorm(4)), []),
        (nn.Sequential(nn.LSTM(3, 4)), ["0"]),
    ],
)
def test_the_outermost_repeated_layers_are_found(model, expected):
    assert paths(model) == expected


@pytest.mark.ranks(2)
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_a_sequential_of_layers_trains_as_it_does_by_itself(ctx, use_checkpoint):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), *layers(2), nn.LayerNorm(4))
    torch.manual_seed(0)
    model = BMTrainModelWrapper(
        nn.Sequential(nn.Linear(3, 4), *layers(2), nn.LayerNorm(4)), use_checkpoint=use_checkpoint
    )
    assert [isinstance(module, Block) for module in model] == [False, True, True, False]
    x = torch.randn(4, 3)
    plain(x).square().sum().backward()
    model(x.chunk(2)[ctx.rank]).square().sum().backward()
    for name, param in model.named_parameters():
        wanted = plain.get_parameter(name).grad[param.bmt_slice.row_start : param.bmt_slice.row_stop]
        torch.testing.assert_close(param.grad, wanted, msg=name)


@pytest.mark.ranks(1)
def test_the_wrapper_says_what_it_has_found():
    with contextlib.redirect_stderr(io.StringIO()) as said:
        BMTrainModelWrapper(nn.ModuleDict({"embed": nn.Embedding(90000, 4), "body": nn.Sequential(*layers(3))}))
        BMTrainModelWrapper(nn.Linear(3, 3), use_checkpoint=False)
    assert said.getvalue() == (
        "BMTrainModelWrapper(ModuleDict): Blocks (recomputed in backward) in body: 3 Layer (0 to 2); unsharded by "
        "themselves: embed (Embedding)\nBMTrainModelWrapper(Linear): no repeated layers\n"
    )
