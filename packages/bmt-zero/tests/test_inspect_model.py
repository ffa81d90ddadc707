"""inspect_model: statistics of logical parameters and gradients, whoever holds which rows."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from bmt_comm import mark_scaled
from bmt_zero import (
    Block,
    BMTrainModelWrapper,
    DistributedParameter,
    Histograms,
    format_summary,
    inspect_model,
    inspect_tensor,
)
from bmt_zero.histograms import magnitudes


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 3)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 11, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + 3
        for layer in self.layers:
            x = layer(x)
        return self.head(x) * self.scale


def expected(name: str, value: torch.Tensor, grad: torch.Tensor | None) -> dict[str, Any]:
    item: dict[str, Any] = {"name": name, "shape": tuple(value.shape)}
    for prefix, x in (("", value), ("grad_", grad)):
        for key in ("max", "min", "mean", "std"):
            one = key == "std" and x is not None and x.numel() == 1
            item[prefix + key] = 0.0 if x is None else math.nan if one else getattr(x.double(), key)().item()
    return item


def assert_same(summary: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    assert [item["name"] for item in summary] == [item["name"] for item in wanted]
    for mine, theirs in zip(summary, wanted):
        assert set(mine) == set(theirs)
        for key, value in theirs.items():
            if not isinstance(value, float):
                assert mine[key] == value, (mine["name"], key)
            elif math.isnan(value):
                assert math.isnan(mine[key]), (mine["name"], key)
            else:
                assert mine[key] == pytest.approx(value, rel=1e-5, abs=1e-7), (mine["name"], key)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("level", [0, 1, 3])
def test_parameters_and_gradients_are_those_of_one_process(ctx: Any, level: int) -> None:
    torch.manual_seed(1)
    plain = Model()
    model = BMTrainModelWrapper(copy.deepcopy(plain), zero_level=level)
    wanted = [expected(n, p, None) for n, p in plain.named_parameters(remove_duplicate=False)]
    assert_same(inspect_model(model, "*"), wanted)
    ids = torch.arange(12).view(4, 3) % 11
    for r in range(ctx.world_size):
        plain(ids + 0 if r == 0 else (ids + r) % 11).square().mean().backward()
    loss = model((ids + ctx.rank) % 11).square().mean() * 8
    mark_scaled(loss, 8)
    loss.backward()
    wanted = [expected(n, p, p.grad) for n, p in plain.named_parameters(remove_duplicate=False)]
    summary = inspect_model(model, "*")
    assert_same(summary, wanted)
    assert [line.split()[0] for line in format_summary(summary).splitlines()] == ["name", *(w["name"] for w in wanted)]
    assert ctx.world.all_gather_object(str(summary)) == [str(summary)] * ctx.world_size


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no backward")


@pytest.mark.ranks(1, 2)
def test_a_failed_backward_leaves_no_loss_scale_behind(ctx: Any) -> None:
    """It failed before it came to a Block, or after; the next loss is not scaled."""
    torch.manual_seed(3)
    plain = nn.Linear(3, 2)
    model = Block(copy.deepcopy(plain))
    x = torch.ones(2, 3)
    plain(x).square().sum().backward()
    for fails_first in (True, False):
        inputs = x.clone().requires_grad_()
        y = model(inputs if fails_first else Failing.apply(inputs))
        loss = (Failing.apply(y) if fails_first else y).sum() * 8
        mark_scaled(loss, 8)
        with pytest.raises(RuntimeError, match="no backward"):
            loss.backward()
        model.zero_grad()
        (model(x).square().sum() / ctx.world_size).backward()
        assert_same(inspect_model(model, "*"), [expected(n, p, p.grad) for n, p in plain.named_parameters()])


@pytest.mark.ranks(2)
def test_patterns_and_prefixes_choose_names(ctx: Any) -> None:
    model = Block(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))
    assert [item["name"] for item in inspect_model(model, "*.weight")] == ["0.weight", "1.weight"]
    assert [item["name"] for item in inspect_model(model, "model.1*", "model.")] == ["model.1.weight", "model.1.bias"]
    assert inspect_model(model, "nothing") == []
    assert format_summary([]).split() == ["name", "shape", "max", "min", "std", "mean", "grad_std", "grad_mean"]


@pytest.mark.ranks(4, tp_size=2)
def test_tensor_parallel_shards_are_one_parameter(ctx: Any) -> None:
    torch.manual_seed(2)
    full = torch.randn(6, 4)
    model = nn.Module()
    shard = full[:, 2 * ctx.tp_rank : 2 * ctx.tp_rank + 2].contiguous()
    model.weight = DistributedParameter(shard, tp_mode=True, tp_split_dim=1)
    model.common = DistributedParameter(full)
    assert_same(inspect_model(model, "*"), [expected("weight", full, None), expected("common", full, None)])


def test_plain_modules_are_inspected_without_a_start() -> None:
    layer = nn.Linear(3, 2)
    layer(torch.ones(1, 3)).sum().backward()
    assert_same(inspect_model(layer, "*"), [expected(n, p, p.grad) for n, p in layer.named_parameters()])


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_both_parts_of_complex_numbers_count(dtype: torch.dtype) -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(3, 4, dtype=dtype))
    module.weight.grad = torch.randn(4, 3, dtype=dtype).mT.conj()
    parts = [torch.view_as_real(x.detach().resolve_conj()) for x in (module.weight, module.weight.grad)]
    assert_same(inspect_model(module, "*"), [expected("weight", *parts) | {"shape": (3, 4)}])
    counts = magnitudes(torch.tensor([3 + 4j, 0, -0.03j, complex("inf")], dtype=dtype))
    assert counts.nonzero().flatten().tolist() == [41, 50]  # of 10^-1.52 and 10^0.69


@pytest.mark.ranks(1, 2)
def test_histograms_count_the_elements_of_all_ranks(ctx: Any, tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    from bmt_zero import record_tensor

    histograms = Histograms()
    for step in range(3):
        with inspect_tensor() as inspector:
            x = torch.full((2, 5), 10.0 ** (step + ctx.rank), requires_grad=True) * 1.0001
            record_tensor(x, "hidden")
            (x * 0.1001).sum().backward()
        histograms.add(step, inspector)
    assert list(histograms.counts) == ["0.hidden", "0.hidden gradient"]
    steps = histograms.counts["0.hidden"]
    assert [step for step, _ in steps] == [0, 1, 2]
    for step, row in steps:
        decades = row.view(-1, 4)[:, 0]  # the first of four bins in each decade
        assert row.sum() == 10 * ctx.world_size
        assert [decades[12 + step + r].item() for r in range(ctx.world_size)] == [10.0] * ctx.world_size
    assert all(row.view(-1, 4)[11].sum() == 10 * ctx.world_size for _, row in histograms.counts["0.hidden gradient"])
    histograms.plot(tmp_path / "picture.png")
    assert (ctx.rank == 0) == (tmp_path / "picture.png").is_file() or ctx.world_size > 1
    with pytest.raises(ValueError, match=r"names=\['other'\] have no histogram"):
        histograms.figure(["other"])
