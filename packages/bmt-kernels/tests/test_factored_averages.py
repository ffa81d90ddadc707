"""Averages of matrices that are sharded over ranks: totals, updated averages, factors; and wrong calls."""

from __future__ import annotations

import pytest
import torch

import bmt_kernels as bk
from bmt_kernels import _native

# The last two dimensions of what all ranks have: rows of which this rank has some, and columns, which it has all. There
# are more than a launch on a GPU takes.
HEIGHTS, WIDTHS = [50, 9, 4, 1] * 12, [7, 5, 3, 640] * 12
HERE = [(33, 7), (2, 3, 4, 5), (0, 3), (1, 640)] * 12
VECTOR = 11  # of an average without rows
DECAY = 0.9


@pytest.fixture(params=["compiled", "torch"])
def way(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(_native, "_selected", None)
    elif _native.cpu_kernels() is None:
        pytest.skip("the compiled module is not here, or not asked for")


def positive(*shape, seed=0, device="cpu"):
    return (torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) * 3 + 0.1).to(device)


def averages(device="cpu"):
    rows = [positive(*shape[:-1], seed=n, device=device) for n, shape in enumerate(HERE)]
    cols = [positive(*shape[:-2], shape[-1], seed=10 + n, device=device) for n, shape in enumerate(HERE)]
    return rows, [*cols, positive(VECTOR, seed=20, device=device)]


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors])


def batches(rows):
    return sum(r.shape[:-1].numel() for r in rows)


def close(result, expected):
    torch.testing.assert_close(result.double().cpu(), expected.double().cpu(), rtol=2e-6, atol=0)


def test_totals(device):
    rows, _ = averages(device)
    sums = positive(flat(rows).numel(), seed=30, device=device)
    totals, before = torch.full((2, batches(rows)), float("nan"), device=device).unbind()
    version = totals._version
    bk.factored_totals(rows, sums, totals, before)
    parts = sums.split([r.numel() for r in rows])
    close(totals, flat([p.double().view(r.shape).sum(-1) for p, r in zip(parts, rows, strict=True)]))
    close(before, flat([r.double().sum(-1) for r in rows]))
    assert totals._version > version


@pytest.mark.parametrize("in_place", [False, True])
def test_averages_and_factors(device, in_place):
    rows, cols = averages(device)
    row_sums, col_sums = (positive(flat(a).numel(), seed=40 + n, device=device) for n, a in enumerate((rows, cols)))
    totals, before = positive(2, batches(rows), seed=50, device=device).unbind()
    expected = {"rows": [], "cols": [], "row": [], "col": []}
    matrix = 0
    for n, r in enumerate(rows):
        part = row_sums.split([x.numel() for x in rows])[n].double().view(r.shape)
        moved = DECAY * r.double() + (1 - DECAY) * part / WIDTHS[n]
        mine = slice(matrix, matrix + r.shape[:-1].numel())
        mean = DECAY * before[mine].double() / HEIGHTS[n] + (1 - DECAY) * totals[mine].double() / (
            HEIGHTS[n] * WIDTHS[n]
        )
        matrix = mine.stop
        expected["rows"].append(moved)
        expected["row"].append((moved / mean.view(*r.shape[:-1], 1)).rsqrt())
    for n, c in enumerate(cols):
        part = col_sums.split([x.numel() for x in cols])[n].double().view(c.shape)
        moved = DECAY * c.double() + (1 - DECAY) * part / [*HEIGHTS, 1][n]
        expected["cols"].append(moved)
        expected["col"].append(moved.rsqrt())
    extra = 3
    row_factors = torch.cat([row_sums, torch.full((extra,), 5.0, device=device)])
    col_factors = torch.cat([col_sums, torch.full((extra,), 5.0, device=device)])
    if in_place:
        row_sums, col_sums = row_factors[:-extra], col_factors[:-extra]
    bk.factored_averages(
        rows,
        cols,
        row_sums,
        col_sums,
        totals,
        before,
        row_factors,
        col_factors,
        heights=[*HEIGHTS, 1],
        widths=WIDTHS,
        decay=DECAY,
    )
    close(flat(rows), flat(expected["rows"]))
    close(flat(cols), flat(expected["cols"]))
    close(row_factors, torch.cat([flat(expected["row"]), torch.ones(extra, device=device).double()]))
    close(col_factors, torch.cat([flat(expected["col"]), torch.ones(extra, device=device).double()]))
    assert rows[0]._version > 0


