"""A model for tests of ``fully_shard``, its training, and plain PyTorch's on the batches of all ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import bmt_zero


class Layer(nn.Module):
    """Ragged sizes, none that a world of 2, 3 or 4 divides."""

    def __init__(self, width: int = 7, inner: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width, bias=False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, layers: int = 3, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 5, bias=False)
        self.first = nn.Linear(5, 7)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.norm = nn.LayerNorm(7)
        self.last = nn.Linear(7, 5)
        self.head = nn.Linear(5, 5, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.embed(x))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.last(self.norm(x)))


def make(**options: Any) -> Model:
    torch.manual_seed(3)
    return Model(**options)


def data(step: int, micro: int, rank: int, size: int = 3) -> tuple[Tensor, Tensor]:
    """What a rank sees in a micro-step."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro + rank)
    return torch.randn(size, 5, generator=generator), torch.randn(size, 5, generator=generator)


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target).square().mean()


def sgd(params: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def train_plain(
    model: nn.Module,
    ranks: int,
    make_optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    steps: int = 10,
    micro_steps: int = 1,
    clip: float | None = None,
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Train on the mean over ranks; the updates by name."""
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_steps):
            for rank in range(ranks):
                x, y = data(step, micro, rank)
                (loss_of(forward(model, x) if forward else model(x), y) / ranks).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: p.detach() - start[name] for name, p in model.named_parameters()}


def full(param: Tensor) -> Tensor:
    """The logical value of a parameter of ours, of torch's FSDP2 or of a plain one."""
    return (param.full_tensor() if hasattr(param, "full_tensor") else param).detach().clone()


def train_sharded(
    model: nn.Module,
    rank: int,
    make_optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    steps: int = 10,
    micro_steps: int = 1,
    clip: float | None = None,
    sync_last_only: bool = False,
    forward: Callable[[nn.Module, Tensor], Tensor] | None = None,
) -> dict[str, Tensor]:
    """A script as FSDP2's users write it; the updates by name."""
    start = {name: full(p) for name, p in model.named_parameters()}
    optimizer = make_optimizer([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(micro_steps):
            if sync_last_only:
                model.set_requires_gradient_sync(micro == micro_steps - 1)
            x, y = data(step, micro, rank)
            loss_of(forward(model, x) if forward else model(x), y).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return {name: full(p) - start[name] for name, p in model.named_parameters()}


def shard_layers(model: nn.Module, fully_shard: Any = bmt_zero.fully_shard, **options: Any) -> nn.Module:
    """Every layer, then the root."""
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


def assert_same_updates(updates: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert list(updates) == list(expected)
    for name, update in expected.items():
        if not update.any():
            assert not updates[name].any(), name
            continue
        error = float((updates[name] - update).norm() / update.norm())
        assert error <= tolerance, f"{name}: {error}"


def twins(**options: Any) -> tuple[Model, Model]:
    plain = make(**options)
    return plain, copy.deepcopy(plain)
