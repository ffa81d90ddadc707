"""Scripts as BMTrain's documentation writes them train as plain PyTorch on the whole batch does."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from bmtrain_gpt import GPT, LAYERS, LENGTH, VOCABULARY, PlainGPT
from torch import Tensor, nn

import bmtrain as bmt
from bmtrain import inspect, optim
from bmtrain.global_var import config

STEPS = 10
TOLERANCE = 1e-5
EPS = 1e-4  # the gradient of a key's bias is 0 but for rounding, of which Adam with a smaller one would make steps
Batch = tuple[Tensor, Tensor, Tensor, Tensor]


def batch_of(step: int, replica: int) -> Batch:
    """Ids, positions, mask and targets of a replica's two samples, of different lengths."""
    generator = torch.Generator().manual_seed(100 * step + replica)
    text = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (2,), generator=generator)
    mask = torch.arange(LENGTH) < lengths[:, None]
    return text[:, :-1], torch.arange(LENGTH).expand(2, -1), mask, text[:, 1:].masked_fill(~mask, -100)


def replicas() -> int:
    return config["world_size"] if config["tp_size"] == 1 else config["tp_zero_size"]


def replica() -> int:
    return config["rank"] if config["tp_size"] == 1 else config["tp_zero_rank"]


def to_device(batch: Batch) -> Iterable[Tensor]:
    return (x.to(config["device"]) for x in batch)


def loss_of(logits: Tensor, targets: Tensor, parallel: bool) -> Tensor:
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100, parallel=parallel)
    return loss_func(logits.flatten(0, 1), targets.flatten())


def plain_copy(model: nn.Module) -> PlainGPT:
    plain = PlainGPT()
    plain.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    return plain


def plain_loss(plain: PlainGPT, step: int, count: int) -> Tensor:
    """The mean over replicas of the mean over each one's tokens. What it records is of all samples."""
    batches = [batch_of(step, r) for r in range(count)]
    logits = plain(*(torch.cat([batch[i] for batch in batches]) for i in range(3)))
    pairs = zip(logits.chunk(count), batches)
    return sum(F.cross_entropy(x.flatten(0, 1), b[3].flatten(), ignore_index=-100) for x, b in pairs) / count


def update_error(model: nn.Module, plain: PlainGPT, before: dict[str, Tensor]) -> float:
    """‖Δp − Δp_ref‖ / ‖Δp_ref‖ over all parameters."""
    after, wanted = model.state_dict(), plain.state_dict()
    assert list(after) == list(wanted)
    mine = torch.cat([(after[name].cpu() - before[name]).flatten() for name in wanted])
    reference = torch.cat([(wanted[name] - before[name]).flatten() for name in wanted])
    return ((mine - reference).norm() / reference.norm()).item()


def noam(start: float, warmup: int, step: int) -> float:
    return start * step / warmup**1.5 if step < warmup else start / math.sqrt(step)


def check_summary(found: list[dict[str, Any]], wanted: list[tuple[str, Tensor, Tensor | None]]) -> None:
    assert [item["name"] for item in found] == [name for name, _, _ in wanted]
    for item, (name, value, grad) in zip(found, wanted):
        for prefix, x in (("", value), ("grad_", grad)):
            for key in ("max", "min", "mean", "std"):
                assert x is not None
                expected = getattr(x.double(), key)().item()
                assert item[prefix + key] == pytest.approx(expected, rel=1e-3, abs=1e-5), (name, prefix + key)