def test_the_parts_of_a_matrix_give_the_factors_of_the_whole(device):
    """Two ranks' rows, put together from their totals, against the step that has them all."""
    height, width = 13, 6
    squares, row, col = (
        positive(height, width, device=device),
        positive(height, seed=1, device=device),
        positive(width, seed=2, device=device),
    )
    moved = DECAY * row + (1 - DECAY) * squares.mean(-1)
    expected = (moved / moved.mean()).rsqrt(), (DECAY * col + (1 - DECAY) * squares.mean(-2)).rsqrt()
    shards = [slice(0, 5), slice(5, height)]
    partials = []
    for mine in shards:
        totals, before = torch.empty(2, 1, device=device).unbind()
        bk.factored_totals([row[mine].clone()], squares[mine].sum(-1), totals, before)
        partials.append((totals, before))
    totals, before = (sum(parts) for parts in zip(*partials, strict=True))
    for mine in shards:
        factors = torch.empty(mine.stop - mine.start, device=device), torch.empty(width, device=device)
        averages_here = [row[mine].clone()], [col.clone()]
        sums = squares[mine].sum(-1), squares.sum(-2)
        numbers = {"heights": [height], "widths": [width], "decay": DECAY}
        bk.factored_averages(*averages_here, *sums, totals, before, *factors, **numbers)
        close(factors[0], expected[0][mine])
        close(factors[1], expected[1])


def test_nothing_to_do(way):
    empty = torch.empty(0)
    bk.factored_totals([], empty, empty, empty)
    factors = torch.zeros(2)
    bk.factored_averages([], [], *[empty] * 4, factors, empty, heights=[], widths=[], decay=0.5)
    assert factors.tolist() == [1.0, 1.0]


def good_call():
    return {
        "row_averages": [torch.ones(3)],
        "col_averages": [torch.ones(4), torch.ones(2)],
        "row_sums": torch.ones(3),
        "col_sums": torch.ones(6),
        "totals": torch.ones(1),
        "before": torch.ones(1),
        "row_factors": torch.ones(3),
        "col_factors": torch.ones(6),
        "heights": [3, 1],
        "widths": [4],
        "decay": 0.5,
    }


