"""Numbers in 8 bits in one buffer, with their scales."""

import sys

import pytest
import torch

from bmt_comm import PlannedCommunicator, packing


@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize("numel", [1, 255, 256, 1000])
def test_numbers_come_back_from_a_buffer(kind, numel):
    pytest.importorskip("bmt_kernels")
    torch.manual_seed(0)
    values, out = torch.randn(numel), torch.full((numel,), 2.0)
    how = packing.Packing(kind, 256)
    packed = torch.full((how.bytes(numel),), 77, dtype=torch.uint8)
    how.pack(packed, values)
    how.unpack(out, packed, add=True)
    for result, expected in zip((out - 2.0).split(256), values.split(256)):
        assert (result - expected).abs().max() <= expected.abs().max() / (254 if kind == "int8" else 27) + 1e-6
    assert len(packed) % 16 == 0


def test_without_kernels_the_package_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "bmt_kernels", None)
    with pytest.raises(RuntimeError, match="compressed communication needs bmt-kernels: pip install bmt-kernels"):
        packing.kernels()


@pytest.mark.ranks(2)
def test_what_cannot_be_summed_packed_is_refused(ctx):
    how = packing.Packing("int8", 256)
    with pytest.raises(TypeError, match=r"packed_reduce_scatter: out is torch.bfloat16; it must be float32"):
        ctx.world.packed_reduce_scatter(torch.empty(3, dtype=torch.bfloat16), torch.empty(6), how)
    with pytest.raises(ValueError, match="packed_reduce_scatter: src has 7 elements; 2 ranks × 3 are needed"):
        ctx.world.packed_reduce_scatter(torch.empty(3), torch.empty(7), how)


def test_planned_ranks_have_no_values():
    pytest.importorskip("bmt_kernels")
    planned = PlannedCommunicator([0, 1])
    planned.packed_reduce_scatter(
        torch.empty(8, device="meta"), torch.empty(16, device="meta"), packing.Packing("int8", 4)
    )
    assert planned.traffic["send"].bytes == packing.Packing("int8", 4).bytes(8)
