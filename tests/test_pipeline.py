"""Pipelines together with tensor parallelism, optimizers and the manager: what one process would compute."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import bmt_zero.gradient_reducer
import bmtrain as bmt
from bmt_pipe import Action, Kind
from bmt_pipe.run import Run
from bmt_zero import load_state_dict

# No number of ranks divides the width. There are as many vectors of tokens and features as tensor-parallel ranks need.
VOCABULARY, WIDTH, FEATURES, LENGTH, LAYERS = 26, 7, 10, 6, 5
ROWS = 3  # samples of a replica: its micro-batches are uneven
STEPS = 10


# --- the model, plain and in parallel -------------------------------------------------------------


class _Strained(torch.autograd.Function):
    """The identity, whose gradient overflows like one of half precision: beyond a limit it is infinite."""

    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.masked_fill(grad.abs() > ctx.limit, torch.inf), None


class PlainLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, FEATURES), nn.Linear(FEATURES, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class PlainModel(nn.Module):
    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(PlainLayer() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        scores = (self.norm(x) @ self.embed.weight.t()).flatten(0, 1)
        return F.cross_entropy(scores.to(torch.promote_types(scores.dtype, torch.float32)), targets.flatten())


class Layer(bmt.DistributedModule):
    def __init__(self, sequence: bool) -> None:
        super().__init__()
        self.limit = float("inf")
        self.norm = nn.LayerNorm(WIDTH)
        self.up = bmt.nn.ColumnParallelLinear(WIDTH, FEATURES, gather_input=sequence)
        self.down = bmt.nn.RowParallelLinear(FEATURES, WIDTH, all_reduce_output=not sequence)
        if sequence:
            bmt.nn.sequence_parallel(self.norm)

    def forward(self, x: Tensor) -> Tensor:
        if self.limit < float("inf"):
            inner = F.layer_norm(x, x.shape[-1:], self.norm.weight, _Strained.apply(self.norm.bias, self.limit))
        else:
            inner = self.norm(x)
        return x + self.down(F.gelu(self.up(inner)))


class Model(bmt.DistributedModule):
    """The same, with the vocabulary and the linear layers cut over tensor-parallel ranks, in a pipeline."""

    def __init__(
        self,
        level: int = 3,
        schedule: str = "recompute",
        sequence: bool = False,
        checkpoint: bool = True,
        layers: int = LAYERS,
        frozen: range = range(0),
    ) -> None:
        super().__init__()
        modules = [Layer(sequence).requires_grad_(i not in frozen) for i in range(layers)]
        self.has_tail = schedule != "recompute"
        self.embed = bmt.nn.VPEmbedding(VOCABULARY, WIDTH, torch.get_default_dtype(), sequence_parallel=sequence)
        self.layers = bmt.PipelineTransformerBlockList(
            [bmt.Block(module, checkpoint, level) for module in modules],
            tail_schedule=schedule if self.has_tail else None,
        )
        self.norm = bmt.BMTrainModelWrapper(nn.LayerNorm(WIDTH), zero_level=level)
        if sequence:
            bmt.nn.sequence_parallel(self.norm)
        self.cross_entropy = bmt.loss.FusedCrossEntropy(parallel=True)

    def loss(self, ids: Tensor, targets: Tensor) -> Tensor:
        if self.has_tail:
            return self.layers(self.embed(ids), tail=self.tail, tail_args=(targets,))
        return self.tail(self.layers(self.embed(ids)), targets)

    def tail(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.cross_entropy(self.embed(self.norm(x), projection=True).flatten(0, 1), targets.flatten())


def start(device: str, dtype: torch.dtype = torch.float64, **layout: int) -> bmt.ParallelContext:
    torch.set_default_dtype(dtype)
    return bmt.init_distributed(device=device, pipe_size=2, num_micro_batches=4, **layout)


def plain_model(layers: int = LAYERS) -> PlainModel:
    torch.manual_seed(0)
    return PlainModel(layers).to(bmt.config["device"])


def batch(number: int, replica: int, part: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * number + 10 * replica + part)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH + 1), generator=generator).to(bmt.config["device"])
    return ids[:, :-1], ids[:, 1:]


def own_batch(number: int, part: int = 0) -> tuple[Tensor, Tensor]:
    return batch(number, bmt.rank() // bmt.config["tp_size"], part)


def mean_loss(plain: PlainModel, number: int, parts: int = 1) -> Tensor:
    """Of the whole batch, of all replicas."""
    replicas = bmt.config["topology"].replicas
    losses = [plain.loss(*batch(number, r, part)) for r in range(replicas) for part in range(parts)]
    return torch.stack(losses).mean()


def assert_same_update(model: Model, plain: PlainModel, before: dict[str, Tensor], tolerance: float) -> None:
    found = model.state_dict()
    assert list(found) == list(before)
    for name, value in plain.state_dict().items():
        expected = value - before[name]
        assert (found[name].to(value) - value).norm() <= tolerance * expected.norm(), name


# --- tensor parallelism ---------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Counts matrix products by the action of the pipeline that computes them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[Kind] = Counter()
        self.kind: Kind | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.kind and func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm):
            self.found[self.kind] += 1
        return func(*args, **(kwargs or {}))

    def do(self, run: Run, action: Action) -> None:
        self.kind = action.kind
        _do(run, action)
        self.kind = None


_do = Run._do


@pytest.mark.ranks(4, init=False, timeout=120)
@pytest.mark.parametrize(
    ("level", "schedule", "sequence"),
    [(0, "zero_bubble_h1", False), (1, "1f1b", False), (2, "zero_bubble_h1", True), (3, "recompute", True)],
)
def test_stages_of_tensor_parallel_ranks_train_as_one_process(device_type, level, schedule, sequence):
    ctx = start(device_type, tp_size=2, zero_level=level)
    plain = plain_model()
    before = copy.deepcopy(plain.state_dict())
    model = Model(level, schedule, sequence, checkpoint=sequence)
    load_state_dict(model, before)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model)]
    products = Products()
    with mock.patch.object(Run, "_do", lambda run, action: products.do(run, action)), products:
        for step in range(STEPS):
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = model.loss(*own_batch(step))
            (loss / ctx.replicas).backward()
            expected = mean_loss(plain, step)
            expected.backward()
            assert bmt.sum_loss(loss).item() == pytest.approx(expected.item(), rel=1e-10)
            for optimizer in optimizers:
                optimizer.step()
    assert_same_update(model, plain, before, 1e-10)
    weights = products.found[Kind.WEIGHT]  # of two linear layers in each layer and micro-batch
    assert weights == (2 * len(list(model.layers.children())) * 4 * STEPS if schedule == "zero_bubble_h1" else 0)


@pytest.mark.ranks(4, init=False, timeout=120)
def test_layers_are_reduced_once_in_zero_bubbles(device_type):
    ctx = start(device_type)
    plain = plain_model().layers
    layers = bmt.PipelineTransformerBlockList(
        [bmt.Block(PlainLayer(), zero_level=i % 2) for i in range(LAYERS)], tail_schedule="zero_bubble_h1"
    )
    load_state_dict(layers, plain.state_dict())
    inputs = torch.randn(ctx.replicas, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(ctx.device)
    module = bmt_zero.gradient_reducer
    with mock.patch.object(module, "Reduction", wraps=module.Reduction) as reductions:
        (layers(inputs[ctx.rank], tail=mean_square) / ctx.replicas).backward()
    assert reductions.call_count == len(list(layers.children()))
    for layer in plain:
        inputs = layer(inputs)
    mean_square(inputs).backward()
    for index in layers.chunks[0]:
        for (name, param), wanted in zip(layers[index].named_parameters(), plain[index].parameters(), strict=True):
            rows = param.bmt_slice
            expected = wanted.grad[rows.row_start : rows.row_stop]
            torch.testing.assert_close(param.grad, expected, msg=lambda m, n=f"{index}.{name}": f"{n}: {m}")


def mean_square(x: Tensor) -> Tensor:
    return x.square().mean()


# --- the manager ----------------------------------------------------------------------------------


def snapshot(model: Model, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    state = [v for p in model.parameters() for v in optimizer.state[p].values() if isinstance(v, Tensor)]
    return [t.detach().clone() for t in (*model.parameters(), *state)]


@pytest.mark.ranks(4, init=False, timeout=120)
@pytest.mark.parametrize(
    ("level", "schedule"), [(0, "recompute"), (1, "zero_bubble_h1"), (2, "recompute"), (3, "1f1b")]
)
def test_manager_accumulates_clips_and_skips_on_all_stages(device_type, level, schedule):
    start(device_type, zero_level=level)
    plain = plain_model()
    before = copy.deepcopy(plain.state_dict())
    model = Model(level, schedule)
    load_state_dict(model, before)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = bmt.optim.OptimManager(loss_scale=1024)
    scheduler = bmt.lr_scheduler.NoDecay(optimizer, 0.1, 0, 100)
    manager.add_optimizer(optimizer, scheduler)

    def accumulate(step: int, parts: int = 2) -> None:
        manager.zero_grad()
        for part in range(parts):
            waits = part < parts - 1 and step % 2 == 0  # the other steps reduce each time
            with bmt.no_sync(model) if waits else contextlib.nullcontext():
                manager.backward(model.loss(*own_batch(step, part)) / parts)

    strained = [m for m in model.layers.modules() if isinstance(m, Layer)][-1]
    for step in range(STEPS):
        if step in (1, 6):
            # An overflow in one parameter of the last stage.
            if bmt.config["pipe_rank"] == 1:
                strained.limit = 0.0
            accumulate(step + 100)
            strained.limit = float("inf")
            state, steps, scale = snapshot(model, optimizer), scheduler.num_iter, manager.loss_scale
            if step == 1:
                assert not manager.clip_grad_norm(model.parameters(), max_norm=0.5).isfinite()
            manager.step()
            assert manager.loss_scale == scale / 2
            assert scheduler.num_iter == steps
            assert all(torch.equal(a, b) for a, b in zip(snapshot(model, optimizer), state, strict=True))
            assert not any(p.grad is not None and p.grad.any() for p in model.parameters())
        accumulate(step)
        norm = manager.clip_grad_norm(model.parameters(), max_norm=0.5)
        manager.step()
        reference.zero_grad()
        mean_loss(plain, step, parts=2).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert expected > 0.5
        assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
        reference.step()
    assert manager.loss_scale == 256
    assert_same_update(model, plain, before, 1e-6)  # the norm is fp32


class _Flushing(torch.autograd.Function):
    """The identity, whose gradient underflows like one of half precision: below a limit it is zero."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.masked_fill(grad.abs() < 1e-2, 0.0)


