"""torch's tools on parameters that tensor-parallel ranks hold shards of: what they give on the plain model."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm, parameters_to_vector, vector_to_parameters

from bmt_comm import shard_of
from bmt_tp import parallelize
from bmt_zero import BMTrainModelWrapper, init_parameters

PLAN = {"up": "colwise", "down": "rowwise"}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(5), nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def make_pair(level):
    torch.manual_seed(0)
    plain = Model().double()
    return plain, BMTrainModelWrapper(parallelize(copy.deepcopy(plain), PLAN), zero_level=level)


def backward(ctx, plain, model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    batch, targets = (torch.randn(4, size, generator=generator, dtype=torch.float64) for size in (5, 3))
    (plain(batch) - targets).square().sum().backward()
    batch, targets = (x.chunk(ctx.data_size)[ctx.data_rank] for x in (batch, targets))
    ((model(batch) - targets).square().sum()).backward()


def part_of(tensor: Tensor, param) -> Tensor:
    return shard_of(tensor, param.bmt_slice)


def assert_close(actual, wanted, name=""):
    torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-12, msg=lambda text: f"{name}: {text}")


def assert_same(model, plain):
    for name, param in model.named_parameters():
        assert_close(param.full_tensor().detach(), plain.get_parameter(name).detach(), name)


every_level = pytest.mark.parametrize("level", [0, 1, 2, 3])


@pytest.mark.ranks(4, tp_size=2)
@every_level
@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop", "Adagrad"])
def test_norms_clipping_and_optimizers(ctx, level, name):
    plain, model = make_pair(level)
    optimizers = [getattr(torch.optim, name)(which.parameters(), lr=0.01) for which in (plain, model)]
    for step in range(4):
        backward(ctx, plain, model, step)
        norms = [get_total_norm([p.grad for p in which.parameters()]) for which in (plain, model)]
        assert_close(norms[1], norms[0])
        for which, optimizer in zip((plain, model), optimizers, strict=True):
            clip_grad_norm_(which.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert_same(model, plain)


@pytest.mark.ranks(2, 4, tp_size=2)
@every_level
def test_norms_penalties_and_vectors_of_parameters(ctx, level):
    plain, model = make_pair(level)
    losses = []
    for which in (plain, model):
        params = list(which.parameters())
        losses.append(sum(p.square().sum() + p.norm() for p in params) + parameters_to_vector(params).abs().sum())
        losses[-1] = losses[-1] + sum((p - 1).pow(4).sum() for p in params)
    assert_close(losses[1], losses[0])
    losses[0].backward()
    (losses[1] / ctx.replicas).backward()  # every rank has the same
    for name, param in model.named_parameters():
        assert_close(param.grad.add(0), part_of(plain.get_parameter(name).grad, param), name)
    with torch.no_grad():
        assert_close(sum(p.norm() for p in model.parameters()), sum(p.norm() for p in plain.parameters()))
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            assert (float(p.max()), p.tolist(), p.numel()) == (float(q.max()), q.tolist(), q.numel())
    vector = parameters_to_vector(plain.parameters()).detach()
    for which in (plain, model):
        vector_to_parameters(vector * 2, which.parameters())
    assert_same(model, plain)


@pytest.mark.ranks(2, 4, tp_size=2)
@every_level
def test_full_tensors_are_differentiable(ctx, level):
    plain, model = make_pair(level)
    for which, parts in ((plain, 1), (model, ctx.replicas)):
        weights = [p.full_tensor() if which is model else p for p in which.parameters()]
        (sum(w.pow(3).sum() for w in weights) / parts).backward()
    for name, param in model.named_parameters():
        assert_close(param.grad.add(0), part_of(plain.get_parameter(name).grad, param), name)


@pytest.mark.ranks(4, tp_size=2)
@every_level
def test_hooks_copies_and_moves(ctx, level):
    plain, model = make_pair(level)
    seen = []
    for which in (plain, model):
        which.up.weight.register_hook(lambda grad: grad * 2)
        which.up.weight.register_post_accumulate_grad_hook(seen.append)
    for which in (plain, model):
        which.to(torch.float32).to(torch.float64)
    backward(ctx, plain, model)
    assert [id(param) for param in seen] == [id(plain.up.weight), id(model.up.weight)]
    for name, param in model.named_parameters():
        wanted = plain.get_parameter(name)
        assert_close(param.grad.add(0), part_of(wanted.grad, param), name)
        assert_close(param.to_local(), part_of(wanted.detach(), param), name)
        assert param.logical_shape == tuple(wanted.shape)
    twins = [copy.deepcopy(which) for which in (plain, model)]
    optimizers = [torch.optim.SGD(which.parameters(), lr=0.1) for which in twins]
    for step in range(2):
        backward(ctx, *twins, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(twins[1], twins[0])
    assert_same(model, plain)
    if ctx.rank == 0:  # alone: nothing of this communicates
        repr(model)
        for param in model.parameters():
            str(param), hash(param), hasattr(param, "T"), param.shape, param.dtype, param.numel(), param.grad


@pytest.mark.ranks(4, tp_size=2)
@every_level
@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon"])
def test_optimizers_of_logical_parameters_are_refused(ctx, level, name):
    if not hasattr(torch.optim, name):
        return  # this version of torch lacks it
    plain, model = make_pair(level)
    backward(ctx, plain, model)
    optimizer = getattr(torch.optim, name)([model.up.weight], lr=0.01)
    before = model.up.weight.detach().clone()
    with pytest.raises(TypeError, match=f"torch.optim.{name}"):
        optimizer.step(lambda: torch.zeros(()))
    assert_close(model.up.weight.detach(), before)


@pytest.mark.ranks(2, 4, tp_size=2)
@every_level
def test_initial_values_are_drawn_for_the_logical_parameter(ctx, level):
    """The bound of kaiming_uniform_ depends on the number of inputs, of which a row-wise shard has a part."""
    plain, model = make_pair(level)
    for which in (plain, model):
        for module in (which.up, which.down):
            torch.manual_seed(5)
            nn.init.kaiming_uniform_(module.weight)
    assert_same(model, plain)
    init_parameters(model)
