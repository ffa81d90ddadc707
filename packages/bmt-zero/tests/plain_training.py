"""What tests compare with: plain PyTorch in one process, which uses nothing of this project."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn


class Layer(nn.Module):
    """A residual layer with ragged sizes, a 0-dim parameter, and none that a world of 2, 3 or 4 divides."""

    def __init__(self, width: int = 7, inner: int = 13) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, inner)
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gain * self.down(torch.tanh(self.up(self.norm(x))))


def build(layers: int = 2, dtype: torch.dtype = torch.float32) -> nn.ModuleDict:
    torch.manual_seed(1)
    return nn.ModuleDict({"layers": nn.Sequential(*(Layer() for _ in range(layers))), "head": nn.Linear(7, 5)}).to(
        dtype
    )


def batch(step: int, size: int = 12) -> tuple[Tensor, Tensor]:
    """The whole batch of a step: (size, 7) inputs and (size, 5) targets."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randn(size, 7, generator=generator), torch.randn(size, 5, generator=generator)


def loss_of(output: Tensor, target: Tensor, size: int = 12) -> Tensor:
    """The part of these samples in the mean over the whole batch of ``size``."""
    return (output.float() - target).square().sum() / size


@dataclass
class Run:
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    start: dict[str, Tensor]
    end: dict[str, Tensor]

    def update(self, name: str) -> Tensor:
        return self.end[name].double() - self.start[name].double()


def train(
    model: nn.ModuleDict,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: int = 10,
    parts: int = 1,
    micro_steps: int = 1,
    compute: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
) -> Run:
    """Train on the whole batch.

    ``parts`` and ``micro_steps`` say in how many pieces gradients are computed, and ``compute`` and
    ``reduce`` in what dtype they are computed and summed over the parts: the roundings of half precision.
    """
    optimizer = make_optimizer(list(model.parameters()))
    named = dict(model.named_parameters())
    run = Run([], [], {n: p.detach().clone() for n, p in named.items()}, {})
    for step in range(steps):
        optimizer.zero_grad()
        xs, ys = batch(step)
        loss = 0.0
        for micro in range(micro_steps):
            sums: dict[str, Tensor] = {}
            for part in range(parts):
                mine = torch.arange(part, len(xs), parts).tensor_split(micro_steps)[micro]
                values = {n: p.detach().to(compute or p.dtype).requires_grad_() for n, p in named.items()}
                hidden = xs[mine].to(next(iter(values.values())).dtype)
                for i, layer in enumerate(model["layers"]):
                    own = {n.removeprefix(f"layers.{i}."): v for n, v in values.items() if n.startswith(f"layers.{i}.")}
                    hidden = torch.func.functional_call(layer, own, hidden)
                own = {"weight": values["head.weight"], "bias": values["head.bias"]}
                piece = loss_of(torch.func.functional_call(model["head"], own, hidden), ys[mine])
                loss += piece.item()
                for name, grad in zip(values, torch.autograd.grad(piece, list(values.values())), strict=True):
                    grad = grad.to(reduce or grad.dtype)
                    sums[name] = sums[name] + grad if name in sums else grad
            for name, param in named.items():
                grad = sums[name].to(param.dtype)
                param.grad = grad if param.grad is None else param.grad + grad
        run.losses.append(loss)
        run.gradients.append({n: p.grad.clone() for n, p in named.items()})
        optimizer.step()
    run.end = {n: p.detach().clone() for n, p in named.items()}
    return run