class FlushingLayer(PlainLayer):
    def forward(self, x: Tensor) -> Tensor:
        return _Flushing.apply(super().forward(x))


@pytest.mark.ranks(2, init=False, timeout=120)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_h1"])
def test_the_first_step_is_computed_for_the_loss_scale(device_type, schedule):
    ctx = start(device_type)
    torch.manual_seed(0)
    plain = nn.ModuleList(PlainLayer() for _ in range(4))
    layers = bmt.PipelineTransformerBlockList(
        [bmt.Block(FlushingLayer(), zero_level=0) for _ in range(4)], tail_schedule=schedule
    )
    load_state_dict(layers, plain.state_dict())
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    manager = bmt.optim.OptimManager(loss_scale=2.0**24, loss_scale_steps=1)
    manager.add_optimizer(optimizer)
    inputs = torch.randn(ctx.replicas, ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).to(ctx.device)
    inputs = inputs / 1e3
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):  # with a larger loss scale each time
        manager.zero_grad()
        manager.backward(layers(inputs[ctx.rank], tail=mean_square))
        x = inputs
        for layer in plain:
            x = layer(x)
        reference.zero_grad()
        mean_square(x).backward()
        for index in (i for chunk in layers.chunks for i in chunk):
            for found, wanted in zip(layers[index].parameters(), plain[index].parameters(), strict=True):
                torch.testing.assert_close(found.grad / manager.loss_scale, wanted.grad, rtol=1e-5, atol=0)
        manager.step()
        reference.step()


