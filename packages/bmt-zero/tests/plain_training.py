"""The reference of tests: plain PyTorch in one process, without code of this project."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
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


def rounded(gradients: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Tensor]:
    return {name: grad.to(dtype or grad.dtype) for name, grad in gradients.items()}


def total(gradients: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The sum, by name: in order, and rounded to the dtype of the first after each addition."""
    sums = dict(gradients[0])
    for each in gradients[1:]:
        sums = {name: (grad + each[name]).to(grad.dtype) for name, grad in sums.items()}
    return sums


@dataclass
class Run:
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    values: list[dict[str, Tensor]]  # before the first step and after each of them

    @property
    def end(self) -> dict[str, Tensor]:
        return self.values[-1]

    @functools.cached_property
    def update_norms(self) -> dict[str, float]:
        """Of each parameter's updates in all steps. A number may come back to where it was."""
        norms: dict[str, float] = {}
        for name in self.end:
            path = torch.stack([values[name].double() for values in self.values])
            norms[name] = float(path.diff(dim=0).norm())
        return norms

    @functools.cached_property
    def gradient_norms(self) -> dict[str, float]:
        """Of each parameter's gradients over all steps."""
        norms = {name: [gradients[name].double().norm() for gradients in self.gradients] for name in self.end}
        return {name: float(torch.stack(of_steps).norm()) for name, of_steps in norms.items()}


def train(
    model: nn.ModuleDict,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    steps: int = 10,
    parts: int = 1,
    micro_steps: int = 1,
    reduce_once: bool = False,
    compute: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
) -> Run:
    """Train on the whole batch, with the roundings of half precision in the order in which the ranks make them.

    Args:
        parts: how many parts the batch is split into, as if by ranks; gradients are summed in the order of the parts.
        micro_steps: the number of micro-steps in which the gradients of a part are computed.
        reduce_once: whether each part sums its micro-steps before the parts are summed; otherwise the parts are summed
            in every micro-step, and the results are summed in the dtype of the parameters.
        compute: the dtype of computation; None: that of the parameters.
        reduce: the dtype of the sum over the parts; None: that of computation.
    """
    optimizer = make_optimizer(list(model.parameters()))
    named = dict(model.named_parameters())
    dtype, device = named["head.bias"].dtype, named["head.bias"].device
    run = Run([], [], [{n: p.detach().clone() for n, p in named.items()}])
    for step in range(steps):
        optimizer.zero_grad()
        xs, ys = (t.to(device) for t in batch(step))
        loss = 0.0
        gradients: list[list[dict[str, Tensor]]] = []  # by micro-step, part and name
        for micro in range(micro_steps):
            gradients.append([])
            for part in range(parts):
                mine = torch.arange(part, len(xs), parts).tensor_split(micro_steps)[micro]
                values = {n: p.detach().to(compute or p.dtype).requires_grad_() for n, p in named.items()}
                hidden = xs[mine].to(next(iter(values.values())).dtype)
                for i, layer in enumerate(model["layers"]):
                    own = {n.removeprefix(f"layers.{i}."): v for n, v in values.items() if n.startswith(f"layers.{i}.")}
                    hidden = torch.func.functional_call(layer, own, hidden)
                own = {"weight": values["head.weight"], "bias": values["head.bias"]}
                part_loss = loss_of(torch.func.functional_call(model["head"], own, hidden), ys[mine])
                loss += part_loss.item()
                grads = torch.autograd.grad(part_loss, list(values.values()))
                gradients[micro].append(dict(zip(values, grads, strict=True)))
        if reduce_once:
            gradients = [[total([rounded(own[0], reduce), *own[1:]]) for own in zip(*gradients, strict=True)]]
        sums = [total([rounded(grads, reduce) for grads in by_part]) for by_part in gradients]
        for name, grad in total([rounded(grads, dtype) for grads in sums]).items():
            named[name].grad = grad
        run.losses.append(loss)
        run.gradients.append({n: p.grad.clone() for n, p in named.items()})
        optimizer.step()
        run.values.append({n: p.detach().clone() for n, p in named.items()})
    return run
