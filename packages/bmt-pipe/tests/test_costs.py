"""A pipeline sends and keeps what its schedule says."""

from __future__ import annotations

from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
from pipe_helpers import Layer, make_layers
from torch import Tensor, nn

from bmt_comm import ParallelContext
from bmt_pipe import Action, Kind, PipelineTransformerBlockList
from bmt_pipe.run import Run
from bmt_zero import Block
from bmt_zero.shard import group_of

ROWS, LENGTH, WIDTH, LAYERS = 4, 3, 7, 8
BATCH_BYTES = ROWS * LENGTH * WIDTH * 4


class _Token:
    """Lives as long as the activations of a layer."""

    alive = peak = 0

    def __init__(self) -> None:
        _Token.alive += 1
        _Token.peak = max(_Token.peak, _Token.alive)

    def __del__(self) -> None:
        _Token.alive -= 1


class _Hold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() or x.requires_grad:
            ctx.token = _Token()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class HoldingLayer(Layer):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(_Hold.apply(x))


def pipeline(**options: Any) -> PipelineTransformerBlockList:
    layers: list[nn.Module] = make_layers(LAYERS, factory=HoldingLayer)
    return PipelineTransformerBlockList([Block(layer, use_checkpoint=False) for layer in layers], **options)


def batch() -> Tensor:
    return torch.randn(ROWS, LENGTH, WIDTH, requires_grad=True)


def loss_of(x: Tensor) -> Tensor:
    return x.square().mean()


def sent(ctx: ParallelContext) -> dict[str, int]:
    total: Counter[str] = Counter()
    for comm in {ctx.pipe, *ctx.pipe_channels.values()}:  # one and the same, unless by NCCL's rules
        total.update({name: traffic.bytes for name, traffic in comm.traffic.items()})
    return total


def between(before: dict[str, int], after: dict[str, int]) -> tuple[int, int]:
    """Bytes sent from stage to stage, and in collectives."""
    changes = {name: after[name] - before.get(name, 0) for name in after}
    return changes.pop("send"), sum(changes.values())


@pytest.mark.ranks(4, pipe_size=4, num_micro_batches=8, timeout=60)
@pytest.mark.parametrize("interleave", [1, 2])
def test_activations_go_from_stage_to_stage_alone(ctx: ParallelContext, interleave: int) -> None:
    layers = pipeline(interleave=interleave)
    x = batch()
    loss_of(layers(x)).backward()  # the first call also learns shapes
    start = sent(ctx)
    y = layers(x)
    middle = sent(ctx)
    loss_of(y).backward()
    forward, words = between(start, middle)
    backward, more_words = between(middle, sent(ctx))
    # Hidden states of all stages to the next place, and those of this rank to the first stage and back.
    through = 4 * BATCH_BYTES * interleave
    outputs = 3 * BATCH_BYTES  # to the three others
    assert forward == (through - 4 * BATCH_BYTES + outputs if ctx.pipe_rank == 3 else through) + (
        BATCH_BYTES if ctx.pipe_rank else 0
    )
    assert backward == (through - 4 * BATCH_BYTES + outputs if ctx.pipe_rank == 0 else through) + (
        BATCH_BYTES if ctx.pipe_rank != 3 else 0
    )
    assert words + more_words < BATCH_BYTES  # digests and flags


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=60)
def test_gradients_of_layers_inputs_are_sent_only_where_a_rank_has_some(ctx: ParallelContext) -> None:
    layers = pipeline()
    x = batch()

    def backward(uses_inputs: bool | None) -> int:
        """Bytes sent; ``uses_inputs``: of layers, by the loss. None: they were not returned."""
        y, *inputs = (layers(x),) if uses_inputs is None else layers(x, return_hidden_states=True)
        loss = loss_of(inputs[0]) if uses_inputs else loss_of(y)
        start = sent(ctx)
        loss.backward()
        return between(start, sent(ctx))[0]

    assert backward(False) == backward(None)
    to_the_other = LAYERS // 2 * BATCH_BYTES
    assert backward(ctx.pipe_rank == 1) == backward(None) + to_the_other  # zeros, because the other rank has gradients


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4, timeout=60)
@pytest.mark.parametrize("interleave", [1, 2, 4])
def test_a_stage_keeps_inputs_and_one_chunks_activations(ctx: ParallelContext, interleave: int) -> None:
    layers = pipeline(interleave=interleave)
    kept = 0

    def note(tensor: Tensor) -> Tensor:
        nonlocal kept
        kept += tensor.nbytes
        return tensor

    x = batch()
    _Token.peak = _Token.alive = 0
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = layers(x)
    assert kept == 2 * BATCH_BYTES * interleave  # m · v inputs, which are both stages' batches v times
    assert _Token.peak == 0
    loss_of(y).backward()
    assert _Token.peak == LAYERS // 2 // interleave
    assert _Token.alive == 0


@pytest.mark.ranks(4, pipe_size=4, num_micro_batches=8, timeout=60)
def test_one_forward_one_backward_keeps_as_many_micro_batches_as_stages_follow(ctx: ParallelContext) -> None:
    layers = pipeline()
    _Token.peak = _Token.alive = 0
    layers(batch(), tail=loss_of).backward()
    assert _Token.peak == LAYERS // 4 * (4 - ctx.pipe_rank)
    assert _Token.alive == 0


@pytest.mark.ranks(2, pipe_size=1, num_micro_batches=4, timeout=60)
@pytest.mark.parametrize("schedule", [None, "1f1b", "zero_bubble_h1"])
@pytest.mark.parametrize("level", [2, 3])
def test_reductions_of_a_micro_batch_go_on_during_the_next_one(
    ctx: ParallelContext, schedule: str | None, level: int
) -> None:
    blocks = [Block(layer, False, level) for layer in make_layers(2)]
    layers = PipelineTransformerBlockList(blocks, tail_schedule=schedule)
    reducers = [reducer for block in layers for reducer in group_of(block).reducers]
    pending: list[bool] = []
    do = Run._do

    def noting(run: Run, action: Action) -> None:
        do(run, action)
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            pending.append(any(reducer.pending for reducer in reducers))

    with mock.patch.object(Run, "_do", noting):
        loss = layers(batch(), **({} if schedule is None else {"tail": loss_of}))
        (loss_of(loss) if schedule is None else loss).backward()
    assert pending == [True] * 4
    assert not any(reducer.pending for reducer in reducers)
