"""Numbers that travel between ranks in 8 bits: exactly rounded, and the same bits on every variant."""

from __future__ import annotations

import math

import pytest
import torch

from bmt_kernels import pack_blocks, reference, unpack_blocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = pytest.mark.parametrize("kind", ["int8", "float8"])
SIZES = [(0, 256), (1, 256), (255, 256), (256, 256), (1000, 256), (1000, 7), (31, 64), (200_003, 256), (5000, 4096)]
SIZES += [(9000, 100), (9000, 2049)]


def packed(values, kind, block, module=None):
    numbers = torch.full((values.numel(),), 99, dtype=torch.uint8, device=values.device)
    scales = torch.full((-(-values.numel() // block),), 99.0, device=values.device)
    (module or pack_blocks)(values, numbers, scales, kind=kind, block=block)
    return numbers, scales


def same(left, right):
    left, right = left.cpu().float(), right.cpu().float()
    return bool(((left == right) | (left.isnan() & right.isnan())).all())


def inputs(numel, dtype):
    """Numbers of many magnitudes, with zeros of both signs, and blocks that are subnormal, infinite or NaN."""
    generator = torch.Generator().manual_seed(numel)
    x = torch.randn(numel, generator=generator) * torch.exp(4 * torch.randn(numel, generator=generator))
    if numel >= 9000:
        x[:256], x[256:300] = 0.0, -0.0
        x[1000:2000] *= 1e-41
        x[3000], x[4000], x[5000] = math.inf, -math.inf, math.nan
        x[6000:7000] = 1e-37
    return x.to(dtype)


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "block"), SIZES)
def test_variants_give_the_bits_of_plain_functions(device, dtype, kind, numel, block):
    values = inputs(numel, dtype).to(device)
    numbers, scales = packed(values, kind, block)
    wanted_numbers, wanted_scales = packed(values, kind, block, reference.pack_blocks)
    assert same(scales, wanted_scales)
    assert torch.equal(numbers, wanted_numbers)
    for add in (False, True):
        out, wanted = values.flip(0).contiguous(), values.flip(0).contiguous()
        unpack_blocks(numbers, scales, out, kind=kind, block=block, add=add)
        reference.unpack_blocks(numbers, scales, wanted, kind=kind, block=block, add=add)
        assert same(out, wanted)


@KINDS
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [256, 100, 3000])
def test_tensors_may_begin_anywhere(device, dtype, kind, block):
    """What is beside them is not touched."""
    values = inputs(7001, dtype).to(device)[1:]
    around = torch.full((7002,), 99, dtype=torch.uint8, device=device)
    numbers, scales = around[1:-1], torch.empty(-(-7000 // block), device=device)
    pack_blocks(values, numbers, scales, kind=kind, block=block)
    wanted_numbers, wanted_scales = packed(values, kind, block, reference.pack_blocks)
    assert same(scales, wanted_scales)
    assert torch.equal(numbers, wanted_numbers)
    assert around[[0, -1]].tolist() == [99, 99]
    for add in (False, True):
        out = torch.full((7002,), 3.0, dtype=dtype, device=device)
        wanted = out[1:-1].clone()
        unpack_blocks(numbers, scales, out[1:-1], kind=kind, block=block, add=add)
        reference.unpack_blocks(numbers, scales, wanted, kind=kind, block=block, add=add)
        assert same(out[1:-1], wanted)
        assert out[[0, -1]].tolist() == [3.0, 3.0]


@KINDS
def test_numbers_are_the_nearest(device, kind):
    """Against a search over all 8-bit numbers in fp64. Halves go to the even one."""
    torch.manual_seed(0)
    values = torch.cat([torch.randn(3000), torch.linspace(-1, 1, 1021)]).to(device)
    numbers, scales = packed(values, kind, 128)
    codes = torch.arange(256, dtype=torch.uint8)
    if kind == "int8":
        entries = codes.view(torch.int8).double()
        entries[128] = math.nan  # -128 is not used
    else:
        entries = codes.view(torch.float8_e4m3fn).double()
    scaled = (values.cpu() * (1.0 / scales.cpu()).repeat_interleave(128)[: len(values)]).double()
    decoded = entries[numbers.long().cpu()]
    distance = (scaled[:, None] - entries).abs().nan_to_num(math.inf)
    assert torch.equal((scaled - decoded).abs(), distance.amin(1))
    tied = (distance == distance.amin(1, keepdim=True)) & (entries != decoded[:, None])
    assert not (tied.any(1) & (numbers.cpu() % 2 == 1)).any()
    back = torch.empty_like(values)
    unpack_blocks(numbers, scales, back, kind=kind, block=128)
    exact = decoded * scales.cpu().double().repeat_interleave(128)[: len(values)]
    assert (back.cpu() - exact).abs().max() <= 1e-6 * exact.abs().max()


@KINDS
def test_blocks_that_are_not_finite_or_too_small(device, kind):
    values = torch.tensor([1.0, math.inf, 2.0, 3.0, math.nan, 1.0, 1e-38, -1e-39, 0.0, -0.0, 4.0, -5.0], device=device)
    numbers, scales = packed(values, kind, 2)
    assert scales[:3].isnan()[[0, 2]].all()
    assert scales[[3, 4]].tolist() == [0.0, 0.0]
    assert not numbers[[0, 1, 4, 5, 6, 7, 8, 9]].any()
    out = torch.empty_like(values)
    unpack_blocks(numbers, scales, out, kind=kind, block=2)
    assert out[[0, 1, 4, 5]].isnan().all()
    assert out[6:10].tolist() == [0.0] * 4
    assert out[11] == -5.0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kind": "int4"}, ValueError, "kind='int4' is unknown; choose 'int8' or 'float8'"),
        ({"block": 0}, ValueError, "block=0 must be a whole number above 0"),
        ({"values": torch.zeros(8, dtype=torch.float64)}, TypeError, "values have dtype torch.float64"),
        ({"values": torch.zeros(2, 4)}, ValueError, r"values has the shape \(2, 4\); it must have one dimension"),
        ({"numbers": torch.zeros(8, dtype=torch.int8)}, TypeError, "numbers have dtype torch.int8"),
        ({"numbers": torch.zeros(7, dtype=torch.uint8)}, ValueError, "8 values in blocks of 4 have as many numbers"),
        ({"scales": torch.zeros(3)}, ValueError, "and there are 8 numbers and 3 scales"),
        ({"values": torch.zeros(16)[::2]}, ValueError, "contiguous"),
    ],
)
def test_wrong_arguments(change, error, message):
    given = {"values": torch.zeros(8), "numbers": torch.zeros(8, dtype=torch.uint8), "scales": torch.zeros(2)}
    arguments = {**given, "kind": "int8", "block": 4, **change}
    with pytest.raises(error, match=message):
        pack_blocks(**arguments)
    arguments["out"] = arguments.pop("values")
    with pytest.raises(error, match=message):
        unpack_blocks(**arguments)
