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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from bmt_comm import Communicator, Work, packing

Kind = Literal["int8", "float8"]


@dataclass(frozen=True)
class Compression:
    """How parameters and gradients travel between ranks: as 8-bit numbers with a scale for each block.

    Attributes:
        parameters: in all-gathers: "int8", "float8" (e4m3), or None, as they are.
        gradients: the same, in reduce-scatters.
        block: how many numbers share a scale.

    Raises:
        ValueError: an unknown kind, or no block.
        RuntimeError: bmt-kernels is not installed.
    """

    parameters: Kind | None = "int8"
    gradients: Kind | None = "int8"
    block: int = 256

    def __post_init__(self) -> None:
        for name in ("parameters", "gradients"):
            kind = getattr(self, name)
            if kind is not None and kind not in get_args(Kind):
                raise ValueError(f"{name}={kind!r} is not a compression; choose 'int8', 'float8' or None")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"block={self.block!r} must be a whole number above 0")
        packing.kernels()

    def all_gather(self, comm: Communicator, out: Tensor, shard: Tensor, async_op: bool, label: str) -> Work:
        """Concatenate every rank's ``shard``, rounded, into ``out``, in rank order."""
        assert self.parameters is not None
        numel = shard.numel()
        packed = out.new_empty((comm.size, packing.packed_bytes(numel, self.block)), dtype=torch.uint8)
        packing.pack(packed[comm.rank], shard, self.parameters, self.block)
        work = comm.all_gather(packed, packed[comm.rank], async_op, label)
        chunks = out.view(comm.size, numel)

        def unpack_all() -> None:
            assert self.parameters is not None
            for values, each in zip(chunks.unbind(), packed.unbind(), strict=True):
                packing.unpack(values, each, self.parameters, self.block)

        return _now_or_later(_Then(work, unpack_all), async_op)

    def reduce_scatter(self, comm: Communicator, out: Tensor, src: Tensor, async_op: bool, label: str) -> Work:
        """Sum ``src`` over the ranks, rounded but for this rank's, and keep this rank's part in ``out`` (fp32).

        ``src`` must stay unchanged until ``wait``.
        """
        assert self.gradients is not None
        assert out.dtype == torch.float32
        chunks = src.view(comm.size, out.numel()).unbind()
        others = [rank for rank in range(comm.size) if rank != comm.rank]
        packed = out.new_empty((2, comm.size, packing.packed_bytes(out.numel(), self.block)), dtype=torch.uint8)
        sent, received = packed[0].unbind(), packed[1].unbind()
        for rank in others:
            packing.pack(sent[rank], chunks[rank], self.gradients, self.block)
        work = comm.send_recv([(sent[r], r) for r in others], [(received[r], r) for r in others], async_op, label)

        def add_up() -> None:
            assert self.gradients is not None
            for rank in range(comm.size):
                if rank != comm.rank:
                    packing.unpack(out, received[rank], self.gradients, self.block, add=rank > 0)
                elif rank == 0:
                    out.copy_(chunks[0])
                else:
                    out.add_(chunks[rank])

        return _now_or_later(_Then(work, add_up, sent), async_op)


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
