"""Block-wise 8-bit numbers in which parameters and gradients travel between ranks.

[Note: compressed communication]
    Numbers that follow one another share a scale (fp32): the largest of their absolute values over the largest 8-bit
    number. That is one byte for each number, and four for each block.

    An all-gather sends packed shards. Every rank, also the owner, computes with what was unpacked, so all have the
    same weights. Shards, which optimizers and checkpoints read, are never rounded.

    A reduce-scatter is an exchange of packed gradients, which are unpacked and summed in fp32, in the order of the
    ranks. Each number is rounded at most once; what a rank has for its own shard is not rounded.

    In a block with an infinite number or NaN no number is finite after unpacking: checks for overflow see it. Blocks
    whose scale would be below the smallest normal number of fp32 become zeros.

    This is the communication of ZeRO++ (https://arxiv.org/abs/2306.10209).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from bmt_comm import Communicator, Work

Kind = Literal["int8", "float8"]
_LARGEST = {"int8": 127.0, "float8": 448.0}  # float8: e4m3
_ALIGNMENT = 16  # bytes; scales begin on multiples of it


@dataclass(frozen=True)
class Compression:
    """How parameters and gradients travel between ranks: as 8-bit numbers with a scale for each block.

    Attributes:
        parameters: in all-gathers: "int8", "float8" (e4m3), or None, as they are.
        gradients: the same, in reduce-scatters.
        block: how many numbers share a scale.
    """

    parameters: Kind | None = "int8"
    gradients: Kind | None = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        for name in ("parameters", "gradients"):
            kind = getattr(self, name)
            if kind is not None and kind not in _LARGEST:
                raise ValueError(f"{name}={kind!r} is not a compression; choose 'int8', 'float8' or None")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"block={self.block!r} must be a whole number above 0")

    def all_gather(self, comm: Communicator, out: Tensor, shard: Tensor, async_op: bool, label: str) -> Work:
        """Concatenate every rank's ``shard``, rounded, into ``out``, in rank order."""
        assert self.parameters is not None
        numel = shard.numel()
        packed = out.new_empty((comm.size, self._packed_bytes(numel)), dtype=torch.uint8)
        self._pack(packed[comm.rank], shard, self.parameters)
        work = comm.all_gather(packed, packed[comm.rank], async_op, label)
        chunks = out.view(comm.size, numel)

        def unpack_all() -> None:
            assert self.parameters is not None
            for values, each in zip(chunks.unbind(), packed.unbind(), strict=True):
                self._unpack(values, each, self.parameters)

        return _now_or_later(_Then(work, unpack_all), async_op)

    def reduce_scatter(self, comm: Communicator, out: Tensor, src: Tensor, async_op: bool, label: str) -> Work:
        """Sum ``src`` over the ranks, rounded but for this rank's, and keep this rank's part in ``out`` (fp32).

        ``src`` must stay unchanged until ``wait``.
        """
        assert self.gradients is not None
        assert out.dtype == torch.float32
        chunks = src.view(comm.size, out.numel()).unbind()
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        packed = out.new_empty((2, comm.size, self._packed_bytes(out.numel())), dtype=torch.uint8)
        sent, received = packed[0].unbind(), packed[1].unbind()
        for rank in others:
            self._pack(sent[rank], chunks[rank], self.gradients)
        work = comm.send_recv([(sent[r], r) for r in others], [(received[r], r) for r in others], async_op, label)

        def add_up() -> None:
            assert self.gradients is not None
            unpacked = torch.empty_like(out)
            for rank in range(comm.size):
                values = chunks[rank] if rank == comm.rank else unpacked
                if rank != comm.rank:
                    self._unpack(unpacked, received[rank], self.gradients)
                if rank == 0:
                    out.copy_(values)
                else:
                    out.add_(values)

        return _now_or_later(_Then(work, add_up, sent), async_op)

    # --- packing ----------------------------------------------------------------------------------

    def _scales_begin(self, numel: int) -> int:
        return -(-numel // _ALIGNMENT) * _ALIGNMENT

    def _packed_bytes(self, numel: int) -> int:
        return self._scales_begin(self._scales_begin(numel) + 4 * -(-numel // self.block))

    def _blocks(self, packed: Tensor, values: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """The whole blocks, and the last one: numbers as bytes, scales, values; of shapes (n, k), (n, 1), (n, k)."""
        numel = values.numel()
        begin, count = self._scales_begin(numel), -(-numel // self.block)
        scales = packed[begin : begin + 4 * count].view(torch.float32).unsqueeze(1)
        whole = numel // self.block
        for first, last, width in ((0, whole, self.block), (whole, count, numel % self.block)):
            if first < last:
                part = slice(first * self.block, first * self.block + (last - first) * width)
                yield packed[part].view(-1, width), scales[first:last], values[part].view(-1, width)

    def _pack(self, packed: Tensor, values: Tensor, kind: Kind) -> None:
        for numbers, scales, block in self._blocks(packed, values):
            # Not of abs(), which would take memory; both let NaN through.
            largest = torch.maximum(block.amax(1, keepdim=True), -block.amin(1, keepdim=True)).float()
            scale = largest / _LARGEST[kind]
            scale = scale.masked_fill(scale < torch.finfo(torch.float32).tiny, 0.0)
            scales.copy_(scale.masked_fill(scale == torch.inf, torch.nan))
            scaled = block * scale.reciprocal().masked_fill(scale == 0.0, 0.0)
            if kind == "int8":
                numbers.view(torch.int8).copy_(scaled.round_().nan_to_num_(0.0))
            else:
                numbers.view(torch.float8_e4m3fn).copy_(scaled)

    def _unpack(self, values: Tensor, packed: Tensor, kind: Kind) -> None:
        for numbers, scales, block in self._blocks(packed, values):
            if kind == "int8":
                block.copy_(numbers.view(torch.int8)).mul_(scales)
            else:
                # The bits as those of fp32 with an exponent too small by 120: torch's conversion is slow on the CPU.
                bits = numbers.view(torch.int8).to(torch.int32).bitwise_left_shift_(20).bitwise_and_(-0x78100000)
                block.copy_(bits.view(torch.float32).mul_(2.0**120).mul_(scales))


def _now_or_later(work: _Then, async_op: bool) -> Work:
    if not async_op:
        work.wait()
    return work


class _Then:
    """A collective after which ``finish`` runs, in the first ``wait``. Until then it holds what is sent, ``keep``."""

    def __init__(self, work: Work, finish: Callable[[], None], keep: object = None) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish
        self._keep = keep

    def wait(self) -> None:
        self._work.wait()
        if self._finish is not None:
            self._finish()
        self._finish = self._keep = None

    def is_completed(self) -> bool:
        return self._finish is None