def train_gpt(**layout: Any) -> None:
    """The training loop of the example, with inspection."""
    bmt.init_distributed(seed=0, **layout)
    model = GPT()
    bmt.init_parameters(model)
    bmt.synchronize()
    plain = plain_copy(model)
    before = copy.deepcopy(plain.state_dict())
    reference = torch.optim.AdamW(plain.parameters(), lr=0.0, eps=EPS, weight_decay=1e-2)

    optimizer = optim.AdamOffloadOptimizer(model.parameters(), eps=EPS, weight_decay=1e-2)
    lr_scheduler = bmt.lr_scheduler.Noam(optimizer, start_lr=2e-2, warmup_iter=4, end_iter=1000, num_iter=0)
    optim_manager = optim.OptimManager(loss_scale=2**10)
    optim_manager.add_optimizer(optimizer, lr_scheduler)
    avg_loss_recorder = bmt.utils.AverageRecorder()
    for iteration in range(STEPS):
        ids, pos, mask, targets = to_device(batch_of(iteration, replica()))
        with inspect.inspect_tensor() as inspector:
            logits = model(ids, pos, mask)
            loss = loss_of(logits, targets, config["tp_size"] > 1)
            global_loss = bmt.sum_loss(loss).item()
            optim_manager.zero_grad()
            optim_manager.backward(loss)
        summary = inspector.get_summary()
        parameters = inspect.inspect_model(model, "*")
        bmt.print_rank(inspect.format_summary(summary))
        bmt.print_rank(inspect.format_summary(parameters))
        grad_norm = optim_manager.clip_grad_norm(optimizer.param_groups, max_norm=1.0)
        assert lr_scheduler.current_lr == pytest.approx(noam(2e-2, 4, iteration))
        optim_manager.step()
        avg_loss_recorder.record(global_loss)

        reference.zero_grad()
        expected = plain_loss(plain, iteration, replicas())
        expected.backward()
        assert global_loss == pytest.approx(expected.item(), rel=1e-5)
        check_summary(parameters, [(name, p, p.grad) for name, p in plain.named_parameters()])
        if config["tp_size"] == 1:  # with it the logits are split, and hidden states are of parts of the sequence
            check_summary(summary, [(name, x, x.grad) for name, x in plain.recorded])
        else:
            wanted = [(name, x, x.grad) for name, x in plain.recorded if "hidden" in name]
            check_summary([item for item in summary if "hidden" in item["name"]], wanted)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        assert grad_norm.item() == pytest.approx(norm.item(), rel=1e-4)
        reference.param_groups[0]["lr"] = noam(2e-2, 4, iteration)
        reference.step()
    assert update_error(model, plain, before) <= TOLERANCE
    assert len(model.transformers) == LAYERS


@pytest.mark.ranks(1, 2, 4, init=False)
def test_the_example() -> None:
    train_gpt()


@pytest.mark.ranks(2, 4, init=False)
def test_the_example_with_tensor_parallelism() -> None:
    train_gpt(tp_size=2)


@pytest.mark.ranks(2, 4, init=False)
def test_the_example_with_a_pipeline() -> None:
    train_gpt(pipe_size=2, num_micro_batches=2)


@pytest.mark.ranks(1, 2, 4, init=False)
def test_gradient_accumulation() -> None:
    bmt.init_distributed()
    model = GPT()
    bmt.init_parameters(model)
    plain = plain_copy(model)
    before = copy.deepcopy(plain.state_dict())
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS, weight_decay=0.0)
    optimizer = optim.AdamOptimizer(model.parameters(), lr=1e-2, eps=EPS)
    optim_manager = optim.OptimManager(loss_scale=256)
    optim_manager.add_optimizer(optimizer)
    for iteration in range(3 * STEPS):
        ids, pos, mask, targets = to_device(batch_of(iteration, replica()))
        optim_manager.backward(loss_of(model(ids, pos, mask), targets, False) / 3)
        (plain_loss(plain, iteration, replicas()) / 3).backward()
        if iteration % 3 == 2:
            optim_manager.clip_grad_norm(optimizer.param_groups, 0.5)
            optim_manager.step()
            optim_manager.zero_grad()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            reference.step()
            reference.zero_grad()
    assert update_error(model, plain, before) <= TOLERANCE


