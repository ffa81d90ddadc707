"""Block-wise 8-bit numbers in plain PyTorch."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

BLOCK_SIZE = 256


def block_count(numel: int, block_offset: int) -> int:
    """How many blocks `numel` elements lie in, the first of them at place `block_offset` of its block."""
    return -(-(numel + block_offset) // BLOCK_SIZE) if numel else 0


@functools.cache
def _dynamic_map(signed: bool) -> Tensor:
    values = [0.0, 1.0]
    for decade in range(7):
        steps = 2**decade if signed else 2 ** (decade + 1)
        for i in range(steps):
            value = (2 * steps + 18 * i + 9) / (20 * steps * 10 ** (6 - decade))
            values += [value, -value] if signed else [value]
    with torch.device("cpu"):
        return torch.tensor(sorted(values), dtype=torch.float64, device="cpu").float()


def dynamic_map(signed: bool = True) -> Tensor:
    """The 256 numbers that the codes stand for, in ascending order: float32, on the CPU.

    Decade d = 0 .. 6 covers the numbers from 10^(d-7) to 10^(d-6) with the middles of n equal steps::

        10^(d-6) * (0.1 + 0.9 * (i + 1/2) / n),  i = 0 .. n - 1,  n = 2^d if signed else 2^(d+1)

    (if signed, with their negatives too); 0 and 1 complete them. Each is the fp32 number nearest to its definition,
    that is within two units in the last place of what other implementations compute in fp32.

    Source: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", arXiv:2110.02861, section 1.3.
    """
    return _dynamic_map(signed).clone()


@functools.cache
def _boundaries(signed: bool) -> Tensor:
    """The largest fp32 number not above the middle between each entry from 0 upwards and the next."""
    entries = _dynamic_map(signed).double()
    entries = entries[entries >= 0]
    middles = (entries[:-1] + entries[1:]) / 2  # exact: an fp32 number and its neighbour have close exponents
    nearest = middles.float()
    return torch.where(nearest.double() > middles, torch.nextafter(nearest, nearest.new_zeros(())), nearest)


def _padded(flat: Tensor, block_offset: int) -> Tensor:
    """(numel,) -> (blocks, 256), with zeros where there is no element."""
    blocks = block_count(flat.numel(), block_offset)
    if blocks == 0:
        return flat.view(0, BLOCK_SIZE)
    after = blocks * BLOCK_SIZE - block_offset - flat.numel()
    return torch.nn.functional.pad(flat, (block_offset, after)).view(blocks, BLOCK_SIZE)


@torch.no_grad()
def quantize_blockwise(x: Tensor, *, signed: bool = True, block_offset: int = 0) -> tuple[Tensor, Tensor]:
    """See `bmt_kernels.quantize_blockwise`."""
    blocks = _padded(x.reshape(-1).float(), block_offset)
    absmax = blocks.abs().amax(dim=1) if len(blocks) else blocks.new_empty(0)
    absmax = torch.where(absmax.isfinite(), absmax, torch.nan)
    one = torch.ones_like(absmax)
    power = torch.where(absmax < 2.0**-64, one * 2.0**64, torch.where(absmax > 2.0**64, one * 2.0**-64, one))
    y = (blocks * power[:, None]) * (1.0 / (absmax * power))[:, None]
    y = torch.where((absmax > 0)[:, None], y, 0.0)  # also where absmax is NaN
    rank = torch.bucketize(y.abs() if signed else y, _boundaries(signed).to(x.device))
    codes = torch.where(y < 0, 127 - rank.clamp(max=127), 127 + rank) if signed else rank
    codes = codes.to(torch.uint8).view(-1)[block_offset : block_offset + x.numel()]
    return codes.reshape(x.shape).contiguous(), absmax


@torch.no_grad()
def dequantize_blockwise(
    codes: Tensor,
    absmax: Tensor,
    *,
    signed: bool = True,
    block_offset: int = 0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """See `bmt_kernels.dequantize_blockwise`."""
    values = _dynamic_map(signed).to(codes.device)[codes.reshape(-1).int()]
    values = (_padded(values, block_offset) * absmax[:, None]).view(-1)[block_offset : block_offset + codes.numel()]
    if out is not None:
        return out.copy_(values.reshape(codes.shape))
    return values.reshape(codes.shape).to(torch.float32 if dtype is None else dtype).contiguous()
