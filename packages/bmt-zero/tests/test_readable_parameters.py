"""Parameters of large modules that other modules read in forward, as fused losses do with the weight of a head."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from block_helpers import assert_same_gradients, own_memory
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bmt_comm import uses_compiler
from bmt_zero import BMTrainModelWrapper, MixedPrecision

CLASSES, WIDTH = 1100, 256  # large enough to be unsharded by itself


class FusedLoss(torch.autograd.Function):
    """Head and loss in one, which sees tensors as they are: torch functions have no part in its call."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = torch.mm(hidden.detach(), weight.detach().t())
        picked = torch.arange(len(target))
        loss = (logits.logsumexp(-1) - logits[picked, target]).sum()
        grad = logits.softmax(-1)
        grad[picked, target] -= 1
        grad_weight = torch.zeros_like(weight).add_(grad.t() @ hidden)
        ctx.save_for_backward(grad @ weight, grad_weight)
        return loss

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * upstream, grad_weight * upstream, None


class Model(nn.Module):
    """Its head is never called, or is the embedding's weight."""

    def __init__(self, tied: bool = False, has_norm: bool = True) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH) if has_norm else nn.Identity()
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        self.writes = False
        self.checkpoints: bool | None = None  # whether the loss is computed again in backward: by a reentrant one

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        assert self.head.weight.shape[0] == CLASSES
        if self.writes:
            with torch.no_grad():
                self.head.weight.mul_(0.5)
        if self.checkpoints is not None:
            return checkpoint(self.loss, self.norm(x), ids, use_reentrant=self.checkpoints)
        return self.loss(self.norm(x), ids)

    def loss(self, x: Tensor, ids: Tensor) -> Tensor:
        return FusedLoss.apply(x, self.head.weight, ids.roll(1))


def ids(seed: int) -> Tensor:
    return torch.randint(CLASSES, (9,), generator=torch.Generator().manual_seed(seed))


def wrapped(tied: bool = False, has_norm: bool = True, **options: Any) -> tuple[Model, Model]:
    torch.manual_seed(0)
    plain = Model(tied, has_norm)
    return plain, BMTrainModelWrapper(copy.deepcopy(plain), **options)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("level", [0, 1, 2, 3])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])  # else there are no small parameters outside of the layers
def test_a_loss_that_takes_the_weight_of_a_head(ctx, level, own, tied, has_norm):
    plain, model = wrapped(tied, has_norm, zero_level=level)
    with own_memory() if own else torch.enable_grad():
        for step in range(2):
            for rank in range(ctx.world_size):
                plain(ids(10 * step + rank)).backward()
            model(ids(10 * step + ctx.rank)).backward()
        assert_same_gradients(model, plain)
        with torch.no_grad():
            torch.testing.assert_close(model(ids(3)), plain(ids(3)))
            with torch.inference_mode():
                torch.testing.assert_close(model(ids(3)), plain(ids(3)))


@pytest.mark.ranks(2)
def test_a_copy_of_a_wrapped_model(ctx):
    plain, model = wrapped()
    twin = copy.deepcopy(model)
    for each in (model, twin):
        torch.testing.assert_close(each(ids(3)), plain(ids(3)))
    assert twin.head.weight is not model.head.weight


@pytest.mark.ranks(2)
def test_outside_of_a_forward_the_attribute_is_the_sharded_parameter(ctx):
    _, model = wrapped()
    params = dict(model.named_parameters())
    assert model.head.weight is params["head.weight"]
    model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(ids(0))
    assert model.head.weight is params["head.weight"]
    assert model.state_dict()["head.weight"].shape == (CLASSES, WIDTH)
    assert model.head.weight is params["head.weight"]


@pytest.mark.ranks(1, 2)
def test_writing_in_a_forward_reaches_the_parameter_or_raises(ctx):
    plain, model = wrapped()
    model.writes = plain.writes = True
    if ctx.world_size == 1:  # one rank has all rows, and code that reads the parameter gets the parameter itself
        torch.testing.assert_close(model(ids(3)), plain(ids(3)))
        torch.testing.assert_close(model.head.weight.detach(), plain.head.weight.detach())
        return
    with pytest.raises(RuntimeError, match=r"code outside of the module .* \(1100, 256\) has written to it"):
        model(ids(0))
    model.writes = False
    model(ids(0)).backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loss_that_is_computed_again_in_backward(ctx, reentrant):
    plain, model = wrapped()
    model.checkpoints = reentrant
    for step in range(2):
        for rank in range(ctx.world_size):
            plain(ids(10 * step + rank)).backward()
        model(ids(10 * step + ctx.rank)).backward()
    assert_same_gradients(model, plain)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("trains", [False, True])
def test_what_is_read_has_the_dtype_of_computation(ctx, trains):
    _, model = wrapped(precision=MixedPrecision(torch.bfloat16))
    model.head.weight.requires_grad_(trains)
    seen = []
    model.norm.register_forward_hook(lambda *_: seen.append(model.head.weight.dtype))
    with torch.no_grad():
        without = model(ids(3))
    loss = model(ids(3))
    loss.backward()
    assert seen == [torch.bfloat16] * 2
    torch.testing.assert_close(loss.detach(), without)
    assert (model.head.weight.grad is not None) == trains


@pytest.mark.ranks(2)
def test_one_rank_may_look_at_a_parameter(ctx):
    plain, model = wrapped()

    def look(*_: Any) -> None:
        if ctx.rank == 0:
            weight = model.head.weight
            assert hasattr(model.head, "weight")
            assert (weight.shape, weight.dtype, weight.requires_grad) == ((CLASSES, WIDTH), torch.float32, True)
            assert uses_compiler() or "is_unsharded=False" in repr(weight)  # compiled code reads plain tensors

    model.norm.register_forward_hook(look)
    torch.testing.assert_close(model(ids(3)), plain(ids(3)))