@pytest.mark.ranks(1, 2, 4, init=False)
def test_several_optimizers() -> None:
    bmt.init_distributed(seed=7)
    model = GPT()
    bmt.init_parameters(model)
    plain = plain_copy(model)
    before = copy.deepcopy(plain.state_dict())
    # No weight decay for vectors; the embeddings by torch's own optimizer.
    kinds = [
        lambda name, p: "emb" not in name and p.dim() == 1,
        lambda name, p: "emb" not in name and p.dim() == 2,
        lambda name, p: "emb" in name,
    ]
    plain_groups = [[p for name, p in plain.named_parameters() if kind(name, p)] for kind in kinds]
    names = [{name for name, p in plain.named_parameters() if kind(name, p)} for kind in kinds]
    groups = [[p for name, p in model.named_parameters() if name in chosen] for chosen in names]
    references = [
        torch.optim.AdamW(plain_groups[0], lr=0.0, eps=EPS, weight_decay=0.0),
        torch.optim.AdamW(plain_groups[1], lr=0.0, weight_decay=0.1, betas=(0.9, 0.95)),
        torch.optim.SGD(plain_groups[2], lr=0.1, momentum=0.9),
    ]
    optimizers = [
        optim.AdamOptimizer(groups[0], eps=EPS),
        optim.AdamOffloadOptimizer(groups[1], weight_decay=0.1, betas=(0.9, 0.95)),
        torch.optim.SGD(groups[2], lr=0.1, momentum=0.9),
    ]
    schedulers = [
        bmt.lr_scheduler.Linear(optimizers[0], start_lr=1e-2, warmup_iter=2, end_iter=20),
        bmt.lr_scheduler.Cosine(optimizers[1], start_lr=1e-2, warmup_iter=2, end_iter=8),
        None,
    ]
    optim_manager = optim.OptimManager(loss_scale=1024)
    for optimizer, scheduler in zip(optimizers, schedulers):
        optim_manager.add_optimizer(optimizer, scheduler)
    for n in range(STEPS):
        ids, pos, mask, targets = to_device(batch_of(n, replica()))
        optim_manager.zero_grad()
        optim_manager.backward(loss_of(model(ids, pos, mask), targets, False))
        norms = [optim_manager.clip_grad_norm(optimizer.param_groups, 0.5) for optimizer in optimizers]
        optim_manager.step()

        for each in references:
            each.zero_grad()
        plain_loss(plain, n, replicas()).backward()
        for norm, params in zip(norms, plain_groups):
            assert norm.item() == pytest.approx(torch.nn.utils.clip_grad_norm_(params, 0.5).item(), rel=1e-4)
        references[0].param_groups[0]["lr"] = 1e-2 * (n / 2 if n < 2 else (20 - n) / 18)
        decayed = 0.0 if n >= 8 else (1 + math.cos(math.pi * (n - 2) / 6)) / 2
        references[1].param_groups[0]["lr"] = 1e-2 * (n / 2 if n < 2 else decayed)
        for each in references:
            each.step()
    assert update_error(model, plain, before) <= TOLERANCE


