"""A small model with a stack of layers, as a pipeline and in plain PyTorch, and their comparison."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bmt_comm import ParallelContext, slice_of
from bmt_pipe import PipelineTransformerBlockList
from bmt_zero import Block, BMTrainModelWrapper

WIDTH = 7  # no number of ranks divides it
STEPS = 10
DTYPE = torch.float64  # so that the order of sums does not matter


class _Product(torch.autograd.Function):
    """x Wᵀ. Its backward makes all gradients at once."""

    backwards = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        _Product.backwards += 1
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2)


class FusedLinear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Product.apply(x, self.weight) + self.bias

    @staticmethod
    def backwards() -> int:
        """How often this rank has computed the gradients of such a layer so far."""
        return _Product.backwards


class Layer(nn.Module):
    """Uses a mask that belongs to samples, a bias that does not, and keyword arguments."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = FusedLinear(2 * width + 1, width)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, bias: Tensor | None = None, *, scale: float = 1.0
    ) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)))
        if mask is not None:
            hidden = hidden * mask[..., None]
        out = x + scale * self.down(hidden)
        return out if bias is None else out + bias


class Dropping(nn.Module):
    """y = w · x, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.weight, 0.2, self.training)


def make_layers(count: int, seed: int = 0, factory: Callable[[], nn.Module] = Layer) -> list[nn.Module]:
    torch.manual_seed(seed)
    return [factory() for _ in range(count)]


class Model(nn.Module):
    """Embedding and head around a list of layers; the head may be tied to the embedding."""

    def __init__(self, count: int, tied: bool = False, make_list: Callable[[list[nn.Module]], nn.Module] | None = None):
        super().__init__()
        torch.manual_seed(1)
        self.embedding = nn.Embedding(11, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        layers = make_layers(count)
        for part in (self.embedding, self.head, *layers):
            part.to(DTYPE)
        self.layers = (make_list or nn.ModuleList)(layers)

    def forward(self, ids: Tensor, mask: Tensor | None = None, tail: bool = False) -> Tensor:
        x = self.embedding(ids)
        if isinstance(self.layers, nn.ModuleList):
            for layer in self.layers:
                x = layer(x, mask)
        elif tail:
            return self.layers(x, mask, tail=self.loss, tail_args=(ids,))
        else:
            x = self.layers(x, mask)
        return self.loss(x, ids)

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(x).flatten(0, -2), ids.roll(1, -1).flatten())


def pipeline_model(count: int, tied: bool = False, level: int = 3, checkpoint: bool = True, **options: Any) -> Model:
    """The same, with the parameters of layers sharded over their stage, and all others over all ranks."""

    def make_list(layers: list[nn.Module]) -> nn.Module:
        blocks = [Block(layer, checkpoint, level) for layer in layers]
        return PipelineTransformerBlockList(blocks, **options)

    return BMTrainModelWrapper(Model(count, tied, make_list), zero_level=level)


def rows_of(tensor: Tensor, param: Tensor) -> Tensor:
    shard = slice_of(param)
    return tensor[shard.row_start : shard.row_stop].reshape(param.shape)


def replica(ctx: ParallelContext) -> int:
    """The number of this rank's batch."""
    return ctx.rank // ctx.tp_size


def batch_of(number: int, rows: int, length: int = 3) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    ids = torch.randint(0, 11, (rows, length), generator=generator)
    return ids, torch.rand(rows, length, generator=generator, dtype=DTYPE)


def plain_training(
    count: int, tied: bool, batches: list[list[tuple[Tensor, Tensor]]], lr: float = 0.1
) -> tuple[dict[str, Tensor], list[list[float]]]:
    """Train plain PyTorch on the whole batch. Returns the changes of the parameters, and each replica's losses."""
    model = Model(count, tied)
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    losses = []
    for step in batches:
        optimizer.zero_grad()
        of_step = [model(ids, mask) for ids, mask in step]
        (sum(of_step) / len(of_step)).backward()
        optimizer.step()
        losses.append([loss.item() for loss in of_step])
    return {name: value - before[name] for name, value in model.state_dict().items()}, losses


def compare(
    ctx: ParallelContext, count: int, rows: list[int], tied: bool = False, tail: bool = False, **options
) -> None:
    """Train on batches of as many rows as the replicas have, and compare all parameters."""
    batches = [[batch_of(step * 10 + r, rows[r % len(rows)]) for r in range(ctx.replicas)] for step in range(STEPS)]
    wanted, losses = plain_training(count, tied, batches)
    model = pipeline_model(count, tied, **options)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step, batch in enumerate(batches):
        loss = model(*batch[replica(ctx)], tail=tail)
        assert loss.item() == pytest.approx(losses[step][replica(ctx)], rel=1e-10)
        optimizer.zero_grad()
        (loss / ctx.replicas).backward()
        optimizer.step()
    for name, param in model.named_parameters():
        change = rows_of(wanted[name], param)
        assert (param.to_local() - before[name] - change).norm() <= 1e-10 * wanted[name].norm(), name
