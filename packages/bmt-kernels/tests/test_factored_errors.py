"""Wrong calls of the factored operations raise what names the entry, and change nothing."""

from __future__ import annotations

import math

import pytest
import torch

import bmt_kernels as bk


def ones_for(grads):
    """Lists with one entry per row and one per column of each matrix."""
    rows = [torch.ones(g.shape[:-1]) for g in grads]
    return rows, [torch.ones(g.shape[:-2] + g.shape[-1:]) for g in grads]


def good_call():
    grads = [torch.ones(3, 4), torch.ones(2, 5)]
    row, col = ones_for(grads)
    return {
        "params": [g.clone() for g in grads], "grads": grads, "row_factors": row, "col_factors": col,
        "step_sizes": torch.ones(2),
        "decay_factors": torch.ones(2), "exp_avgs": [g.clone() for g in grads], "beta1": 0.9, "masters": [None, None],
    }  # fmt: skip


WRONG = {
    "tensor for a list": ({"grads": torch.ones(3, 4)}, TypeError, r"grads is a Tensor; pass a list"),
    "none in a list": ({"grads": [None, None]}, TypeError, r"grads\[0\] is a NoneType"),
    "length": ({"row_factors": [torch.ones(3)]}, ValueError, r"row_factors has 1 entries and grads has 2"),
    "vector": (
        {"grads": [torch.ones(3), torch.ones(3)]},
        ValueError,
        r"grads\[0\] has shape \(3,\); it must have rows",
    ),
    "integers": ({"grads": [torch.ones(3, 4).int()] * 2}, TypeError, r"grads\[0\] has dtype torch.int32"),
    "fp64 params": ({"params": [torch.ones(3, 4).double()] * 2}, TypeError, r"params\[0\] has dtype torch.float64"),
    "half moments": ({"exp_avgs": [torch.ones(3, 4).half()] * 2}, TypeError, r"exp_avgs\[0\] has dtype torch.float16"),
    "shape of params": ({"params": [torch.ones(4, 3)] * 2}, ValueError, r"params\[0\] has shape \(4, 3\); .*\(3, 4\)"),
    "row factors": ({"row_factors": [torch.ones(4)] * 2}, ValueError, r"row_factors\[0\] has shape \(4,\); .*\(3,\)"),
    "column factors": ({"col_factors": [torch.ones(3)] * 2}, ValueError, r"col_factors\[0\] has shape .*\(4,\)"),
    "device": ({"exp_avgs": [torch.ones(3, 4, device="meta")] * 2}, ValueError, r"exp_avgs\[0\] is on meta"),
    "strides": ({"params": [torch.ones(4, 3).t()] * 2}, ValueError, r"params\[0\] has strides \(1, 3\)"),
    "sizes": ({"step_sizes": torch.ones(3)}, ValueError, r"step_sizes has shape \(3,\); it must be \(2,\)"),
    "number for sizes": ({"step_sizes": 0.1}, TypeError, r"step_sizes is a float"),
    "fp64 decay": ({"decay_factors": torch.ones(2).double()}, TypeError, r"decay_factors has dtype torch.float64"),
    "decay elsewhere": ({"decay_factors": torch.ones(2, device="meta")}, ValueError, r"decay_factors is on meta"),
    "beta1": ({"beta1": 1.0}, ValueError, r"beta1 is 1.0; it must be not negative and less than 1"),
    "beta1 alone": ({"exp_avgs": None}, ValueError, r"beta1 is 0.9 without exp_avgs"),
    "scale": ({"grad_scale": 0.0}, ValueError, r"grad_scale is 0.0; it must be positive"),
    "scale type": ({"grad_scale": "2"}, TypeError, r"grad_scale is a str"),
    "nan": ({"grad_scale": math.nan}, ValueError, r"grad_scale is nan"),
    "factor": ({"grad_factor": torch.ones(2)}, ValueError, r"grad_factor has shape \(2,\)"),
    "flag": ({"found_inf": 1.0}, TypeError, r"found_inf is a float"),
    "needless master": ({"masters": [torch.ones(3, 4), None]}, TypeError, r"masters\[0\] belongs to a float32"),
}


class TestWrongCalls:
    @pytest.mark.parametrize(("change", "error", "message"), WRONG.values(), ids=WRONG.keys())
    def test_are_named_and_change_nothing(self, change, error, message):
        arguments = {**good_call(), **change}
        before = good_call()
        with pytest.raises(error, match=message):
            bk.factored_update(**arguments)
        for name in set(before) - set(change) - {"beta1", "masters", "step_sizes", "decay_factors"}:
            assert all(torch.equal(a, b) for a, b in zip(arguments[name], before[name], strict=True))

    @pytest.mark.parametrize(
        ("name", "other"), [("params", "grads"), ("exp_avgs", "params"), ("params", "row_factors")]
    )
    def test_overlaps_are_found(self, name, other):
        arguments = good_call()
        whole = torch.ones(20)
        arguments[name][0], arguments[other][0] = whole[:12].view(3, 4), whole[8:].view(3, 4)
        if other == "row_factors":
            arguments[other][0] = whole[8:11]
        with pytest.raises(ValueError, match="overlaps"):
            bk.factored_update(**arguments)

    def test_sums_may_not_overlap_nor_out_its_inputs(self):
        grads, both = [torch.ones(3, 3)], torch.ones(3)
        with pytest.raises(ValueError, match="overlaps"):
            bk.factored_square_sums(grads, [both], [both], eps=0.0)
        with pytest.raises(ValueError, match=r"out overlaps grads\[0\]|grads\[0\] overlaps out"):
            bk.factored_update_square_sum(grads, [both], [torch.ones(3)], grads[0][0, :1])
        with pytest.raises(ValueError, match=r"eps is -1\.0"):
            bk.factored_square_sums(grads, [torch.ones(3)], [both], eps=-1.0)