@pytest.mark.ranks(1, 2, 4, init=False)
@pytest.mark.parametrize("gathered", [False, True])
def test_save_and_load(tmp_path: Path, gathered: bool) -> None:
    """Training goes on from files as if it had not stopped."""
    bmt.init_distributed(seed=3)

    def build() -> tuple[GPT, optim.OptimManager]:
        model = GPT()
        bmt.init_parameters(model)
        optimizer = optim.AdamOffloadOptimizer(model.parameters(), lr=1e-2, eps=EPS, weight_decay=1e-2)
        optim_manager = optim.OptimManager(loss_scale=64)
        optim_manager.add_optimizer(
            optimizer, bmt.lr_scheduler.Exponential(optimizer, start_lr=1e-2, warmup_iter=3, end_iter=100)
        )
        return model, optim_manager

    def train(model: GPT, optim_manager: optim.OptimManager, steps: Iterable[int]) -> None:
        for n in steps:
            ids, pos, mask, targets = to_device(batch_of(n, replica()))
            optim_manager.zero_grad()
            optim_manager.backward(loss_of(model(ids, pos, mask), targets, False))
            optim_manager.step()

    model, optim_manager = build()
    plain = plain_copy(model)
    before = copy.deepcopy(plain.state_dict())
    reference = torch.optim.AdamW(plain.parameters(), lr=0.0, eps=EPS, weight_decay=1e-2)
    for n in range(STEPS):
        reference.zero_grad()
        plain_loss(plain, n, replicas()).backward()
        reference.param_groups[0]["lr"] = 1e-2 * (n / 3 if n < 3 else 0.95 ** (n - 3))
        reference.step()

    train(model, optim_manager, range(STEPS // 2))
    folder = Path(bmt.store.broadcast_object(str(tmp_path), config["comm"], src=0))
    bmt.save(model, str(folder / "model.pt"))
    states = folder / f"optimizer-{0 if gathered else bmt.rank()}.pt"
    state = optim_manager.state_dict(gather_opt=gathered)
    if not gathered or bmt.rank() == 0:
        torch.save(state, states)
    bmt.synchronize()
    PlainGPT().load_state_dict(torch.load(folder / "model.pt", weights_only=True))

    model, optim_manager = build()
    bmt.load(model, str(folder / "model.pt"))
    optim_manager.load_state_dict(torch.load(states, weights_only=True))
    train(model, optim_manager, range(STEPS // 2, STEPS))
    assert update_error(model, plain, before) <= TOLERANCE


@pytest.mark.ranks(2, init=False)
def test_scripts_ask_for_their_rank_before_they_start() -> None:
    assert (bmt.rank(), bmt.world_size(), config["rank"], config["world_size"]) == (0, 1, 0, 1)
    printed = io.StringIO()
    bmt.print_rank("before", file=printed)
    assert printed.getvalue() == "before\n"
    bmt.init_distributed()
    drawn = torch.rand(3)
    assert bmt.store.allgather_objects(drawn.tolist()) == [drawn.tolist()] * 2  # seed=0 on all ranks
    topology = config["topology"]
    assert (topology.tp_id, topology.stage_id, topology.stages, topology.pipe_idx) == (0, 0, 1, bmt.rank())
    assert topology.get_group_rank("zero") == bmt.rank()


def drawn_by_one_process(model: GPT) -> Iterable[tuple[str, Tensor]]:
    """The values that torch's generator gives next for the parameters, in order."""
    for name, param in model.named_parameters():
        if name.endswith("bias"):
            yield name, torch.zeros(param.logical_shape)
        elif "ln" in name or "norm" in name:
            yield name, torch.ones(param.logical_shape)
        else:
            yield name, torch.empty(param.logical_shape).normal_(0.0, 1.0 if "emb" in name else 0.2)


@pytest.mark.ranks(1, 2, 4, init=False)
@pytest.mark.parametrize("one_by_one", [False, True])
def test_initial_values_are_those_of_one_process(one_by_one: bool) -> None:
    """With the same seed; and equal modules get different values."""
    bmt.init_distributed(seed=5)
    model = GPT()
    for seed in (5, 6):
        torch.manual_seed(seed)  # 5 is what init_distributed did
        if one_by_one:
            for module in [model.word_emb, model.pos_emb, *model.transformers, model.layernorm]:
                bmt.init_parameters(module)
        else:
            bmt.init_parameters(model)
        found = {name: param.full_tensor().cpu() for name, param in model.named_parameters()}
        if config["device"].type == "cpu":
            torch.manual_seed(seed)
            for name, value in drawn_by_one_process(model):
                assert torch.equal(found[name], value), name
        name = "transformers.{}.ff.w_in.weight"
        assert not torch.equal(found[name.format(0)], found[name.format(1)])


@pytest.mark.ranks(1, 2, init=False)
def test_blocks_have_the_attributes_of_bmtrain() -> None:
    bmt.init_distributed()
    layer = nn.Linear(4, 4)
    plain = copy.deepcopy(layer)
    shared = bmt.TransformerBlockList([layer, layer])  # twice the same weights
    block = shared["0"]
    assert shared[0] is shared["1"] is block
    assert block._module is block
    assert [(group, len(params)) for group, params in block.grouped_parameters()] == [(None, 2)]
    x = torch.randn(3, 4)
    loss = shared(x).sum()
    loss.backward()
    plain(plain(x)).sum().backward()
    assert torch.allclose(block.weight.grad.norm(), plain.weight.grad.norm() * bmt.world_size(), rtol=1e-5)
    assert list(shared.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    for mode in ("PIPE", "BLOCK"):
        assert isinstance(bmt.Block(nn.Linear(2, 2), mode=mode), bmt.CheckpointBlock)


class Counted(bmt.DistributedModule):
    """Counts how often its forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = bmt.nn.Linear(6, 6)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return F.dropout(self.linear(x), 0.5, self.training)


@pytest.mark.ranks(1, 2, init=False)
def test_blocks_compute_again_what_needs_gradients_alone() -> None:
    bmt.init_distributed()
    layers = [bmt.Block(Counted()) for _ in range(6)]
    for layer in layers[:3]:
        layer.requires_grad_(False)
    y = torch.randn(8, 6, device=config["device"])
    for layer in layers:
        y = layer(y)
    y.sum().backward()
    assert [layer.count for layer in layers] == [1, 1, 1, 2, 2, 2]
    assert all(param.grad is None for layer in layers[:3] for param in layer.parameters())
    assert all(param.grad is not None for layer in layers[3:] for param in layer.parameters())
    model = bmt.TransformerBlockList(layers)
    x = torch.ones(64, 6, device=config["device"])
    assert (model.train()(x) == 0).any()
    assert not (model.eval()(x) == 0).any()


@pytest.mark.ranks(1, 2, init=False)
def test_parameters_are_frozen_between_steps() -> None:
    """The lines of a summary: what is frozen keeps the gradient that it had, and what never had one shows zeros."""
    bmt.init_distributed()
    layer = bmt.nn.Linear(6, 6)
    model = bmt.TransformerBlockList([bmt.Block(layer), bmt.Block(bmt.nn.Linear(6, 6))])
    plain = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    plain.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    optim_manager = optim.OptimManager(loss_scale=4)
    before: list[str] = []
    for step, (weight, bias) in enumerate([(True, False), (False, True), (True, False)]):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        for first in (layer, plain[0]):
            first.weight.requires_grad_(weight)
            first.bias.requires_grad_(bias)
        optim_manager.backward(model(x.to(config["device"])).sum())
        plain(x).sum().backward()
        summary = inspect.inspect_model(model, "*")
        lines = inspect.format_summary(summary).split("\n")[1:]
        for item, (name, param) in zip(summary, plain.named_parameters()):
            assert item["name"] == name
            wanted = torch.zeros(2) if param.grad is None else param.grad
            for key in ("mean", "std", "max", "min"):
                assert item[f"grad_{key}"] == pytest.approx(getattr(wanted.double(), key)().item(), rel=1e-4, abs=1e-6)
        if step == 0:
            assert layer.bias.grad is None
            assert lines[1].split()[-2:] == ["0.0000", "0.0000"]
        else:
            assert [mine == old for mine, old in zip(lines[:2], before)] == [not weight, not bias]
        before = lines


@pytest.mark.ranks(1, 2, init=False)
@pytest.mark.parametrize("by_manager", [False, True])
def test_gradients_are_shown_without_the_loss_scale_that_they_have(by_manager: bool) -> None:
    """Two managers of different scales; and then a loss that nobody has scaled."""
    bmt.init_distributed()
    torch.manual_seed(0)
    plain = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
    heads = nn.ModuleList(bmt.Block(copy.deepcopy(layer)) for layer in plain)
    optimizers = [optim.AdamOptimizer(heads[0].parameters(), lr=0.0), torch.optim.SGD(heads[1].parameters(), lr=0.0)]
    managers = [optim.OptimManager(loss_scale=scale) for scale in (2.0**10, 2.0**4)]
    for manager, optimizer in zip(managers, optimizers):
        manager.add_optimizer(optimizer)
    values = torch.randn(2, 4)
    x = values.clone().requires_grad_()
    hidden = torch.tanh(x)
    hidden.retain_grad()
    sum(head(hidden).square().mean() for head in plain).backward()

    def check_parameters() -> None:
        for item, param in zip(inspect.inspect_model(heads, "*"), plain.parameters()):
            assert item["grad_std"] == pytest.approx(param.grad.double().std().item(), rel=1e-4), item["name"]

    for scaled in (True, True, False):
        with inspect.inspect_tensor() as inspector:
            mine = values.clone().requires_grad_()
            inspect.record_tensor(mine, "input")
            mine_hidden = torch.tanh(mine)
            inspect.record_tensor(mine_hidden, "hidden")
            losses = [head(mine_hidden).square().mean() for head in heads]
            if scaled:
                for manager in managers:
                    manager.zero_grad()
                managers[0].scale_loss(losses[0]).backward(retain_graph=True)
                if by_manager:
                    managers[1].backward(losses[1])
                else:
                    managers[1].scale_loss(losses[1]).backward()
            else:
                heads.zero_grad()
                (sum(losses) / bmt.world_size()).backward()
        for item, grad in zip(inspector.get_summary(), (x.grad, hidden.grad)):
            wanted = grad.double().repeat(bmt.world_size(), 1).std() / bmt.world_size()
            assert item["grad_std"] == pytest.approx(wanted.item(), rel=1e-4), item["name"]
        check_parameters()
        if scaled:
            for manager in managers:
                manager.step()
            if scaled and by_manager:
                check_parameters()  # gradients are there until they are zeroed


def clip_rows(params: list[nn.Parameter], scale: float, max_norm: float) -> Tensor:
    """Clips the rows of each rank by the norm over all ranks, as scripts do without ``clip_grad_norm``."""
    total = torch.zeros(1, device=config["device"])
    for param in params:
        total += param.grad.data.float().norm(2) ** 2
    bmt.nccl.allReduce(total, total, "sum", config["comm"])
    norm = total[0] ** 0.5
    if max_norm * scale / norm < 1:
        for param in params:
            param.grad.data.mul_(max_norm * scale / norm)
    return norm / scale


@pytest.mark.ranks(1, 2, 4, init=False)
def test_a_script_clips_by_itself() -> None:
    """``p.grad.data`` is this rank's rows; ``p.grad.norm()`` is the norm of the whole gradient."""
    bmt.init_distributed()
    model = GPT()
    bmt.init_parameters(model)
    plain = plain_copy(model)
    before = copy.deepcopy(plain.state_dict())
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS, weight_decay=0.0)
    optimizer = optim.AdamOptimizer(model.parameters(), lr=1e-2, eps=EPS)
    optim_manager = optim.OptimManager(loss_scale=2**10)
    optim_manager.add_optimizer(optimizer)
    for iteration in range(STEPS):
        ids, pos, mask, targets = to_device(batch_of(iteration, replica()))
        optim_manager.zero_grad()
        optim_manager.backward(loss_of(model(ids, pos, mask), targets, False))
        reference.zero_grad()
        plain_loss(plain, iteration, replicas()).backward()
        for mine, theirs in zip(model.parameters(), plain.parameters()):
            assert mine.grad.norm().item() == pytest.approx(2**10 * theirs.grad.norm().item(), rel=1e-3, abs=1e-3)
            rows = getattr(mine.grad, "to_local", lambda grad=mine.grad: grad)()
            assert type(rows) is Tensor
            assert torch.equal(rows, mine.grad.data)
        norm = clip_rows([*model.parameters()], 2**10, 0.1)
        wanted = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        assert norm.item() == pytest.approx(wanted.item(), rel=1e-4)
        optim_manager.step()
        reference.step()
    assert update_error(model, plain, before) <= TOLERANCE