WRONG = {
    "tensor for a list": ({"col_averages": torch.ones(4)}, TypeError, "col_averages is a Tensor; pass a list"),
    "number in a list": ({"row_averages": [1.0]}, TypeError, r"row_averages\[0\] is a float"),
    "scalar in a list": ({"row_averages": [torch.tensor(1.0)]}, ValueError, r"row_averages\[0\] has no dimension"),
    "number for a vector": ({"totals": 1.0}, TypeError, "totals is a float; it must be a torch.Tensor"),
    "fp64": ({"before": torch.ones(1).double()}, TypeError, "before has dtype torch.float64; it must be torch.float32"),
    "device": ({"row_sums": torch.ones(3, device="meta")}, ValueError, "row_sums is on meta; it must be on cpu"),
    "strides": ({"col_sums": torch.ones(12)[::2]}, ValueError, r"col_sums has strides \(2,\); it must be contiguous"),
    "strides in a list": ({"row_averages": [torch.ones(6)[::2]]}, ValueError, r"row_averages\[0\] has strides \(2,\)"),
    "length of sums": ({"row_sums": torch.ones(4)}, ValueError, r"row_sums has shape \(4,\); it must be \(3,\), for"),
    "length of column sums": ({"col_sums": torch.ones(7)}, ValueError, r"col_sums has .*; it must be \(6,\), for"),
    "length of factors": ({"col_factors": torch.ones(5)}, ValueError, r"col_factors has .*; it must be \(6,\) or long"),
    "matrix for a vector": (
        {"row_sums": torch.ones(1, 3)},
        ValueError,
        r"row_sums has shape \(1, 3\); it must be \(3,",
    ),
    "number for totals": ({"totals": torch.tensor(1.0)}, ValueError, r"totals has shape \(\); it must be \(1,\)"),
    "no integers": ({"heights": [2.5, 1]}, TypeError, r"heights is \[2.5, 1\]; it must be a list of integers"),
    "totals": ({"totals": torch.ones(2)}, ValueError, r"totals has shape \(2,\); it must be \(1,\)"),
    "heights": ({"heights": [3]}, ValueError, "heights has 1 entries; it must be 2, one for each"),
    "widths": ({"widths": [4, 2]}, ValueError, "widths has 2 entries; it must be 1, one for each"),
    "zero": ({"widths": [0]}, ValueError, "widths has the entry 0; it must be at least 1"),
    "fewer columns": (
        {"col_averages": [], "col_sums": torch.ones(0), "heights": []},
        ValueError,
        "col_averages has 0 entries; it must be 1 or more",
    ),
    "decay": ({"decay": 1.5}, ValueError, r"decay is 1.5; it must be from 0 to 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_calls_change_nothing(way, case):
    change, error, message = WRONG[case]
    arguments = {**good_call(), **change}
    with pytest.raises(error, match=message):
        bk.factored_averages(**arguments)
    for name, values in good_call().items():
        if name not in change and name not in ("heights", "widths", "decay"):
            result = arguments[name]
            assert all(torch.equal(a, b) for a, b in zip(result, values, strict=True)), name


def test_memory_that_is_shared_is_refused(way):
    """But for sums that their factors replace."""
    memory = torch.ones(12)
    row = good_call()["row_averages"][0]
    for change in (
        {"row_averages": [row, row], "row_sums": torch.ones(6), "totals": torch.ones(2), "before": torch.ones(2)}
        | {"row_factors": torch.ones(6), "widths": [4, 4]},
        {"row_factors": memory[1:4], "row_sums": memory[:3]},
        {"row_factors": memory, "row_sums": memory[:3], "col_sums": memory[3:9]},
        {"row_factors": memory, "row_sums": memory[:3], "totals": memory[3:4]},
        {"col_averages": [memory[:4], memory[3:5]]},
        {"col_factors": memory[:6], "row_factors": memory[5:8]},
    ):
        before = memory.clone()
        with pytest.raises(ValueError, match=r"overlaps .* in memory"):
            bk.factored_averages(**{**good_call(), **change})
        assert torch.equal(memory, before)
    one = torch.ones(1)
    with pytest.raises(ValueError, match=r"overlaps .* in memory"):
        bk.factored_totals([torch.ones(3)], torch.ones(3), one, one)


def test_the_compiled_way_is_taken(monkeypatch, device):
    if _native.cpu_kernels() is None and _native.cuda_kernels(device) is None:
        pytest.skip("the compiled module is not here, or not asked for")
    for name in ("_move", "_totals"):
        monkeypatch.setitem(bk.factored_averages.__globals__, name, None)
    arguments = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), good_call())
    bk.factored_totals(*(arguments[name] for name in ("row_averages", "row_sums", "totals", "before")))
    assert arguments["totals"].tolist() == arguments["before"].tolist() == [3.0]
    bk.factored_averages(**arguments)
    assert arguments["col_averages"][1].tolist() == [1.0, 1.0]
    assert arguments["row_averages"][0].tolist() == [0.625] * 3


@pytest.mark.parametrize("name", ["row_sums", "totals", "before"])
def test_wrong_totals(way, name):
    arguments = {key: good_call()[key] for key in ("row_averages", "row_sums", "totals", "before")}
    bk.factored_totals(**arguments)
    with pytest.raises(ValueError, match=rf"{name} has shape \(9,\); it must be"):
        bk.factored_totals(**{**arguments, name: torch.ones(9)})
