"""Stochastic rounding: unbiased, exact where it can be, the same on every layout and every device."""

from __future__ import annotations

import pytest
import torch

from bmt_kernels import reference, round_stochastically

DTYPES = [torch.bfloat16, torch.float16]


def bits(tensor):
    """All NaN are one."""
    return torch.where(tensor.isnan(), float("nan"), tensor).cpu().view(torch.int16)


def awkward(numel):
    """Numbers of all magnitudes and both signs, with infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-140, 128, (numel,), generator=generator).float()
    values = torch.randn(numel, generator=generator) * torch.exp2(exponents)
    values[::97], values[1::97], values[2::97] = float("inf"), float("-inf"), float("nan")
    values[3::97], values[4::97], values[5::97] = 65519.0, 3.4e38, 0.0
    values[6::97] = torch.randn(len(values[6::97]), generator=generator) * 2.0**-15  # subnormal in fp16
    return values


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 37, 20_001])
def test_every_kernel_gives_the_bits_of_the_reference(device, dtype, numel):
    values = awkward(numel)
    index = 2**33 + 5 + torch.arange(numel)
    expected = reference.round_stochastically(values, dtype, 11, index)
    rounded = round_stochastically(values.to(device), dtype, seed=11, first=2**33 + 5)
    assert rounded.dtype is dtype
    assert torch.equal(bits(rounded), bits(expected))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_of_many_is_the_number(device, dtype):
    value = {torch.bfloat16: 1 + 2.0**-9, torch.float16: 3 * 2.0**-26}[dtype]
    step = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-24}[dtype]
    rounded = round_stochastically(torch.full((100_000,), value, device=device), dtype, seed=3)
    assert len(rounded.unique()) == 2
    assert abs(rounded.double().mean().item() - value) < 0.01 * step


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_dtype_has_stays(device, dtype):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).to(device)
    rounded = round_stochastically(every.float(), dtype, seed=1)
    assert torch.equal(rounded[~every.isnan()], every[~every.isnan()])
    assert rounded[every.isnan()].isnan().all()


def test_a_part_is_rounded_as_in_the_whole(device):
    full = awkward(40 * 50).view(40, 50).to(device)
    expected = bits(round_stochastically(full, torch.bfloat16, seed=7))
    rows = round_stochastically(full[11:29], torch.bfloat16, seed=7, first=11 * 50)
    assert torch.equal(bits(rows), expected[11:29])
    block = round_stochastically(full[11:29, 13:44], torch.bfloat16, seed=7, first=11 * 50 + 13, width=31, stride=50)
    assert torch.equal(bits(block), expected[11:29, 13:44])
    assert not torch.equal(bits(round_stochastically(full, torch.bfloat16, seed=8)), expected)


@pytest.mark.parametrize(
    ("values", "options", "error", "message"),
    [
        ([1.0], {}, TypeError, "values is a list"),
        (torch.ones(2, dtype=torch.float64), {}, TypeError, "values has dtype torch.float64"),
        (torch.ones(2), {"dtype": torch.float32}, TypeError, "dtype is torch.float32"),
        (torch.ones(2), {"first": -1}, ValueError, "first is -1; it must be at least 0"),
        (torch.ones(2), {"width": 0}, ValueError, "width is 0; it must be at least 1"),
    ],
)
def test_a_wrong_call_is_named(values, options, error, message):
    with pytest.raises(error, match=message):
        round_stochastically(values, **{"dtype": torch.bfloat16, "seed": 1, **options})
