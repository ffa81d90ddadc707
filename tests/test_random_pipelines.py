"""Random models and training scripts in pipelines, against plain PyTorch."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from random_programs import (
    ACTIONS,
    VOCAB,
    WIDTH,
    Around,
    Program,
    Residual,
    cross_entropy,
    freeze_some,
    run_programs,
)
from torch import Tensor, nn

from bmt_comm import ParallelContext
from bmt_pipe import PipelineTransformerBlockList
from bmt_pipe.messages import StageFailedError
from bmt_zero import Block, BMTrainModelWrapper

CALLS = ["list", "loop", "states", "tail"]


class Chained(Residual):
    kinds = ("plain", "in place", "view", "checkpoint")


class Choosing(nn.Module):
    """Uses another parameter in each replica, or none, arguments of samples, and arguments that have no samples."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.experts = nn.ParameterList([nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1) for _ in range(3)])
        self.skips = draw.random() < 0.3

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor, chosen: int) -> Tensor:
        if chosen == 0 and self.skips:
            return x
        return x + mask[..., None] * torch.tanh(x @ self.experts[chosen] + bias)


class Layer(nn.Module):
    """One of the above, or a module of torch, which takes the hidden states and arguments of a model's layers.

    Two hidden states exchange their places in each layer; the second one can be in a container.
    """

    def __init__(self, draw: random.Random, hidden: str) -> None:
        super().__init__()
        self.inner = draw.choice([Chained, Around, Choosing])(draw)
        self.hidden = hidden
        if hidden != "one":
            self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, *rest: Any, chosen: int) -> Any:
        second, (mask, bias) = (None, rest) if self.hidden == "one" else (rest[0], rest[1:])
        if isinstance(self.inner, Choosing):
            y = self.inner(x, mask, bias, chosen)
        else:
            y = self.inner(x, *([bias.sin()] if isinstance(self.inner, Residual) else []))
        if second is None:
            return y
        z = second["z"][0] if self.hidden == "nested" else second
        x, z = y + 0.1 * z, y + self.other(z)
        return x, ({"z": [z]} if self.hidden == "nested" else z)


