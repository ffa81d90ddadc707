"""Tensors that layers of a pipeline record: once each, in the order of the layers, of all stages and micro-batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from bmt_comm import mark_scaled
from bmt_pipe import PipelineTransformerBlockList
from bmt_zero import Block, inspect_model, inspect_tensor, load_state_dict, record_tensor

WIDTH, LAYERS, ROWS = 5, 5, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        record_tensor(x, "input")
        h = torch.tanh(self.first(x))
        record_tensor(h, "middle", "layer")
        return x + h


def mean_square(hidden: Tensor) -> Tensor:
    return hidden.square().mean()


@pytest.mark.ranks(2, 4, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("tail", [None, "1f1b", "zero_bubble_h1", "zero_bubble_v"])
@pytest.mark.parametrize("checkpoint", [False, True])
def test_statistics_are_those_of_one_process(ctx: Any, tail: str | None, checkpoint: bool) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList(Layer() for _ in range(LAYERS))
    blocks = [Block(Layer(), checkpoint) for _ in range(LAYERS)]
    layers = PipelineTransformerBlockList(blocks, tail_schedule=tail)
    load_state_dict(layers, plain.state_dict())
    batches = torch.randn(ctx.replicas, ROWS, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    for scale in (1.0, 8.0):
        for model in (plain, layers):
            model.zero_grad()
        x = batches.flatten(0, 1)
        kept: list[tuple[str, Tensor]] = [("0.batch", x)]
        for index, layer in enumerate(plain):
            h = torch.tanh(layer.first(x))
            kept += [(f"{index}.input", x), (f"layer.{index}.middle", h)]
            x = x + h
        kept.append(("1.batch", kept[0][1]))
        for _, tensor in kept:
            if tensor.requires_grad:
                tensor.retain_grad()
        mean_square(x).backward()
        mine = batches[ctx.rank].to(ctx.device)
        with inspect_tensor() as inspector:
            record_tensor(mine, "batch")  # outside of the pipeline, before it and after it
            if tail is None:
                loss = mean_square(layers(mine))
            else:
                loss = layers(mine, tail=mean_square)
            record_tensor(mine, "batch")
            loss = loss * scale / ctx.replicas
            mark_scaled(loss, scale)
            loss.backward()
        summary = inspector.get_summary()
        parameters = inspect_model(layers, "*")
        assert [item["name"] for item in summary] == [name for name, _ in kept]
        for item, (_, value) in zip(summary, kept):
            assert item["shape"] == tuple(value.shape)
            for prefix, wanted in (("", value), ("grad_", value.grad)):
                for key in ("max", "min", "mean", "std"):
                    if wanted is None:
                        assert item[prefix + key] is None
                    else:
                        expected = getattr(wanted.double(), key)().item()
                        assert item[prefix + key] == pytest.approx(expected, rel=1e-4, abs=1e-7), (item, prefix + key)
        assert [item["name"] for item in parameters] == list(plain.state_dict())
        for item, param in zip(parameters, plain.parameters()):
            assert item["grad_std"] == pytest.approx(param.grad.double().std().item(), rel=1e-4)


@pytest.mark.ranks(2, 4, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("alone", [False, True])
def test_a_loss_may_use_what_was_recorded(ctx: Any, checkpoint: bool, count: int, alone: bool) -> None:
    """Each stage uses tensors of its own layers, of all micro-batches of its replica, with or without the output."""
    torch.manual_seed(0)
    plain = nn.ModuleList(Layer() for _ in range(count))
    layers = PipelineTransformerBlockList([Block(Layer(), checkpoint) for _ in range(count)])
    load_state_dict(layers, plain.state_dict())
    batches = torch.randn(ctx.replicas, ROWS, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        plain.zero_grad()
        layers.zero_grad()
        first = batches.flatten(0, 1).clone().requires_grad_()
        x, total = first, torch.zeros(())
        kept = []
        for layer in plain:
            kept += [x, torch.tanh(layer.first(x))]
            total = total + kept[-1].pow(3).sum() + 2 * x.square().sum()
            x = x + kept[-1]
        for each in kept:
            each.retain_grad()
        (total if alone else total + 3 * x.square().sum()).backward()
        mine = batches[ctx.rank].to(ctx.device).requires_grad_()
        with inspect_tensor() as inspector:
            y = layers(mine)
        loss = torch.zeros((), device=ctx.device)
        for item in inspector.summary:
            value = item["tensor"]
            loss = loss + (value.pow(3).sum() if item["name"] == "middle" else 2 * value.square().sum())
        (loss if alone else loss + 3 * y.square().sum()).backward()
        assert torch.allclose(mine.grad.cpu(), first.grad.view_as(batches)[ctx.rank], rtol=1e-4, atol=1e-4)
        for item, param in zip(inspect_model(layers, "*"), plain.parameters(), strict=True):
            for key in ("mean", "std", "max", "min"):
                wanted = getattr(param.grad.double(), key)().item()
                assert item[f"grad_{key}"] == pytest.approx(wanted, rel=1e-4, abs=1e-4), item["name"]
        for item, value in zip(inspector.get_summary(), kept, strict=True):
            assert item["grad_std"] == pytest.approx(value.grad.double().std().item(), rel=1e-3), item["name"]


@pytest.mark.ranks(2, 4, pipe_size=2, num_micro_batches=4)
@pytest.mark.parametrize("count", [2, 5])
def test_a_graph_that_is_retained_gives_recorded_tensors_the_sum_of_gradients(ctx: Any, count: int) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList(Layer() for _ in range(count))
    layers = PipelineTransformerBlockList([Block(Layer()) for _ in range(count)])
    load_state_dict(layers, plain.state_dict())
    batches = torch.randn(ctx.replicas, ROWS, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    x, middles = batches.flatten(0, 1), []
    for layer in plain:
        middles.append(torch.tanh(layer.first(x)))
        middles[-1].retain_grad()
        x = x + middles[-1]
    y, sums = x, sum(middle.pow(3).sum() for middle in middles)
    for loss in (y.pow(3).sum(), 2 * sums, (y.square().sum() + sums) / 2):
        loss.backward(retain_graph=True)
    with inspect_tensor() as inspector:
        output = layers(batches[ctx.rank].to(ctx.device))
    own = sum(item["tensor"].pow(3).sum() for item in inspector.summary if item["name"] == "middle")
    for loss in (output.pow(3).sum(), 2 * own, (output.square().sum() + own) / 2):
        loss.backward(retain_graph=True)
    for item, param in zip(inspect_model(layers, "*"), plain.parameters(), strict=True):
        assert item["grad_std"] == pytest.approx(param.grad.double().std().item(), rel=1e-3), item["name"]
    recorded = [item for item in inspector.get_summary() if item["name"].startswith("layer")]
    for item, value in zip(recorded, middles, strict=True):
        assert item["grad_std"] == pytest.approx(value.grad.double().std().item(), rel=1e-3), item["name"]


@pytest.mark.ranks(2, pipe_size=2)
def test_a_loss_cannot_use_what_was_recorded_with_a_tail(ctx: Any) -> None:
    layers = PipelineTransformerBlockList([Block(Layer()) for _ in range(2)])
    with inspect_tensor() as inspector:
        layers(torch.randn(2, 1, WIDTH), tail=mean_square).backward()
    with pytest.raises(
        RuntimeError, match=r"a loss uses a tensor that was recorded inside of a pipeline.*return_hidden"
    ):
        inspector.get_tensor("middle", "layer").sum().backward()


@pytest.mark.ranks(2, 4, pipe_size=2, num_micro_batches=2)
def test_stages_number_their_tensors_together(ctx: Any) -> None:
    layers = PipelineTransformerBlockList([Block(Layer()) for _ in range(3)])
    with inspect_tensor() as inspector:
        layers(torch.randn(2, 1, WIDTH)).sum().backward()
    if ctx.rank == 0:
        assert inspector.summary  # no rank waits for another
    middles = [item for item in inspector.summary if item["name"] == "middle"]
    assert [(item["index"], item["summary_name"]) for item in middles] == [(i, f"layer.{i}.middle") for i in range(3)]
    everyone = [item["name"] for item in inspector.get_summary()]
    assert everyone == [name for i in range(3) for name in (f"{i}.input", f"layer.{i}.middle")]
    assert [item["summary_name"] for item in inspector.summary] == everyone
    own = [0, 1] if ctx.pipe_rank == 0 else [2]
    assert [item["name"] for item in inspector._summary] == ["input", "middle"] * (2 * len(own))


@pytest.mark.ranks(2, 4, pipe_size=2, num_micro_batches=4)
def test_every_rank_has_its_own_samples_of_all_stages(ctx: Any) -> None:
    check_recorded(ctx)


@pytest.mark.ranks(1, 2)
def test_every_rank_has_its_own_samples_of_a_pipeline_of_one_stage(ctx: Any) -> None:
    check_recorded(ctx)


def check_recorded(ctx: Any) -> None:
    torch.manual_seed(0)
    plain = nn.ModuleList(Counting() for _ in range(LAYERS))
    layers = PipelineTransformerBlockList([Block(Counting()) for _ in range(LAYERS)])
    load_state_dict(layers, plain.state_dict())
    x = torch.randn(ctx.replicas, ROWS, 2, WIDTH, generator=torch.Generator().manual_seed(1))[ctx.rank]
    with inspect_tensor() as inspector:
        layers(x.to(ctx.device))
        with pytest.raises(RuntimeError, match=r"stages of a pipeline exchange .* use recorded tensors after it"):
            inspector.get_tensor("input")
    for index, layer in enumerate(plain):
        recorded = [(name, inspector.get_tensor(name, group, index)) for name, group in Counting.names]
        after, values = layer.recorded(x)
        for (name, value), wanted in zip(recorded, values, strict=True):
            assert value is not None, name
            assert value.dtype == wanted.dtype
            value, wanted = (x.detach().cpu().double() for x in (value, wanted))
            assert torch.allclose(value, wanted, rtol=1e-5, atol=1e-5), name
        x = after.detach()
    assert inspector.get_tensor("input") is inspector.get_tensor("input", index=0)
    assert inspector.get_tensor("input", index=LAYERS) is None
    assert all(item["tensor"].shape == item["shape"] for item in inspector.summary)


@pytest.mark.ranks(2, 4, pipe_size=2, num_micro_batches=4)
def test_losses_of_ranks_use_different_recorded_tensors_and_one_backward_fails(ctx: Any) -> None:
    """A stage uses only tensors of the other one. A loss that failed has no effect later."""
    torch.manual_seed(0)
    plain = nn.ModuleList(Layer() for _ in range(4))
    layers = PipelineTransformerBlockList([Block(Layer()) for _ in range(4)])
    load_state_dict(layers, plain.state_dict())
    batches = torch.randn(ctx.replicas, ROWS, 2, WIDTH, generator=torch.Generator().manual_seed(1))
    x = batches.flatten(0, 1)
    middles = []
    for layer in plain:
        middles.append(torch.tanh(layer.first(x)))
        x = x + middles[-1]
    chosen = [3 - 3 * rank // (ctx.replicas - 1) for rank in range(ctx.replicas)]
    own = [slice(ROWS * rank, ROWS * rank + ROWS) for rank in range(ctx.replicas)]
    sum(middles[index][rows].pow(3).sum() for index, rows in zip(chosen, own)).backward()
    with inspect_tensor() as inspector:
        layers(batches[ctx.rank].to(ctx.device))
        failing = Failing.apply(torch.ones(1, requires_grad=True))  # fails between the loss and the pipeline
    loss = inspector.get_tensor("middle", "layer", chosen[ctx.rank]).pow(3).sum()
    with pytest.raises(RuntimeError, match="no backward"):
        (loss + failing.to(ctx.device)).backward(retain_graph=True)
    loss.backward()
    for item, param in zip(inspect_model(layers, "*"), plain.parameters(), strict=True):
        for key in ("mean", "std", "max", "min"):
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            wanted = getattr(grad.double(), key)().item()
            assert item[f"grad_{key}"] == pytest.approx(wanted, rel=1e-4, abs=1e-4), item["name"]


class Counting(nn.Module):
    """Records numbers that are not floating-point, and one number for each micro-batch."""

    names = (("input", None), ("positive", None), ("sign", "layer"))

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)

    def recorded(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        return x + torch.tanh(self.first(x)), [x, x > 0, x.sign().long()]

    def forward(self, x: Tensor) -> Tensor:
        y, values = self.recorded(x)
        for (name, group), value in zip(self.names, values):
            record_tensor(value, name, group)
        record_tensor(x.detach().mean(), "mean")
        return y


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError("no backward")
