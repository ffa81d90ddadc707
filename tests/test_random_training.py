"""Random models and training scripts on several ranks, sharded in all ways, against plain PyTorch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from random_programs import VOCAB, WIDTH, Around, Program, Residual, cross_entropy, freeze_some, run_programs
from torch import Tensor, nn

from bmt_comm import ParallelContext
from bmt_zero import Block, BMTrainModelWrapper, MixedPrecision, fully_shard, shard

STYLES = ["wrapper", "blocks", "some blocks", "fully_shard", "shard"]


class Experts(nn.Module):
    """Uses another parameter on each rank, or none on some."""

    chosen = 0

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.first, self.all = nn.Identity(), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1) for _ in range(3)])
        self.skips = draw.random() < 0.3

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x)
        if self.chosen == 0 and self.skips:
            return x
        return self.all(x) + x @ self.experts[self.chosen]


class Model(nn.Module):
    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        count = draw.randint(1, 4)
        kinds = [draw.choice([Residual, Residual, Residual, Around, Around, Experts]) for _ in range(count)]
        self.layers = nn.ModuleList([kind(draw) for kind in kinds])
        self.order = [*range(count), *([draw.randrange(count)] if draw.random() < 0.25 else [])]  # perhaps one twice
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if draw.random() < 0.4:
            self.head.weight = self.embedding.weight
        self.passes_mask = draw.random() < 0.3
        freeze_some(self.layers, draw)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for index in self.order:
            kwargs = {"mask": torch.full((WIDTH,), 0.5)} if self.passes_mask else {}
            y = self.layers[index](x, **kwargs)
            x = y[0] if isinstance(y, tuple) else y["hidden"] if isinstance(y, dict) else getattr(y, "hidden", y)
        return self.head(self.norm(x))


class ShardedProgram(Program):
    def make_plain(self) -> nn.Module:
        return Model(self.draw)

    def make_sharded(self, plain: nn.Module) -> nn.Module:
        model: Any = plain
        draw = self.draw
        level = draw.choice([0, 1, 2, 3, 3])
        options: dict[str, Any] = {"use_checkpoint": draw.choice([False, False, True, 0.5, "matmuls"])}
        options["offload"] = draw.random() < 0.25
        self.style = self.draw_style(STYLES, averaging=["fully_shard"])
        if self.style == "fully_shard":
            for layer in model.layers:
                fully_shard(layer, reshard_after_forward=draw.choice([True, False]))
            return fully_shard(model)
        if draw.random() < 0.2 and not self.single:
            options["precision"] = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)
            self.tolerance = 1e-4
        if self.style == "shard":
            rest = {"precision": options.get("precision")}
            shard(model.embedding, level, **rest)
            for layer in model.layers:
                shard(layer, level, **options)
            return shard(model, level, **rest)
        for index, layer in enumerate(model.layers):
            if self.style == "blocks" or (self.style == "some blocks" and index % 2 == 0):
                own = level if self.style == "blocks" else draw.choice([2, 3, level])
                model.layers[index] = Block(layer, zero_level=own, **options)
        return BMTrainModelWrapper(model, zero_level=level, **options)

    def loss(self, model: nn.Module, ids: Tensor, replica: int, step: int) -> Tensor:
        Experts.chosen = (replica + step) % 2
        return cross_entropy(model(ids), ids)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("first", range(0, 24, 8))
def test_random_training(ctx: ParallelContext, first: int) -> None:
    run_programs(ShardedProgram, ctx, range(first, first + 8))


@pytest.mark.long
@pytest.mark.ranks(2, 3, timeout=900)
def test_much_random_training(ctx: ParallelContext) -> None:
    run_programs(ShardedProgram, ctx, range(1000, 1150))
