"""Numbers that travel between ranks in 8 bits: the specification."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

LARGEST = {"int8": 127.0, "float8": 448.0}  # float8: e4m3


@torch.no_grad()
def pack_blocks(values: Tensor, numbers: Tensor, scales: Tensor, *, kind: str, block: int) -> None:
    for number, scale_of, part in _blocks(numbers, scales, values, block):
        # Not of abs(), which would take memory; both let NaN through.
        largest = torch.maximum(part.amax(1, keepdim=True), -part.amin(1, keepdim=True)).float()
        # By a tensor: torch's CUDA kernels multiply by the reciprocal of a number, which rounds twice.
        scale = largest / torch.full_like(largest, LARGEST[kind])
        scale = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 0.0)
        irregular = ~scale.isfinite()
        scale_of.copy_(scale.masked_fill(irregular, torch.nan))
        inverse = scale.reciprocal().masked_fill(irregular | (scale == 0.0), 0.0)
        scaled = (part.float() * inverse).masked_fill(inverse == 0.0, 0.0)
        if kind == "int8":
            number.view(torch.int8).copy_(scaled.round_())
        else:
            number.view(torch.float8_e4m3fn).copy_(scaled)


@torch.no_grad()
def unpack_blocks(numbers: Tensor, scales: Tensor, out: Tensor, *, kind: str, block: int, add: bool = False) -> None:
    for number, scale, part in _blocks(numbers, scales, out, block):
        if kind == "int8":
            values = number.view(torch.int8).float().mul_(scale)
        else:
            # The bits as those of fp32 with an exponent too small by 120: torch's conversion is slow on the CPU.
            bits = number.view(torch.int8).to(torch.int32).bitwise_left_shift_(20).bitwise_and_(-0x78100000)
            values = bits.view(torch.float32).mul_(2.0**120).mul_(scale)
        part.copy_(values.add_(part) if add else values)


def _blocks(numbers: Tensor, scales: Tensor, values: Tensor, block: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The full blocks, and the last one: numbers, scales, values; of shapes (n, k), (n, 1), (n, k)."""
    numel = values.numel()
    full, count = numel // block, -(-numel // block)
    for first, last, width in ((0, full, block), (full, count, numel % block)):
        if first < last:
            part = slice(first * block, first * block + (last - first) * width)
            yield numbers[part].view(-1, width), scales[first:last].unsqueeze(1), values[part].view(-1, width)