@pytest.mark.ranks(2, init=False, timeout=120)
@pytest.mark.parametrize("schedule", ["recompute", "1f1b"])
def test_training_recovers_from_a_loss_scale_that_is_too_large(device_type, schedule):
    start(device_type)
    plain = plain_model()
    before = copy.deepcopy(plain.state_dict())
    model = Model(schedule=schedule)
    load_state_dict(model, before)
    for layer in model.layers.modules():
        if isinstance(layer, Layer):
            layer.limit = 2.0**6
    reference, optimizer = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (plain, model))
    manager = bmt.optim.OptimManager(loss_scale=2.0**16, loss_scale_steps=4)
    manager.add_optimizer(optimizer)
    good = 0
    for _ in range(30):
        scale = manager.loss_scale
        manager.zero_grad()
        manager.backward(model.loss(*own_batch(good)))
        manager.step()
        if manager.loss_scale < scale:
            assert scale > 2.0**6
            continue
        reference.zero_grad()
        mean_loss(plain, good).backward()
        reference.step()
        good += 1
    assert good >= STEPS
    assert_same_update(model, plain, before, 1e-10)


@pytest.mark.ranks(2, init=False, timeout=120)
def test_an_unusable_gradient_of_the_loss_leaves_later_ones_alone(device_type):
    start(device_type)
    plain = plain_model()
    model = Model(schedule="1f1b")
    load_state_dict(model, plain.state_dict())
    mean_loss(plain, 0).backward()
    wanted = dict(plain.named_parameters())
    for factor in (1.0, 0.0, 0.5, float("inf"), 2.0, float("nan"), 1.0):
        model.zero_grad()
        (model.loss(*own_batch(0)) * factor / 2).backward()
        for name, param in model.named_parameters():
            rows = param.bmt_slice
            if abs(factor) < float("inf"):
                expected = wanted[name].grad[rows.row_start : rows.row_stop] * factor
                torch.testing.assert_close(param.grad, expected, msg=lambda m, f=factor, n=name: f"{f} {n}: {m}")
            else:
                assert not param.grad.isfinite().all() or not param.grad.numel()


