"""Scripted functions inside a checkpointed Block: gradients are those of the plain module at every call."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bmt_comm import local_rows
from bmt_zero import Block


def scripted(function: Any) -> Any:
    """A new one, because after some calls TorchScript replaces the function that it runs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # newer versions of torch would have torch.compile
        return torch.jit.script(function)


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    dtype = hidden.dtype
    variance = hidden.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
    hidden = (hidden * torch.rsqrt(variance + eps)).to(dtype)
    return hidden * weight


def gate(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(x) * y + F.dropout(x, 0.25, True)


class Scripted(nn.Module):
    """Uses scripted functions, and returns nested containers."""

    def __init__(self, script: bool) -> None:
        super().__init__()
        self.rms_norm, self.gate = (scripted(f) if script else f for f in (rms_norm, gate))
        self.weight = nn.Parameter(torch.randn(7))
        self.up = nn.Linear(7, 5)
        self.down = nn.Linear(5, 7)

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> dict[str, Any]:
        h = self.up(self.rms_norm(x, self.weight, 1e-6))
        h = self.gate(h, h * 2)
        return {"hidden": x + self.down(h), "others": [h, {"sum": (h.sum() + more["y"].sum(),)}]}


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x, {"y": y})
    return out["hidden"].square().mean() + out["others"][0].sum() + out["others"][1]["sum"][0] * 0.5


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 3])
def test_gradients_of_many_calls(ctx: Any, level: int) -> None:
    torch.manual_seed(3)
    plain, inner = Scripted(False), Scripted(True)
    inner.load_state_dict(plain.state_dict())
    block = Block(inner, zero_level=level)
    for step in range(8):
        torch.manual_seed(step)
        x = torch.randn(3, 4, 7)
        y = torch.randn(2)
        inputs = [(x.clone().requires_grad_(), y.clone().requires_grad_()) for _ in range(2)]
        for model, (own_x, own_y) in zip((plain, block), inputs):
            torch.manual_seed(100 + step)  # of the dropout
            loss_of(model, own_x, own_y).backward()
        for mine, wanted in zip(inputs[1], inputs[0]):
            assert torch.allclose(mine.grad, wanted.grad, rtol=1e-5, atol=1e-6)
    for param, wanted in zip(block.parameters(), plain.parameters()):
        rows = slice(param.bmt_slice.row_start, param.bmt_slice.row_stop)
        expected = ctx.world_size * wanted.grad[rows]
        assert torch.allclose(local_rows(param.grad), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("before", [0, 1, 2, 6])
@pytest.mark.parametrize("sizes", [(3,), (3, 2, 5, 1)])
def test_the_same_functions_are_called_outside_of_the_block(ctx: Any, before: int, sizes: tuple[int, ...]) -> None:
    """Before the Block is made, when the executor optimizes, and later on, between a forward and its backward."""
    torch._C._jit_set_profiling_mode(True)
    torch.manual_seed(3)
    plain, inner = Scripted(False), Scripted(True)
    inner.load_state_dict(plain.state_dict())

    def call_outside(step: int) -> None:
        x = torch.randn(sizes[step % len(sizes)], 4, 7, requires_grad=True)
        inner.gate(x, inner.rms_norm(x, torch.ones(7, requires_grad=True), 1e-6)).sum().backward()

    for step in range(before):
        call_outside(step)
    block = Block(inner)
    for step in range(10):
        x = torch.randn(sizes[step % len(sizes)], 4, 7)
        y = torch.randn(2)
        for model in (plain, block):
            torch.manual_seed(step)
            loss = loss_of(model, x, y)
            call_outside(step + 1)
            loss.backward()
    for param, wanted in zip(block.parameters(), plain.parameters()):
        assert torch.allclose(local_rows(param.grad), wanted.grad, rtol=1e-4, atol=1e-4)


def gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))


class EndsScripted(nn.Module):
    """The last tensors that backward needs are saved by a scripted function."""

    def __init__(self, script: bool, nested: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(7, 7)
        self.gelu = scripted(gelu) if script else gelu
        self.nested = nested

    def forward(self, x: Tensor) -> Any:
        y = self.gelu(self.linear(x))
        return {"all": [y, (self.gelu(y),)]} if self.nested else x + y


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("nested", [False, True])
def test_a_scripted_function_is_the_last_that_backward_needs(ctx: Any, nested: bool) -> None:
    torch.manual_seed(3)
    plain, inner = EndsScripted(False, nested), EndsScripted(True, nested)
    inner.load_state_dict(plain.state_dict())
    block = Block(inner)
    for step in range(8):
        x = torch.randn(3, 7, generator=torch.Generator().manual_seed(step))
        for model in (plain, block):
            y = model(x)
            (y["all"][1][0] + y["all"][0] if nested else y).square().sum().backward()
    for param, wanted in zip(block.parameters(), plain.parameters()):
        rows = slice(param.bmt_slice.row_start, param.bmt_slice.row_stop)
        assert torch.allclose(local_rows(param.grad), ctx.world_size * wanted.grad[rows], rtol=1e-4, atol=1e-4)


@pytest.mark.ranks(1)
def test_an_error_in_a_scripted_function_is_raised(ctx: Any) -> None:
    calls = []

    class Failing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(7, 7)
            self.gelu = scripted(gelu)

        def forward(self, x: Tensor) -> Tensor:
            calls.append(len(calls))
            y = self.linear(x)
            return self.gelu(y if len(calls) == 1 else torch.cat([y, y])[:, :0].expand(-1, 5)) + x

    block = Block(Failing())
    y = block(torch.randn(3, 7))
    with pytest.raises(RuntimeError, match="expand"):
        y.sum().backward()
