"""Every tool of torch on every layout returns the same as on the plain model, or raises an error."""

from __future__ import annotations

import copy
import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from block_helpers import pair, rows_of, seeded
from torch import Tensor, nn
from torch.nn.utils import (
    clip_grad_norm_,
    get_total_norm,
    parameters_to_vector,
    parametrizations,
    parametrize,
    prune,
    vector_to_parameters,
    weight_norm,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from bmt_comm import Communicator
from bmt_zero import BMTrainModelWrapper, gathered_parameters, shard

LAYOUTS = [0, 1, 2, 3, "hybrid"]
OPTIMIZERS = ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adadelta", "Adagrad", "RMSprop", "Rprop", "ASGD"]


def make() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.LayerNorm(3))


def make_pair(ctx, layout, make=make) -> tuple[nn.Module, nn.Module]:
    """Both in fp64: divisions by small gradients show the order of sums in fp32."""
    if layout != "hybrid":
        plain, block = pair(make, zero_level=layout)
        return plain.double(), block.double()
    groups = {ranks: dist.new_group(list(ranks)) for ranks in [(0, 1), (2, 3), (0, 2), (1, 3)]}
    shard, replicate = (
        next(groups[ranks] for ranks in kinds if ctx.rank in ranks) for kinds in ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
    )
    plain, block = pair(make, shard_comm=Communicator(shard), replicate_comm=Communicator(replicate))
    return plain.double(), block.double()


def backward(ctx, plain: nn.Module, block: nn.Module, seed: int = 0, factor: float | Tensor = 1.0) -> None:
    batch, targets = seeded(seed, 2 * ctx.world_size, 5).double(), seeded(seed + 100, 2 * ctx.world_size, 3).double()
    ((plain(batch) - targets).square().sum() * factor).backward()
    batch, targets = (x.chunk(ctx.world_size)[ctx.rank] for x in (batch, targets))
    ((block(batch) - targets).square().sum() * factor).backward()


def full(grad: Tensor) -> Tensor:
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def assert_same(block: nn.Module, plain: nn.Module) -> None:
    for name, param in block.named_parameters():
        wanted = plain.get_parameter(name).detach()
        torch.testing.assert_close(param.full_tensor().detach(), wanted, rtol=1e-9, atol=1e-12, msg=name)


def assert_same_training(ctx, plain: nn.Module, block: nn.Module, steps: int) -> None:
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, block)]
    for step in range(steps):
        backward(ctx, plain, block, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(block, plain)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_clipping_and_optimizers(ctx, layout, name):
    plain, block = make_pair(ctx, layout)
    optimizers = [getattr(torch.optim, name)(model.parameters(), lr=0.01) for model in (plain, block)]
    for step in range(4):
        backward(ctx, plain, block, step)
        grads = [[p.grad for p in model.parameters()] for model in (plain, block)]
        torch.testing.assert_close(get_total_norm(grads[1]), get_total_norm(grads[0]))
        norms = [clip_grad_norm_(model.parameters(), 1.0) for model in (plain, block)]
        torch.testing.assert_close(norms[1], norms[0])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_same(block, plain)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_moving_a_model(ctx, layout):
    plain, block = make_pair(ctx, layout)
    for model in (plain, block):
        model.to(torch.float32).to("cpu", torch.float64)
    backward(ctx, plain, block)
    for model in (plain, block):
        torch.optim.SGD(model.parameters(), lr=0.01).step()
    assert_same(block, plain)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_grad_scaler(ctx, layout):
    plain, block = make_pair(ctx, layout)
    models = (plain, block)
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1) for _ in models]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in models]
    for step in range(3):
        factors = [scaler.scale(torch.ones(())) for scaler in scalers]
        backward(ctx, plain, block, step, factors[0])
        if step == 1:  # one element, on one rank of a shard group
            plain[0].weight.grad[0, 0] = float("inf")
            where = block[0].weight.bmt_slice
            if where.row_start == 0 and where.row_stop > 0:
                block[0].weight.grad[0, 0] = float("inf")
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
    assert_same(block, plain)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_hooks_of_parameters(ctx, layout):
    plain, block = make_pair(ctx, layout)
    seen = []
    for model in (plain, block):
        model[2].weight.register_hook(lambda grad: grad * 2)
        model[2].weight.register_post_accumulate_grad_hook(lambda param: seen.append(param))
    backward(ctx, plain, block)
    assert [id(param) for param in seen] == [id(plain[2].weight), id(block[2].weight)]
    for name, param in block.named_parameters():
        torch.testing.assert_close(param.grad.add(0), rows_of(plain.get_parameter(name).grad, param), msg=name)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_vectors_of_parameters(ctx, layout):
    plain, block = make_pair(ctx, layout)
    vector = parameters_to_vector(plain.parameters()).detach()
    torch.testing.assert_close(parameters_to_vector(block.parameters()).detach(), vector)
    if layout != 0:  # without gradients it would be a view, of a gathered copy
        with torch.no_grad(), pytest.raises(RuntimeError, match="full_tensor"):
            parameters_to_vector(block.parameters())
    for model in (plain, block):
        vector_to_parameters(vector * 2, model.parameters())
    assert_same(block, plain)
    backward(ctx, plain, block)
    torch.optim.SGD(block.parameters(), lr=0.01).step()
    torch.optim.SGD(plain.parameters(), lr=0.01).step()
    assert_same(block, plain)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_averages_of_models(ctx, layout):
    plain, block = make_pair(ctx, layout)
    averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for model in (plain, block)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (plain, block)]
    for step in range(4):
        backward(ctx, plain, block, step)
        for optimizer, average, model in zip(optimizers, averages, (plain, block), strict=True):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
    assert_same(averages[1], averages[0])
    with torch.no_grad():
        batch = seeded(9, 2, 5).double()
        torch.testing.assert_close(averages[1](batch), averages[0](batch))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_parameters_and_models_say_and_their_copies(ctx, layout):
    plain, block = make_pair(ctx, layout)
    assert_same(copy.deepcopy(block), plain)
    for name, param in block.named_parameters():
        wanted = plain.get_parameter(name)
        assert param.logical_shape == tuple(wanted.shape)
        torch.testing.assert_close(param.to_local(), rows_of(wanted.detach(), param))
    if ctx.rank == 0:  # alone: nothing of this communicates
        assert repr(block) == repr(plain)
        for param in block.parameters():
            str(param), hash(param), hasattr(param, "placements"), param.shape, param.dtype, param.numel(), param.grad