# --- Adam -----------------------------------------------------------------------------------------

ADAM = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-4, "weight_decay": 0.1}


def moments_bytes(optimizer: torch.optim.Optimizer, module: nn.Module) -> int:
    """Of this rank's part of the parameters of ``module``."""
    names = ("exp_avg", "exp_avg_sq")
    return sum(optimizer.state[p][name].nbytes for p in module.parameters() if p.requires_grad for name in names)


@pytest.mark.ranks(4, init=False, timeout=120)
@pytest.mark.parametrize(
    ("optimizer_class", "level", "schedule", "frozen"),
    [
        (bmt.optim.AdamOptimizer, 0, "1f1b", range(0)),
        (bmt.optim.AdamOptimizer, 3, "recompute", range(2, 4)),  # the last stage
        (bmt.optim.AdamOffloadOptimizer, 3, "recompute", range(0)),
        (bmt.optim.AdamOffloadOptimizer, 2, "1f1b", range(2)),  # the first
    ],
)
def test_adam_on_what_a_stage_has(device_type, optimizer_class, level, schedule, frozen):
    ctx = start(device_type, torch.float32, zero_level=level)
    plain = plain_model(4).double()
    for layer in frozen:
        plain.layers[layer].requires_grad_(False)
    before = copy.deepcopy(plain.state_dict())
    model = Model(level, schedule, layers=4, frozen=frozen)
    load_state_dict(model, {name: value.float() for name, value in before.items()})
    reference = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **ADAM)
    optimizer = optimizer_class([p for p in model.parameters() if p.requires_grad], **ADAM)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    for step in range(STEPS):
        manager.zero_grad()
        manager.backward(model.loss(*own_batch(step)))
        norm = manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        manager.step()
        reference.zero_grad()
        mean_loss(plain, step).backward()
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-5)
        reference.step()
    assert_same_update(model, plain, before, 1e-5)

    # What a list of all layers has on every rank, or shares out over all, is half as much for one stage.
    elements = sum(p.numel() for p in plain.layers[0].parameters())
    first = 2 * ctx.pipe_rank
    trained = sum(i not in frozen for i in range(first, first + 2))
    sizes = torch.tensor([8 * elements * trained, 4 * elements * 2])
    found = torch.tensor([moments_bytes(optimizer, model.layers), sum(p.nbytes for p in model.layers.parameters())])
    if level == 0:
        assert torch.equal(found, sizes)
    else:
        longest_row = 8 * FEATURES
        assert (found <= sizes / 2 + len(list(model.layers.parameters())) * longest_row).all()
        ctx.zero.all_reduce(found)
        assert torch.equal(found, sizes)


@pytest.mark.ranks(4, init=False, timeout=120)
def test_bf16_parameters_are_as_good_as_in_one_process(device_type):
    start(device_type, torch.bfloat16, tp_size=2)
    low = plain_model()
    exact, masters = copy.deepcopy(low).double(), copy.deepcopy(low).float()
    before = copy.deepcopy(exact.state_dict())
    model = Model(schedule="zero_bubble_h1", sequence=True)
    torch.set_default_dtype(torch.float32)
    load_state_dict(model, low.state_dict())
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), **ADAM)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    references = [torch.optim.AdamW(m.parameters(), **ADAM) for m in (exact, masters)]
    for step in range(STEPS):
        manager.zero_grad()
        manager.backward(model.loss(*own_batch(step)))
        manager.step()
        for plain in (low, exact):
            plain.zero_grad()
            mean_loss(plain, step).backward()
        for master, param in zip(masters.parameters(), low.parameters()):
            master.grad = param.grad.float()
        for reference in references:
            reference.step()
        low.load_state_dict(masters.state_dict())

    def error(state: dict[str, Tensor]) -> float:
        differences = [(state[name].double() - value).flatten() for name, value in exact.state_dict().items()]
        return torch.cat(differences).norm().item()

    one_process = error(low.state_dict())
    assert one_process < 0.05 * error(before)
    assert error(model.state_dict()) < 1.5 * one_process