class Model(nn.Module):
    """Calls its layers in one of four ways. ``call`` is "loop" in the plain model."""

    def __init__(self, draw: random.Random, call: str, hidden: str, count: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Layer(draw, hidden) for _ in range(count)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        if draw.random() < 0.4:
            self.head.weight = self.embedding.weight
        self.bias = nn.Parameter(torch.randn(WIDTH)) if draw.random() < 0.5 else None
        self.call, self.hidden = call, hidden
        freeze_some(self.layers, draw)

    def forward(self, ids: Tensor, chosen: int) -> Tensor:
        x = self.embedding(ids)
        first: list[Any] = [x]
        if self.hidden != "one":
            first.append({"z": [x * 0.5]} if self.hidden == "nested" else x * 0.5)
        mask = (ids % 3 + 1).to(x.dtype) / 3
        args = mask, torch.ones(WIDTH, dtype=x.dtype) if self.bias is None else self.bias
        plain = isinstance(self.layers, nn.ModuleList)
        if self.call == "tail" and not plain:
            return self.layers(*first, *args, chosen=chosen, tail=self.tail, tail_args=(ids,))
        states: list[Any] = []
        hidden: Any = tuple(first)
        if plain or self.call == "loop":
            for layer in self.layers:
                states.append(hidden[0])
                hidden = layer(*hidden, *args, chosen=chosen)
                hidden = hidden if isinstance(hidden, tuple) else (hidden,)
            states = torch.stack(states) if self.call == "states" else states  # type: ignore[assignment]
        elif self.call == "states":
            output = self.layers(*hidden, *args, chosen=chosen, return_hidden_states=True)
            hidden, states = output[: len(first)], output[len(first)]
        else:
            hidden = self.layers(*hidden, *args, chosen=chosen)
            hidden = hidden if isinstance(hidden, tuple) else (hidden,)
        loss = self.tail(*hidden, ids)
        return loss + 0.1 * states.square().mean() if self.call == "states" else loss  # type: ignore[attr-defined]

    def tail(self, x: Tensor, *rest: Any) -> Tensor:
        if self.hidden != "one":
            x = x + (rest[0]["z"][0] if self.hidden == "nested" else rest[0])
        return cross_entropy(self.head(self.norm(x)), rest[-1])


class PipelineProgram(Program):
    failure = (KeyError, StageFailedError)
    single_tolerance = 3e-4  # sums over micro-batches round in another order

    def __init__(self, seed: int, ctx: ParallelContext) -> None:
        super().__init__(seed, ctx)
        # The loss of a tail has no gradients any more, and torch's function sees those of one stage only.
        refused = {"backward twice" if self.call == "tail" else "", "clip" if self.manager is None else ""}
        self.actions = [action for action in ACTIONS if action not in refused]

    def make_plain(self) -> nn.Module:
        draw, stages = self.draw, self.ctx.pipe_size
        self.call = draw.choice(CALLS)
        self.hidden = draw.choice(["one", "one", "two", "nested"]) if self.call in ("list", "tail") else "one"
        self.schedule = draw.choice([None, "1f1b", "interleaved_1f1b", "zero_bubble_h1", "zero_bubble_v"])
        self.interleave = {"zero_bubble_v": 2, "interleaved_1f1b": 2}.get(self.schedule or "", 1)
        self.count = stages * self.interleave + draw.randint(0, 3)
        return Model(draw, self.call, self.hidden, self.count)

    def make_sharded(self, plain: nn.Module) -> nn.Module:
        model: Any = plain
        draw = self.draw
        level = draw.choice([0, 1, 2, 3])
        layers = list(model.layers)
        blocks = draw.random() < 0.7
        if blocks:
            options = {"use_checkpoint": draw.choice([False, True, 0.5]), "offload": draw.random() < 0.2}
            layers = [Block(layer, zero_level=level, **options) for layer in layers]
        weights = [draw.choice([1, 2, 3]) for _ in layers] if draw.random() < 0.5 else None
        model.layers = PipelineTransformerBlockList(
            layers,
            1 if self.hidden == "one" else 2,
            interleave=None if self.schedule == "zero_bubble_v" else self.interleave,
            weights=weights,
            tail_schedule=self.schedule,
        )
        self.style = f"{self.call}, {self.hidden}, {self.schedule}, {self.count}, level {level}, blocks {blocks}"
        return BMTrainModelWrapper(model, zero_level=level)

    def batches(self) -> list[list[Tensor]]:
        rows = [self.draw.randint(1, 5) for _ in range(self.ctx.replicas)]
        return [[torch.randint(VOCAB, (n, 4)) for n in rows] for _ in range(self.accumulated)]

    def loss(self, model: nn.Module, ids: Tensor, replica: int, step: int) -> Tensor:
        return model(ids, (replica + step) % 2)

    def gradient_norm(self, grad: Tensor) -> float:
        # The norm of a stage's gradient is refused, because a script means that of all stages.
        return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).norm().item()


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("first", range(0, 16, 8))
def test_random_pipelines(ctx: ParallelContext, first: int) -> None:
    run_programs(PipelineProgram, ctx, range(first, first + 8))


@pytest.mark.ranks(4, pipe_size=2, num_micro_batches=4)
def test_random_pipelines_of_replicas(ctx: ParallelContext) -> None:
    run_programs(PipelineProgram, ctx, range(100, 106))


@pytest.mark.long
@pytest.mark.ranks(3, pipe_size=3, num_micro_batches=7, timeout=900)
def test_many_random_pipelines(ctx: ParallelContext) -> None:
    run_programs(PipelineProgram, ctx, range(1000, 1100))