@pytest.mark.ranks(4)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weight_normalisation_comes_before_sharding(ctx, layout):
    def make_normalised() -> nn.Module:
        return nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 7)), nn.Linear(7, 3))

    plain, block = make_pair(ctx, layout, make_normalised)
    assert_same_training(ctx, plain, block, 3)
    for tool in (parametrizations.weight_norm, weight_norm):
        with pytest.raises(TypeError, match=r"weight_norm.* of shape \(3, 7\) would take .* shard the model then"):
            tool(block[1])


PRUNING = {
    "ln": lambda module: prune.ln_structured(module, "weight", 0.5, n=2, dim=1),
    "random_structured": lambda module: prune.random_structured(module, "weight", 0.5, dim=0),
    "l1": lambda module: prune.l1_unstructured(module, "weight", 0.4),
    "scores": lambda module: prune.l1_unstructured(module, "weight", 0.4, importance_scores=seeded(3, 7, 5)),
    "mask": lambda module: prune.custom_from_mask(module, "weight", torch.arange(35).view(7, 5) % 3 > 0),
    "global": lambda module: prune.global_unstructured([(module, "weight")], prune.L1Unstructured, amount=0.4),
}


@pytest.mark.ranks(2)
def test_pruning_reads_unsharded_parameters(ctx):
    plain, block = make_pair(ctx, 3)
    before = list(block.state_dict())
    for tool in PRUNING.values():
        with pytest.raises(TypeError, match=r"pruning of .* would take .* in gathered_parameters\(\)"):
            tool(block[0])
        assert list(block.state_dict()) == before
    replicas = make_pair(ctx, 0)
    for name, tool in PRUNING.items():
        for model in replicas:
            torch.manual_seed(1)
            tool(model[0])
        backward(ctx, *replicas)
        assert list(replicas[1].state_dict()) == list(replicas[0].state_dict()), name
        for param, wanted in zip(replicas[1].parameters(), replicas[0].parameters(), strict=True):
            torch.testing.assert_close(full(param.grad), wanted.grad, msg=name)
        for model in replicas:
            prune.remove(model[0], "weight")
            model.zero_grad()
    with gathered_parameters(block):
        for model in (plain, block):
            prune.remove(prune.ln_structured(model[0], "weight", 0.5, n=2, dim=0), "weight")
    backward(ctx, plain, block)
    assert_same(block, plain)


class Doubles(nn.Module):
    def forward(self, weight):
        return weight * 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", [0, 1, 2, 3])
