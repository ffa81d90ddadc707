"""The tail of a pipeline: gradients of its parameters, frozen models, and what a loss keeps."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from call_helpers import Twins, hidden, same
from pipe_helpers import DTYPE, WIDTH, Layer, batch_of, make_layers, rows_of
from torch import nn

from bmt_pipe import PipelineTransformerBlockList
from bmt_zero import Block, BMTrainModelWrapper, DistributedParameter
from bmt_zero.shard import group_of


class Two(nn.Module):
    """Autograd gives the sum of two parameters one gradient for both, and a sum of elements an expanded one."""

    def __init__(self, make=nn.Parameter):
        super().__init__()
        self.a, self.b, self.c = (make(torch.arange(WIDTH, dtype=DTYPE) * n) for n in (1, 2, 3))

    def forward(self, x):
        return (x * (self.a + self.b)).pow(2).mean() + 0.1 * self.c.sum()


def check_shared_gradients(ctx, tail):
    layers, plain = Twins(ctx, Layer, 4), Two()
    x = hidden(ctx, 4)
    layers.piped(x, tail=tail).backward()
    plain(layers.plain(x.detach())).backward()
    for name, param in tail.named_parameters():
        wanted = plain.get_parameter(name).grad.clone()
        if ctx.world_size > 1:
            ctx.world.all_reduce(wanted)
        same(name, param.grad, wanted if ctx.world_size == 1 else rows_of(wanted, param), 1e-8)


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=2)
@pytest.mark.parametrize("inside", [False, True])
def test_a_frozen_stage(ctx, inside):
    embedding = BMTrainModelWrapper(nn.Embedding(11, WIDTH).to(DTYPE).requires_grad_(False))
    layers = PipelineTransformerBlockList([Block(layer.to(DTYPE)) for layer in make_layers(4)])
    for index in range(2):  # the first stage
        layers[index].requires_grad_(False)
    for _ in range(2):
        x = embedding(batch_of(ctx.rank, 4)[0])
        loss = layers(x, tail=lambda y: y.pow(2).mean()) if inside else layers(x).pow(2).mean()
        loss.backward()
    assert all((param.grad is None) == (ctx.rank == 0) for param in layers.parameters())


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
def test_gradients_that_parameters_share(ctx):
    check_shared_gradients(ctx, Two(DistributedParameter))


@pytest.mark.ranks(1, num_micro_batches=4)
def test_gradients_that_plain_parameters_share(ctx):
    check_shared_gradients(ctx, Two())


class Sometimes(nn.Module):
    """Uses its second parameter for some batches only."""

    def __init__(self, make=nn.Parameter):
        super().__init__()
        self.a, self.b = (make(torch.arange(1, WIDTH + 1, dtype=DTYPE) * n) for n in (1, 2))

    def forward(self, x, is_used):
        return (x * self.a + (self.b if is_used else 0)).square().mean()


@pytest.mark.ranks(4, pipe_size=2, num_micro_batches=4, timeout=60)
@pytest.mark.parametrize("users", [[0], [], [1, 2]])
def test_parameters_that_only_some_ranks_use(ctx, users):
    layers, tail, plain = Twins(ctx, Layer, 4), Sometimes(DistributedParameter), Sometimes()
    x, is_used = hidden(ctx, 4), ctx.rank in users
    layers.piped(x, tail=tail, tail_args=(is_used,)).backward()
    plain(layers.plain(x.detach()), is_used).backward()
    for name, param in tail.named_parameters():
        grad = plain.get_parameter(name).grad
        wanted = torch.zeros(WIDTH, dtype=DTYPE) if grad is None else grad
        ctx.world.all_reduce(wanted)
        same(name, param.grad, rows_of(wanted, param) if name == "a" or users else None, 1e-8)


@pytest.mark.ranks(1)
def test_the_loss_of_a_frozen_model_needs_no_gradient(ctx):
    layers = Twins(ctx, Layer, 4, prepare=lambda _, layer: layer.requires_grad_(False))
    assert not layers.piped(hidden(ctx, 4, grad=False), tail=lambda x: x.sum()).requires_grad


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
def test_a_loss_that_lives_on_keeps_no_batch(ctx):
    layers = Twins(ctx, Layer, 4)
    x, mask = hidden(ctx, 4, grad=False), torch.ones(4, 3, dtype=DTYPE)
    alive = [weakref.ref(x), weakref.ref(mask)]
    loss = layers.piped(x, mask, tail=lambda y: y.pow(2).mean())
    loss.backward()
    del x, mask
    gc.collect()
    assert [each() for each in alive] == [None, None]


@pytest.mark.ranks(2, pipe_size=2, num_micro_batches=4)
def test_hidden_states_that_cannot_be_stacked_leave_nothing_gathered(ctx):
    class Grows(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH, dtype=DTYPE)

        def forward(self, x):
            return torch.cat([self.inner(x[..., :WIDTH]), x], -1)

    layers = PipelineTransformerBlockList([Block(Grows(), False, 2) for _ in range(4)])
    with pytest.raises(RuntimeError):
        layers(hidden(ctx, 4), return_hidden_states=True)
    assert not any(group_of(block).held for block in layers.children())
