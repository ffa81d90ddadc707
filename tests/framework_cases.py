"""A model, its batches and optimizers, for training in other libraries' loops; and the plain updates beside them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from plain_optimizers import LambFormula, galore_torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from bmt_optim import CAME, AdamW, GaLoreAdamW, Lamb, Muon

STEPS, ROWS = 10, 3
DECAYED = {"lr": 0.05, "weight_decay": 0.1}
LAMB = {**DECAYED, "betas": (0.8, 0.95), "eps": 1e-6}
PROJECTION = {"rank": 2, "update_proj_gap": 4, "scale": 0.5, "proj_type": "std"}
TOLERANCES = {"AdamW": 1e-5, "Lamb": 1e-5, "CAME": 5e-5, "GaLore": 1e-5, "Muon": 1e-5}
"""By optimizer: the largest relative error of an update."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up, self.down = nn.Linear(6, 11), nn.Linear(11, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Its output is the loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), target)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return torch.randn(ROWS, 6, generator=generator), torch.randint(5, (ROWS,), generator=generator)


def by_dims(model: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The matrices, and the rest."""
    params = list(model.parameters())
    return [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]


def make_optimizer(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    matrices, rest = by_dims(model)
    if kind == "GaLore":
        return GaLoreAdamW([{"params": matrices, **PROJECTION}, {"params": rest}], nbits=32, **DECAYED)
    if kind == "Muon":
        return Muon([{"params": matrices}, {"params": rest, "use_muon": False, **DECAYED, "eps": 1e-8}], **DECAYED)
    classes: dict[str, Callable[..., torch.optim.Optimizer]] = {"AdamW": AdamW, "Lamb": Lamb, "CAME": CAME}
    return classes[kind](model.parameters(), **(LAMB if kind == "Lamb" else DECAYED))


def authors_optimizers(kind: str, model: nn.Module) -> list[Any]:
    matrices, rest = by_dims(model)
    if kind == "GaLore":
        groups = [{"params": matrices, **PROJECTION}, {"params": rest}]
        return [galore_torch()(groups, no_deprecation_warning=True, eps=1e-8, **DECAYED)]
    if kind == "Muon":
        return [
            torch.optim.Muon(matrices, **DECAYED),
            torch.optim.AdamW(rest, betas=(0.9, 0.95), **DECAYED),
        ]
    if kind == "Lamb":
        return [LambFormula(list(model.parameters()), **LAMB)]
    if kind == "CAME":
        return [importlib.import_module("came_pytorch").CAME(model.parameters(), **DECAYED)]
    return [torch.optim.AdamW(model.parameters(), **DECAYED)]


def plain_updates(kind: str, ranks: int) -> dict[str, Tensor]:
    """What the authors' code, in one process, does to the parameters in ten steps on the batches of all ranks.

    Gradients are added up rank by rank, as two ranks do: Muon's rounds in bf16, so that the last bit counts.
    """
    model = Net()
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizers = authors_optimizers(kind, model)
    for step in range(STEPS):
        model.zero_grad()
        for rank in range(ranks):
            (model(*batch(step, rank)) / ranks).backward()
        for optimizer in optimizers:
            optimizer.step()
    return {name: p.detach() - start[name] for name, p in model.named_parameters()}


def check_updates(kind: str, model: nn.Module, ranks: int) -> None:
    """Compare what has become of a ``Net`` with the plain updates. All ranks must call this."""
    start = dict(Net().named_parameters())
    values = {
        name.removeprefix("module."): (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for name, p in model.named_parameters()
    }
    wanted = plain_updates(kind, ranks)
    assert values.keys() == wanted.keys()
    update = torch.cat([each.flatten() for each in wanted.values()])
    found = torch.cat([(values[name] - start[name]).detach().flatten() for name in wanted])
    assert min(each.norm() for each in wanted.values()) > 1e-3
    assert (found - update).norm() <= TOLERANCES[kind] * update.norm()
