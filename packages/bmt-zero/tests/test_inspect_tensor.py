"""inspect_tensor: recorded tensors are seen once, with the statistics and gradients of all ranks, and reach losses."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from test_inspect_model import assert_same
from torch import Tensor, nn

from bmt_comm import local_rows, mark_scaled
from bmt_zero import Block, TransformerBlockList, inspect_tensor, record_tensor

WIDTH, LAYERS = 5, 3


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        record_tensor(x, "input")
        h = torch.tanh(self.a(x))
        record_tensor(h, "middle", "layer")
        return x + self.b(h)


class Recorder(nn.Module):
    """The same layers in plain PyTorch; keeps what they record."""

    def __init__(self, layers: list[Layer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.kept: list[tuple[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            self.keep(f"{index}.input", x)
            h = torch.tanh(layer.a(x))
            self.keep(f"layer.{index}.middle", h)
            x = x + layer.b(h)
        self.keep("0.output", x)
        return x

    def keep(self, name: str, x: Tensor) -> None:
        if x.requires_grad:
            x.retain_grad()
        self.kept.append((name, x))


def summary_of(kept: list[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    summary = []
    for name, value in kept:
        item: dict[str, Any] = {"name": name, "shape": tuple(value.shape)}
        for prefix, x in (("", value), ("grad_", value.grad)):
            for key in ("max", "min", "mean", "std"):
                item[prefix + key] = None if x is None else getattr(x.double(), key)().item()
        summary.append(item)
    return summary


def batch(ctx: Any, rank: int, rows: int = 2) -> Tensor:
    return torch.randn(rows + rank, 3, WIDTH, generator=torch.Generator().manual_seed(rank))


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("level", [0, 2, 3])
def test_statistics_are_those_of_the_whole_batch(ctx: Any, checkpoint: bool, level: int) -> None:
    torch.manual_seed(1)
    layers = [Layer() for _ in range(LAYERS)]
    plain = Recorder(copy.deepcopy(layers))
    model = TransformerBlockList([Block(layer, checkpoint, level) for layer in layers])
    whole = torch.cat([batch(ctx, r) for r in range(ctx.world_size)])
    plain(whole).square().sum().div(64).backward()
    with inspect_tensor() as inspector:
        y = model(batch(ctx, ctx.rank))
        record_tensor(y, "output")
        loss = y.square().sum() / 64 * 4
        mark_scaled(loss, 4)
        loss.backward()
    assert_same(inspector.get_summary(), summary_of(plain.kept))
    assert [item["summary_name"] for item in inspector.summary] == [name for name, _ in plain.kept]
    assert torch.equal(inspector.get_tensor("output"), y)
    assert inspector.get_tensor("middle", "layer", 2) is inspector.summary[5]["tensor"]
    assert inspector.get_tensor("input") is inspector.summary[0]["tensor"]
    assert inspector.get_tensor("middle") is None
    assert [(item["name"], item["group"]) for item in inspector._summary] == [
        (item["name"], item["group"]) for item in inspector.summary
    ]
    assert all(mine["tensor"] is item["tensor"] for mine, item in zip(inspector._summary, inspector.summary))
    with inspect_tensor() as later:
        pass
    assert later.get_summary() == []


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("level", [0, 2, 3])
@pytest.mark.parametrize("chosen", [[1], [0, 1, 2]])
def test_a_loss_may_use_recorded_tensors_alone_and_backward_may_come_later(
    ctx: Any, checkpoint: bool, level: int, chosen: list[int]
) -> None:
    torch.manual_seed(2)
    layers = [Layer() for _ in range(LAYERS)]
    plain = Recorder(copy.deepcopy(layers))
    model = TransformerBlockList([Block(layer, checkpoint, level) for layer in layers])
    whole = torch.cat([batch(ctx, r) for r in range(ctx.world_size)])
    for _ in range(2):  # a second time: nothing is left over
        plain.kept.clear()
        plain(whole)
        middles = [x for name, x in plain.kept if "middle" in name]
        sum((middles[i] * (i + 1)).square().sum() for i in chosen).backward()
        with inspect_tensor() as inspector:
            model(batch(ctx, ctx.rank))
        loss = 0
        for i in chosen:
            loss = loss + (inspector.get_tensor("middle", "layer", i) * (i + 1)).square().sum()
        with inspect_tensor() as other:
            loss.backward()
        assert other.summary == []
        assert_same(inspector.get_summary(), summary_of(plain.kept[:-1]))
    for param, wanted in zip(model.parameters(), plain.parameters()):
        if wanted.grad is None:
            assert param.grad is None or not local_rows(param.grad).any()
            continue
        rows = slice(param.bmt_slice.row_start, param.bmt_slice.row_stop)
        assert torch.allclose(local_rows(param.grad), wanted.grad[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.ranks(4, tp_size=2)
def test_tensors_that_tensor_parallel_ranks_hold_in_common_count_once(ctx: Any) -> None:
    torch.manual_seed(ctx.data_rank)
    common = torch.randn(3, 4)
    with inspect_tensor() as inspector:
        record_tensor(common, "common")
        record_tensor(common[:, 2 * ctx.tp_rank :][:, :2], "features")
    everyone = torch.cat([x.clone() for x in ctx.world.all_gather_object(common)[::2]])
    item, features = inspector.get_summary()
    assert (item["shape"], features["shape"]) == ((6, 4), (6, 2))
    for statistics in (item, features):
        assert statistics["mean"] == pytest.approx(everyone.double().mean().item())
        assert statistics["std"] == pytest.approx(everyone.double().std().item())
        assert statistics["grad_mean"] is None


@pytest.mark.ranks(2)
def test_ranks_that_record_different_tensors_are_told(ctx: Any) -> None:
    with inspect_tensor() as inspector:
        record_tensor(torch.ones(2), f"of rank {ctx.rank}")
    with pytest.raises(RuntimeError, match=r"ranks disagree on the recorded tensors: item 0 is None\.of rank 0"):
        inspector.get_summary()


def test_wrong_calls() -> None:
    record_tensor(torch.ones(1), "outside")  # nothing happens
    with pytest.raises(TypeError, match="x must be a tensor, not int"):
        record_tensor(1, "x")  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="'w' is a parameter; inspect_model shows parameters"):
        record_tensor(nn.Parameter(torch.ones(1)), "w")
    for x in (torch.eye(2).to_sparse(), torch.nested.nested_tensor([torch.ones(2)], layout=torch.jagged)):
        with pytest.raises(TypeError, match=r"'odd' is (nested|of layout torch\.sparse_coo); record a dense tensor"):
            record_tensor(x, "odd")
    with inspect_tensor() as inspector:
        with pytest.raises(RuntimeError, match="in use already"), inspect_tensor():
            pass
        record_tensor(torch.ones(2, dtype=torch.int64), "numbers")
    assert inspector.get_summary()[0]["mean"] == 1.0


def test_checkpointing_of_torch_records_once() -> None:
    from torch.utils.checkpoint import checkpoint

    layer = Layer()
    x = torch.randn(2, WIDTH, requires_grad=True)
    with inspect_tensor() as inspector:
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    assert [item["name"] for item in inspector.summary] == ["input", "middle"]
    assert inspector.get_summary()[1]["grad_mean"] is not None