def test_a_parametrization_after_sharding(ctx, layout):
    plain, block = make_pair(ctx, layout)
    if layout > 0:
        for index in (0, 2):  # one is on both ranks, and one on one rank
            with pytest.raises(TypeError, match=r"a parametrization of .* would take .* or pass unsafe=True"):
                parametrize.register_parametrization(block[index], "weight", Doubles())
    for model in (plain, block):
        parametrize.register_parametrization(model[0], "weight", Doubles(), unsafe=layout > 0)
    for seed in range(2):
        backward(ctx, plain, block, seed)
        assert list(block.state_dict()) == list(plain.state_dict())
    wanted = {name: param.grad for name, param in plain.named_parameters()}
    assert wanted.keys() == dict(block.named_parameters()).keys()
    for name, param in block.named_parameters():
        torch.testing.assert_close(full(param.grad), wanted[name], rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", [0, 3])
def test_hooks_that_autograd_would_not_call_are_refused(ctx, layout):
    _, block = make_pair(ctx, layout)
    with pytest.raises(TypeError, match=r"register_multi_grad_hook of .* register_post_accumulate_grad_hook"):
        torch.autograd.graph.register_multi_grad_hook(list(block.parameters()), lambda grads: None)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS[:4])
@pytest.mark.parametrize("write", ["step", "one row", "embedding"])
def test_writes_between_forward_and_backward_are_noticed_as_in_plain_pytorch(ctx, layout, write):
    """Where autograd has saved the parameter, and only there."""

    class Layers(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.first, self.last = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, ids):
            return self.last(self.first(self.embedding(ids)).tanh())

    plain, block = pair(Layers, zero_level=layout, use_checkpoint=False)
    ids = torch.arange(4).chunk(2)[ctx.rank]
    for model in (plain, block):
        loss, later = model(ids).sum(), model(ids).square().sum()
        loss.backward()
        with torch.no_grad():
            if write == "step":
                torch.optim.SGD(model.parameters(), lr=0.1).step()
            elif write == "one row":
                model.last.weight[0] += 1
            else:
                model.embedding.weight[2] = 0
        raises = pytest.raises(RuntimeError, match="modified by an inplace operation")
        with nullcontext() if write == "embedding" else raises:
            later.backward()
        model.zero_grad()
        model(ids).sum().backward()  # goes on
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_a_graph_that_is_dropped_keeps_nothing_alive(ctx, layout):
    _, block = pair(make, zero_level=layout, use_checkpoint=False)
    gc.disable()  # without a search for cycles
    try:
        x = torch.ones(2, 5, requires_grad=True)
        kept = weakref.ref(x)
        loss = block(x).sum()
        del x, loss
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_a_layer_that_was_frozen_since_the_forward_gets_no_gradient(ctx, layout):
    plain, block = make_pair(ctx, layout)
    for model in (plain, block):
        loss = model(seeded(0, 4, 5).double().chunk(2)[ctx.rank] if model is block else seeded(0, 4, 5).double()).sum()
        model[0].requires_grad_(False)
        loss.backward()
    for name, param in block.named_parameters():
        wanted = plain.get_parameter(name).grad
        assert (param.grad is None) == (wanted is None) == name.startswith("0.")
        if wanted is not None:
            torch.testing.assert_close(full(param.grad), wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("layout", LAYOUTS[:4])
def test_a_converted_model_is_evaluated_first_and_trained_then(ctx, layout):
    plain, block = pair(make, zero_level=layout, use_checkpoint=False)
    for model in (plain, block):
        model.double()
        with torch.inference_mode():
            model(seeded(0, 2, 5).double())
    assert_same_training(ctx, plain, block, 2)


@pytest.mark.ranks(1)
def test_modules_of_torch_jit_are_named(ctx):
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    for tool in (shard, BMTrainModelWrapper):
        with pytest.raises(ValueError, match=r"1 was compiled by torch.jit and cannot be sharded"):
            tool(model)
    assert all(type(param) is nn.Parameter for param in model.parameters())


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["LBFGS", "Adafactor", "Muon"])
def test_optimizers_of_logical_parameters_are_refused_on_replicas_of_shards(ctx, name):
    if not hasattr(torch.optim, name):
        return  # this version of torch lacks it
    plain, block = make_pair(ctx, "hybrid")
    backward(ctx, plain, block)
    optimizer = getattr(torch.optim, name)([block[0].weight], lr=0.01)
    before = block[0].weight.detach().clone()
    with pytest.raises(TypeError, match=f"torch.optim.{name}"):
        optimizer.step(lambda: torch.zeros(()))
    torch.testing.assert_close(block[0].weight.detach(), before)
